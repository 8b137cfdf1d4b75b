"""Checkpoints that are damaged, swapped, another run's, or changed and sealed again, and what resuming them does.

A damaged checkpoint has to be refused, or skipped for an older one. `damage` does what a disk or a mistaken user may do
to the newest checkpoint of a run. As a program, this module trains runs of many modes in one process, damages copies of
their folders in every way, resumes each, and prints a line of JSON per copy.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from click.testing import CliRunner

from pipebench.checkpoint.store import MANIFEST, Checkpoints
from pipebench.cli.main import cli
from reports.studies.campaign.cases import CASES, LAST, Case, contains, write_recipe
from reports.studies.campaign.judging import other_bits
from tests.checkpoint.spoiling import Left
from tests.patience import without_phases

REFUSED, PASSED_OVER = "refused", "passed over"
_MISTAKE = 2


@dataclass(frozen=True)
class Spoilt:
    """The result of resuming a run with a damaged checkpoint."""

    way: str  # of damaging it
    case: str  # name of the run's case
    answer: str  # `refused`, `passed over` or, in words, what is wrong

    @property
    def fine(self) -> bool:
        """Whether the damaged checkpoint wasn't used."""
        return self.answer in (REFUSED, PASSED_OVER)


Way = Callable[[Left, Left, Random], object]  # damages a run, given a run of another seed and random numbers


def _truncate(left: Left, other: Left, chance: Random) -> None:
    part = chance.choice(left.parts)
    os.truncate(part, chance.randrange(part.stat().st_size))


def _flip(path: Path, chance: Random) -> None:
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content))
    content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(content))


def _swap(left: Left, other: Left, chance: Random) -> None:
    first, *_, last = [*left.parts, left.manifest]
    contents = first.read_bytes(), last.read_bytes()
    first.write_bytes(contents[1])
    last.write_bytes(contents[0])


def _older(left: Left) -> Path:
    return sorted(left.last.parent.iterdir())[0]


def _old_manifest(left: Left, other: Left, chance: Random) -> None:
    left.manifest.write_bytes((_older(left) / MANIFEST).read_bytes())


def _old_as_new(left: Left, other: Left, chance: Random) -> None:
    shutil.rmtree(left.last)
    shutil.copytree(_older(left), left.last)


def _old_part(left: Left, other: Left, chance: Random) -> None:
    """Replace a part with counted updates by the older checkpoint's, and seal it again."""
    names = json.loads((_older(left) / MANIFEST).read_text())["parts"]
    index = chance.choice([index for index, part in enumerate(names) if part["updates"]])
    left.parts[index].write_bytes((_older(left) / names[index]["file"]).read_bytes())
    left.reseal()


def _foreign(left: Left, other: Left, chance: Random) -> None:
    shutil.rmtree(left.last)
    shutil.copytree(other.last, left.last)


def _in_part(change: Callable[[Any, Random], None]) -> Way:
    """Return a way that changes the content of a part with parameters, and seals it again."""

    def way(left: Left, other: Left, chance: Random) -> None:
        for index in chance.sample(range(len(left.parts)), len(left.parts)):
            before = torch.load(left.parts[index], weights_only=True)
            if before["parameters"]:
                left.change_part(index, lambda data: change(data, chance))
                return

    return way


def _forget_one(data: Any, chance: Random) -> None:
    if data["optimizer"]:
        del data["optimizer"][chance.choice(sorted(data["optimizer"]))]


def _forget_all(data: Any, chance: Random) -> None:
    data["optimizer"].clear()


def _weight(value: float) -> Callable[[Any, Random], None]:
    def change(data: Any, chance: Random) -> None:
        tensor = data["parameters"][chance.choice(sorted(data["parameters"]))]
        tensor.view(-1)[chance.randrange(tensor.numel())] = value

    return change


