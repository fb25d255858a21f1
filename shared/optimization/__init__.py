"""Gradients, optimizers and learning-rate schedules."""
