"""The model in one piece again, for metrics that no single stage can give: what a translation model writes."""

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from pipebench.checkpoint.share import own_names
from pipebench.engine.setup import Setup


class WholeModel:
    """A copy of the whole model, in evaluation mode, that takes its weights from the stages.

    Args:
        setup: whose model; it must still hold its initial weights, for what no stage trains.
    """

    def __init__(self, setup: Setup) -> None:
        self._model = copy.deepcopy(setup.graph.model).to(setup.device).eval()
        self._tensors = dict(self._model.named_buffers()) | dict(self._model.named_parameters(remove_duplicate=False))
        self._own_names = own_names(setup.graph)

    def filled(self, stages: Iterable[Mapping[str, torch.Tensor]]) -> nn.Module:
        """Return the model with the stages' parameters and buffers, given by qualified name."""
        with torch.no_grad():
            for tensors in stages:
                for stages_name, tensor in tensors.items():
                    name = self._own_names[stages_name]
                    if name in self._tensors:  # tensors made in forward are buffers after tracing only
                        self._tensors[name].copy_(tensor)
        return self._model
