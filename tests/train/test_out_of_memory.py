"""Devices out of memory, by a stand-in on the CPU: the error, its advice, and measured memory."""

import copy
import errno
import gc
import os
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pipebench.checkpoint.state import ModelState
from pipebench.distributed.launch import worth_restart
from pipebench.distributed.launch_failure import of_exception, report
from pipebench.engine.virtual import VirtualEngine
from pipebench.errors import OutOfMemoryError
from pipebench.garbage import without_collector
from pipebench.model import allocator
from pipebench.model.allocator import Allocator, free_cycles
from pipebench.model.plan import recut
from pipebench.profile import measure
from pipebench.profile.enough import StopRule
from pipebench.profile.request import ProfileRequest
from pipebench.profile.stored import read_profile, write_profile
from pipebench.simulate.kinds import WORKSPACES
from pipebench.simulate.memory import stage_memories
from pipebench.train.engines import on_virtual_clock
from pipebench.train.loop import TrainingLoop
from pipebench.train.memory_forecast import MemoryForecast
from tests.made_up_gpu import made_up_gpu
from tests.support import make_engine
from tests.train.test_training import Silent, prepared, recipe

pytestmark = pytest.mark.usefixtures("few_objects_to_collect")


def full(module: Any, inputs: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity ...")


def test_a_device_out_of_memory_ends_the_run_in_one_sentence() -> None:
    given = prepared(recipe(), plan=([4], [1, 1]))

    def make(*callbacks: Any) -> VirtualEngine:
        engine = on_virtual_clock(given)(*callbacks)
        assert isinstance(engine, VirtualEngine)
        engine.replicas[1].module.register_forward_pre_hook(full)
        return engine

    with pytest.raises(OutOfMemoryError) as caught:
        TrainingLoop(given, make, Silent(), lambda point: None).run()
    said = str(caught.value)
    first = given.setup.graph.layers[4].name
    assert said.startswith(f"out of memory in 1F0@0: worker 1 (stage 1, {first} to ")
    assert ") held " in said
    assert "(weights " in said
    assert "; what would help: parallelism.depth: 1, train.minibatch_size: " in said
    assert "\n" not in said
    failure = of_exception(caught.value, 1)
    assert (failure.exit_code, report(failure)) == (3, f"pipebench: error: {said}")
    assert not worth_restart(failure, started=True)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        # while a stage is cut, say, or a checkpoint taken up
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore"), "Tried to allocate 2.00 GiB"),
        (RuntimeError("CUDA error: out of memory"), "out of memory"),  # of pinned memory, and of contexts
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "(handle)`"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "can't allocate memory"),
        (MemoryError(), "MemoryError"),  # Python's own
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "Cannot allocate memory"),  # fork's
        (ImportError("\n\nREAD THIS\n\nx.so: failed to map segment from shared object\n"), "from shared object"),
    ],
)
def test_running_out_of_memory_outside_of_an_instruction_is_one_sentence_too(error: Exception, message: str) -> None:
    """It was a traceback, and the run was restarted as often as a recipe allows; so was `ulimit -v` in 0.2.0."""
    failure = of_exception(error, rank=1)
    said = report(failure)
    assert said.startswith("pipebench: error: out of memory before or between a worker's instructions: ")
    assert said.endswith(message)
    assert (failure.exit_code, len(said.splitlines())) == (3, 1)
    assert not worth_restart(failure, started=True)
    assert of_exception(RuntimeError("a memory of summer"), rank=1).kind == "failed"


