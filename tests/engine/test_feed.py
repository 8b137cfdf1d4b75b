"""The data that stages read has the same bits in the same order, whether fetched ahead or not; and the whole model."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped] # it has no types of its own
import pytest
import torch
from torch import nn
from torch.cuda._utils import _get_device_index

from pipebench.engine.feed import Feed
from pipebench.model import loading
from pipebench.model.loading import Loaders, Source, Task
from pipebench.simulate.costs import stage_costs
from tests.made_up_gpu import made_up_gpu
from tests.models import ConvNet
from tests.support import Blobs, Mlp, make_engine, make_setup, parameters_of


class Noisy(Blobs):
    """Random augmentation: a sample's noise follows from its index and the draw."""

    loader_processes = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.threads: set[str] = set()

    def fetch(self, split: str, indices: Any, fields: Any, draw: int = 0) -> dict[str, torch.Tensor]:
        self.threads.add(threading.current_thread().name)
        fetched = super().fetch(split, indices, fields)
        if split == "train" and "x" in fetched:
            noise = [torch.randn(6, generator=torch.Generator().manual_seed(draw % 1000003 + i)) for i in indices]
            fetched["x"] = fetched["x"] + torch.stack(noise)
        return fetched


class Whole(Noisy):
    """Samples that are read whole, also for their labels alone; records which process reads which."""

    targets_apart = False
    notes_in = os.devnull

    def fetch(self, split: str, indices: Any, fields: Any, draw: int = 0) -> dict[str, torch.Tensor]:
        with Path(self.notes_in).open("a") as file:
            file.write(json.dumps([split, parent_process() is None, [*fields], [*indices]]) + "\n")
        return super().fetch(split, indices, fields, draw)


