"""A folder of checkpoints: every worker writes a part, a manifest completes them, and reading checks them.

    step-00000375/
        stage-0.6f1e0c9ab2d4.pt     a worker's part, named after its content
        stage-1.0b77e2c5d901.pt
        manifest.json               the parts' names, sizes and SHA-256, the run and its progress; written last

A part with other content has another name, so writing never touches a complete checkpoint, even of the same step. The
manifest includes its own SHA-256.
"""

import hashlib
import io
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipebench import files
from pipebench.checkpoint.identity import RunIdentity
from pipebench.checkpoint.optimizers import updates_of
from pipebench.checkpoint.progress import SavedProgress
from pipebench.checkpoint.state import CheckpointError, ModelState
from pipebench.typed_json import Count, JsonError, Number, read, shown

MANIFEST = "manifest.json"
_FORMAT = "pipebench checkpoint 2"
_STEP = re.compile(r"step-(\d{8,})", re.ASCII)
_PART = re.compile(r"[A-Za-z0-9][\w.-]*\.pt", re.ASCII)


@dataclass(frozen=True)
class CheckpointFile:
    """A part of a checkpoint, as its manifest names it."""

    file: str  # its name in the checkpoint's folder
    num_bytes: Count
    sha256: str  # of its content, in hexadecimal
    # The optimizer's number of steps on every parameter with optimizer state, None where that doesn't count them
    updates: dict[str, Number | None]


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest without its SHA-256."""

    step: Count  # number of minibatches done
    parts: tuple[CheckpointFile, ...]
    progress: dict[str, Any]  # the training loop's data, which it checks itself
    format: str = _FORMAT
    run: RunIdentity | None = None  # the run that wrote it; None without a folder


@dataclass(frozen=True)
class Checkpoint(Manifest):
    """A complete checkpoint; `path` is its folder."""

    path: Path = field(kw_only=True)

    def load(self) -> ModelState:
        """Return the model's state, joined from all parts; see `load_parts`."""
        return ModelState.joined(self.load_parts())

    def load_parts(self) -> list[ModelState]:
        """Return the parts' contents. Files are mapped into memory, so that only what is used is read.

        Raises:
            CheckpointError: a part can't be read as one; names it.
        """
        return [_load_part(self.path / part.file) for part in self.parts]

    def check(self) -> None:
        """Read and check all parts.

        Raises:
            CheckpointError: names the part that is missing or isn't what was written.
        """
        for part in self.parts:
            path = self.path / part.file
            try:
                if not path.is_file() and path.exists():
                    raise CheckpointError(f"{path}: isn't a file")
                num_bytes = path.stat().st_size
                if num_bytes != part.num_bytes:
                    raise CheckpointError(f"{path}: has {num_bytes:,} bytes instead of {part.num_bytes:,}")
                if files.sha256_of(path) != part.sha256:
                    raise CheckpointError(f"{path}: its content isn't what was written (another SHA-256)")
            except FileNotFoundError:
                raise CheckpointError(f"{path}: is missing") from None
            except OSError as error:
                raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
        self.load()


