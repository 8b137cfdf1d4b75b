"""Hooks and fixtures of all tests."""

import gc
import os
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Iterator

import pytest

from pipebench import errors
from pipebench.show import inline
from tests import shortcuts


def pytest_configure() -> None:
    """Set up signals, the garbage collector and cuBLAS."""
    # torch reads it once, at the first product on a GPU: with this workspace, products are deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Collect garbage rarely: searching thousands of tests and their modules took a twelfth of the time.
    gc.set_threshold(50_000, 20, 20)
    # Handle Ctrl-C, in processes that tests start, too: a shell lets background commands ignore it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Exclude the tests and their modules from garbage collection."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Include them in the interpreter's last collection: triton would print them as leaks, at length."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases of tests that are marked `sampled(n)` as slow, except the first and about one in n, by their names."""
    seen: set[str] = set()
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None:
            test = item.nodeid.partition("[")[0]
            if test in seen and zlib.crc32(item.nodeid.encode()) % mark.args[0]:
                item.add_marker("slow")
            seen.add(test)


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:
    """Print what was compared on a GPU, and with what; pytest 8.3 has no public name for the reporter's class."""
    compared = getattr(sys.modules.get("tests.test_gpu_distributed"), "COMPARED", ())
    for what, count in sorted(Counter(what for what, _ in compared).items()):
        also = sum(also for each, also in compared if each == what)
        terminalreporter.write_line(
            f"{what}: {count} cases have the bits of the virtual engine on the same device; {also} of them, those in "
            "32 or 64 bits with SGD, are also within 1e-4 of the CPU's"
        )


@pytest.fixture(scope="module")
def few_objects_to_collect() -> None:
    """Exclude existing objects from garbage collection: tests that collect then search only their own."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def handles_sighup() -> Iterator[None]:
    """Handle SIGHUP, in processes that the test starts, too, even under `nohup`, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def _forget_hidden_values() -> None:
    errors._hidden.clear()


@pytest.fixture(autouse=True, scope="session")
def _profile_cache_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a cache of profiles of this test run, shared with processes that tests start and with other workers."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPEBENCH_CACHE", str(folder / "cache"))
        yield


@pytest.fixture(autouse=True, scope="session")
def _runs_take_shortcuts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Take the shortcuts of `tests.shortcuts`; tests that look at a picture use `rendered`.

    They don't hold in processes that tests start.
    """
    render = inline.InlineFigure.write
    with pytest.MonkeyPatch.context() as patch:
        shortcuts.take(patch.setattr, tmp_path_factory.mktemp("store") / "mlflow.db")
        patch.setattr(inline.InlineFigure, "render", render, raising=False)
        yield


@pytest.fixture(autouse=True, scope="module")
def _compose_one_figure_of_each_kind_per_file() -> None:
    shortcuts.compose_again()


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline.InlineFigure, "write", vars(inline.InlineFigure)["render"])
    monkeypatch.setattr(inline, "draw", lambda figure, of, path: figure(*of).write(path))
