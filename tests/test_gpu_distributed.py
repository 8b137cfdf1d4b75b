"""Processes on GPUs: several that share one, by Gloo through the host's memory or by NCCL; NCCL where there are enough.

Everything here needs a GPU. One is enough for NCCL, too: ranks share it, each as a host of its own.
Processes are compared with the virtual engine on the same device, bit for bit: the same kernels on the same values.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipebench.distributed import channel
from pipebench.distributed.channel import LANES, ChannelLink, ChannelSender, DirectSends, Receiver
from pipebench.distributed.engine import DistributedEngine
from pipebench.distributed.instruction_times import DeviceTimer, Pace
from pipebench.distributed.transport import _pair
from pipebench.distributed.world import World
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.model.device import torch_settings
from pipebench.model.memory_format import as_bytes
from pipebench.recipe.schema import EngineRecipe
from pipebench.simulate.meter import WORKERS_IDLE
from tests.distributed.cases import Case, Outcome, compare, distributed, small_setup, virtually
from tests.distributed.test_asynchronous import CASES as ASYNCHRONOUS
from tests.distributed.test_asynchronous import ordered, pushes_of
from tests.distributed.test_equality import THREE, TWO
from tests.distributed.test_first_use import WAITING
from tests.model.test_optimizer import named
from tests.processes import Processes
from tests.unwatched import unwatched

# Ranks on one GPU; NCCL's reductions in the switch don't take them.
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FOUR = {
    "2-1-1": Case("conv", (3, 6), (2, 1, 1)),
    "straight": Case("skip", (2, 4, 6), (1, 1, 1, 1)),
    "2-2, gpipe": Case("conv", (4,), (2, 2), {"weights": "one", "order": "all-forwards", "microbatches": 2}),
}
# Its optimizer counts steps on the host
MOVING = Case("conv", (3,), (1, 1), {}, (17, 5), moves=(Repartition(6, (5,)),), optimizer=named("rmsprop"))
TIMED = {"pipedream": Case("conv", (4,), (1, 1), {"depth": 3}), "gpipe": TWO["gpipe"]}
DEVICE = "cuda"
COMPARED: list[tuple[str, bool]] = []  # every case that agreed: between whom, and whether the CPU agrees as well


def check(case: Case, processes: Processes, run: str = "on_gpu") -> None:
    """Compare processes with the virtual engine on the same device; they have its bits.

    With the CPU's virtual engine, too, to float tolerance, where the arithmetic allows that.
    """
    found = processes.run(f"tests.test_gpu_distributed:{run}", case)
    with torch_settings(EngineRecipe()):
        compare(found, virtually(case, DEVICE), 0.0)
        if like_the_cpu := agrees_with_cpu(case):
            compare(found, virtually(case, "cpu"), 1e-4)
    COMPARED.append((f"{len(found)} ranks by {'NCCL' if run == 'directly' else 'Gloo'}", like_the_cpu))


def agrees_with_cpu(case: Case) -> bool:
    """Return whether a GPU's sums, whose last bits differ, leave a case within 1e-4 of the CPU's.

    Not in 16 bits, whose rounding makes a last bit a large one, nor in models of several types, of which some has 16;
    not with dropout, whose generators are the devices';
    not with other optimizers than SGD, since Adam and its like divide a gradient by its own size; not with a loss
    scale, which depends on overflows.
    """
    same = case.model not in ("mixed", "stack") and case.optimizer is None
    return same and not {"precision", "loss_scale"} & {*case.columns}


def on_gpu(world: World, case: Case) -> Outcome:
    with torch_settings(EngineRecipe()):
        return distributed(world, case)


def directly(world: World, case: Case) -> Outcome:
    """Run a case with the settings of a run, by NCCL."""
    assert world.direct
    return on_gpu(world, case)


def facts(world: World) -> tuple[str, bool, str]:
    """Return where a process computes, whether tensors travel by NCCL, and the note on it."""
    return str(world.device), world.direct, world.remark


def received_beside_work(world: World) -> bool:
    """Send a tensor to a GPU that is busy for seconds; return whether it was there before the GPU was done."""
    lanes = [world.new_group("gloo") for _ in range(LANES)]
    idle = torch.cuda.Stream(world.device)  # type: ignore[no-untyped-call]
    link = ChannelLink(1 - world.rank, lanes, 2, _pair(world, (0, 1), 1), world.device, lambda: 0.0, idle)
    torch.cuda.synchronize()
    world.barrier()
    if world.rank == 0:
        sender = ChannelSender(link, 0)
        sender.send(0, {4: torch.arange(1 << 20, device=world.device)}, 0.0)
        sender.flush()
        torch.cuda.synchronize()
        return True
    works: list[Any] = []
    found = _Noting(works)
    channel.dist, before = found, channel.dist  # type: ignore[assignment, attr-defined]
    receiver = Receiver(link, 0)
    torch.cuda._sleep(5_000_000_000)  # type: ignore[no-untyped-call] # cycles
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    receiver.expect(1)
    values = receiver.receive(0).values
    channel.dist = before  # type: ignore[attr-defined]
    while not works[-1].is_completed() and not done.query():  # type: ignore[no-untyped-call]
        pass
    was_first = not done.query()  # type: ignore[no-untyped-call]
    assert torch.equal(values[4].cpu(), torch.arange(1 << 20))
    return was_first


def measured(world: World, case: Case) -> tuple[list[dict[str, Any]], dict[str, float], float, bool]:
    """Train a case; return the measurements per worker and in total, the seconds, and whether NCCL was used."""
    with torch_settings(EngineRecipe()):
        setup = replace(small_setup(case), device=world.device)
        engine = DistributedEngine(setup, world, unwatched(setup))
        engine.start_clock()
        engine.train(0, 40)
        training_s = engine.clock_s
        found = engine.measured(training_s)
        engine.close()
    assert WORKERS_IDLE not in found.notes
    return [*found.workers], found.metrics, training_s, world.direct and world.device.type == "cuda"


def check_times(found: tuple[list[dict[str, Any]], dict[str, float], float, bool]) -> None:
    """Check that the parts of every worker's time add up, and that transfers and waits for them are within."""
    rows, metrics, training_s, tells_overlap = found
    for row in rows:
        parts_s = [row[name] for name in ("compute_s", "waiting_s", "sending_s", "other_s")]
        assert sum(parts_s) == pytest.approx(training_s, rel=1e-3)  # else computing and waiting are more than all
        assert min(row["compute_s"], row["waiting_s"]) > 0
        assert 0 <= row["stall_s"] <= row["waiting_s"] * (1 + 1e-6)
        assert ("overlapped_s" in row) is tells_overlap
    if tells_overlap:
        messages_s = [metrics[f"comm_time_{kind}_s"] for kind in ("activation", "gradient")]
        assert min(messages_s) > 0
        assert sum(row["stall_s"] + row["overlapped_s"] for row in rows) == pytest.approx(sum(messages_s), rel=1e-3)