class Checkpoints:
    """The checkpoints of a run. Every worker writes its parts; then one of them commits the checkpoint.

    Args:
        folder: where they are; it needn't exist.
        keep: how many complete ones to retain, the newest; at least 1.
        run: the run that writes and resumes; None for one without a folder.
    """

    def __init__(self, folder: Path, keep: int = 2, run: RunIdentity | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.run = run
        self.best: int | None = None  # a step that is retained besides the newest ones

    def write_part(self, step: int, part: str, state: ModelState) -> CheckpointFile:
        """Write one worker's part of a step to disk and sync it; its state must not change meanwhile.

        `part`, of letters, digits and `-`, is unique to the worker.

        Raises:
            OSError: it can't be written, as on a full disk or without the run's folder; nothing of it is left behind.
            CheckpointError: a module carries a state of a type that can't be read back.
        """
        plain = state.to_plain()
        target = self._folder(step) / f"{part}.pt"
        if not target.parent.is_dir():
            self.folder.mkdir(exist_ok=True)  # no parents: checkpoints without the run's other files are of no use
            target.parent.mkdir(exist_ok=True)
            files.sync_folder(self.folder)
        written = files.write_aside(target, lambda writer: torch.save(plain, writer))  # type: ignore[arg-type] # it only writes
        named = target.with_name(f"{part}.{written.sha256[:12]}.pt")
        files.rename(written.path, named)
        return CheckpointFile(named.name, written.num_bytes, written.sha256, updates_of(plain["optimizer"]))

    def commit(self, step: int, parts: Sequence[CheckpointFile], progress: Mapping[str, Any]) -> None:
        """Complete a checkpoint of all workers' parts; then remove old checkpoints and leftovers.

        `progress` is JSON data, stored in the manifest.

        Raises:
            OSError: the manifest can't be written; earlier checkpoints stay.
        """
        content = asdict(Manifest(step, tuple(parts), {}, run=self.run)) | {"progress": progress}
        files.replace(self._folder(step) / MANIFEST, _sealed(content).encode())
        with suppress(OSError, CheckpointError):
            self._prune(step)

    def amend(self, step: int, progress: Mapping[str, Any]) -> None:
        """Replace a complete checkpoint's `progress`; see `commit`.

        Raises:
            CheckpointError: there is no complete checkpoint of that step.
            OSError: as in `commit`; the checkpoint stays as it is.
        """
        self.commit(step, _read(self._folder(step)).parts, progress)

    def abandon(self, step: int) -> None:
        """Remove the parts of a step that won't be committed; an earlier checkpoint of the same step stays."""
        folder = self._folder(step)
        if not (folder / MANIFEST).exists():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            with suppress(OSError, CheckpointError):
                self._tidy(_read(folder))

    def remove(self) -> None:
        """Remove all checkpoints."""
        for path, _ in self._entries():
            _remove(path)

    def latest(
        self, fits: Callable[[Checkpoint], object] = lambda checkpoint: None
    ) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint that is intact and fits, if any, and a sentence for each newer one.

        `fits` raises a CheckpointError for an intact checkpoint that can't be used.
        """
        skipped: list[str] = []
        for step in sorted(self.steps(), reverse=True):
            try:
                checkpoint = self.at(step)
                fits(checkpoint)
                return checkpoint, skipped
            except CheckpointError as error:
                skipped.append(f"skipped the checkpoint of step {step}: {error}")
        return None, skipped

    def at(self, step: int, *, check: bool = True) -> Checkpoint:
        """Return the checkpoint of a step; `check` reads all of it, which one process does for all.

        Raises:
            CheckpointError: there is none, or it isn't intact; names the file and the reason.
        """
        checkpoint = _read(self._folder(step))
        if check:
            checkpoint.check()
        return checkpoint

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, complete or not, ascending."""
        return sorted(step for _, step in self._entries())

    def epochs(self) -> float:
        """Return the epochs trained at the newest checkpoint whose progress can be read; 0 if there is none."""
        for step in reversed(self.steps()):
            with suppress(CheckpointError):
                return SavedProgress.from_json(self.at(step, check=False).progress).epoch
        return 0.0

    def _folder(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _entries(self) -> Iterator[tuple[Path, int]]:
        """Yield the folder and the step of every checkpoint, complete or not."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            matched = _STEP.fullmatch(path.name)
            if matched and path.name == f"step-{int(matched[1]):08d}":
                yield path, int(matched[1])

    def _prune(self, committed: int) -> None:
        """Remove older checkpoints, leftovers, and later steps: the run has resumed from an earlier one."""
        self._tidy(_read(self._folder(committed)))
        num_left = 1
        for path, step in sorted(self._entries(), key=lambda entry: -entry[1]):
            if step == committed or step == self.best:
                continue
            if step < committed and num_left < self.keep and _seems_whole(path):
                num_left += 1
            else:
                _remove(path)
        for path in self.folder.glob(".removed-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _tidy(self, checkpoint: Checkpoint) -> None:
        """Remove parts that a checkpoint doesn't name, and unfinished ones, from its folder."""
        used = {part.file for part in checkpoint.parts}
        for path in checkpoint.path.iterdir():
            is_part = _PART.fullmatch(path.name) or path.name.endswith(files.ASIDE)
            if is_part and path.name not in used:
                path.unlink(missing_ok=True)


def to_bytes(state: ModelState) -> bytes:
    """Return a state, or pieces of one, serialised; raises a CheckpointError if it holds what can't be read back."""
    written = io.BytesIO()
    torch.save(state.to_plain(), written)
    return written.getvalue()


def from_bytes(content: bytes) -> ModelState:
    """Return what `to_bytes` wrote."""
    return ModelState.from_plain(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))


def reason_of(skipped: Sequence[str]) -> str:
    """Return why no checkpoint can be used, as the end of a sentence, from the sentences of `latest`."""
    if not skipped:
        return ""
    others = len(skipped) - 1
    more = f", nor can the {f'{others} ' if others > 1 else ''}older one{'s' if others > 1 else ''} be used"
    return f": {skipped[0]}{more if others else ''}"


def _read(folder: Path) -> Checkpoint:
    """Return a checkpoint by its manifest, its parts unread."""
    path = folder / MANIFEST
    try:
        data = read(dict[str, Any], files.read_bytes(path))
        if data.pop("sha256", None) != _hash_of(_text(data)):
            raise JsonError("")
    except files.FileError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        problem = "is missing, so the checkpoint was never finished" if missing else error.problem
        raise CheckpointError(f"{path}: {problem}") from error
    except JsonError:
        raise CheckpointError(f"{path}: isn't what was written") from None
    try:
        return _checkpoint(folder, data)
    except JsonError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _checkpoint(folder: Path, data: dict[str, Any]) -> Checkpoint:
    """Return the checkpoint of a manifest's data; raise a `JsonError` for impossible content."""
    if data.get("format") != _FORMAT:
        raise JsonError(f"is of format {shown(data.get('format'))}, expected is {_FORMAT!r}")
    manifest = read(Manifest, data)
    names = [part.file for part in manifest.parts]
    if folder.name != f"step-{manifest.step:08d}" or not all(map(_PART.fullmatch, names)):
        raise JsonError(f"belongs to another checkpoint, of step {manifest.step}")
    if len({*names}) < len(names) or not names:
        raise JsonError("names a part twice, or none at all")
    return Checkpoint(**vars(manifest), path=folder)


def _load_part(path: Path) -> ModelState:
    """Return a part's content."""
    try:
        if path.stat().st_size == 0:
            raise CheckpointError("is empty")
        return ModelState.from_plain(_loaded(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: refused, it holds more than tensors and plain data") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # whatever torch finds wrong with a file of any kind
        reason = str(error).partition("\n")[0][:160] or type(error).__name__
        raise CheckpointError(f"{path}: can't be read as a checkpoint: {reason}") from error


def _loaded(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # a file system without maps


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True)


def _sealed(content: Mapping[str, Any]) -> str:
    """Return a manifest's text with its own SHA-256 at the end."""
    text = _text(content)
    return f'{text.removesuffix("}")}, "sha256": "{_hash_of(text)}"}}'


def _hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _seems_whole(folder: Path) -> bool:
    """Return whether a checkpoint's files have the right sizes; to read them at every commit would take too long."""
    try:
        parts = _read(folder).parts
        return all((folder / part.file).stat().st_size == part.num_bytes for part in parts)
    except (CheckpointError, OSError):
        return False


def _remove(path: Path) -> None:
    """Remove a checkpoint by renaming it first, so that no reader finds half of one."""
    out_of_sight = path.with_name(f".removed-{path.name}")
    shutil.rmtree(out_of_sight, ignore_errors=True)
    if path.is_dir():
        path.rename(out_of_sight)
        shutil.rmtree(out_of_sight, ignore_errors=True)
