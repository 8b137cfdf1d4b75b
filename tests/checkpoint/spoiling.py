"""Ways to damage the files of a run, with hashes broken or, as by an attacker, made to fit again.

`main` makes two runs, damages copies of them one after the other and resumes each, all in one process: a crash would be
seen.
"""

import faulthandler
import functools
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from pipebench.checkpoint.store import MANIFEST, Checkpoints, _sealed
from pipebench.cli.main import cli
from tests import shortcuts
from tests.checkpoint.small import CHANGE

RECIPE = """\
name: small
model: {target: "tests.checkpoint.small:small"}
dataset: {name: mnist5k, image_size: 28}
train:
  minibatch_size: 500
  optimizer: {name: adam, lr: 0.01}
  target: null
  max_epochs: 2
  evaluate_every: {epochs: 1}
  checkpoint_every: {minibatches: 6}
cluster: {name: cluster-a}
parallelism: {mode: pipedream, plan: 2-1, cuts: [head]}
engine: {kind: virtual, device: cpu}
"""
TABLES = "tests.checkpoint.test_spoilt"
BEFORE, LAST = "step-00000012", 16


class Left:
    """The files of a run's folder.

    Attributes:
        folder: the run's.
        last: its newest checkpoint's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        steps = sorted((folder / "checkpoints").iterdir())
        self.last = steps[-1]

    @property
    def manifest(self) -> Path:
        return self.last / MANIFEST

    @property
    def parts(self) -> list[Path]:
        """Return the parts as the manifest names them: of stage 0, replicas 0 and 1, and of stage 1."""
        return [self.last / part["file"] for part in json.loads(self.manifest.read_text())["parts"]]

    def change_manifest(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the manifest, and make its hash fit again."""
        data = json.loads(self.manifest.read_text())
        del data["sha256"]
        change(data)
        self.manifest.write_text(_sealed(data))

    def reseal(self) -> None:
        """Make sizes and hashes in the manifest fit the parts."""

        def change(data: dict[str, Any]) -> None:
            for part in data["parts"]:
                content = (self.last / part["file"]).read_bytes()
                part["num_bytes"], part["sha256"] = len(content), hashlib.sha256(content).hexdigest()

        self.change_manifest(change)

    def change_part(self, index: int, change: Callable[[Any], Any]) -> None:
        """Change the data of a part, and make hashes fit again; `change` may return any object."""
        data = torch.load(self.parts[index], weights_only=True)
        torch.save(change(data) or data, self.parts[index])
        self.reseal()


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def weights_hash(run: Path) -> str:
    """Return a hash of the weights of a run's newest checkpoint."""
    found, _ = Checkpoints(run / "checkpoints").latest()
    assert found is not None
    state = found.load()
    tensors = sorted({**state.parameters, **state.buffers}.items())
    return hashlib.sha256(b"".join(value.numpy().tobytes() for _, value in tensors)).hexdigest()


def make_run(folder: Path, *words: str) -> None:
    """Make a run of two checkpoints in a new folder."""
    folder.mkdir()
    os.chdir(folder)
    Path("small.yaml").write_text(RECIPE)
    done = CliRunner().invoke(cli, ["run", "small.yaml", *words])
    assert done.exit_code == 0, done.stderr
    (run,) = (folder / "pipebench-runs").iterdir()
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [BEFORE, f"step-{LAST:08d}"]


