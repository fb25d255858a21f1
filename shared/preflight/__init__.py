"""The command that checks a launch before the first run."""
