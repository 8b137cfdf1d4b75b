"""A recipe's setup: all that an engine needs, and what follows from it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from pipebench.checkpoint.share import Share, own_cuts, own_names
from pipebench.cluster import Cluster, Level
from pipebench.errors import PlanError
from pipebench.model.graph import LayerGraph
from pipebench.model.optimizer import MakeOptimizer
from pipebench.model.plan import Plan, recut
from pipebench.model.sampling import Sampler, microbatch_sizes
from pipebench.planner.predict import pipeline_under
from pipebench.profile.model import Profile
from pipebench.recipe.schema import LossScaleRecipe
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.weights import CORRECTION_DECAY, WEIGHT_POLICIES, delay, update_costs
from pipebench.simulate.costs import Costs, stage_costs
from pipebench.simulate.evaluation import Evaluation, evaluation_of
from pipebench.zoo.registry import Dataset


@dataclass(frozen=True)
class Setup:
    """All that an engine needs to run a recipe."""

    graph: LayerGraph  # its parameters are the initial weights
    plan: Plan
    pipeline: Pipeline  # shape and order of work
    profile: Profile  # layer costs at every size of a unit
    costs: Costs  # seconds and bytes of every instruction, from the profile
    evaluation: Evaluation  # the stages of evaluations, and their costs
    cluster: Cluster
    dataset: Dataset
    sampler: Sampler  # of training minibatches
    held_out: Sampler  # of evaluation minibatches
    make_optimizer: MakeOptimizer  # makes a stage's optimizer
    lr: Callable[[int, int, int], float]  # an update's rate, from (stage, samples before it, its own samples)
    clip_norm: float | None  # largest norm of an update's gradients: of all stages in flushing modes, else of each
    seed: int  # for random layers
    device: torch.device  # of the arithmetic
    loss_scale: LossScaleRecipe | None = None  # None: no scaling
    correction_decay: float = CORRECTION_DECAY  # PipeMare's D, see `gamma`
    steps_on_whole: bool = False  # the optimizer needs whole parameters, so shards don't cut them
    repartitions: bool = False  # layers may move, so processes keep the whole model and connect all stages
    compiled: bool = False  # stages are compiled
    channels_last: bool = False  # images and weights of convolutions are laid out channels last

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of every worker."""
        return self.plan.devices

    @property
    def copies(self) -> bool:
        """Whether devices copy activations to their hosts, or may do so once layers have moved."""
        return bool(self.pipeline.swaps) or self.repartitions

    def under(self, plan: Plan) -> "Setup":
        """Return the same run under a plan with other cuts or memory policies.

        Raises:
            PlanError: stages, replicas, devices or depth differ.
        """
        own, given = ((p.replicas, p.devices, p.depth, p.chunks) for p in (self.plan, plan))
        if own != given:
            raise PlanError(
                f"a run that goes on keeps replicas, devices, depth and chunks per worker: got {given}, it has {own}; "
                f"what may change are the cuts and what layers keep"
            )
        plan = recut(self.graph, plan, plan.starts)
        rows = self.profile.rows
        pipeline = pipeline_under(self.pipeline, plan, rows)
        costs = stage_costs(self.profile, plan, update_costs(pipeline), sharded=pipeline.is_sharded)
        return replace(
            self,
            plan=plan,
            pipeline=pipeline,
            costs=replace(costs, host=self.costs.host),
            evaluation=evaluation_of(self.graph, plan, pipeline, self.profile, self.dataset),
        )

    def gamma(self, stage: int) -> float | None:
        """Return the decay gamma = D^(1 / tau) of a parameter's mean change per update; None without correction.

        Paper: PipeMare (Yang et al., MLSys'21), technique T2. Its tau is the delay of the stage's forwards, since
        backwards have none.
        """
        tau = delay(self.pipeline, stage)
        if tau == 0 or not WEIGHT_POLICIES[self.pipeline.weights].corrects:
            return None
        return float(self.correction_decay ** (1 / tau))

    def level_between(self, sender: int, receiver: int) -> Level:
        """Return the innermost level that joins two different workers."""
        return self.cluster.levels[self.cluster.level_between(self.devices[sender], self.devices[receiver])]

    def ring(self, workers: Iterable[int]) -> list[int]:
        """Return workers in the order of their devices: the ring then enters and leaves every server only once."""
        return sorted(workers, key=self.devices.__getitem__)

    def servers(self, ring: Sequence[int]) -> list[list[int]]:
        """Return the groups of a ring's workers that sum first, by position in the ring."""
        return self.cluster.servers([self.devices[worker] for worker in ring])


def ranks_of(setup: Setup) -> list[int]:
    """Return every worker's process rank: processes run in the order of devices, on those that the plan uses."""
    return [sorted(setup.devices).index(device) for device in setup.devices]


def share_of(setup: Setup, stage: int, replica: int) -> Share:
    """Return a stage replica's share of the model's state."""
    sizes = microbatch_sizes(setup.sampler.size(0), setup.pipeline.microbatches) if setup.sampler.streams else ()
    names, ties = own_names(setup.graph), zip(setup.pipeline.ties, setup.costs.ties, strict=True)
    elsewhere = {names[name] for stages, tied in ties if stages[0] < stage for name in tied.parameters}
    slices = setup.graph.slices
    return Share(
        names, replica, setup.pipeline.replicas[stage], tuple(sizes), frozenset(elsewhere),
        0 if slices is None else slices.group.rank, own_cuts(setup.graph),
    )  # fmt: skip
