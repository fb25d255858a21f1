"""Benchmarks: each module is a script with a command at its top; `harness` has what several of them use."""