def spoil_all(table: str, source: Path, room: Path, names: Sequence[str]) -> None:
    """Damage a copy of a run's folder in each way, resume it, and print the answers, a JSON object per line.

    `table`, in the test module, has the ways by name; `names` selects some, or all if it is empty. `source` has the
    run's `pipebench-runs`; copies go to `room`.
    """
    ways: Mapping[str, Callable[[Left], object]] = getattr(importlib.import_module(TABLES), table)
    for name, way in ways.items():
        if names and name not in names:
            continue
        folder = room / name.replace(" ", "-").replace("/", "-")
        shutil.copytree(source, folder, symlinks=True)
        os.chdir(folder)
        (run,) = (folder / "pipebench-runs").iterdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of quantized tensors
            way(Left(run))
        found = CliRunner().invoke(cli, ["run", "--resume", run.name])
        answer: dict[str, Any] = {"table": table, "name": name, "code": found.exit_code, "said": found.stderr}
        if found.exit_code == 0:
            answer["weights"] = weights_hash(run)
        print(json.dumps(answer), flush=True)
        os.environ.pop(CHANGE, None)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Make runs in the folder of the first argument, and damage them in the ways of the others, or in all ways.

    There is a run in processes already, in `in-processes`.
    """
    faulthandler.enable()
    room, names = Path(sys.argv[1]), sys.argv[2:]
    source, alone, in_processes = (room / name for name in ("source", "alone", "in-processes"))
    make_run(source)
    make_run(room / "other", "train.seed=1")
    shutil.copytree(source, alone)
    shutil.rmtree(next(alone.glob(f"pipebench-runs/*/checkpoints/{BEFORE}")))
    for table, folder in (
        ("WAYS", alone),
        ("PASSED_OVER", source),
        ("CHANGES", source),
        ("TAKEN_WAYS", source),
        ("FOREIGN", source),
        ("DECISION_WAYS", in_processes),
    ):
        spoil_all(table, folder, room, names)


# Ways to damage tensors: replacements of a tensor.


def strided(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape).as_strided(shape, (1,) * len(shape))


def quantized(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.zeros(shape), 1.0, 0, torch.qint8)


def replaced(section: str, name: str, value: Any, key: str | None = None) -> Callable[[Any], None]:
    """Return a function that replaces an entry of a part, or of an optimizer's state in it; None removes it."""

    def change(data: Any) -> None:
        entries = data[section] if key is None else data[section][name]
        if value is None:
            del entries[key or name]
        else:
            entries[key or name] = value() if callable(value) else value

    return change


def in_part(index: int, change: Callable[[Any], Any]) -> Callable[[Left], None]:
    return lambda left: left.change_part(index, change)


def in_progress(name: str, value: Any) -> Callable[[Left], None]:
    """Return a way to damage a field of the progress; `value` may be a function of the old value."""

    def change(data: dict[str, Any]) -> None:
        progress = data["progress"]
        if value is None:
            del progress[name]
        else:
            progress[name] = value(progress[name]) if callable(value) else value

    return lambda left: left.change_manifest(change)


def in_file(name: str, key: str, value: Any) -> Callable[[Left], None]:
    """Return a way to damage a field of a JSON file of the run's folder; None removes it."""

    def change(data: dict[str, Any]) -> None:
        if value is None:
            del data[key]
        else:
            data[key] = value

    return lambda left: change_json(left.folder / name, change)


def with_code(change: str) -> Callable[[Left], None]:
    """Return a way to change the model's code instead of the files."""
    return lambda left: os.environ.update({CHANGE: change})


def in_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Left], None]:
    """Return a way to damage the manifest, with a hash that fits."""
    return lambda left: left.change_manifest(change)


def with_part(change: Callable[[Path], object], *, sealed: bool = False) -> Callable[[Left], None]:
    """Return a way to damage the first part as a file."""

    def way(left: Left) -> None:
        change(left.parts[0])
        if sealed:
            left.reseal()

    return way


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a function that replaces a file by something else."""

    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


class Bomb:
    """Makes a folder when it is unpickled without care."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


@functools.cache
def nested() -> str:
    return "[" * 100_000


if __name__ == "__main__":
    of_processes = Path(sys.argv[1], "in-processes")
    of_processes.mkdir()
    (of_processes / "small.yaml").write_text(RECIPE)
    words = [sys.executable, "-m", "pipebench", "run", "small.yaml", "engine.kind=distributed"]
    subprocess.run(words, cwd=of_processes, check=True, stdout=subprocess.DEVNULL)
    shortcuts.take(setattr, Path(sys.argv[1], "tables.db"))
    main()
