"""FSDP2: a model whose weights, gradients and optimizer state are divided over the processes, and its checkpoints."""
