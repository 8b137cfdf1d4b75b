"""A plan as a file: JSON that names every stage's layers one a line, so that moving a line moves a layer.

It is written by `pipebench plan --out` and with every run, edited by hand, and read back by `parallelism.plan`. What
can be known without the model is checked here; `model/plan_layers.py` compares the layers.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipebench.errors import PlanError, RecipeError, choice
from pipebench.files import read_text
from pipebench.recipe.schema import ParallelismRecipe
from pipebench.schedule.modes import AUTO, KEEP, MEMORY_POLICIES, RECOMPUTE, SWAP, Mode
from pipebench.schedule.notation import parse_plan
from pipebench.schedule.pipeline import SPLIT
from pipebench.typed_json import Count, JsonError, Ordinal, faults_in, read, shown

VERSION = 1
_KEY = "pipebench_plan"
MOST_DEPTH = 2**31
Problems = Iterator[tuple[str, str]]  # where in the file, and the end of a sentence


@dataclass(frozen=True)
class StageForm:
    """One stage.

    Attributes:
        replicas: copies of it.
        devices: of every replica, numbered along the cluster's levels.
        layers: its layers by name, in order of execution, each with its memory policy.
    """

    replicas: Ordinal
    devices: tuple[Count, ...]
    layers: dict[str, str]


@dataclass(frozen=True)
class PlanForm:
    """A plan as its file has it.

    Attributes:
        mode: name of the mode it is for.
        depth: minibatches in flight per input-stage replica.
        chunks: stages per worker. With P positions in the pipeline, stages s and s + P share their devices.
        stages: in order.
    """

    mode: str
    depth: Ordinal
    chunks: Ordinal
    stages: tuple[StageForm, ...]

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of every position in the pipeline."""
        return tuple(stage.replicas for stage in self.positions)

    @property
    def positions(self) -> tuple[StageForm, ...]:
        """The stages that come first on their workers."""
        return self.stages[: max(1, len(self.stages) // self.chunks)]

    def data(self) -> dict[str, Any]:
        """Return what the file holds."""
        return {_KEY: VERSION, **asdict(self)}

    def text(self) -> str:
        """Return the file."""
        head = {_KEY: VERSION, "mode": self.mode, "depth": self.depth, "chunks": self.chunks}
        lines = ["{", *(f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()), ' "stages": [']
        for index, stage in enumerate(self.stages):
            layers = [f"    {json.dumps(name)}: {json.dumps(policy)}" for name, policy in stage.layers.items()]
            lines += ["  {", f'   "replicas": {stage.replicas},', f'   "devices": {json.dumps(stage.devices)},']
            lines += ['   "layers": {', ",\n".join(layers), "   }", "  }," if index < len(self.stages) - 1 else "  }"]
        return "\n".join([*lines, " ]", "}"]) + "\n"


def is_plan_file(given: object) -> bool:
    """Return whether a recipe's plan is the path of a file, and not in the papers' notation."""
    return isinstance(given, str) and (given.endswith(".json") or "/" in given)


def is_our_plan(path: Path) -> bool:
    """Return whether a file is a plan's, whole or not."""
    try:
        with path.open("rb") as file:
            return f'"{_KEY}"'.encode() in file.read(200)
    except OSError:
        return False


def load_plan(path: str) -> PlanForm:
    """Read a plan's file.

    Raises:
        RecipeError: it can't be read, or isn't a plan of this version.
    """
    return parse_plan_file(read_text(path), path)


def parse_plan_file(text: bytes | str, source: str) -> PlanForm:
    """Read what `PlanForm.text` wrote, and people may have edited.

    Args:
        text: the JSON.
        source: what to call it.

    Raises:
        RecipeError: it isn't a plan of this version; says where it isn't.
    """
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
    """Return the replicas per position that a recipe's plan asks for, or None if it leaves them to the planner.

    Raises:
        PlanError: it isn't a plan, or not one of this mode, or needs more workers than there are.
    """
    if plan == AUTO and mode.shape not in ("one", "one-stage"):
        return None
    if isinstance(plan, str) and is_plan_file(plan):
        try:
            return load_plan(plan).replicas
        except RecipeError as error:
            raise PlanError(str(error)) from None
    return parse_plan(plan, mode, num_workers)


def form_problems(form: PlanForm, asked: ParallelismRecipe, num_workers: int) -> Problems:
    """Yield what is wrong with a plan for a recipe, as far as that can be known without its model.

    Args:
        form: the plan.
        asked: what the recipe asks for, its mode resolved.
        num_workers: devices of the cluster.
    """
    name, mode, depth = asked.mode, asked.row, asked.depth
    if form.mode != name:
        yield "mode", f"got {shown(form.mode)}, allowed is {name}, the recipe's mode"
    others_allowed = asked.chunks is None and mode.chunks > 1
    if form.chunks != mode.chunks and not (others_allowed and form.chunks > 1):
        allowed = "2 or more stages per worker" if others_allowed else f"{mode.chunks}, the stages per worker"
        yield "chunks", f"got {form.chunks}, in mode {name} allowed is {allowed}"
        form = replace(form, chunks=1)  # the rest is checked as if it weren't said
    yield from _stage_problems(form, asked.recompute, mode.backward)
    if not form.stages or len(form.stages) % form.chunks:
        given, allowed = len(form.stages), f"a multiple of {form.chunks}, the stages per worker"
        yield "stages", f"got {given} stages, allowed is {allowed if form.chunks > 1 else 'at least one'}"
        return
    try:
        parse_plan("-".join(map(str, form.replicas)), mode, num_workers)
    except PlanError as error:
        yield "stages", f"{error} (mode {name}, {num_workers} workers)"
    else:
        yield from _device_problems(form, num_workers)
    if mode.depth is not None and form.depth != mode.depth:
        yield "depth", f"got {form.depth}, in mode {name} allowed is {mode.depth}"
    elif mode.depth is None and isinstance(depth, int) and not isinstance(depth, bool) and form.depth != depth:
        yield "depth", f"got {form.depth}, allowed is {depth}, the recipe's parallelism.depth"
    elif form.depth > MOST_DEPTH:
        yield "depth", f"got {form.depth}, allowed is a whole number from 1 to {MOST_DEPTH}"


def _stage_problems(form: PlanForm, recompute: bool | None, backward: str) -> Problems:
    """Yield what is wrong inside single stages: nothing in them, or memory policies."""
    for index, stage in enumerate(form.stages):
        where = f"stages[{index}].layers"
        if not stage.layers:
            yield where, "got no layer, allowed is at least one in every stage"
        for layer, policy in stage.layers.items():
            if policy not in MEMORY_POLICIES:
                yield f"{where}[{shown(layer)}]", choice(policy[:60], MEMORY_POLICIES)
            elif policy == SWAP and backward == SPLIT:
                why = "backwards are split, and their weight parts keep what layers read"
                yield f"{where}[{shown(layer)}]", f"got {SWAP!r}, allowed are {KEEP} and {RECOMPUTE}: {why}"
        given, allowed = (KEEP, RECOMPUTE) if recompute else (RECOMPUTE, KEEP)
        if recompute is not None and given in stage.layers.values():
            said = f"as the recipe says parallelism.recompute: {str(recompute).lower()}"
            yield where, f"got {given}, allowed is {allowed}, {said}"


def _device_problems(form: PlanForm, num_workers: int) -> Problems:
    """Yield replicas without a device, devices without a replica or of two, and devices that aren't there."""
    holders: dict[int, int] = {}
    for index, stage in enumerate(form.stages):
        where, position = f"stages[{index}].devices", index % len(form.positions)
        given = list(stage.devices)
        if position != index:
            first = form.stages[position]
            if (stage.replicas, stage.devices) != (first.replicas, first.devices):
                allowed = f"{first.replicas} on {list(first.devices)}, as stage {position}, whose workers run it too"
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
    """Return the keys that stand twice in one object; JSON readers silently take the last."""
    found: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in items]
        found.extend(name for index, name in enumerate(names) if name in names[:index])
        return dict(items)

    json.loads(text, object_pairs_hook=pairs)
    return found
