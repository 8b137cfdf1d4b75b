"""What an engine needs to run a recipe, and what follows from it alone."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from pipebench.checkpoint.share import Share, own_names
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
from pipebench.schedule.weights import CORRECTION_DECAY, WEIGHT_POLICIES, delay
from pipebench.simulate.costs import Costs, stage_costs
from pipebench.simulate.evaluation import Evaluation, evaluation_of
from zoo.registry import Dataset


@dataclass(frozen=True)
class Setup:
    """Everything an engine needs to run a recipe.

    Attributes:
        graph: the layer graph; its parameters are the initial weights.
        plan: stages, where their replicas stand, and what crosses between them.
        pipeline: the pipeline's shape and order of work.
        profile: layer costs at every size that travels.
        costs: seconds and bytes of every instruction, which follow from it.
        evaluation: how evaluations are cut.
        cluster: where it runs.
        dataset: the data.
        sampler: which samples make up minibatch k.
        held_out: which held-out samples make up minibatch k of an evaluation.
        make_optimizer: makes a stage's optimizer.
        lr: learning rate of a stage's update from (stage, samples seen before it, its own samples).
        clip_norm: largest norm of an update's gradient: of all stages where they share it, else of each; or None.
        seed: for random layers.
        device: where arithmetic happens.
        loss_scale: how the scale of the loss changes; None for no scaling.
        correction_decay: PipeMare's D, see `gamma`.
        repartitions: whether layers may move from stage to stage between two drains or at one: processes then keep the
            model that stages are cut from, and connections between all stages.
        balances: whether stages are measured, and layers move to balance them.
        live: whether layers move while training goes on, else at a drain.
        chooses: what layers may do with their activations once they have moved, beside what they do; where stages are
            balanced they choose from it, and from nothing nobody does.
    """

    graph: LayerGraph
    plan: Plan
    pipeline: Pipeline
    profile: Profile
    costs: Costs
    evaluation: Evaluation
    cluster: Cluster
    dataset: Dataset
    sampler: Sampler
    held_out: Sampler
    make_optimizer: MakeOptimizer
    lr: Callable[[int, int, int], float]
    clip_norm: float | None
    seed: int
    device: torch.device
    loss_scale: LossScaleRecipe | None = None
    correction_decay: float = CORRECTION_DECAY
    repartitions: bool = False
    balances: bool = False
    live: bool = True
    chooses: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of every worker."""
        return self.plan.devices

    @property
    def copies(self) -> bool:
        """Whether devices copy to their hosts and back, now or once layers have moved, which may begin to swap then."""
        return bool(self.pipeline.swaps) or self.repartitions

    def under(self, plan: Plan) -> "Setup":
        """Return the same run under a plan with other cuts or memory policies; all that follows from them follows.

        Raises:
            PlanError: stages, replicas, devices or depth are others: those stay.
        """
        kept, given = ((p.replicas, p.devices, p.depth, p.chunks) for p in (self.plan, plan))
        if kept != given:
            raise PlanError(
                f"a run that goes on keeps replicas, devices, depth and chunks per worker: got {given}, it has {kept}; "
                f"what may change are the cuts and what layers keep"
            )
        memory = [policy for stage in plan.stages for policy in stage.memory]
        plan = recut(self.graph, plan, [stage.start for stage in plan.stages[1:]], memory)
        rows = next(iter(self.profile.layers.values()))
        pipeline = pipeline_under(self.pipeline, plan, rows)
        costs = stage_costs(self.profile, plan, WEIGHT_POLICIES[pipeline.weights].update_cost)
        return replace(
            self,
            plan=plan,
            pipeline=pipeline,
            costs=replace(costs, host=self.costs.host),
            evaluation=evaluation_of(self.graph, plan, pipeline, self.profile, self.dataset),
        )

    def gamma(self, stage: int) -> float | None:
        """Return the share of a parameter's mean change that an update leaves as it is, D^(1 / tau); None keeps none.

        PipeMare's tau is the delay of the stage's forwards, since its backwards have none.
        """
        tau = delay(self.pipeline, stage)
        if tau == 0 or not WEIGHT_POLICIES[self.pipeline.weights].corrects:
            return None
        return float(self.correction_decay ** (1 / tau))

    def level_between(self, sender: int, receiver: int) -> Level:
        """Return the innermost level that joins two different workers."""
        return self.cluster.levels[self.cluster.level_between(self.devices[sender], self.devices[receiver])]

    def ring(self, workers: Iterable[int]) -> list[int]:
        """Return workers in the order of their devices: as a ring, they leave and enter every component once."""
        return sorted(workers, key=self.devices.__getitem__)

    def servers(self, ring: Sequence[int]) -> list[list[int]]:
        """Return which members of a ring of workers sum together first, by their positions in it."""
        return self.cluster.servers([self.devices[worker] for worker in ring])


def ranks_of(setup: Setup) -> list[int]:
    """Return the process that every worker runs in: they stand in the order of the workers' devices.

    A plan may leave devices out; processes are only started for those it uses.
    """
    return [sorted(setup.devices).index(device) for device in setup.devices]


def minibatch_weight(setup: Setup, k: int) -> float:
    """Return the weight of minibatch k in a mean loss."""
    return setup.dataset.weight("train", setup.sampler.indices(k))


def loss_divisors(setup: Setup, first: int, num_minibatches: int) -> list[float] | None:
    """Return what the loss of every minibatch of a segment is divided by, before its backward.

    The weight of its update, where all stages' updates average over the same minibatches (flushing modes, straight
    pipelines). Otherwise None: every stage then divides at its own update. Either way a gradient is divided once.
    """
    pipeline = setup.pipeline
    sizes = {pipeline.round_size(stage) for stage in range(pipeline.num_stages)}
    if len(sizes) > 1:
        return None
    size = sizes.pop()
    divisors: list[float] = []
    for start in range(0, num_minibatches, size):
        group = range(start, min(start + size, num_minibatches))
        divisors += [sum(minibatch_weight(setup, first + k) for k in group)] * len(group)
    return divisors


def share_of(setup: Setup, stage: int, replica: int) -> Share:
    """Return the share of a replica of a stage in the state of a setup's model."""
    sizes = microbatch_sizes(setup.sampler.size(0), setup.pipeline.microbatches) if setup.sampler.streams else ()
    return Share(own_names(setup.graph), replica, setup.pipeline.replicas[stage], tuple(sizes))
