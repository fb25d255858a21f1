"""Figures of a run: losses, rates, time, the pass over the validation data, curves, trackers."""