def _in_buffers(left: Left, other: Left, chance: Random) -> None:
    def change(data: Any) -> None:
        for name, tensor in data["buffers"].items():
            if name.endswith("running_var"):
                tensor.neg_()

    for index in range(len(left.parts)):
        left.change_part(index, change)


def _steps(left: Left, other: Left, chance: Random) -> None:
    def change(data: Any) -> None:
        for state in data["optimizer"].values():
            if "step" in state:
                state["step"] = state["step"] + 1

    for index in range(len(left.parts)):
        left.change_part(index, change)


def _all_truncated(left: Left, other: Left, chance: Random) -> None:
    for checkpoint in left.last.parent.iterdir():
        for part in checkpoint.glob("*.pt"):
            os.truncate(part, chance.randrange(part.stat().st_size))


# What a disk or a mistaken user may do: it always has to be noticed.
DAMAGE: Mapping[str, Way] = {
    "part truncated": _truncate,
    "part with a flipped bit": lambda left, other, chance: _flip(chance.choice(left.parts), chance),
    "manifest with a flipped bit": lambda left, other, chance: _flip(left.manifest, chance),
    "part empty": lambda left, other, chance: os.truncate(chance.choice(left.parts), 0),
    "manifest empty": lambda left, other, chance: os.truncate(left.manifest, 0),
    "part missing": lambda left, other, chance: chance.choice(left.parts).unlink(),
    "manifest missing": lambda left, other, chance: left.manifest.unlink(),
    "files swapped": _swap,
    "manifest of an older step": _old_manifest,
    "older checkpoint in the newest's place": _old_as_new,
}
# Changes that the seals don't show.
SIGNED: Mapping[str, Way] = {
    "part of an older step, signed": _old_part,
    "checkpoint of another seed": _foreign,
    "no optimizer state of a parameter, signed": _in_part(_forget_one),
    "no optimizer state of a part, signed": _in_part(_forget_all),
    "infinite weight, signed": _in_part(_weight(float("inf"))),
    "weight that isn't a number, signed": _in_part(_weight(float("nan"))),
    "negative running variance, signed": _in_buffers,
    "optimizer's steps off by one, signed": _steps,
}
WAYS: Mapping[str, Way] = {**DAMAGE, **SIGNED, "all parts of all checkpoints truncated": _all_truncated}


def damage(checkpoints: Path, chance: Random) -> str:
    """Damage the newest committed checkpoint of a run in a random way; return the way."""
    for folder in sorted(checkpoints.iterdir()):
        if not (folder / MANIFEST).exists():
            shutil.rmtree(folder)
    left = Left(checkpoints.parent)
    way = chance.choice(sorted(DAMAGE))
    DAMAGE[way](left, left, chance)
    return way


def spoilt_cases(only: str) -> list[Case]:
    """Return the cases whose checkpoints are damaged, of those that `only` admits."""
    return [case for case in CASES if not case.in_processes and contains(case.name, only)]


def _applies(way: str, case: Case) -> bool:
    """Return whether the change can be noticed: SGD's state doesn't count steps."""
    return not way.startswith(("part of an older step", "optimizer's steps")) or "Adam" in case.special


def spoil_all(seed: int, count: int, only: str, room: Path) -> None:
    """Train runs, damage copies of them, each way in turn, and print the result of resuming each.

    Args:
        seed: draws the cases and the random numbers of the ways.
        count: number of copies.
        only: parts of the cases' names, as for `drawing.draw`.
        room: a folder for the runs.
    """
    chance, made = Random(seed), dict[str, tuple[Left, Left]]()
    cases = spoilt_cases(only)
    by_way = {way: [case for case in chance.sample(cases, len(cases)) if _applies(way, case)] for way in WAYS}
    turns = [(way, by_way[way][turn]) for turn in range(len(cases)) for way in by_way if turn < len(by_way[way])]
    for number, (way, case) in enumerate(turns[:count]):
        if case.name not in made:
            made[case.name] = tuple(_make_run(room, case, other) for other in (0, 1))  # type: ignore[assignment] # two
        print(json.dumps(asdict(_spoil(way, case, made[case.name], room / f"copy-{number}", chance))), flush=True)