@pytest.mark.parametrize(
    ("made", "plan", "columns"),
    [
        (Noisy, ([4], [2, 1]), {}),
        (Noisy, ([4], [1, 2]), {"weights": "one", "microbatches": 2, "accumulate": 2}),
        (Whole, ([4], [1, 2]), {"weights": "one", "microbatches": 2, "accumulate": 2}),
        (Whole, ([], [2]), {}),
    ],
    ids=["pipedream", "flush", "samples read whole in flush", "samples read whole in dp"],
)
def test_loading_ahead_changes_nothing(
    made: type[Noisy], plan: Any, columns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for processes, in_a_thread in ((0, False), (2, False), (0, True)):
        data = made(num_train=46)
        data.loader_processes = processes
        if in_a_thread:
            fetch_in_a_thread(monkeypatch)
        engine = make_engine(make_setup(Mlp(), plan, dataset=data, **columns))
        engine.train(0, 13)
        found.append((engine.evaluate(), parameters_of(engine)))
        engine.loaders.close()
        assert (len(data.threads - {threading.current_thread().name}) > 0) is in_a_thread
    for other in found[1:]:
        assert found[0][0] == other[0]
        assert all(torch.equal(value, other[1][name]) for name, value in found[0][1].items())


@pytest.mark.parametrize(
    ("plan", "columns", "reads"),
    [
        (([], [1]), {}, [["x", "label"]]),
        (([4], [1, 1]), {}, [["label"], ["x"]]),
        (([2, 4], [1, 1, 1]), {"weights": "one", "order": "sequential", "chunks": 3, "depth": 1}, [["x", "label"]]),
        (
            ([2, 4, 5], [1, 1, 1, 1]),
            {"weights": "one", "order": "zbv", "chunks": 2, "backward": "split"},
            [["x", "label"]],
        ),
    ],
    ids=["single", "pipedream", "a worker with all stages", "in a V"],
)
def test_samples_that_are_read_whole_are_read_ahead_for_their_targets_too(
    plan: Any, columns: Any, reads: list[list[str]], tmp_path: Path
) -> None:
    data = Whole(num_train=46)
    engine = make_engine(make_setup(Mlp(), plan, dataset=data, **columns))
    assert engine.setup.pipeline.loads == tuple(range(len(reads)))
    data.notes_in, data.loader_processes = str(tmp_path / "notes"), 1
    engine.train(0, 5)
    engine.evaluate()
    engine.loaders.close()
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert [note for note in notes if note[1]] == []
    read = sorted((indices, fields) for split, _, fields, indices in notes if split == "train")
    expected = (([*engine.setup.sampler.indices(minibatch)], fields) for minibatch in range(5) for fields in reads)
    assert read == sorted(expected)


class Named(Blobs):
    """Returns, as inputs, which process reads which minibatch, and for what."""

    def fetch(self, split: str, indices: Any, fields: Any, draw: int = 0) -> dict[str, torch.Tensor]:
        return {field: torch.tensor([os.getpid(), indices[0], draw, split == "eval"]) for field in fields}


def test_loader_processes_stay_between_segments_whatever_is_left_of_one() -> None:
    setup = replace(make_setup(Mlp(), ([], [1]), dataset=Blobs(num_train=46)), dataset=Named(num_train=46))
    setup.dataset.loader_processes = 2
    loaders, processes = Loaders(setup.dataset, setup.device), set[int]()
    for split, first, count, read in (
        ("train", 0, 11, 3), ("train", 3, 8, 8), ("eval", 0, 2, 2), ("train", 11, 4, 0), ("train", 11, 4, 4),
    ):  # fmt: skip
        feed = Feed(setup, split, first, count, loaders)
        for unit in range(read):
            (found,) = feed.inputs(0, 0, unit, ["x"])
            process, *fetched_for = found.tolist()
            processes.add(process)
            assert fetched_for == [feed.indices(unit)[0], feed._task(unit).draw, split == "eval"]
        feed.close()
    assert len(processes) == 2
    assert not any(_is_gone(process) for process in processes)
    loaders.close()
    assert all(_is_gone(process) for process in processes)


def _is_gone(process: int) -> bool:
    return not psutil.pid_exists(process)


def fetch_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch on a CPU as beside a GPU, but for pinned memory."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", _get_device_index)  # refuses what torch does
    monkeypatch.setattr(loading, "pinned", lambda value: value)
    monkeypatch.setattr(Source, "minibatches", lambda self, tasks, _=None: self._in_a_thread(tasks))


def tasks_of(taken: list[int], count: int) -> Iterator[Task]:
    for k in range(count):
        taken.append(k)
        yield Task([4 * k, 4 * k + 1], k)


def test_a_thread_is_two_minibatches_ahead_and_ends_with_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_in_a_thread(monkeypatch)
    taken: list[int] = []
    data = Noisy()
    source = Source(data, "train", ["x"], torch.device("cuda"))
    minibatches = source.minibatches(tasks_of(taken, 8))
    for k in range(3):
        expected = data.fetch("train", [4 * k, 4 * k + 1], ["x"], k)["x"]
        assert torch.equal(next(minibatches)["x"], expected)
        assert taken == [*range(k + loading.AHEAD + 1)]
    minibatches.close()
    assert not any(thread.name.startswith("fetch-ahead") for thread in threading.enumerate())


def test_an_error_in_the_thread_is_raised_where_the_minibatch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_in_a_thread(monkeypatch)
    source = Source(Noisy(), "train", ["x"], torch.device("cuda"))
    minibatches = source.minibatches(iter([Task([0]), Task([1 << 40])]))
    assert next(minibatches)["x"].shape == (1, 6)
    with pytest.raises(IndexError):
        next(minibatches)


def test_microbatches_and_stages_see_the_same_augmentation() -> None:
    """Gpipe on parts of a minibatch takes the gradient that one worker takes on the whole."""
    found = []
    for plan, parts in ((([], [1]), 1), (([4], [1, 1]), 4)):
        engine = make_engine(make_setup(Mlp(), plan, dataset=Noisy(), weights="one", microbatches=parts))
        engine.train(0, 10)
        found.append(parameters_of(engine))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-12, atol=1e-12)


