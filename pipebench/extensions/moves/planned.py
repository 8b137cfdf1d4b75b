"""Moves of layers that a recipe asks for, as plans from a minibatch on; and plans of the moves that a run has made."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipebench.cluster import Cluster
from pipebench.engine.setup import Setup
from pipebench.errors import PlanError, choice
from pipebench.extensions.moves.recipe import AskedMove, recipe_moves
from pipebench.extensions.moves.repartition_plan import Repartition, RepartitionPlan, layout_of, shape_problems
from pipebench.extensions.moves.settings import settings_of
from pipebench.formats import listed
from pipebench.model.graph import LayerGraph
from pipebench.model.plan import Plan, no_layer, recut, starts_of_cuts
from pipebench.recipe.schema import Recipe
from pipebench.schedule.modes import KEEP, MEMORY_POLICIES
from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.simulate.meter import CUT_ANEW
from pipebench.train.job import JobExtension
from pipebench.train.periods import Periods
from pipebench.train.plan import check_copies
from pipebench.train.profiled_model import ProfiledModel

_KEY = "parallelism.vpipe.moves"
_MOST_LISTED = 5  # moves that a note lists
BEFOREHAND, BALANCED = "decided beforehand", "to balance the stages"  # why cuts change: a recipe's move, Algorithm 1's


@dataclass(frozen=True)
class PlannedMove:
    """A plan, and the minibatch from which on it holds."""

    minibatch: int  # of the run: the first whose forward runs under the plan
    plan: Plan


@dataclass(frozen=True)
class MovesPlanned(JobExtension):
    """The moves that a job's recipe asks for."""

    recipe: Recipe
    planned: tuple[PlannedMove, ...] = ()  # ascending

    switches = True

    @classmethod
    def of(cls, recipe: Recipe, cluster: Cluster, known: ProfiledModel) -> "MovesPlanned":
        """Return the extension's part of a recipe's job, without plans, which need the setup."""
        return cls(recipe)

    def prepared(self, setup: Setup) -> "MovesPlanned":
        """Return the part with the plans that the recipe asks for."""
        periods = Periods.of(self.recipe.train, setup.sampler.minibatches_per_epoch)
        return replace(self, planned=planned_moves(recipe_moves(self.recipe), setup, periods))

    def refused(self, setup: Setup) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) of every listed move after the run's end; a file's run may have been longer."""
        vpipe, epochs, streams = self.recipe.parallelism.vpipe, self.recipe.train.max_epochs, setup.sampler.streams or 1
        total, late = self._late(setup)
        if vpipe is not None and isinstance(vpipe.moves, list):
            last = (total - 1) // streams * streams
            for index in late:
                given = f"got minibatch {self.planned[index].minibatch}, and the run ends after {total}"
                yield f"{_KEY}[{index}].at", f"{given} (train.max_epochs {epochs}): allowed is one from 1 to {last}"

    def notes(self, setup: Setup) -> dict[str, str]:
        """Return a note that lists the moves after the run's end, if any."""
        _, late = self._late(setup)
        places = listed([f"{self.planned[index].minibatch}" for index in late], _MOST_LISTED)
        return {CUT_ANEW: f"not at minibatch {places}, which the run ends before"} if late else {}

    def _late(self, setup: Setup) -> tuple[int, list[int]]:
        """Return the run's number of minibatches, and the indices of the moves after its end."""
        total = Periods.of(self.recipe.train, setup.sampler.minibatches_per_epoch).total
        return total, [index for index, move in enumerate(self.planned) if move.minibatch >= total]


def planned_moves(asked: Sequence[AskedMove], setup: Setup, periods: Periods) -> tuple[PlannedMove, ...]:
    """Return the plans that a recipe's moves ask for, in order.

    Args:
        asked: the moves, in order.
        setup: the setup at the start of the run.
        periods: the run's drains.

    Raises:
        PlanError: layers can't move, or a move's cuts or minibatch are impossible; names the move.
    """
    _check_movable(setup)
    found: list[PlannedMove] = []
    plan, streams = setup.plan, setup.sampler.streams or 1
    for index, move in enumerate(asked):
        where, minibatch = f"{_KEY}[{index}]", move.at.minibatch(setup.sampler.minibatches_per_epoch)
        after = found[-1].minibatch if found else 0
        if minibatch <= after:
            raise PlanError(f"{where}.at: got minibatch {minibatch}, allowed is one after {after}, ascending")
        if minibatch % streams:
            raise PlanError(f"{where}.at: got minibatch {minibatch}, allowed are multiples of train.streams, {streams}")
        if len(move.cuts) != len(plan.stages) - 1:
            raise PlanError(
                f"{where}.cuts: got {len(move.cuts)}, allowed are {len(plan.stages) - 1}, the first layers of all "
                f"stages but the first"
            )
        plan = plan_after(setup.graph, plan, move.cuts, move.memory, where)
        check_copies(setup.cluster, plan, where)
        found.append(PlannedMove(minibatch, plan))
    if settings_of(setup.pipeline).live:
        _check_live(found, setup, periods)
    return tuple(found)