class Standing(Allocator):
    """An allocator whose work takes 1,000 bytes beside live tensors every time."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now, self.most = 500, 500

    @property
    def held_bytes(self) -> int:
        self.now += 100  # of a tensor that stays
        return self.now

    @property
    def peak_bytes(self) -> int:
        return max(self.most, self.now + 1100)

    @property
    def total_bytes(self) -> int:
        return 1 << 30

    def forget(self) -> None:
        self._before = (max(self._before[0], self.peak_bytes), 0)
        self.most = self.now


def test_an_allocator_measures_memory_beside_live_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 9000)
    stand_in = Standing()
    value, read = stand_in.beside(lambda: 7)
    assert (value, read()) == (7, 1000.0)
    assert stand_in.most_bytes == {"allocated_peak_bytes": 1800, "reserved_peak_bytes": 9000}
    assert allocator.allocator_of(torch.device("cpu")) is None


def test_peaks_are_those_since_training_began(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"max_memory_allocated": 0, "max_memory_reserved": 0}
    for name in now:
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: now[name])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: now.update(dict.fromkeys(now, 1)))
    gpu = Allocator(torch.device("cuda", 0))

    def message(allocated: int, reserved: int) -> tuple[int, ...]:
        now.update(max_memory_allocated=allocated, max_memory_reserved=reserved)
        return tuple(gpu.most_bytes.values())

    assert message(70, 90) == (70, 90)  # of measuring
    gpu.begin()
    assert message(30, 50) == (30, 50)
    gpu.forget()
    assert message(20, 40) == (30, 50)
    assert message(35, 55) == (35, 55)


class Cycle:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_cycles_are_freed_where_memory_is_a_gpu_s(kind: str) -> None:
    with without_collector():
        cycle = weakref.ref(Cycle())
        free_cycles(torch.device(kind))
        assert (cycle() is None) == (kind == "cuda")


@pytest.mark.parametrize("when", ["layers move", "a run is resumed under a moved plan"])
def test_recut_stages_free_their_memory_at_once(when: str) -> None:
    """Without Python's collector, which comes late, and takes a tenth of a second where it is called."""
    setup = prepared(recipe(), plan=([4], [1, 1])).setup
    with without_collector():
        engine = make_engine(setup)
        engine.train(0, 4)
        gc.collect()  # the first step of a process has torch import what stays in a traceback
        state = ModelState.merge(ModelState.from_plain(part.to_plain()) for _, part in copy.deepcopy(engine.parts()))
        tensors = [value for replica in engine.replicas for value in replica.tensors().values()]
        held: list[Any] = [StorageWeakRef(value.untyped_storage()) for value in tensors]  # type: ignore[no-untyped-call]
        del tensors[:]
        plan = recut(setup.graph, setup.plan, [3])
        if when == "layers move":
            engine.switch_setup(setup.under(plan))
        else:
            engine.restore(state, None, 0.0, plan)
        assert held
        assert all(storage.expired() for storage in held)
        assert engine.train(4, 4) == 4


def test_a_measured_model_is_freed_from_a_gpu() -> None:
    """Modules of torch.fx and their graphs refer to each other."""
    given = prepared(recipe(), plan=([4], [1, 1]))
    setup, optimizer = given.setup, given.recipe.train.optimizer
    request = ProfileRequest(setup.graph, setup.dataset, [4], optimizer, "it")
    gc.collect()
    with made_up_gpu(), without_collector():
        before = num_parameters()
        measure.measured_profile(request, torch.device("cuda"), StopRule(most=1), engine=given.recipe.engine)
        assert num_parameters() == before


def num_parameters() -> int:
    """Return how many parameters are alive, dropped or not."""
    return sum(issubclass(type(each), torch.nn.Parameter) for each in gc.get_objects())


def test_workspaces_are_measured_stored_and_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured by a stand-in; a profile without them reads as none, and is written as it was."""
    given = prepared(recipe(), plan=([4], [1, 1]))
    setup, stand_in = given.setup, Standing()
    monkeypatch.setattr(measure, "allocator_of", lambda device: stand_in)
    sizes, optimizer = [*setup.profile.layers], given.recipe.train.optimizer
    request = ProfileRequest(setup.graph, setup.dataset, sizes, optimizer, "it")
    found = measure.measured_profile(request, setup.device, StopRule(most=1), engine=given.recipe.engine)
    rows = next(iter(found.layers.values()))
    assert {row.workspace_bytes for row in rows} == {1000}
    assert read_profile(write_profile(found)) == found
    assert "workspace" not in write_profile(setup.profile)
    assert read_profile(write_profile(setup.profile)) == setup.profile
    none = found.with_rows(lambda rows: tuple(replace(row, workspace_bytes=0) for row in rows))
    peaks = []
    for profile in (none, found):
        job = replace(given, setup=replace(setup, profile=profile))
        peaks.append(MemoryForecast(job).memory.fullest)
    assert peaks[1].num_bytes == peaks[0].num_bytes + 1000
    assert peaks[1].by_kind[WORKSPACES] == 1000
    (memory, *_) = stage_memories(found, setup.plan, setup.pipeline)
    assert max(memory.workspace.values()) == 1000
