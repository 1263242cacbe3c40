"""Keeps a run on disk: config, episodes, tensors, images, metrics and checkpoints."""
