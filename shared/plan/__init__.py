"""Which samples each process sees in which micro-batch of which step, and how they are loaded."""
