"""Brings the tensors of all processes to one of them."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from pipebench.distributed.launch_join import peers
from pipebench.distributed.world import World


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
