"""Figures of a run: losses, rates, time, evaluation and its metrics, curves, trackers."""