def _check_movable(setup: Setup) -> None:
    """Raise an error if layers can't move, or stages are to be balanced that can't be measured one by one."""
    if setup.repartitions and settings_of(setup.pipeline).live:
        for problem in shape_problems(setup.pipeline):
            raise PlanError(f"parallelism.vpipe: {problem}")
        if setup.loss_scale is not None:
            raise PlanError(
                "parallelism.vpipe: layers move while training goes on only where no stage scales its gradients; set "
                "vpipe.live: false, or train.precision: bf16"
            )
    if settings_of(setup.pipeline).balances and setup.pipeline.num_workers > setup.pipeline.num_stages:
        raise PlanError(
            f"parallelism.vpipe.repartition: stages are balanced where each has one worker, and plan {setup.plan} has "
            f"replicas; set vpipe.repartition: false, or parallelism.plan: straight"
        )


def _check_live(planned: Sequence[PlannedMove], setup: Setup, periods: Periods) -> None:
    """Raise an error for the first move that is too soon after a drain or another move, or moves layers too far."""
    plan, drained = setup.plan, 0
    moves = RepartitionPlan(setup.pipeline, layout_of(plan))
    for index, move in enumerate(planned):
        if move.minibatch >= periods.total:  # the run ends before
            return
        while periods.next_drain(drained) <= move.minibatch:
            drained = periods.next_drain(drained)
            moves = RepartitionPlan(setup.pipeline, layout_of(plan))
        if move.minibatch > drained:
            asked = Repartition(move.minibatch - drained, *layout_of(move.plan))
            for problem in moves.problems(asked):
                since = f", counted from the drain after {drained}" if drained else ""
                raise PlanError(f"{_KEY}[{index}]: {problem}{since}; or set vpipe.live: false")
            moves.announce(asked)
        plan = move.plan


def plan_after(
    graph: LayerGraph, plan: Plan, cuts: Sequence[str], memory: dict[str, str] | None, where: str = _KEY
) -> Plan:
    """Return a plan with other cuts and policies.

    Args:
        graph: the model.
        plan: the plan to change.
        cuts: the first layer of every stage but the first, by name.
        memory: policies by layer name; layers not named save their activations. None: all policies stay.
        where: the recipe's key that asks for it, for errors.

    Raises:
        PlanError: no such layer, or a stage without layers.
    """
    policies = None if memory is None else _policies(graph, memory, where)
    try:
        return recut(graph, plan, starts_of_cuts(graph, cuts), policies)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None


def _policies(graph: LayerGraph, memory: Mapping[str, str], where: str) -> list[str]:
    """Return the policy of every layer; those not named save their activations."""
    names = [layer.name for layer in graph.layers]
    for name, policy in memory.items():
        if name not in names:
            raise PlanError(f"{where}.memory: {no_layer(name, names)}")
        if policy not in MEMORY_POLICIES:
            raise PlanError(f"{where}.memory.{name}: {choice(policy, MEMORY_POLICIES)}")
    return [memory.get(name, KEEP) for name in names]


def cuts_of(graph: LayerGraph, plan: Plan) -> tuple[str, ...]:
    """Return the first layer of every stage but the first."""
    return tuple(graph.layers[start].name for start in plan.starts)


def policies_of(graph: LayerGraph, plan: Plan) -> dict[str, str]:
    """Return the policies of layers that don't save their activations, by name."""
    return {layer.name: each for layer, each in zip(graph.layers, plan.memory, strict=True) if each != KEEP}


def under(setup: Setup, moves: Sequence[RepartitionRecord]) -> Plan:
    """Return a run's plan after the moves that it has made; `setup` is that of its start."""
    return plan_after(setup.graph, setup.plan, moves[-1].cuts, moves[-1].memory) if moves else setup.plan
