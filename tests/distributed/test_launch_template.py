"""Workers forked from a template process, which has imported their modules, start, end and fail as new processes do."""

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped] # it has no types of its own
import pytest

from pipebench.distributed import launch_template
from pipebench.distributed.launch import run_workers
from pipebench.distributed.launch_template import Template, TemplateWorker
from pipebench.model.cores import usable_cores
from tests.commands import CopiedCommand
from tests.distributed.test_launch import ROOT, alive, script, when
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process is copied")


def launch() -> None:
    """Be a launcher whose workers run a file in plain Python, in a process that has computed nothing."""
    folder, program, size, restarts = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    launch_template._ANSWER_S = float(sys.argv[5])
    suspended_before = folder / "suspend-before"  # has a rank

    def start(settings: Mapping[str, str], passed: Mapping[str, int]) -> TemplateWorker:
        if suspended_before.exists() and suspended_before.read_text() == settings["RANK"]:
            os.kill(template.pid, signal.SIGSTOP)
        copy = template.start([program, "a b"], settings, passed)
        (folder / f"started-{settings['RANK']}").write_text("yes")
        return copy

    with Template(lambda: runpy.run_path(sys.argv[1], run_name="__main__")) as template:
        said: list[str] = []
        (folder / "template").write_text(str(template.pid))
        code = run_workers(start, size, folder, max_restarts=restarts, grace_s=0.2, say=said.append)
    print(json.dumps([code, said]))


def launcher(
    folder: Path, text: str, size: int = 2, restarts: int = 0, *, answer_s: float = PATIENCE_S
) -> CopiedCommand:
    program = script(folder, text)[-1]
    # As the command has it: a busy machine draws warnings of sockets.
    settings = {"TORCH_CPP_LOG_LEVEL": "FATAL", "PYTHONPATH": str(ROOT)}
    words, out = [str(folder), program, str(size), str(restarts), str(answer_s)], folder / "printed.txt"
    return CopiedCommand(words, folder, out, out, settings, launch, without=["OMP_NUM_THREADS"])


def run(folder: Path, text: str, size: int = 2, restarts: int = 0) -> tuple[int, list[str], list[str]]:
    """Return the launcher's exit code and messages, and the workers' output."""
    with launcher(folder, text, size, restarts) as process:
        process.wait()
    printed = (folder / "printed.txt").read_text().splitlines()
    assert alive(folder) == []
    assert not psutil.pid_exists(int((folder / "template").read_text()))
    code, said = json.loads(printed[-1])
    return code, said, printed[:-1]


def wait_until_gone(folder: Path) -> None:
    """Wait until the template and all workers have ended."""
    template, until = int((folder / "template").read_text()), time.monotonic() + PATIENCE_S
    while alive(folder) or psutil.pid_exists(template):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_copy_gets_its_rank_as_a_new_process_does(tmp_path: Path) -> None:
    text = """
import json, stat, threading
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "PIPEBENCH_RUN", "OMP_NUM_THREADS"]
is_socket = stat.S_ISSOCK(os.fstat(int(os.environ["PIPEBENCH_STORE"])).st_mode)
leads, ignores = os.getpgid(0) == os.getpid(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN
os.kill(os.getppid(), signal.SIGTERM)  # what all processes of a job get is for workers: the template lives on
torch = sys.modules["torch"]
assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
assert torch.ones(999, 999).sum().item() == 999 * 999
print(*[os.environ[name] for name in names], sys.argv[2:], is_socket, leads, ignores, threading.active_count())
"""
    code, said, printed = run(tmp_path, text, size=3)
    assert (code, said) == (0, [])
    threads = max(1, int(usable_cores() / 3))
    expected = [f"{rank} 3 {rank} {tmp_path} {threads} ['a b'] True True True 1" for rank in range(3)]
    assert sorted(printed) == expected


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("sys.exit(7)", "ended with exit code 7 and said nothing"),
        ("raise ValueError", "ended with exit code 1 and said nothing"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
    ],
)
def test_the_end_of_a_copy_is_reported(how: str, outcome: str, tmp_path: Path) -> None:
    text = f"""
while rank == 1:
    if (folder / "up-0-0").exists():
        {how}
    time.sleep(0.01)
time.sleep({PATIENCE_S})
"""
    code, said, _ = run(tmp_path, text)
    assert (code, said) == (3, [f"pipebench: error: worker process rank 1 {outcome} (before training began)"])


def test_killed_copies_are_replaced_by_copies(tmp_path: Path) -> None:
    text = """
assert "torch" in sys.modules
while attempt == 0:
    if rank == 1 and (folder / "up-0-0").exists(): os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
"""
    code, said, _ = run(tmp_path, text, restarts=1)
    assert (code, said) == (0, ["pipebench: worker process rank 1 ended by SIGKILL; restart 1 of 1"])


def test_copies_that_do_not_stop_are_ended(tmp_path: Path) -> None:
    process = launcher(tmp_path, f"time.sleep({PATIENCE_S})\n")
    with process, when([tmp_path / "up-0-0", tmp_path / "up-0-1"], process.terminate):
        process.wait()
    assert json.loads((tmp_path / "printed.txt").read_text())[0] == 130
    assert alive(tmp_path) == []


def test_no_copy_and_no_template_outlives_the_launcher(tmp_path: Path) -> None:
    process = launcher(tmp_path, f"time.sleep({2 * PATIENCE_S})\n")
    with process, when([tmp_path / "up-0-0", tmp_path / "up-0-1"], process.kill):
        assert process.wait() == -signal.SIGKILL
    wait_until_gone(tmp_path)


def test_a_killed_template_is_a_failure_of_its_workers(tmp_path: Path) -> None:
    def kill() -> None:
        os.kill(int((tmp_path / "template").read_text()), signal.SIGKILL)

    process = launcher(tmp_path, f"time.sleep({2 * PATIENCE_S})\n")
    with process, when([tmp_path / name for name in ("up-0-0", "up-0-1", "started-0", "started-1")], kill):
        process.wait()
    code, said = json.loads((tmp_path / "printed.txt").read_text().splitlines()[-1])
    assert code == 3
    sentence = "pipebench: error: worker process rank 0 ended by SIGKILL (before training began)"
    assert said[0].splitlines()[0] == sentence
    wait_until_gone(tmp_path)  # a process closes its sockets, which the launcher sees, before its children notice


@pytest.mark.parametrize("before", ["an end", "a start"])
def test_a_suspended_template_is_named(before: str, tmp_path: Path) -> None:
    """The launcher waited for its answer without a limit."""
    text = """
if rank == 0:
    os.kill(os.getppid(), signal.SIGSTOP)
    (folder / "suspended").touch()
while not (folder / "suspended").exists():
    time.sleep(0.01)
"""
    if before == "a start":
        text = f"time.sleep({2 * PATIENCE_S})\n"
        (tmp_path / "suspend-before").write_text("1")  # the rank
    with launcher(tmp_path, text, restarts=1, answer_s=0.5) as process:
        process.wait()
    code, said = json.loads((tmp_path / "printed.txt").read_text().splitlines()[-1])
    template = (tmp_path / "template").read_text()
    assert (code, len(said)) == (3, 1), said
    assert said[0].startswith(f"pipebench: error: process {template}, which starts the workers, has not answered")
    wait_until_gone(tmp_path)
