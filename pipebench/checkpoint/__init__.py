"""Checkpoints: their content, each worker's share of it, and the files that store it."""
