"""A stage's layers compiled by `torch.compile` (key `engine.compile`), which fuses layers into kernels.

Parameters are arguments of the compiled function, so all weight versions use the same one. It is compiled at the first
call, and again for another number of samples.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipebench.model.stage import Stage

# Random layers draw the same numbers as without compilation, so that draws depend on no engine and no partition.
_OPTIONS: dict[str, Any] = {"fallback_random": True}


def compiled(stage: Stage) -> Callable[..., Any]:
    """Return the stage's module, compiled, with the module's arguments and results.

    Excluded is what depends on more than tensors: the seeding of random layers, the loss, recurrent layers and modules
    that carry a state.
    """
    carrying = [stage.module.get_submodule(path) for path in stage.stateful]
    recurrent = [part for part in stage.module.modules() if isinstance(part, nn.RNNBase)]
    for part in dict.fromkeys((stage.seeder, stage.loss, *carrying, *recurrent)):
        part.forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]
    made: Callable[..., Any] = torch.compile(stage.module.with_forward(), options=_OPTIONS)
    return made
