"""What the processes of a run tell each other: collectives, waiting, signals, locks, and how they end.

May import: config.
"""
