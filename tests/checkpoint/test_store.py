"""Checkpoints after crashes, full disks and tampering, and the messages."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pipebench import files
from pipebench.checkpoint.state import CheckpointError, ModelState
from pipebench.checkpoint.store import MANIFEST, CheckpointFile, Checkpoints
from tests.commands import CopiedCommand, run_code
from tests.patience import wait_for

FIRST, SECOND = 10, 20


def state(step: int, stage: int = 0, size: int = 40) -> ModelState:
    """Return a state that contains step and stage."""
    name = f"layer{stage}.weight"
    value = torch.full((size,), float(step * 100 + stage))
    return ModelState(
        {name: value}, {name: {"step": step, "momentum_buffer": value + 1}}, {f"layer{stage}.mean": value}
    )


def write(store: Checkpoints, step: int, num_stages: int = 2, **options: Any) -> list[CheckpointFile]:
    return [store.write_part(step, f"stage-{stage}", state(step, stage, **options)) for stage in range(num_stages)]


def save(store: Checkpoints, step: int, **options: Any) -> list[CheckpointFile]:
    parts = write(store, step, **options)
    store.commit(step, parts, {"epoch": step / 4, "points": [1.5, None]})
    return parts


def newest(store: Checkpoints) -> tuple[int | None, list[str]]:
    """Return the newest step, having compared what is loaded."""
    checkpoint, skipped = store.latest()
    if checkpoint is None:
        return None, skipped
    loaded = checkpoint.load()
    for stage in range(2):
        wanted = state(checkpoint.step, stage)
        assert torch.equal(loaded.parameters[f"layer{stage}.weight"], wanted.parameters[f"layer{stage}.weight"])
        assert loaded.optimizer[f"layer{stage}.weight"]["step"] == checkpoint.step
    assert checkpoint.progress == {"epoch": checkpoint.step / 4, "points": [1.5, None]}
    return checkpoint.step, skipped


@pytest.mark.parametrize("epoch", ["two", None, float("inf")])
def test_unreadable_epochs_count_as_not_trained(tmp_path: Path, epoch: object) -> None:
    """0.2.0, on --resume, before a checkpoint is checked: the text of another type ended in an internal error."""
    store = Checkpoints(tmp_path)
    store.commit(4, write(store, 4), {"epoch": epoch})
    assert store.epochs() == 0.0


def test_nothing_is_written_after_a_run_s_folder_was_removed(tmp_path: Path) -> None:
    """It was made again, with checkpoints alone: no command finds a run by them, and the folder couldn't come back."""
    store = Checkpoints(tmp_path / "run-12345678" / "checkpoints")
    store.folder.parent.mkdir()
    save(store, FIRST)
    store.folder.parent.rename(tmp_path / "renamed")
    with pytest.raises(FileNotFoundError, match="run-12345678"):
        save(store, SECOND)
    (tmp_path / "renamed").rename(store.folder.parent)
    assert newest(store) == (FIRST, [])


class Saved(NamedTuple):
    """Two checkpoints."""

    store: Checkpoints
    folder: Path  # of the newer one
    parts: list[Path]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    store = Checkpoints(tmp_path / "checkpoints")
    save(store, FIRST)
    parts = save(store, SECOND)
    folder = store.folder / f"step-{SECOND:08d}"
    return Saved(store, folder, [folder / part.file for part in parts])


def check_skipped(saved: Saved, path: Path, reason: str) -> None:
    step, skipped = newest(saved.store)
    assert step == FIRST
    [sentence] = skipped
    assert sentence.startswith(f"skipped the checkpoint of step {SECOND}: {path}: ")
    assert reason in sentence
    assert "\n" not in sentence


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest(Checkpoints(tmp_path / "none")) == (None, [])
    with pytest.raises(CheckpointError, match=r"manifest.json: is missing, so the checkpoint was never finished"):
        Checkpoints(tmp_path / "none").at(3)


def test_the_newest_is_found(saved: Saved) -> None:
    assert newest(saved.store) == (SECOND, [])
    assert saved.store.at(FIRST).step == FIRST


