"""The planner's request and answers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from pipebench.cluster import Cluster
from pipebench.model.plan import Plan
from pipebench.planner.activations import VirtualMemory
from pipebench.planner.cost_models import CostModel
from pipebench.profile.model import Profile
from pipebench.schedule.modes import MODES, Mode
from pipebench.schedule.syncs import NOT_SHARDED


@dataclass(frozen=True)
class Request:
    """What to plan."""

    profile: Profile
    cluster: Cluster
    model: CostModel
    minibatch_size: int  # samples, in modes that don't cut minibatches; the profile has that size
    runnable: bool = True  # whether cuts must follow the order of execution, for an engine to run the plan unchanged
    microbatches: int = 1  # per minibatch, for modes that cut minibatches
    # Blocks of minibatches per flush, for modes that flush; None for as many as keep the pipeline full
    accumulate: int | None = None
    depth: int | None = None  # minibatches in flight per input-stage replica; None for NOAM, lowered if memory demands
    row: Mode | None = None  # the mode's row of the table if the recipe changes it
    # Whether the row's number of layer groups of a sharded model is exact, as with given cuts; else it is the most
    is_cut: bool = False
    memory: tuple[str, ...] | None = None  # policy of every layer; None for the mode's
    chooses: tuple[str, ...] = ()  # policies besides keep that stages choose from in order to fit: vPipe's Algorithm 2
    # Streams of text, whose state continues from minibatch to minibatch; the replicas of every stage divide the number
    streams: int | None = None
    unsuited: Mapping[str, str] = field(default_factory=dict)  # reasons by mode that the training can't use
    relay: bool = False  # whether values that skip stages pass through those between
    ties: bool = True  # whether stages may each have a copy of a tied weight, in modes that allow it
    shares_norm: bool = False  # whether updates need the norm of all gradients, as for clipping
    may_shard: Collection[str] = ()  # modes whose replicas may shard optimizer state where memory binds
    may_recompute: bool = False  # whether layers may be recomputed where memory binds


@dataclass(frozen=True)
class MemoryChoice:
    """A way for plans to fit where memory binds, and the time of the best such plan."""

    shard: str  # what replicas shard, a name in `syncs.SHARDS`
    recompute: bool  # whether all layers are recomputed
    minibatch_s: float | None = None  # predicted seconds per minibatch; None: no plan fits

    def __str__(self) -> str:
        """Return the columns of a recipe that ask for it."""
        given = (f"shard: {self.shard}" * (self.shard != NOT_SHARDED), "recompute: true" * self.recompute)
        return ", ".join(filter(None, given)) or "neither"


@dataclass(frozen=True)
class StageEstimate:
    """Costs of one stage; seconds are per minibatch."""

    compute_s: float
    sync_s: float  # of the gradient sum, on its own
    transfer_s: float
    stage_s: float  # of all of these under the cost model
    memory_bytes: float  # peak of one replica
    in_flight: int  # units in flight on one replica
    virtual: VirtualMemory | None = None  # its layers' activation policies, if they differ


@dataclass(frozen=True)
class StageTime:
    """Fractions of the time of a stage's workers in the simulator's steady state; their sum is 1."""

    computing: float
    transfers: float  # waiting for bytes in transit: the part of transfers and gradient sums that isn't hidden
    waiting: float  # for other stages and for data


@dataclass(frozen=True)
class PlanEstimate:
    """A plan and its costs; seconds are per minibatch."""

    plan: Plan  # its layers are numbered along `order`
    order: tuple[int, ...]  # indices into the profile's layers; not ascending only if cuts may be anywhere in the graph
    found_by: str  # the search's name
    stages: tuple[StageEstimate, ...]
    microbatches: int  # as in `Request`
    accumulate: int  # as in `Request`
    bottleneck_s: float  # of the slowest worker or port, by the cost model
    port_s: float  # of the busiest port between components
    minibatch_s: float  # predicted: simulated, or the bottleneck on clusters too large to simulate
    num_bytes: dict[str, float]  # payload per minibatch by kind, independent of the cost model
    is_simulated: bool = False  # whether `minibatch_s` is from the simulator
    at_least_s: float = 0.0  # lower bound for plans of the mode; 0 if unknown
    # Whether every plan up to a depth of NOAM + 1 was simulated or can't be faster; then `at_least_s` bounds these
    tried_all: bool = False
    choices: tuple[MemoryChoice, ...] = ()  # compared where memory binds, this plan's first; else empty

    @property
    def memory_bytes(self) -> float:
        """Peak of the fullest worker, all its stages included."""
        return max(sum(stage.memory_bytes for stage in stages) for stages in self.by_position)

    def chosen(self, row: Mode) -> Mode:
        """Return the mode's row with what was chosen for this plan."""
        return replace(row, shard=self.choices[0].shard, recompute=self.choices[0].recompute) if self.choices else row

    @property
    def by_position(self) -> list[tuple[StageEstimate, ...]]:
        """The stages of every position in the pipeline: one, or the number of chunks."""
        return [tuple(self.stages[index] for index in stages) for stages in self.plan.by_position]


@dataclass(frozen=True)
class Comparison:
    """The best plan of every mode."""

    best: PlanEstimate  # the requested mode's, or the fastest mode's
    others: tuple[PlanEstimate, ...]  # of every other planned mode, fastest first
    # Data parallelism on all workers, even if it doesn't fit in memory or its replicas don't divide streams
    dp: PlanEstimate
    refused: dict[str, str]  # reasons, by mode without a plan
    # Seconds by part: `search` and `simulation` are for the requested mode, or for all modes if the fastest was asked
    # for; `other modes` is the rest.
    took_s: dict[str, float]
    num_states: int  # places to cut, both ends of the model included
    at_most: float = 1.0  # upper bound on the best bottleneck found over the smallest possible; 1 if exact
    cuts_anywhere: bool = False  # whether plans were allowed whose cuts don't follow the order of execution

    @property
    def unplanned(self) -> list[str]:
        """Modes left to plan: sharded ones are among them only if data parallelism doesn't fit."""
        planned = {self.best.plan.mode, *(each.plan.mode for each in self.others), *self.refused}
        binds = "dp" in self.refused
        return [name for name, row in MODES.items() if name not in planned and (binds or not row.is_sharded)]

    @property
    def solve_s(self) -> float:
        """Seconds to choose the best, simulations included, without other modes."""
        return self.took_s["search"] + self.took_s["simulation"]
