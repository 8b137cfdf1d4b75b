"""What is asked of the planner, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipebench.cluster import Cluster
from pipebench.model.plan import Plan
from pipebench.planner.activations import VirtualMemory
from pipebench.planner.cost_models import CostModel
from pipebench.profile.model import Profile
from pipebench.schedule.modes import MODES, Mode


@dataclass(frozen=True)
class Request:
    """What to plan.

    Attributes:
        profile: the model, as a graph of layers.
        cluster: the devices and their links.
        model: the cost model.
        minibatch_size: samples that travel where a mode doesn't cut minibatches; the profile has that size.
        runnable: whether cuts must follow the order of execution, so that an engine can run the plan as it is.
        microbatches: units per minibatch, for modes that cut minibatches.
        accumulate: blocks of minibatches per flush, for modes that flush; None for as many as keep the pipeline full.
        depth: minibatches in flight per input-stage replica; None for NOAM, lowered when memory demands.
        row: the mode's row of the table if the recipe changes it.
        memory: policy of every layer; None for the mode's.
        chooses: policies that are chosen layer by layer so that every stage fits, beside keeping: vPipe's Algorithm 2.
        streams: for text, which is carried on from minibatch to minibatch: every stage's replicas divide it.
        unsuited: modes that the training can't run in, and why.
        relay: whether what skips stages goes through all of those between.
    """

    profile: Profile
    cluster: Cluster
    model: CostModel
    minibatch_size: int
    runnable: bool = True
    microbatches: int = 1
    accumulate: int | None = None
    depth: int | None = None
    row: Mode | None = None
    memory: tuple[str, ...] | None = None
    chooses: tuple[str, ...] = ()
    streams: int | None = None
    unsuited: Mapping[str, str] = field(default_factory=dict)
    relay: bool = False


@dataclass(frozen=True)
class StageEstimate:
    """What one stage of a plan comes to; seconds are per minibatch.

    Attributes:
        compute_s, sync_s, transfer_s: computing, summing gradients, and sending and receiving, each on its own.
        stage_s: what the cost model makes of them together.
        memory_bytes: what one replica keeps at most.
        in_flight: minibatches (or microbatches) in flight on one replica.
        virtual: what becomes of its activations, where every layer has a policy of its own; else None.
    """

    compute_s: float
    sync_s: float
    transfer_s: float
    stage_s: float
    memory_bytes: float
    in_flight: int
    virtual: VirtualMemory | None = None


@dataclass(frozen=True)
class PlanEstimate:
    """A plan, and what it comes to.

    Attributes:
        plan: the plan; its layers are counted along `order`.
        order: indices into the profile's layers: other than ascending only where cuts may be anywhere in the graph.
        found_by: the algorithm that found it.
        stages: what every stage comes to.
        microbatches, accumulate: as in `Request`.
        bottleneck_s: seconds per minibatch of the slowest worker or port, by the cost model.
        port_s: those of the busiest port between components.
        minibatch_s: predicted seconds per minibatch: simulated, or the bottleneck of a cluster too large to simulate.
        num_bytes: payload per minibatch by kind, whatever the cost model makes of it.
        is_simulated: whether the simulator gave `minibatch_s`.
        at_least_s: seconds per minibatch that no plan of the mode takes less than; 0: nothing is known.
        tried_all: whether that is of the plans with up to one minibatch more than NOAM in flight, all of which were
            simulated or can't be better; else it is a bound on all plans there are.
    """

    plan: Plan
    order: tuple[int, ...]
    found_by: str
    stages: tuple[StageEstimate, ...]
    microbatches: int
    accumulate: int
    bottleneck_s: float
    port_s: float
    minibatch_s: float
    num_bytes: dict[str, float]
    is_simulated: bool = False
    at_least_s: float = 0.0
    tried_all: bool = False

    @property
    def memory_bytes(self) -> float:
        """What the fullest worker keeps at most, of all its stages."""
        return max(sum(stage.memory_bytes for stage in stages) for stages in self.by_position)

    @property
    def by_position(self) -> list[tuple[StageEstimate, ...]]:
        """The stages of every position in the pipeline: one, or as many as there are chunks per worker."""
        step = len(self.plan.positions)
        return [self.stages[position::step] for position in range(step)]


@dataclass(frozen=True)
class Comparison:
    """The best plan of every mode.

    Attributes:
        best: the one asked for: the mode's, or the fastest mode's.
        others: the best of every other mode that was planned, fastest first.
        dp: pure data parallelism on all workers, even if it doesn't fit in memory or its replicas don't divide streams.
        refused: modes without a plan, and why.
        took_s: seconds by what they went to: `search` and `simulation` of the plan asked for (of all modes where the
            fastest is asked for), `other modes`.
        num_states: places to cut, both ends of the model included.
        at_most: how many times the smallest bottleneck that of a search for `best` can be; 1 if all were exact.
    """

    best: PlanEstimate
    others: tuple[PlanEstimate, ...]
    dp: PlanEstimate
    refused: dict[str, str]
    took_s: dict[str, float]
    num_states: int
    at_most: float = 1.0

    @property
    def unplanned(self) -> list[str]:
        """Modes that were not planned."""
        planned = {self.best.plan.mode, *(each.plan.mode for each in self.others), *self.refused}
        return [name for name in MODES if name not in planned]

    @property
    def solve_s(self) -> float:
        """Seconds that choosing the best took, simulations included, other modes not."""
        return self.took_s["search"] + self.took_s["simulation"]
