"""Which workers use NCCL, and its options."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from pipebench.distributed import nccl
from pipebench.distributed.launch_join import HostSlot, PeerLostError, peers
from pipebench.distributed.nccl import pair_options, set_environment, shares, sharing_remark, takes
from pipebench.distributed.world import World
from pipebench.extensions.asynchronous import processes

needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")


def facts_of(*gpus: str | None, shared: bool = False) -> list[dict[str, Any]]:
    return [{"host": "a", "gpu": gpu, "shares": shared} for gpu in gpus]


@needs_nccl
def test_nccl_needs_a_gpu_per_worker_unless_told_to_share() -> None:
    assert takes(facts_of("GPU-1", "GPU-2"))
    assert not takes(facts_of("GPU-1", "GPU-2", "GPU-1"))
    assert takes(facts_of("GPU-1", "GPU-1", shared=True))
    assert not takes([*facts_of("GPU-1", shared=True), *facts_of("GPU-1")])  # one of them has another setting
    assert not takes(facts_of("GPU-1", None, shared=True))


@pytest.mark.parametrize(("version", "hosts"), [((2, 30, 7), set()), ((2, 28, 9), {"pipebench-0", "pipebench-1"})])
def test_ranks_may_share_a_gpu_by_nccl_and_before_2_30_have_different_host_ids(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], hosts: set[str]
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    environments = [{"NCCL_MULTI_RANK_GPU_ENABLE": "1"} for _ in range(2)]
    for rank, environ in enumerate(environments):
        assert shares(environ)
        set_environment(environ, rank)
    assert {environ["NCCL_HOSTID"] for environ in environments if "NCCL_HOSTID" in environ} == hosts
    assert all(("NCCL_IB_DISABLE" in environ) is bool(hosts) for environ in environments)
    assert not shares({"NCCL_MULTI_RANK_GPU_ENABLE": "0"})
    assert not shares({})
    untold: dict[str, str] = {}
    set_environment(untold, 1)
    assert "NCCL_HOSTID" not in untold


def test_shared_gpus_are_reported() -> None:
    assert sharing_remark(facts_of("GPU-1", "GPU-2")) == ""
    assert sharing_remark(facts_of("GPU-1", "GPU-1")).startswith(
        "2 workers share 1 GPU: values and gradients travel by"
    )
    assert sharing_remark(facts_of("GPU-1", "GPU-2", "GPU-1")).startswith("3 workers share 2 GPUs: ")


def test_cuda_s_settings_keep_the_user_s() -> None:
    found = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    set_environment(found, 0)
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert found["TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"] == "false"


def test_the_groups_of_channels_time_their_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of messages are read off torch's events, which it records for groups with this option."""
    timed: list[str] = []
    group = SimpleNamespace(_enable_collectives_timing=lambda: timed.append("a pair's"))
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: group)
    monkeypatch.setattr(nccl, "pair_options", lambda *_: "options")
    store: Any = None
    slot = HostSlot(0, 2, 0, 2, "", 0, agent_store=False, attempt=None)
    world = World(slot, torch.device("cpu"), direct=True, store=store, operation_limit_s=1.0, connection=store)
    for backend, num_pairs in (("gloo", 0), ("nccl", 0), ("nccl", 3)):
        world.new_group(backend, [0, 1], num_pairs=num_pairs)
    assert timed == ["a pair's"]
    assert hasattr(dist.ProcessGroup, "_enable_collectives_timing")
    assert hasattr(dist.Work, "_get_duration")


@pytest.mark.parametrize("direct", [False, True])
def test_groups_of_gloo_beside_nccl_have_all_ranks(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch lets ranks outside of a new group split their communicator, which waits for those in it: by NCCL only."""
    made: list[Any] = []

    def new_group(*given: Any, limit_s: float) -> Any:
        made.append(given)
        return given

    world = SimpleNamespace(direct=direct, new_group=new_group)
    collectives = SimpleNamespace(world=world, ranks=[2, 0, 1], groups=[])
    monkeypatch.setattr(processes, "ServerLink", lambda *given: given)
    server = object.__new__(processes.ProcessServer)
    server._collectives, server._own, server._all_ranks = cast("Any", collectives), 2, None
    server._weights = cast("Any", SimpleNamespace(newest=SimpleNamespace(parameters=[])))
    links: list[Any] = [link for worker in (1, 2) for link in server._links(worker)]
    ((_, peer, _),) = links
    assert peer == 2  # the server's rank
    assert made == ([("gloo", None)] if direct else [("gloo", [0, 2]), ("gloo", [1, 2])])
    assert len(collectives.groups) == len(made)


@needs_nccl
def test_a_pair_s_communicator_is_small_and_comes_first() -> None:
    options = pair_options(timedelta(seconds=7), 12)
    assert options.is_high_priority_stream
    assert options._timeout == timedelta(seconds=7)


@needs_nccl
@pytest.mark.parametrize(("num_pairs", "blocks"), [(1, 8), (2, 8), (7, 4), (12, 4), (30, 1), (60, 1)])
def test_the_pairs_of_a_worker_leave_room_for_each_other(num_pairs: int, blocks: int) -> None:
    """1-6-1 has twelve on its first worker: six peers, activations and gradients."""
    assert pair_options(timedelta(seconds=7), num_pairs).config.max_ctas == blocks


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("NCCL communicator was aborted on rank 0."),
        dist.DistBackendError("NCCL operation failed"),
        dist.DistBackendError("NCCL operation timed out"),
        RuntimeError("NCCL communicator was aborted after a previous error"),
        RuntimeError("NCCL Async Error: remote process exited or there was a network error"),
    ],
    ids=str,
)
def test_torch_s_errors_on_a_lost_peer_are_not_the_worker_s_failure(error: Exception) -> None:
    """The first of torch until 2.14, the others of 2.15, whose groups of NCCL are new."""
    with pytest.raises(PeerLostError, match=r"^lost a peer: "), peers():
        raise error


@pytest.mark.parametrize("error", ["NCCL Send failed: unhandled cuda error", "NCCL Send failed: invalid argument"])
def test_torch_s_errors_on_a_worker_s_own_mistakes_are_passed_on(error: str) -> None:
    with pytest.raises(RuntimeError, match=error), peers():
        raise RuntimeError(error)
