"""The trainer: configuration, loop, optimizer, metrics, checkpoints."""
