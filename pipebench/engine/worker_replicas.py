"""The replicas of one worker, one of each of its stages: how they are made, and their state between segments.

Checkpoints, drains and sums over replicas read that state. `engine/worker.py` executes instructions on the replicas.
"""

from collections.abc import Mapping, Sequence
from functools import partial, reduce

import torch

from pipebench.checkpoint.handover import StateClaim
from pipebench.checkpoint.share import Share, own_cuts, own_names, trained_names
from pipebench.checkpoint.state import ModelState
from pipebench.engine.clipping import squared_norms
from pipebench.engine.protocols import StageRunner
from pipebench.engine.replica import Replica, ReplicaRules
from pipebench.engine.replica_state import held_by, names_in, restore, state_of
from pipebench.engine.ring import of_one_type
from pipebench.engine.setup import Setup, share_of
from pipebench.engine.shards import Sharding, divided
from pipebench.model.graph import LayerGraph, averaged_buffers
from pipebench.model.slice_modules import Divided
from pipebench.model.stage import Stage, cut_stage
from pipebench.schedule.pipeline import SPLIT
from pipebench.schedule.weights import WEIGHT_POLICIES


def replica_of_stage(setup: Setup, stage: int, replica: int = 0) -> Replica:
    """Return a replica of a stage of the plan, with its initial weights; `replica` is its index."""
    return make_replica(setup, stage, cut_stage(setup.graph, setup.plan, stage), replica)


def make_replica(setup: Setup, stage: int, cut: Stage, replica: int = 0) -> Replica:
    """Return a replica of a stage's layers, with their initial weights."""
    policy = WEIGHT_POLICIES[setup.pipeline.weights]
    rules = ReplicaRules(
        split=setup.pipeline.backward == SPLIT,
        overwrite=not policy.stashed,
        moves=policy.moves(setup.pipeline, stage),
        gamma=setup.gamma(stage),
        loss_scale=setup.loss_scale,
        compiled=setup.compiled,
        channels_last=setup.channels_last,
        slices=setup.graph.slices,
    )
    kind: type[Replica] = next(iter(setup.pipeline.hooks("replica").values()), Replica)
    own = partial(_sharding, setup, stage, replica) if setup.pipeline.shards_stage(stage) else None
    return kind(cut, setup.make_optimizer, device=setup.device, seed=setup.seed, rules=rules._replace(divide=own))


def _sharding(setup: Setup, stage: int, replica: int, named: Mapping[str, torch.Tensor]) -> Sharding:
    """Return how the replicas of a stage divide its parameters `named`, bucket by bucket."""
    own, like, count = own_names(setup.graph), [*named.values()], setup.pipeline.replicas[stage]
    sizes = [parameter.numel() for parameter in like]
    buckets = (
        tuple(divided(indices, sizes, count, whole=setup.steps_on_whole))
        for bucket in setup.costs.stages[stage].buckets
        for indices in of_one_type(positions_of(bucket.parameters, [*named], own), like)
    )
    return Sharding(tuple(buckets), replica, keeps_all=not setup.pipeline.gathers)


class TiedCopies:
    """One worker's copies of the weights of a tie: weights that layers of several stages share.

    Every stage steps its own copy. Copies begin equal and get the same gradient, the sum over all copies, so they stay
    equal to the bit, as Megatron-LM's two embeddings do. A worker with both ends of the pipeline has two copies. If
    replicas are sharded, each has the same shard of every copy: gradients are those of the shards.

    Args:
        setup: what is run.
        group: the tie's index, counted on from the stages.
        replicas: the worker's, by stage.
        shares: their shares of the model's state.
    """

    def __init__(self, setup: Setup, group: int, replicas: Mapping[int, Replica], shares: Mapping[int, Share]) -> None:
        tie = group - setup.pipeline.num_stages
        names = setup.costs.ties[tie].parameters
        self._copies = [
            (replicas[stage], positions_of(names, replicas[stage].weights.stepped_names, shares[stage].names))
            for stage in setup.pipeline.ties[tie]
            if stage in replicas
        ]
        for replica, positions in self._copies:
            if not setup.pipeline.is_sharded:
                replica.accumulation.tied_positions |= frozenset(positions)

    @property
    def like(self) -> list[torch.Tensor]:
        """The tie's weights, in its order: tensors of the shapes and types of their gradients."""
        replica, positions = self._copies[0]
        return [replica.weights.newest.parameters[position] for position in positions]

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradient of every weight, summed over this worker's copies from the first stage on."""
        own = ([replica.gradients[position] for position in positions] for replica, positions in self._copies)
        return [_sum(column) for column in zip(*own, strict=True)]

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Replace the gradients of this worker's copies by `gradients`, the sums over all workers."""
        for index, (replica, positions) in enumerate(self._copies):
            own = list(replica.gradients)
            for position, gradient in zip(positions, gradients, strict=True):
                # Cloned for a second copy, since an optimizer may change its gradients.
                own[position] = gradient.clone() if index and gradient is not None else gradient
            replica.gradients = own