def test_augmentation_differs_from_epoch_to_epoch() -> None:
    seen: list[torch.Tensor] = []

    class Watching(Noisy):
        def fetch(self, split: str, indices: Any, fields: Any, draw: int = 0) -> dict[str, torch.Tensor]:
            if 7 in indices and "x" in fields:
                seen.append(super().fetch(split, [7], fields, draw)["x"])
            return super().fetch(split, indices, fields, draw)

    data = Watching(num_train=8)
    make_engine(make_setup(Mlp(), ([], [1]), dataset=data)).train(0, 4)
    assert len(seen) == 2
    assert not torch.equal(seen[0], seen[1])


class Writing(Blobs):
    """A metric that needs the whole model."""

    generates_with = "forward"
    metrics: Mapping[str, str] = {"whole": "max"}

    def __init__(self) -> None:
        super().__init__(shape=(2, 8, 8))
        self._x = self._x.float()
        self.models: list[nn.Module] = []

    def whole_model_metrics(self, model: nn.Module) -> dict[str, float]:
        self.models.append(model)
        with torch.no_grad():
            return {"whole": float(model(self._x.to(next(model.parameters()).device)).detach().square().sum())}


def test_the_whole_model_has_the_newest_weights_and_statistics() -> None:
    data = Writing()
    engine = make_engine(make_setup(ConvNet(), ([2, 5], [1, 2, 1]), dataset=data))
    values = []
    for start in (0, 5):
        engine.train(start, 5)
        values.append(engine.evaluate()["whole"])
        model = data.models[-1]
        assert isinstance(model, ConvNet)
        assert not model.training
        newest = parameters_of(engine)
        assert all(torch.equal(p, newest[name]) for name, p in model.named_parameters())
        buffers = {n: b for r in engine.replicas for n, b in r.module.named_buffers()}
        assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
        assert len(buffers) == len(list(model.named_buffers())) == 6
    assert values[0] != values[1]


def test_the_whole_model_is_on_a_gpu_only_while_it_is_scored() -> None:
    """There it would take memory from training."""
    data = Writing()
    with made_up_gpu():
        setup = replace(make_setup(ConvNet(), ([2, 5], [1, 2, 1]), dataset=data), device=torch.device("cuda"))
        engine = make_engine(setup)
        values = []
        for start in (0, 5):
            engine.train(start, 5)
            values.append(engine.evaluate()["whole"])
            kept, scored = (
                {each.device.type for each in [*model.parameters(), *model.buffers()]}
                for model in (engine._whole._model, data.models.pop())
            )
            assert (kept, scored) == ({"cpu"}, {"cuda"})
            assert not data.models
    assert values[0] != values[1]


