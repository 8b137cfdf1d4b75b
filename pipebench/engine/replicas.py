"""Makes replicas of a run's stages for its schedule and recipe."""

from collections.abc import Mapping
from functools import partial

import torch

from pipebench.engine.replica import Replica, ReplicaRules
from pipebench.engine.ring import of_one_type
from pipebench.engine.setup import Setup
from pipebench.engine.shards import Sharding, divided
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
    own = partial(_sharding, setup, stage, replica) if setup.pipeline.shards(stage) else None
    return kind(cut, setup.make_optimizer, device=setup.device, seed=setup.seed, rules=rules._replace(divide=own))


def _sharding(setup: Setup, stage: int, replica: int, named: Mapping[str, torch.Tensor]) -> Sharding:
    """Return how the replicas of a stage divide its parameters, bucket by bucket."""
    names, like, count = [*named], [*named.values()], setup.pipeline.replicas[stage]
    sizes = [parameter.numel() for parameter in like]
    buckets = (
        tuple(divided(indices, sizes, count, whole=setup.steps_on_whole))
        for bucket in setup.costs.stages[stage].buckets
        for indices in of_one_type([names.index(name) for name in bucket.parameters], like)
    )
    return Sharding(tuple(buckets), replica, keeps_all=not setup.pipeline.gathers)
