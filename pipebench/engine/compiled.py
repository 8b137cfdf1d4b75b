"""A stage's layers compiled by torch (`engine.compile`): forward and backward as kernels that fuse layers.

Parameters are arguments of what is compiled, so weight versions share it. It is made when first called, and again for
another number of samples.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipebench.model.stage import Stage

# Draws stay those of the layers by themselves: the same in every engine and partition.
_OPTIONS: dict[str, Any] = {"fallback_random": True}


def compiled(stage: Stage) -> Callable[..., Any]:
    """Return the stage's module, compiled; it takes and returns what the module does.

    What depends on more than tensors runs as it is: the seeding of random layers, the loss, recurrent layers and
    modules that carry a state.
    """
    carrying = [stage.module.get_submodule(path) for path in stage.stateful]
    recurrent = [part for part in stage.module.modules() if isinstance(part, nn.RNNBase)]
    for part in dict.fromkeys((stage.seeder, stage.loss, *carrying, *recurrent)):
        part.forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]
    made: Callable[..., Any] = torch.compile(stage.module.with_forward(), options=_OPTIONS)
    return made