class Constant(nn.Module):
    """Makes a tensor in its forward, which tracing turns into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        return self.two(self.one(x) * torch.arange(5.0))


def test_a_model_that_makes_tensors_can_be_joined_from_its_stages() -> None:
    class Whole(Blobs):
        generates_with = "forward"

        def whole_model_metrics(self, model: nn.Module) -> dict[str, float]:
            return {"whole": float(model(self._x).detach().square().sum())}

    engine = make_engine(make_setup(Constant(), ([1], [1, 1]), dataset=Whole()))
    engine.train(0, 3)
    assert engine.evaluate()["whole"] > 0


def test_processes_are_shared_out_among_the_workers_that_load() -> None:
    data = Noisy()
    for processes, plan, each in ((8, ([], [4]), 2), (2, ([], [4]), 1), (3, ([4], [1, 1]), 3), (0, ([], [2]), 0)):
        data.loader_processes = processes
        assert Feed(make_setup(Mlp(), plan, dataset=data), "train", 0, 1)._num_processes == each
    assert Feed(make_setup(Mlp(), ([4], [2, 1]), dataset=whole(6)), "train", 0, 1)._num_processes == 2


def whole(processes: int) -> Whole:
    data = Whole()
    data.loader_processes = processes
    return data


@pytest.mark.parametrize(
    ("data", "plan", "loads_s"),
    [
        (Noisy(), ([], [4]), [1.0]),
        (Noisy(), ([4], [2, 1]), [1.0, 0.0]),
        (Whole(), ([4], [2, 1]), [1.0, 1.0]),
        (whole(6), ([4], [2, 1]), [3.0, 3.0]),
        (whole(4), ([], [4]), [4.0]),
        (whole(3), ([], [4]), [3.0]),
        (whole(5), ([], [2]), [2.5]),
        (whole(5), ([], [1]), [1.0]),
    ],
)
def test_workers_that_load_wait_for_their_share_of_the_processes(data: Noisy, plan: Any, loads_s: list[float]) -> None:
    """A second is what a unit takes with all processes; a worker has as many as the feed gives it."""
    setup = make_setup(Mlp(), plan, dataset=data)
    profile = replace(setup.profile, load_s=dict.fromkeys(setup.profile.load_s, 1.0), loaders=data.loader_processes)
    assert [stage.load_s[4] for stage in stage_costs(profile, setup.plan).stages] == loads_s


class Fetched:
    """A tensor in the host's memory that records how it is copied."""

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned

    def is_pinned(self) -> bool:
        return self._pinned

    def pin_memory(self) -> "Fetched":
        assert not self._pinned
        return Fetched(pinned=True)

    def to(self, device: torch.device, *, non_blocking: bool) -> str:
        assert non_blocking
        return f"on {device.type}, {'pinned' if self._pinned else 'copied at once'}"


class Unmoved(Blobs):
    """Data that a loader has pinned, or hasn't."""

    pinned = False

    def fetch(self, split: str, indices: Any, fields: Any, draw: int = 0) -> Any:
        return {field: Fetched(self.pinned) for field in fields}


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("concurrent", [False, True])
def test_a_gpu_copies_inputs_and_targets_from_pinned_memory(
    pinned: bool, concurrent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1.0: targets were copied from pageable memory, so the host waited for all of the GPU's work."""
    set_to: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", set_to.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    data = Unmoved()
    data.concurrent = concurrent
    setup = make_setup(Mlp(), ([4], [1, 1]))
    data.pinned = pinned
    feed = Feed(replace(setup, dataset=data, device=torch.device("cuda")), "train", 0, 2)
    moved: list[Any] = [*feed.inputs(0, 0, 0, ["x"]), feed.targets(0, 0)["label"]]
    assert moved == ["on cuda, pinned"] * 2
    feed.close()
    assert set_to == [3] * concurrent  # pinned memory belongs to the thread's device


STOPPED = """
import multiprocessing, os, signal, sys
from pipebench.model.loading import LoaderProcesses, Task
import torch
from tests.support import Blobs
asked = []
signal.signal(signal.SIGHUP, lambda number, frame: asked.append(number))
loaders = LoaderProcesses(Blobs(), torch.device("cpu"), 2)
minibatches = loaders.minibatches("train", ["x"], iter([Task([k]) for k in range(40)]))
found = [next(minibatches), next(minibatches)]  # one of each, which have started
os.killpg(0, signal.SIGHUP)  # as torchrun
for each in multiprocessing.active_children():  # as who ends all processes of a job
    os.kill(each.pid, signal.SIGTERM)
found += minibatches
loaders.close()
print(len(found), len(asked))
"""


def test_loader_processes_go_on_until_a_run_that_is_stopped_has_drained() -> None:
    """They ended at the signal, so the run ended with an error instead of a checkpoint."""
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", STOPPED], env=environment, start_new_session=True, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "40 1\n"), done.stderr[-2000:]
