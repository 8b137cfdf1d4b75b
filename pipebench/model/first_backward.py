"""Imports ahead of time what torch imports in a process's first backward, which takes a third of a second."""

from importlib import import_module


def import_for_backward() -> None:
    """Import what torch's function that checks given gradients imports; to call before training is timed."""
    import_module("torch.fx.experimental.symbolic_shapes")
