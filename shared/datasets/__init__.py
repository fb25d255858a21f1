"""Rows and their labels: files, saved data sets, the Hub, the demo texts.

May import: plan, pretrained and below.
"""