def late_sender(world: World) -> tuple[float, float]:
    """Let the first send when it has computed for long; return seconds that one waits, or that the message takes."""
    timer = DeviceTimer(world.rank, time.perf_counter, print, direct=True)
    sends = DirectSends(_pair(world, (0, 1), 1), 1, timer)
    tensor = torch.zeros(1 << 20, device=world.device)
    torch.cuda.synchronize()
    world.barrier()
    start = timer.mark()
    if world.rank == 0:
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call] # cycles
        end = timer.mark()
        sends.send([tensor])
        sends.flush()
    else:
        torch.distributed.irecv(as_bytes(tensor), 0, group=sends._group).wait()  # type: ignore[union-attr]
        end = timer.mark()
    timer.sync_clock()
    return end.s - start.s, sum(sends.times_s()[1:])


class _Noting:
    """Stands in for `torch.distributed`; records the operations requested."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def irecv(self, *args: Any, **kwargs: Any) -> Any:
        self._works.append(torch.distributed.irecv(*args, **kwargs))
        return self._works[-1]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int, bool], Processes]]:
    """Make worlds, one at a time: each rank's context and connections take memory of the GPU."""
    with ExitStack() as stack:
        made: dict[tuple[int, bool], Processes] = {}

        def of(size: int, by_nccl: bool) -> Processes:
            if (size, by_nccl) not in made:
                made.clear()
                stack.close()
                made[size, by_nccl] = stack.enter_context(Processes(size, DEVICE, SHARING if by_nccl else {}))
            return made[size, by_nccl]

        yield of


def world_of(size: int, *, by_nccl: bool) -> Any:
    """Return a fixture: so many processes, by Gloo or by NCCL."""

    @pytest.fixture
    def processes(worlds: Callable[[int, bool], Processes]) -> Processes:
        return worlds(size, by_nccl)

    return processes


