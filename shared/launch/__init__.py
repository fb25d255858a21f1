"""The start of a run: checks of the launch, the rendezvous of its processes, and the Accelerator."""
