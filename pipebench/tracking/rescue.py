"""The folder that keeps a run when MLflow can't: a tracking failure must never lose a training result."""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath

from pipebench.train.result import Point, RunResult
from pipebench.typed_json import write

RESULTS_FOLDER = "pipebench-results"
_POINTS = "points.jsonl"


class Rescue:
    """`pipebench-results/<run name>-<n>/`, made when first needed and brought up to date as often as one likes.

    Safe to use from two threads: the sender writes when MLflow fails, the training thread when the sender hangs.

    Attributes:
        path: the folder, None until it is made.
        run_id: MLflow's id of the run, None where there is none; an earlier process's folder of it is gone on with.
    """

    def __init__(self, name: str, about: Mapping[str, Mapping[str, str]], folder: Path) -> None:
        """Prepare, without touching the disk.

        Args:
            name: the run's name.
            about: what was known at the start (`params`, `tags`), kept as `run.json`.
            folder: where `pipebench-results` is or will be.
        """
        self._stem = re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "run"
        self._about = about
        self._parent = folder / RESULTS_FOLDER
        self._lock = threading.Lock()
        self._num_points = 0
        self._last_samples = -1
        self._written: dict[str, bytes] = {}
        self.path: Path | None = None
        self.run_id: str | None = None

    def write(self, points: Sequence[Point], artifacts: Mapping[str, bytes], result: RunResult | None = None) -> Path:
        """Write what isn't in the folder yet.

        Args:
            points: every point of the run so far.
            artifacts: every artifact so far, by name.
            result: the run's result, when there is one.

        Raises:
            OSError: the folder can't be written.
        """
        with self._lock:
            path = self.path or self._make()
            self._append_points(path, points)
            for name, content in artifacts.items():
                if self._written.get(name) is not content:
                    _write_inside(path, name, content)
                    self._written[name] = content
            if result is not None:
                (path / "result.json").write_text(write(result), encoding="utf-8")
            return path

    def _make(self) -> Path:
        self.path = self._earlier()
        number = 1
        while self.path is None:
            path = self._parent / f"{self._stem}-{number}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                number += 1
                continue
            about = {"run_id": self.run_id, **self._about}
            (path / "run.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
            self.path = path
        return self.path

    def _earlier(self) -> Path | None:
        """Return the folder that an earlier process made for this run; its points don't come again."""
        if self.run_id is None:
            return None
        for file in sorted(self._parent.glob("*/run.json")):
            try:
                if json.loads(file.read_text(encoding="utf-8")).get("run_id") != self.run_id:
                    continue
            except ValueError:  # torn by a crash
                continue
            self._last_samples = _mend_points(file.parent / _POINTS)
            return file.parent
        return None

    def _append_points(self, path: Path, points: Sequence[Point]) -> None:
        new = [point for point in points[self._num_points :] if point.samples > self._last_samples]
        with (path / _POINTS).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(point)) + "\n" for point in new)
        self._num_points = len(points)


def _mend_points(path: Path) -> int:
    """Cut a last line that a crash tore, and return the samples of the last point, -1 where there is none."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return max((int(json.loads(line)["samples"]) for line in whole.splitlines()), default=-1)


def _write_inside(folder: Path, name: str, content: bytes) -> None:
    parts = [part for part in PurePosixPath(name).parts if part not in ("/", "..")]
    path = folder.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
