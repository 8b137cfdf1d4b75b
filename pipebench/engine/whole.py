"""The model in one piece again, for metrics that no single stage can give: what a translation model writes."""

import copy
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from pipebench.checkpoint.share import own_names
from pipebench.distributed.launch_join import peers
from pipebench.distributed.world import World
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


def gather_tensors(own: Mapping[str, torch.Tensor], world: World) -> list[dict[str, torch.Tensor]]:
    """Bring the tensors of all ranks to rank 0, through the hosts' memory; the others get nothing. Collective.

    Raises:
        PeerLostError: a rank is gone.
    """
    described = [[[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in own.items()]]
    found: list[dict[str, torch.Tensor]] = [dict(own)]
    for rank, (rows,) in enumerate(world.exchange(described)):
        if rank == 0 or world.rank not in (0, rank):
            continue
        with peers():
            if world.rank == rank:
                for tensor in own.values():
                    dist.send(tensor.detach().cpu().contiguous(), 0)
            else:
                received = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in rows}
                for tensor in received.values():
                    dist.recv(tensor, rank)
                found.append(received)
    return found if world.rank == 0 else []
