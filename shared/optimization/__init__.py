"""Losses, gradients, optimizers and learning-rate schedules.

May import: models and below.
"""