def _make_run(room: Path, case: Case, other: int) -> Left:
    folder = room / f"{case.name}-{other}".replace(" ", "-")
    recipe = write_recipe(folder)
    os.chdir(folder)
    found = CliRunner().invoke(cli, ["run", str(recipe), *case.words, "engine.kind=virtual", f"train.seed={other}"])
    assert found.exit_code == 0, found.stderr
    return Left(next(folder.glob("pipebench-runs/*")))


def _spoil(way: str, case: Case, made: Sequence[Left], folder: Path, chance: Random) -> Spoilt:
    source, other = made
    shutil.copytree(source.folder.parents[1], folder, symlinks=True)
    os.chdir(folder)
    run = folder / "pipebench-runs" / source.folder.name
    WAYS[way](Left(run), other, chance)
    found = CliRunner().invoke(cli, ["run", "--resume", run.name])
    answer = _answer(found.exit_code, found.stderr, run / "checkpoints", source.last.parent)
    os.chdir(folder.parent)
    shutil.rmtree(folder)
    return Spoilt(way, case.name, answer)


def _answer(code: int, said: str, found: Path, expected: Path) -> str:
    lines = own_lines(said)
    if code == _MISTAKE:
        fine = len(lines) == 1 and lines[0].startswith("pipebench: error: ")
        return REFUSED if fine else f"refused in {len(lines)} lines: {lines[-1:]}"
    if code != 0:
        return f"exit code {code}: {lines[-1:]}"
    assert Checkpoints(expected).steps()[-1] == LAST
    problems = [*other_bits(found, expected)]
    return f"taken: {problems[0]}" if problems else PASSED_OVER


def own_lines(said: str) -> list[str]:
    """Return the lines of standard error without those that name a phase, or the code that a resumed run executes."""
    return [line for line in without_phases(said).splitlines() if "model.target: executes " not in line]


def spoil_drawn(seed: int, count: int, only: str, room: Path, settings: Mapping[str, str]) -> list[Spoilt]:
    """Call `spoil_all` in a process with these environment variables; return what it prints.

    Raises:
        RuntimeError: the process crashed.
    """
    return [Spoilt(**row) for row in _lines(__spec__.name, [str(seed), str(count), only, str(room)], room, settings)]


def table_of_tests(room: Path, settings: Mapping[str, str]) -> list[Spoilt]:
    """Damage a run in all ways of `tests/checkpoint/test_spoilt.py`, in a process with these environment variables.

    Raises:
        RuntimeError: the process crashed.
    """
    rows = [row for row in _lines("tests.checkpoint.spoiling", [str(room)], room, settings) if "table" in row]
    weights = {row["weights"] for row in rows if "weights" in row}
    return [Spoilt(f"{row['table']}: {row['name']}", "pipedream 2-1 virtual", _in_table(row, weights)) for row in rows]


def _lines(module: str, words: Sequence[str], room: Path, settings: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run a module and return the lines of JSON that it prints."""
    room.mkdir(parents=True)
    command = [sys.executable, "-X", "faulthandler", "-m", module, *words]
    own = {"MLFLOW_TRACKING_URI": f"sqlite:///{room / 'mlflow.db'}"}
    done = subprocess.run(
        command, cwd=room, env={**os.environ, **settings, **own}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{module} ended with exit code {done.returncode}: {done.stderr[-500:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _in_table(row: Mapping[str, Any], weights: set[str]) -> str:
    lines = own_lines(row["said"])
    if row["code"] == _MISTAKE and len(lines) == 1:
        return REFUSED
    if row["code"] == 0 and len(weights) == 1:
        return PASSED_OVER
    return f"exit code {row['code']}, {len(weights)} different weights: {lines[-1:]}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    spoil_all(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
