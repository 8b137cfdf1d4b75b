"""A worker's copies of the weights that stages of a tie share: their gradients, added up and shared out.

Every stage steps its own copy. Copies begin equal and get the same gradient, the sum over all of them, so they stay
equal to the bit, as Megatron-LM's two embeddings do.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import torch

from pipebench.checkpoint.share import Share
from pipebench.engine.replica import Replica
from pipebench.engine.setup import Setup


class TiedCopies:
    """The copies of one tie on one worker: usually one of every weight, two where it has both ends of the pipeline.

    `replicas` are the worker's, by stage, and `shares` their shares of the model's state.
    """

    def __init__(self, setup: Setup, group: int, replicas: Mapping[int, Replica], shares: Mapping[int, Share]) -> None:
        tie = group - setup.pipeline.num_stages
        names = setup.costs.ties[tie].parameters
        self._copies = [
            (replicas[stage], positions_of(names, replicas[stage], shares[stage]))
            for stage in setup.pipeline.ties[tie]
            if stage in replicas
        ]
        for replica, positions in self._copies:
            replica.keep_apart(positions)

    @property
    def like(self) -> list[torch.Tensor]:
        """The weights, in the tie's order."""
        replica, positions = self._copies[0]
        return [replica.weights.newest.parameters[position] for position in positions]

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the sum of the worker's own gradients of every weight, added from the first stage on."""
        return [_sum(column) for column in zip(*self._own(), strict=True)]

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Replace the gradients of all its copies by those of all workers."""
        for index, (replica, positions) in enumerate(self._copies):
            own = list(replica.gradients)
            for position, gradient in zip(positions, gradients, strict=True):
                # An optimizer may change the gradients that it is given.
                own[position] = gradient.clone() if index and gradient is not None else gradient
            replica.gradients = own

    def _own(self) -> Iterator[list[torch.Tensor | None]]:
        for replica, positions in self._copies:
            yield [replica.gradients[position] for position in positions]


def tied_copies(setup: Setup, replicas: Mapping[int, Replica], shares: Mapping[int, Share]) -> dict[int, TiedCopies]:
    """Return a worker's copies of every tie that has some there, by the tie's group."""
    ties = enumerate(setup.pipeline.ties, setup.pipeline.num_stages)
    mine = (group for group, stages in ties if not replicas.keys().isdisjoint(stages))
    return {group: TiedCopies(setup, group, replicas, shares) for group in mine}


def positions_of(names: Sequence[str], replica: Replica, share: Share) -> list[int]:
    """Return where a replica's parameters have some of the graph's names: of a shared one a stage may know another."""
    place = {share.names[name]: index for index, name in enumerate(replica.weights.names)}
    return [place[share.names[name]] for name in names]


def _sum(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [gradient for gradient in gradients if gradient is not None]
    return reduce(torch.add, there) if there else None
