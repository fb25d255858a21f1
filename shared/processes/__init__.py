"""Communication between the processes of a run: collectives, waiting, signals, locks, exit codes and exit reasons."""
