"""Plan files: JSON with one layer per line, so that moving a line moves a layer to another stage.

`pipebench plan --out` and every run write them, users edit them, and `parallelism.plan` names them. This module checks
all that can be checked without the model; `model/plan_layers.py` compares the layers with the model's.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipebench.errors import PlanError, RecipeError, choice
from pipebench.files import read_text, start_of
from pipebench.recipe.schema import ParallelismRecipe
from pipebench.schedule.csv_form import is_csv
from pipebench.schedule.modes import AUTO, KEEP, MEMORY_POLICIES, MODES, RECOMPUTE, SWAP, Mode
from pipebench.schedule.notation import parse_plan
from pipebench.schedule.pipeline import SPLIT
from pipebench.schedule.placement import places
from pipebench.schedule.syncs import OPTIMIZER
from pipebench.typed_json import Count, JsonError, Ordinal, faults_in, read, shown

VERSION = 1
_KEY = "pipebench_plan"
MOST_DEPTH = 2**31  # minibatches in flight
Problems = Iterator[tuple[str, str]]  # place in the file, and the end of a sentence


@dataclass(frozen=True)
class StageForm:
    """One stage."""

    replicas: Ordinal
    devices: tuple[Count, ...]  # one per replica, numbered along the cluster's levels
    layers: dict[str, str]  # memory policy by layer name, in order of execution


@dataclass(frozen=True)
class PlanForm:
    """The content of a plan file."""

    mode: str
    depth: Ordinal  # minibatches in flight per input-stage replica
    chunks: Ordinal  # stages per worker, which have the same devices
    stages: tuple[StageForm, ...]
    shard: str | None = None  # what replicas share out, if the planner chose that

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of replicas at every position in the pipeline."""
        return tuple(stage.replicas for stage in self.stages[: max(1, len(self.stages) // self.chunks)])

    def data(self) -> dict[str, Any]:
        """Return the file's content as plain data."""
        found = {_KEY: VERSION, **asdict(self)}
        return {key: value for key, value in found.items() if value is not None}

    def text(self) -> str:
        """Return the file's text."""
        head = {key: value for key, value in self.data().items() if key != "stages"}
        lines = ["{", *(f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()), ' "stages": [']
        for index, stage in enumerate(self.stages):
            layers = [f"    {json.dumps(name)}: {json.dumps(policy)}" for name, policy in stage.layers.items()]
            lines += ["  {", f'   "replicas": {stage.replicas},', f'   "devices": {json.dumps(stage.devices)},']
            lines += ['   "layers": {', ",\n".join(layers), "   }", "  }," if index < len(self.stages) - 1 else "  }"]
        return "\n".join([*lines, " ]", "}"]) + "\n"


def is_plan_file(given: object) -> bool:
    """Return whether a recipe's plan is a file's path, not the papers' notation."""
    return isinstance(given, str) and (given.endswith(".json") or "/" in given)


def is_our_plan(path: Path) -> bool:
    """Return whether a file is a plan file, valid or not, by its beginning."""
    return f'"{_KEY}"'.encode() in start_of(path, 200)


def load_plan(path: str) -> PlanForm:
    """Read a plan file; raises a RecipeError if it can't be read or isn't a plan of this version."""
    return parse_plan_file(read_text(path), path)


def parse_plan_file(text: bytes | str, source: str) -> PlanForm:
    """Read the text of a plan file named `source`; raises a RecipeError if it isn't a plan of this version."""
    with faults_in(source):
        data = read(dict[str, Any], text)
        if _KEY not in data:
            raise JsonError(f"isn't a pipebench plan: an object with the key {_KEY!r} is expected")
        version = data.pop(_KEY)
        if type(version) is not int or version != VERSION:
            raise JsonError((_KEY, f"got {shown(version)}, allowed is {VERSION}, the version of this form"))
        form = read(PlanForm, data)
        if twice := _twice(text):
            raise JsonError(*(("stages", f"{name!r} stands twice in one object, allowed is once") for name in twice))
    return form


def asked_replicas(plan: object, mode: Mode, num_workers: int) -> tuple[int, ...] | None:
    """Return the number of replicas per position of a recipe's plan, None if the planner chooses them.

    Raises:
        PlanError: not a valid plan, not of this mode, or it needs more workers than there are.
    """
    if plan == AUTO and not mode.is_one_stage:
        return None
    if isinstance(plan, str) and is_plan_file(plan):
        try:
            return load_plan(plan).replicas
        except RecipeError as error:
            raise PlanError(str(error)) from None
    return parse_plan(plan, mode, num_workers)


def form_problems(form: PlanForm, asked: ParallelismRecipe, num_workers: int) -> Problems:
    """Yield the problems of a plan file for a recipe, whose mode isn't `auto`, that can be found without the model."""
    name, mode, depth = asked.mode, asked.row, asked.depth
    if form.mode != name:  # the rest of the file depends on the mode
        instead = f"; to run it, give parallelism.mode={form.mode}" if form.mode in MODES else ""
        yield "mode", f"got {shown(form.mode)}, allowed is {name}, the recipe's mode{instead}"
        return
    others_allowed = asked.chunks is None and mode.chunks > 1
    # A plan of sharded data parallelism may have fewer groups of layers than the mode has places for.
    others_allowed |= mode.shape == "one-stage" and form.chunks <= mode.chunks
    if form.chunks != mode.chunks and not (others_allowed and (form.chunks > 1 or mode.shape == "one-stage")):
        allowed = "2 or more stages per worker" if others_allowed else f"{mode.chunks}, the stages per worker"
        yield "chunks", f"got {form.chunks}, in mode {name} allowed is {allowed}"
        form = replace(form, chunks=1)  # checks the rest without chunks
    if form.shard not in (None, mode.shard) and (asked.shard is not None or form.shard != OPTIMIZER):
        open_to = () if asked.shard is not None else (OPTIMIZER,)
        yield "shard", choice(form.shard, dict.fromkeys((mode.shard, *open_to)))
    yield from _stage_problems(form, asked.recompute, mode.backward)
    if not form.stages or len(form.stages) % form.chunks:
        allowed = f"a multiple of {form.chunks}, the stages per worker" if form.chunks > 1 else "at least one"
        yield "stages", f"got {len(form.stages)} stages, allowed is {allowed}"
        return
    try:
        parse_plan("-".join(map(str, form.replicas)), mode, num_workers)
    except PlanError as error:
        yield "stages", f"{error} (mode {name}, {num_workers} workers)"
    else:
        # Earlier versions wrote devices under an order from a CSV file as if stages took turns.
        others = ("",) if is_csv(mode.order) else ()
        found = [[*_device_problems(form, order, num_workers)] for order in (*others, mode.order)]
        yield from min(found, key=len)
    if mode.depth is not None and form.depth != mode.depth:
        yield "depth", f"got {form.depth}, in mode {name} allowed is {mode.depth}"
    elif mode.depth is None and type(depth) is int and form.depth != depth:
        yield "depth", f"got {form.depth}, allowed is {depth}, the recipe's parallelism.depth"
    elif form.depth > MOST_DEPTH:
        yield "depth", f"got {form.depth}, allowed is a whole number from 1 to {MOST_DEPTH}"


def _stage_problems(form: PlanForm, recompute: bool | None, backward: str) -> Problems:
    """Yield problems inside single stages: no layers, or invalid memory policies."""
    for index, stage in enumerate(form.stages):
        where = f"stages[{index}].layers"
        if not stage.layers:
            yield where, "got no layer, allowed is at least one in every stage"
        for layer, policy in stage.layers.items():
            if policy not in MEMORY_POLICIES:
                yield f"{where}[{shown(layer)}]", choice(policy, MEMORY_POLICIES)
            elif policy == SWAP and backward == SPLIT:
                why = "backwards are split, and their weight parts keep what layers read"
                yield f"{where}[{shown(layer)}]", f"got {SWAP!r}, allowed are {KEEP} and {RECOMPUTE}: {why}"
        given, allowed = (KEEP, RECOMPUTE) if recompute else (RECOMPUTE, KEEP)
        if recompute is not None and given in stage.layers.values():
            said = f"as the recipe says parallelism.recompute: {str(recompute).lower()}"
            yield where, f"got {given}, allowed is {allowed}, {said}"


def _device_problems(form: PlanForm, order: str, num_workers: int) -> Problems:
    """Yield replicas without a device, devices without a replica or with two, and unknown devices."""
    holders: dict[int, int] = {}
    placed = places(order, [stage.replicas for stage in form.stages], form.chunks)
    first_of = {min(own): index for index, own in reversed([*enumerate(placed)])}
    for index, stage in enumerate(form.stages):
        where, position = f"stages[{index}].devices", first_of[min(placed[index])]
        given = list(stage.devices)
        if position != index:
            first = form.stages[position]
            at = dict(zip(placed[position], first.devices, strict=False))
            devices = tuple(at[worker] for worker in placed[index] if worker in at)
            if (stage.replicas, stage.devices) != (first.replicas, devices):
                allowed = f"{first.replicas} on {list(devices)}, as stage {position}, whose workers run it too"
                yield f"stages[{index}]", f"got {stage.replicas} replicas on {given}, allowed is {allowed}"
            continue
        if len(given) != stage.replicas:
            allowed = f"{stage.replicas}, one for each replica"
            yield where, f"got {len(given)} devices, {_short(given)}, allowed is {allowed}"
        for device in given:
            if device >= num_workers:
                yield where, f"got {device}, allowed are 0 to {num_workers - 1}, the cluster's devices"
            elif device in holders:
                yield where, f"got {device}, which stage {holders[device]} stands on: allowed is every device once"
            holders.setdefault(device, index)


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ..]"


def _twice(text: bytes | str) -> list[str]:
    """Return the keys that some object has twice; JSON readers silently take the last value."""
    found: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in items]
        found.extend(name for index, name in enumerate(names) if name in names[:index])
        return dict(items)

    json.loads(text, object_pairs_hook=pairs)
    return found
