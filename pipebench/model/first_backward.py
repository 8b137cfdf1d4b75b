"""What torch imports in a process's first backward from given gradients: a third of a second, which is no training."""

from importlib import import_module


def import_for_backward() -> None:
    """Import it before the clock starts; `torch.autograd` has an import in the function that checks gradients."""
    import_module("torch.fx.experimental.symbolic_shapes")