def test_a_part_truncated_anywhere_is_detected(saved: Saved) -> None:
    content = saved.parts[1].read_bytes()
    for length in range(0, len(content), 97):
        saved.parts[1].write_bytes(content[:length])
        check_skipped(saved, saved.parts[1], f"has {length:,} bytes instead of {len(content):,}")


def test_a_flipped_byte_anywhere_is_detected(saved: Saved) -> None:
    content = saved.parts[0].read_bytes()
    for place in range(0, len(content), 53):
        saved.parts[0].write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        check_skipped(saved, saved.parts[0], "isn't what was written")


def test_a_manifest_truncated_anywhere_is_detected(saved: Saved) -> None:
    path = saved.folder / MANIFEST
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        check_skipped(saved, path, "isn't what was written")


def test_a_flipped_byte_of_the_manifest_is_detected_or_harmless(saved: Saved) -> None:
    path = saved.folder / MANIFEST
    content = path.read_bytes()
    noticed = 0
    places = range(0, len(content), 5)
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        step, skipped = newest(saved.store)  # compares what it finds
        assert (step, len(skipped)) in ((FIRST, 1), (SECOND, 0))
        noticed += step == FIRST
    assert noticed > 0.7 * len(places)  # the rest is white space


def other_part(saved: Saved) -> tuple[Path, str]:
    saved.parts[0].write_bytes(saved.parts[1].read_bytes())
    return saved.parts[0], "isn't what was written"


def foreign_part(saved: Saved) -> tuple[Path, str]:
    saved.parts[0].write_text("my notes")
    return saved.parts[0], "has 8 bytes instead of"


def missing_part(saved: Saved) -> tuple[Path, str]:
    saved.parts[0].unlink()
    return saved.parts[0], "is missing"


def missing_manifest(saved: Saved) -> tuple[Path, str]:
    (saved.folder / MANIFEST).unlink()
    return saved.folder / MANIFEST, "is missing, so the checkpoint was never finished"


def foreign_manifest(saved: Saved) -> tuple[Path, str]:
    (saved.folder / MANIFEST).write_text('{"version": 3, "files": []}')
    return saved.folder / MANIFEST, "isn't what was written"


def list_for_manifest(saved: Saved) -> tuple[Path, str]:
    (saved.folder / MANIFEST).write_text("[[[]]]")
    return saved.folder / MANIFEST, "isn't what was written"


def other_manifest(saved: Saved) -> tuple[Path, str]:
    shutil.copy(saved.store.folder / f"step-{FIRST:08d}" / MANIFEST, saved.folder / MANIFEST)
    return saved.folder / MANIFEST, f"belongs to another checkpoint, of step {FIRST}"


def changed_progress(saved: Saved) -> tuple[Path, str]:
    path = saved.folder / MANIFEST
    path.write_text(path.read_text().replace('"epoch": 5.0', '"epoch": 6.0'))
    return path, "isn't what was written"


def file_for_folder(saved: Saved) -> tuple[Path, str]:
    shutil.rmtree(saved.folder)
    saved.folder.write_text("")
    return saved.folder / MANIFEST, "Not a directory"


@pytest.mark.parametrize(
    "damage",
    [
        other_part, foreign_part, missing_part, missing_manifest, foreign_manifest, list_for_manifest,
        other_manifest, changed_progress, file_for_folder,
    ],
    ids=lambda damage: damage.__name__,
)  # fmt: skip
def test_damage_is_named_and_skipped(saved: Saved, damage: Callable[[Saved], tuple[Path, str]]) -> None:
    check_skipped(saved, *damage(saved))
    if damage is not file_for_folder:
        save(saved.store, SECOND)  # the run comes to that step again
        assert newest(saved.store) == (SECOND, [])


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda target: {"parameters": Bomb(target)}, "refused, it holds more than tensors and plain data"),
        (lambda target: {"weights": torch.zeros(3)}, "is not a checkpoint of pipebench"),
        (lambda target: [1, 2], "is not a checkpoint of pipebench"),
        (lambda target: vars(ModelState()) | {"buffers": {"x": 3}}, "isn't a tensor among its buffers"),
        (lambda target: vars(ModelState()) | {"optimizer": {"x": 3}}, "isn't a parameter's state"),
    ],
    ids=["bomb", "other", "list", "number", "optimizer"],
)
def test_consistent_tampering_executes_no_code(saved: Saved, tmp_path: Path, make: Any, reason: str) -> None:
    """An attacker who also changes hashes still can't run code."""
    target = tmp_path / "exploded"
    path = saved.folder / "stage-0.000000000000.pt"
    torch.save(make(target), path)
    part = CheckpointFile(path.name, path.stat().st_size, files.sha256_of(path), {})
    saved.store.commit(SECOND, [part], {})
    check_skipped(saved, path, reason)
    assert not target.exists()


