"""What the benchmarks share: it starts runs, lets contestants take turns, and writes the results."""
