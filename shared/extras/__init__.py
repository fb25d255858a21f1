"""What a run can do besides training: curves, trackers, a time report, MFU, profiles, and more. Each is a hook."""