def test_only_the_newest_checkpoints_are_kept_and_partial_ones_removed(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (10, 20, 30):
        save(store, step)
    write(store, 40)  # killed before it was whole
    save(store, 50)
    assert store.steps() == [30, 50]
    (store.folder / "step-00000030" / MANIFEST).unlink()
    save(store, 60)
    assert store.steps() == [50, 60]
    (store.folder / "notes.txt").write_text("mine")
    (store.folder / "step-7").mkdir()
    save(store, 70)
    assert sorted(path.name for path in store.folder.iterdir()) == [
        "notes.txt", "step-00000060", "step-00000070", "step-7",
    ]  # fmt: skip


def test_a_rewound_run_removes_its_later_checkpoints(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "checkpoints")
    for step in (10, 30):
        save(store, step)
    save(store, 20)
    assert store.steps() == [10, 20]


def test_the_same_step_again_keeps_the_first_checkpoint_until_the_second_is_complete(saved: Saved) -> None:
    before = {path.name: path.read_bytes() for path in saved.folder.iterdir()}
    parts = [saved.store.write_part(SECOND, f"stage-{stage}", state(FIRST, stage, size=50)) for stage in range(2)]
    assert newest(saved.store) == (SECOND, [])
    saved.store.abandon(SECOND)
    assert {path.name: path.read_bytes() for path in saved.folder.iterdir()} == before
    parts = write(saved.store, SECOND, num_stages=2)
    saved.store.commit(SECOND, parts, {"epoch": SECOND / 4, "points": [1.5, None]})
    assert newest(saved.store) == (SECOND, [])


def test_an_abandoned_step_leaves_no_files(saved: Saved) -> None:
    write(saved.store, 30)
    saved.store.abandon(30)
    saved.store.abandon(40)
    assert saved.store.steps() == [FIRST, SECOND]


class FullDisk:
    """Lets files grow together to a number of bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
        self.left = num_bytes
        real = open

        def opened(path: Any, mode: str) -> Any:
            file = real(path, mode, buffering=0)
            if "w" in mode:
                write_bytes = file.write

                class Limited:
                    def __enter__(self) -> Any:
                        return self

                    def __exit__(self, *_: object) -> None:
                        file.close()

                    def __getattr__(self, name: str) -> Any:
                        return getattr(file, name)

                    def write(_, data: Any) -> int:  # noqa: N805
                        self.left -= memoryview(data).nbytes
                        if self.left < 0:
                            raise OSError(28, "No space left on device")
                        return int(write_bytes(data))

                return Limited()
            return file

        monkeypatch.setattr(files, "open", opened, raising=False)


@pytest.mark.parametrize("missing_bytes", [1, 300, 800, 1500, 2500, 4000, 5000, 0])
def test_a_full_disk_leaves_the_last_good_checkpoint(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, missing_bytes: int
) -> None:
    before = sorted(saved.store.folder.rglob("*"))
    with monkeypatch.context() as context:
        FullDisk(context, sum(path.stat().st_size for path in saved.folder.iterdir()) - missing_bytes)
        if missing_bytes == 0:
            save(saved.store, 30)
        else:
            with pytest.raises(OSError, match="No space left"):
                save(saved.store, 30)
    if missing_bytes > 0:
        saved.store.abandon(30)
        assert sorted(saved.store.folder.rglob("*")) == before
    assert newest(saved.store) == (SECOND if missing_bytes else 30, [])


LIMITED = """
import sys
from pathlib import Path
from pipebench.checkpoint.store import Checkpoints
from tests.checkpoint.test_store import newest, save, write
store = Checkpoints(Path(sys.argv[1]))
save(store, 10)
try:
    write(store, 20, size=int(sys.argv[2]))
except OSError as error:
    print("failed:", error.strerror)
    store.abandon(20)
print(newest(store), sorted(path.name for path in store.folder.iterdir()))
"""


def run_limited(folder: Path, size: int, limit: str = "") -> str:
    done = run_code(f"{limit}\n{LIMITED}", folder.parent, str(folder), str(size))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_limit_on_file_sizes_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    """The error is the system's, not that of torch's zip writer."""
    # Python 3.11 keeps a compiled module that the limit cut short, and every later import of it fails.
    limit = """
import resource, sys
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
"""
    printed = run_limited(tmp_path / "store", 100_000, limit)
    assert printed == "failed: File too large\n(10, []) ['step-00000010']\n"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can make a disk to fill")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_an_error_and_not_a_crash(tiny_disk: Path) -> None:
    printed = run_limited(tiny_disk, 100_000)
    assert printed == "failed: No space left on device\n(10, []) ['step-00000010']\n"


def test_a_view_is_written_without_its_base(tmp_path: Path) -> None:
    large = torch.zeros(1000, 1000)
    views = {"row": large[3], "column": large[:, 3], "some": large[:4, ::2].t(), "expanded": torch.ones(1).expand(8)}
    part = Checkpoints(tmp_path).write_part(1, "stage-0", ModelState(dict(views)))
    assert part.num_bytes < 30_000
    Checkpoints(tmp_path).commit(1, [part], {})
    found = Checkpoints(tmp_path).at(1).load().parameters
    assert all(torch.equal(found[name], view) for name, view in views.items())
    assert found["row"].add_(1).sum() == 1000  # may be written to; the file stays as it is
    assert Checkpoints(tmp_path).at(1).load().parameters["row"].sum() == 0


def test_states_that_could_not_be_read_back_are_refused_when_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"0/0/core holds a Saved; a checkpoint holds tensors, numbers"):
        Checkpoints(tmp_path).write_part(1, "a", ModelState(carried={"0/0/core": [Saved(None, None, None)]}))  # type: ignore[arg-type]


def test_the_manifest_is_readable_json(saved: Saved) -> None:
    manifest = json.loads((saved.folder / MANIFEST).read_text())
    assert manifest["step"] == SECOND
    assert [part["file"] for part in manifest["parts"]] == [path.name for path in saved.parts]


def test_a_crash_between_any_two_steps_of_writing_leaves_a_complete_checkpoint(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each change of the disk, the files are checked as a restarted run would find them."""
    found: list[int | None] = []

    def look() -> None:
        with monkeypatch.context() as undisturbed:
            for holder, name, real in watched:
                undisturbed.setattr(holder, name, real)
            copy = tmp_path / f"copy-{len(found)}"
            shutil.copytree(saved.store.folder, copy)
            found.append(newest(Checkpoints(copy))[0])

    def watch(real: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*arguments: Any, **options: Any) -> Any:
            look()
            return real(*arguments, **options)

        return watching

    watched = [
        (holder, name, getattr(holder, name))
        for holder, name in ((os, "replace"), (os, "fsync"), (os, "rmdir"), (os, "unlink"), (os, "rename"))
    ]
    for holder, name, real in watched:
        monkeypatch.setattr(holder, name, watch(real))
    save(saved.store, 30)
    look()
    assert found == sorted(found, key=lambda step: step or 0)
    assert set(found) == {SECOND, 30}
    assert len(found) > 15


KILLED = """
import sys
from pathlib import Path
from pipebench.checkpoint.store import Checkpoints
from tests.checkpoint.test_store import save
store = Checkpoints(Path(sys.argv[1]))
for step in range(30, 10**6, 10):
    save(store, step)
"""


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(saved: Saved, tmp_path: Path) -> None:
    out, main = tmp_path / "out.txt", partial(exec, KILLED, {})
    with CopiedCommand([str(saved.store.folder)], tmp_path, out, out, main=main) as process:
        wait_for(lambda: saved.store.steps()[-1] > SECOND + 10)  # and so the one before is whole
        assert process.poll() is None, out.read_text()
        process.kill()
        process.wait()
    step, _ = newest(saved.store)
    assert step is not None
    assert step > SECOND
    save(saved.store, step + 10)
    assert len(saved.store.steps()) == 2