def tied_copies(setup: Setup, replicas: Mapping[int, Replica], shares: Mapping[int, Share]) -> dict[int, TiedCopies]:
    """Return a worker's copies of the ties of its stages, by the tie's group."""
    ties = enumerate(setup.pipeline.ties, setup.pipeline.num_stages)
    mine = (group for group, stages in ties if not replicas.keys().isdisjoint(stages))
    return {group: TiedCopies(setup, group, replicas, shares) for group in mine}


def positions_of(names: Sequence[str], held: Sequence[str], own: Mapping[str, str]) -> list[int]:
    """Return the positions of those parameters `names` of the graph that are among a stage's, `held`.

    A parameter that layers share has several names, and the stage's may be another than the graph's. `own` maps every
    name to the model's own one.
    """
    position = {own[name]: index for index, name in enumerate(held)}
    return [position[own[name]] for name in names if own[name] in position]


def _sum(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [gradient for gradient in gradients if gradient is not None]
    return reduce(torch.add, there) if there else None


class WorkerReplicas:
    """One worker's replicas, by stage."""

    def __init__(self, setup: Setup, index: int) -> None:
        self.setup = setup
        self.index = index  # the worker's
        self.replica_index = {s: setup.pipeline.replica_of(index, s) for s in setup.pipeline.stages_of(index)}
        self.replicas = {stage: replica_of_stage(setup, stage, own) for stage, own in self.replica_index.items()}
        # What executes a stage's instructions: its replica or, while layers move, a `MigratingReplica`
        self.running: dict[int, StageRunner] = {**self.replicas}
        self._trained = trained_names(setup.graph)
        self._divided = _divided(setup.graph, self._trained)
        self._averaged = averaged_buffers(setup.graph)
        self.shares = {stage: share_of(setup, stage, own) for stage, own in self.replica_index.items()}
        self.tied = tied_copies(setup, self.replicas, self.shares)  # by group

    @property
    def is_last(self) -> bool:
        """Whether it has the last stage, which computes the loss."""
        return self.setup.pipeline.num_stages - 1 in self.replicas

    def open_data(self) -> None:
        """Fetch a minibatch before the clock runs, since a data set may open its files at the first fetch."""
        fields = dict(zip(self.setup.graph.inputs, self.setup.dataset.inputs, strict=True))
        names = [fields[name] for replica in self.replicas.values() for name in replica.stage.inputs]
        names += self.setup.dataset.targets if self.is_last else []
        if names:
            self.setup.dataset.fetch("train", self.setup.sampler.indices(0), names)

    def recut(self, setup: Setup) -> None:
        """Cut the stages anew at a drain; the state of their layers must be on this worker."""
        self.setup, self._averaged = setup, averaged_buffers(setup.graph)
        for stage, replica in self.replicas.items():
            made = replica_of_stage(self.setup, stage)
            restore(made, held_by(replica, self.shares[stage]), self.shares[stage])
            made.weights.renumber(replica.weights.newest.number)
            made.weights.versions.most_alive = replica.weights.most_alive
            self.replicas[stage] = self.running[stage] = made
        self.tied = tied_copies(setup, self.replicas, self.shares)

    def summed(self, group: int) -> tuple[list[torch.Tensor], list[list[int]]]:
        """Return what a group (a stage's replicas or a tie's copies) sums: its parameters, and positions per bucket."""
        costs, num_stages = self.setup.costs, self.setup.pipeline.num_stages
        if group >= num_stages:
            like = self.tied[group].like
            return like, of_one_type(range(len(like)), like)
        weights, own = self.replicas[group].weights, self.shares[group].names
        like = weights.newest.parameters
        named = (positions_of(bucket.parameters, weights.names, own) for bucket in costs.stages[group].buckets)
        return like, [part for bucket in named for part in of_one_type(bucket, like)]

    def squared_norms(self) -> torch.Tensor:
        """Return the squared norms of the round's gradients, for a norm shared by all stages.

        Every parameter of the model has an entry of its own, so that the sum over workers changes no bit. By now all
        replicas of a stage have the same gradients: the first one reports them, and the others report 0. Sharded
        replicas report those of their pieces. A tied weight is reported by its first stage.

        Returns:
            [parameters of the model, at least one] float64.
        """
        found = dict.fromkeys(self._trained, torch.zeros((), dtype=torch.float64, device=self.setup.device))
        for stage, replica in self.replicas.items():
            if self.replica_index[stage] > 0 and not self.setup.pipeline.shards_stage(stage):
                continue
            share, scale = self.shares[stage], 1.0 if replica.scale is None else replica.scale.value
            names = (share.names[name] for name in replica.weights.stepped_names)
            squares = squared_norms(replica.gradients, self.setup.device, replica.weights.whole_sizes)
            named = zip(names, squares, strict=True)
            found |= {name: square / scale**2 for name, square in named if name not in share.elsewhere}
        own = torch.stack([*found.values()])
        return own if self._divided is None else self._divided.whole(own)

    def buffers(self, stage: int) -> list[torch.Tensor]:
        """Return a stage's running statistics, which a drain averages over its replicas."""
        if stage not in self.replicas:  # the group of a tie, which has no buffers
            return []
        named = self.replicas[stage].module.named_buffers(remove_duplicate=False)
        return [*{id(buffer): buffer for name, buffer in named if name in self._averaged}.values()]

    def parts(self) -> list[tuple[str, ModelState]]:
        """Return this worker's parts of a checkpoint, by name."""
        slices = self.setup.graph.slices
        last = "" if slices is None else f"-slice-{slices.group.rank}"
        return [
            (f"stage-{stage}-replica-{self.replica_index[stage]}{last}", state_of(replica, self.shares[stage]))
            for stage, replica in self.replicas.items()
        ]

    def restore(self, state: ModelState) -> None:
        """Restore from a checkpoint of the whole model, under any plan."""
        for stage, replica in self.replicas.items():
            restore(replica, state, self.shares[stage])

    def held(self) -> ModelState:
        """Return all state that this worker holds at a drain: references, not copies."""
        return ModelState.merge(held_by(replica, self.shares[stage]) for stage, replica in self.replicas.items())

    def claim(self) -> StateClaim:
        """Return which state this worker needs."""
        shares = self.shares
        return StateClaim(
            frozenset(shares[stage].names[n] for stage, replica in self.replicas.items() for n in names_in(replica)),
            frozenset(path for replica in self.replicas.values() for path in replica.stage.stateful),
            next(iter(shares.values())),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return `Replica.tensors` of the stages of which this worker has the first replica."""
        first = (replica for stage, replica in self.replicas.items() if self.replica_index[stage] == 0)
        return {name: tensor for replica in first for name, tensor in replica.tensors().items()}

    @property
    def loss_scales(self) -> list[tuple[float, int]]:
        """Every stage's gradient scale and skipped updates; empty without scaling."""
        scales = (replica.scale for replica in self.replicas.values())
        return [(scale.value, scale.num_skipped) for scale in scales if scale is not None]

    @property
    def versions_max(self) -> int:
        """The most weight versions of one stage that have been alive at once."""
        return max(replica.weights.most_alive for replica in self.replicas.values())


def _divided(graph: LayerGraph, names: Sequence[str]) -> Divided | None:
    """Return which parameters of the whole model are divided among processes, if any are."""
    cuts = own_cuts(graph)
    return None if graph.slices is None else Divided(graph.slices.group, torch.tensor([name in cuts for name in names]))
