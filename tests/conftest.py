"""What holds for all tests."""

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
    """Hear Ctrl-C, and let processes that are started hear it: a shell lets what runs in its background ignore it.

    Garbage is collected seldom: thousands of tests and their modules stay, and looking through them took a twelfth of
    the time. On a GPU torch looks once, at the first product of any test, whether cuBLAS has a workspace with which
    products are deterministic.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    gc.set_threshold(50_000, 20, 20)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Let the collector pass over the tests and all that they import."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter's last collection find it all: triton prints what it would pass over as leaks, at length."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the cases of a test marked `sampled(n)`, but for its first and about one in n, by their names."""
    seen: set[str] = set()
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None:
            test = item.nodeid.partition("[")[0]
            if test in seen and zlib.crc32(item.nodeid.encode()) % mark.args[0]:
                item.add_marker("slow")
            seen.add(test)


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:
    """Say what was compared on a GPU, and with what; pytest 8.3 has no public name for what it says it by."""
    compared = getattr(sys.modules.get("tests.test_gpu_distributed"), "COMPARED", ())
    for what, count in sorted(Counter(what for what, _ in compared).items()):
        also = sum(also for each, also in compared if each == what)
        terminalreporter.write_line(
            f"{what}: {count} cases have the bits of the virtual engine on the same device; {also} of them, those in "
            "32 or 64 bits with SGD, are also within 1e-4 of the CPU's"
        )


@pytest.fixture(scope="module")
def little_to_search() -> None:
    """Let the collector pass over what there is already: tests that ask for garbage search only what they make."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def hears_sighup() -> Iterator[None]:
    """Hear SIGHUP, and let processes that are started hear it, which `nohup` has ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def _messages_hide_nothing_of_other_tests() -> None:
    errors._hidden.clear()


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_known_from_other_times(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what is profiled in a cache of these tests' own, in processes that they start or run beside, too."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPEBENCH_CACHE", str(folder / "cache"))
        yield


@pytest.fixture(autouse=True, scope="session")
def _runs_take_shortcuts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests that look at a picture use `rendered`. Processes that tests start draw and make tables, as users' do."""
    render = inline.InlineFigure.write
    with pytest.MonkeyPatch.context() as patch:
        shortcuts.take(patch.setattr, tmp_path_factory.mktemp("store") / "mlflow.db")
        patch.setattr(inline.InlineFigure, "render", render, raising=False)
        yield


@pytest.fixture(autouse=True, scope="module")
def _figures_of_each_kind_are_composed_in_every_file() -> None:
    shortcuts.compose_again()


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline.InlineFigure, "write", vars(inline.InlineFigure)["render"])
    monkeypatch.setattr(inline, "draw", lambda figure, of, path: figure(*of).write(path))
