"""Checkpoints: what they hold, which part of it a worker holds, and the files they are kept in."""