two, three, four = (world_of(size, by_nccl=False) for size in (2, 3, 4))
two_by_nccl, three_by_nccl, four_by_nccl = (world_of(size, by_nccl=True) for size in (2, 3, 4))


def test_workers_have_gpus_of_their_own_or_share_them_by_gloo(two: Processes) -> None:
    enough = torch.cuda.device_count() >= 2
    found = two.run("tests.test_gpu_distributed:facts")
    assert [direct for _, direct, _ in found] == [enough, enough]
    assert len({device for device, _, _ in found}) == (2 if enough else 1)
    assert all(bool(remark) is not enough for _, _, remark in found)


def test_workers_share_a_gpu_by_nccl_if_the_settings_say_so(two_by_nccl: Processes) -> None:
    found = two_by_nccl.run("tests.test_gpu_distributed:facts")
    assert [(direct, remark) for _, direct, remark in found] == [(True, "")] * 2


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_agree_with_the_virtual_engine(two: Processes, name: str) -> None:
    check(TWO[name], two)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", THREE)
def test_three_ranks_agree_with_the_virtual_engine(three: Processes, name: str) -> None:
    check(THREE[name], three)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_agree_with_the_virtual_engine(four: Processes, name: str) -> None:
    check(FOUR[name], four)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_by_nccl(two_by_nccl: Processes, name: str) -> None:
    check(TWO[name], two_by_nccl, "directly")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", THREE)
def test_three_ranks_by_nccl(three_by_nccl: Processes, name: str) -> None:
    check(THREE[name], three_by_nccl, "directly")


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_by_nccl(four_by_nccl: Processes, name: str) -> None:
    check(FOUR[name], four_by_nccl, "directly")


def test_layers_move_by_nccl(two_by_nccl: Processes) -> None:
    check(MOVING, two_by_nccl, "directly")


@pytest.mark.parametrize("name", ["two", "three"])
def test_pushes_beside_nccl(request: pytest.FixtureRequest, name: str) -> None:
    """They travel by Gloo; given their order, the virtual engine has the same bits."""
    processes: Processes = request.getfixturevalue(f"{name}_by_nccl")
    found = processes.run("tests.test_gpu_distributed:directly", ASYNCHRONOUS[name])
    with torch_settings(EngineRecipe()):
        compare(found, virtually(ordered(ASYNCHRONOUS[name], pushes_of(found)), DEVICE), 0.0)
    COMPARED.append((f"{len(found)} ranks, pushes", False))


@pytest.mark.parametrize("num_workers", WAITING)
def test_a_first_all_reduce_that_waits_hangs_nobody(request: pytest.FixtureRequest, num_workers: int) -> None:
    processes: Processes = request.getfixturevalue({3: "three_by_nccl", 4: "four_by_nccl"}[num_workers])
    check(WAITING[num_workers], processes, "directly")


def test_tensors_are_received_while_the_gpu_computes(two_by_nccl: Processes) -> None:
    assert two_by_nccl.run("tests.test_gpu_distributed:received_beside_work") == [True, True]


@pytest.mark.parametrize("name", TIMED)
@pytest.mark.parametrize("processes", ["two", "two_by_nccl"])
def test_parts_of_a_worker_s_time_add_up(request: pytest.FixtureRequest, processes: str, name: str) -> None:
    own: Processes = request.getfixturevalue(processes)
    for found in own.run("tests.test_gpu_distributed:measured", TIMED[name]):
        check_times(found)


def test_a_late_sender_is_waited_for_but_its_message_is_not_long(two_by_nccl: Processes) -> None:
    (computed_s, takes_s), (waited_s, _) = two_by_nccl.run("tests.test_gpu_distributed:late_sender")
    assert waited_s > 0.5 * computed_s
    assert 0 < takes_s < 0.5 * computed_s


def test_the_host_stays_two_steps_ahead_of_a_gpu() -> None:
    pace, ends = Pace(torch.device("cuda", torch.cuda.current_device())), list[torch.cuda.Event]()
    for _ in range(6):
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        ends.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        ends[-1].record()
        pace.step()
        assert all(end.query() for end in ends[:-2])  # type: ignore[no-untyped-call]
    assert not ends[-1].query()  # type: ignore[no-untyped-call]
