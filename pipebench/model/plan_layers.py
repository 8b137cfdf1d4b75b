"""Converts between plans and plan files, whose layers are named and checked against the model's."""

import bisect
import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pipebench.errors import Fault, RecipeError, nearest
from pipebench.formats import listed
from pipebench.lines import LinedFile
from pipebench.model.plan import Cuttable, Plan, StagePlan, make_plan, split_ties
from pipebench.recipe.plan_file import PlanForm, Problems, StageForm
from pipebench.typed_json import shown

_MOST_NAMED = 4  # layers named in one sentence


def form_of(plan: Plan, names: Sequence[str]) -> PlanForm:
    """Return a plan in the form of its file; `names` are the names of all layers in order."""
    stages = (
        StageForm(stage.replicas, stage.devices, dict(zip(names[stage.start : stage.stop], stage.memory, strict=True)))
        for stage in plan.stages
    )
    return PlanForm(plan.mode, plan.depth, plan.chunks, tuple(stages), plan.shard)


def plan_of(form: PlanForm, graph: Cuttable, *, relay: bool = False, ties: bool = False) -> Plan:
    """Return the plan of a file that has no `layer_problems`; `relay` and `ties` are as in `Plan`."""
    counts = [len(stage.layers) for stage in form.stages]
    made = make_plan(
        graph,
        [sum(counts[:index]) for index in range(1, len(counts))],
        [stage.replicas for stage in form.stages],
        mode=form.mode,
        devices=[stage.devices for stage in form.stages],
        depth=form.depth,
        chunks=form.chunks,
        memory=[policy for stage in form.stages for policy in stage.layers.values()],
        relay=relay,
        ties=ties,
    )
    return replace(made, shard=form.shard)


def refuse(source: str, problems: Iterable[tuple[str, str]], hint: str = "") -> None:
    """Raise a RecipeError with all (where, problem) in a plan's file, if there are any; `hint` is added to each."""
    faults = [Fault(LinedFile(source), where, f"{problem}{hint}") for where, problem in problems]
    if faults:
        raise RecipeError(faults)


def layer_problems(form: PlanForm, graph: Cuttable, *, ties: bool = False) -> Problems:
    """Yield unknown, missing, repeated and misplaced layers, and ties across stages; `ties` is as in `Plan`."""
    if not form.stages:
        return
    names = [layer.name for layer in graph.layers]
    place = {name: index for index, name in enumerate(names)}
    problems = [*_unknown_or_twice(form, place)]
    holder = {name: index for index, stage in reversed([*enumerate(form.stages)]) for name in stage.layers}
    known = [name for name in dict.fromkeys(name for stage in form.stages for name in stage.layers) if name in place]
    in_order = _longest_ascending([place[name] for name in known])
    for name in (name for name in known if place[name] not in in_order):
        problem = f"got {name!r} out of order, in the model it comes {_belongs(place[name], names)}"
        problems.append((f"stages[{holder[name]}].layers", problem))
    missing = [name for name in names if name not in holder]
    for name in holder:  # a misspelt name isn't reported twice
        if name not in place:
            missing = [each for each in missing if each not in difflib.get_close_matches(name, missing, 1)]
    if missing:
        said = f"missing are {listed([*map(repr, missing)], _MOST_NAMED)}, allowed is every layer of the model once"
        problems.append(("stages", f"{said}; {missing[0]!r} comes {_belongs(place[missing[0]], names)}"))
    yield from problems
    if not problems and all(stage.layers for stage in form.stages):
        starts = [place[next(iter(stage.layers))] for stage in form.stages]
        stages = [StagePlan(a, b, 1, (), ()) for a, b in itertools.pairwise([*starts, len(names)])]
        for problem in split_ties(graph, stages, ties=ties):
            yield "stages", problem


def _unknown_or_twice(form: PlanForm, place: Mapping[str, int]) -> Problems:
    """Yield names that the model doesn't have, and names that are in several stages."""
    holder: dict[str, int] = {}
    for index, stage in enumerate(form.stages):
        where = f"stages[{index}].layers"
        for name in stage.layers:
            if name not in place:
                yield where, f"got {shown(name)}, and the model has no such layer{nearest(name, place)}"
            elif name in holder:
                yield where, f"got {name!r}, which stage {holder[name]} has too, allowed is every layer once"
            holder.setdefault(name, index)


def _longest_ascending(values: Sequence[int]) -> set[int]:
    """Return a longest ascending subsequence of different numbers; the fewest others are then out of order."""
    tails: list[int] = []  # for every length, the least last number of an ascending subsequence of that length
    before: dict[int, int | None] = {}  # a number to the one before it in the longest subsequence that ends with it
    for value in values:
        at = bisect.bisect_left(tails, value)
        before[value] = tails[at - 1] if at else None
        tails[at : at + 1] = [value]
    chosen: set[int] = set()
    last = tails[-1] if tails else None
    while last is not None:
        chosen.add(last)
        last = before[last]
    return chosen


def _belongs(place: int, names: Sequence[str]) -> str:
    return f"after {names[place - 1]!r}" if place else "first"
