"""Compares the last checkpoint and the record of a disturbed run with those of an undisturbed one."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pipebench.checkpoint.state import CheckpointError
from pipebench.checkpoint.store import Checkpoint, Checkpoints
from reports.studies.watched_run import recorded

_SECTIONS = ("parameters", "optimizer", "buffers", "counters", "carried", "mean_change", "loss_scale")
# Tolerance of losses, relative, and of running statistics, absolute. Both are sums of fp32 numbers that processes add
# in another order than the virtual engine, which trains the undisturbed runs: each process adds up its own losses
# first, and a ring of more than two replicas averages running statistics.
_CLOSE = 1e-6
_AVERAGED = "buffers"


def other_bits(found: Path, expected: Path) -> Iterator[str]:
    """Yield how the newest checkpoint in a folder differs from the expected one: in weights, optimizer, curves, ..."""
    try:
        mine, theirs = _newest(found), _newest(expected)
    except CheckpointError as error:
        yield f"the last checkpoint can't be read: {error}"
        return
    if mine.step != theirs.step:
        yield f"the last checkpoint is of step {mine.step} instead of {theirs.step}"
        return
    states = mine.load(), theirs.load()
    for section in _SECTIONS:
        mine_of, theirs_of = (getattr(state, section) for state in states)
        if not _same(mine_of, theirs_of) and not (section == _AVERAGED and _distance(mine_of, theirs_of) <= _CLOSE):
            most = _distance(mine_of, theirs_of)
            yield f"other {section}" + (f", by up to {most:.1e}" if most < math.inf else "")
    yield from _other_points(mine.progress["points"], theirs.progress["points"])


def record_problems(folder: Path, points: int) -> Iterator[str]:
    """Yield what is wrong with MLflow's record of the only run in a folder, of `points` evaluations."""
    try:
        record = recorded(folder)
    except Exception as error:  # whatever MLflow and SQLite raise for a damaged store
        yield f"MLflow's record can't be read: {type(error).__name__}"
        return
    yield from problems_of(record, points)


def problems_of(record: Mapping[str, Any], points: int) -> Iterator[str]:
    """Yield what is wrong with a record as `recorded` returns it, of `points` evaluations."""
    if len(record["runs"]) != 1:
        yield f"MLflow has {len(record['runs'])} runs"
        return
    if record["runs"][0]["status"] != "FINISHED":
        yield f"MLflow's status is {record['runs'][0]['status']}"
    twice = sorted(
        name
        for name, rows in record["metrics"].items()
        if not name.startswith("system/") and len({step for step, _ in rows}) < len(rows)
    )
    if twice:
        curves = [name for name in twice if name.startswith("curves/")]
        what = f"curves, {curves[0]} for one" if curves else f"single metrics, {twice[0]} for one"
        yield f"MLflow has {len(curves or twice)} {what}, more than once at a step"
    losses = record["metrics"].get("curves/eval_loss", [])
    if len({step for step, _ in losses}) != points:
        yield f"MLflow has {len(losses)} evaluations instead of {points}"


def _newest(folder: Path) -> Checkpoint:
    checkpoint, skipped = Checkpoints(folder).latest()
    if checkpoint is None:
        raise CheckpointError(skipped[0] if skipped else f"{folder} holds none")
    return checkpoint


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Return the largest difference between tensors of the same names; infinity if names, shapes or types differ."""
    if a.keys() != b.keys():
        return math.inf
    pairs = [(a[name], b[name]) for name in a if not _same(a[name], b[name])]
    if any(not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or x.shape != y.shape for x, y in pairs):
        return math.inf
    return max((float((x.double() - y.double()).abs().max()) for x, y in pairs), default=0.0)


def _other_points(found: list[Any], expected: list[Any]) -> Iterator[str]:
    if [each["samples"] for each in found] != [each["samples"] for each in expected]:
        yield f"{len(found)} evaluations instead of {len(expected)}"
        return
    for mine, theirs in zip(found, expected, strict=True):
        for name, value in theirs["metrics"].items():
            if not math.isclose(mine["metrics"].get(name, math.nan), value, rel_tol=_CLOSE):
                yield f"{name} after {theirs['samples']} samples is {mine['metrics'].get(name)} instead of {value}"
                return
