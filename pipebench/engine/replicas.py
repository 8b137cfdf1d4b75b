"""Makes replicas of a run's stages for its schedule and recipe."""

from pipebench.engine.replica import Replica, ReplicaRules
from pipebench.engine.setup import Setup
from pipebench.model.stage import Stage, cut_stage
from pipebench.schedule.pipeline import SPLIT
from pipebench.schedule.weights import WEIGHT_POLICIES


def replica_of_stage(setup: Setup, stage: int) -> Replica:
    """Return a replica of a stage of the plan, with its initial weights."""
    return make_replica(setup, stage, cut_stage(setup.graph, setup.plan, stage))


def make_replica(setup: Setup, stage: int, cut: Stage) -> Replica:
    """Return a replica of a stage's layers, with their initial weights."""
    policy = WEIGHT_POLICIES[setup.pipeline.weights]
    rules = ReplicaRules(
        split=setup.pipeline.backward == SPLIT,
        overwrite=not policy.stashed,
        moves=policy.moves(setup.pipeline, stage),
        gamma=setup.gamma(stage),
        loss_scale=setup.loss_scale,
    )
    kind: type[Replica] = next(iter(setup.pipeline.hooks("replica").values()), Replica)
    return kind(cut, setup.make_optimizer, device=setup.device, seed=setup.seed, rules=rules)
