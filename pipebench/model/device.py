"""torch's settings for one run, and the record of the machine and the checkout."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import pipebench
from pipebench.model.cores import usable_cores
from pipebench.recipe.schema import EngineRecipe


@contextlib.contextmanager
def torch_settings(engine: EngineRecipe) -> Iterator[None]:
    """Set threads, TF32 and determinism as the recipe says; restore them afterwards."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    deterministic = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        if engine.threads != "auto":
            torch.set_num_threads(int(engine.threads))
        elif "OMP_NUM_THREADS" not in os.environ:
            # torch takes a thread per core of the host, of which a container may use only a few.
            torch.set_num_threads(max(1, min(threads, int(usable_cores()))))
        torch.backends.cudnn.benchmark = not engine.deterministic
        # Without this variable torch considers cuBLAS's products nondeterministic. It is read once in a process, at the
        # first product, which may be in an earlier run that needn't be deterministic; so it is always set.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if engine.deterministic:
            # Some layers have no deterministic backward on CUDA (adaptive pooling): torch warns, and the run's log has
            # the warning. use_deterministic_algorithms would also import torch's compiler, which takes a second.
            torch.set_deterministic_debug_mode("warn")
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        with _tf32(engine.tf32):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark
        torch.set_deterministic_debug_mode(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@contextlib.contextmanager
def _tf32(enabled: bool) -> Iterator[None]:
    """Set whether products and convolutions may round to TF32; restore the settings afterwards.

    torch has two sets of switches. If a user's code has used the new ones (`fp32_precision`), torch refuses to read the
    old ones, which then don't override the new ones for cuDNN. So both are set.
    """
    cudnn: Any = torch.backends.cudnn
    convolutions = (cudnn.conv, cudnn.rnn)
    switches: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, *convolutions]  # type: ignore[attr-defined]
    before, old = [each.fp32_precision for each in switches], None
    with contextlib.suppress(RuntimeError):
        old = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    _set_old_switches("high" if enabled else "highest", enabled)
    for each in convolutions:
        each.fp32_precision = "tf32" if enabled else "ieee"
    try:
        yield
    finally:
        if old is not None:
            _set_old_switches(*old)
        for each, precision in zip(switches, before, strict=True):
            each.fp32_precision = precision


def _set_old_switches(matmul_precision: str, cudnn_tf32: bool) -> None:
    torch.set_float32_matmul_precision(matmul_precision)
    torch.backends.cudnn.allow_tf32 = cudnn_tf32


def environment(device: torch.device) -> dict[str, str]:
    """Return versions, hardware and settings of this run, without host names and paths."""
    commit = _git("rev-parse", "HEAD").strip()
    changed = str(len(_git("status", "--porcelain").splitlines()))
    return {
        "pipebench": pipebench.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: importlib.metadata.version(name) for name in ("torchvision", "omegaconf", "mlflow", "numpy")},
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        **({"commit": commit, "changed_files": changed} if commit else {}),
    }


def commit_diff() -> str:
    """Return the uncommitted changes of pipebench's checkout; "" without one."""
    return _git("diff", "HEAD")


def tree_of(paths: Sequence[str]) -> str:
    """Return the commit of pipebench's checkout, 12 digits, and how many files of `paths` differ; "" without one."""
    commit, changed = _git("rev-parse", "HEAD").strip(), _git("status", "--porcelain", "--", *paths).splitlines()
    return commit[:12] + (f" and {len(changed)} changed files" if commit and changed else "")


def _git(*words: str) -> str:
    """Return git's output on pipebench's checkout; "" without one."""
    root = Path(pipebench.__file__).parent.parent
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return ""
    # The checkout may belong to another user, as one mounted into a container does. Git refuses to read it by default,
    # since its settings can run commands; but pipebench already runs code from it.
    command = [git, "-c", f"safe.directory={root}", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
