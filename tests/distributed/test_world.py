"""Joining the other workers: ranks, the store, the handshake, and shared facts."""

import contextlib
import errno
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch lists it nowhere

from pipebench.distributed import interfaces, launch_join, nccl, world
from pipebench.distributed.launch_join import (
    HostSlot,
    PeerLostError,
    connect,
    lost,
    meet,
    peers,
    prefix,
    read_place,
    serve,
)
from pipebench.distributed.world import World, check_devices, check_world_size
from pipebench.errors import UserError
from pipebench.run import processes as process_run
from tests.patience import PATIENCE_S
from tests.processes import Processes, reserved_port


def place(rank: int = 0, size: int = 1, port: int = 1, **changes: Any) -> HostSlot:
    values = {"local_rank": rank, "local_size": size, "address": "127.0.0.1", "agent_store": True, "attempt": None}
    return HostSlot(**{"rank": rank, "size": size, "port": port, **values, **changes})


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


GLOO = "[/src/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:1: Connection reset by peer. This is typically x"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PeerLostError("rank 0 gave up"), True),
        (dist.DistNetworkError("Failed to recv, got 0 bytes."), True),
        (dist.DistStoreError("wait timeout after 1000ms"), True),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError(GLOO), True),
        (RuntimeError("[gloo/pair.cc:1] Timed out waiting 1000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error: Duplicate GPU detected"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("the data server timed out"), False),
        (ConnectionResetError("Connection reset by peer"), False),
        (UserError("connection reset by peer (gloo)"), False),
    ],
)
def test_errors_of_lost_peers_are_distinguished_from_causes(error: Exception, expected: bool) -> None:
    assert lost(error) is expected


def test_peers_turns_a_lost_connection_into_one_sentence() -> None:
    with (
        pytest.raises(PeerLostError, match=r"^lost a peer: Read error \[127.0.0.1\]:1: Connection reset by peer$"),
        peers(),
    ):
        raise RuntimeError(GLOO)
    with pytest.raises(ValueError, match="mine"), peers():
        raise ValueError("mine")


ENVIRONMENT = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}


def test_places_are_read_from_the_environment() -> None:
    bare = read_place(ENVIRONMENT)
    assert bare == HostSlot(3, 4, 0, 1, "node-1", 29500, agent_store=False, attempt=None)
    assert not bare.one_host
    torchrun = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ours = read_place({**ENVIRONMENT, **torchrun, "PIPEBENCH_ATTEMPT": "2", "PIPEBENCH_STORE": "7"})
    assert ours == HostSlot(3, 4, 1, 4, "", 0, agent_store=True, attempt=2, connection=7)
    assert ours.one_host


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"RANK": "4"}, "RANK: got '4', allowed is a whole number from 0 to 3"),
        ({"RANK": "one"}, "RANK: got 'one', allowed is a whole number from 0 to 3"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE: got '', allowed is a whole number from 1"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE: it isn't set"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT: got '0', allowed is a whole number from 1 to 65535"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: it isn't set"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE: got '5', allowed is a whole number from 1 to 4"),
    ],
)
def test_a_faulty_environment_is_one_sentence(change: dict[str, str | None], sentence: str) -> None:
    environment = {name: value for name, value in {**ENVIRONMENT, **change}.items() if value is not None}
    with pytest.raises(UserError, match=re.escape(f"environment: {sentence}")):
        read_place(environment)


def test_the_number_of_workers_must_be_the_plan_s() -> None:
    check_world_size(4, 4, "2-1-1")
    with pytest.raises(UserError, match=r"^plan 2-1-1 needs 4 workers, got 2: .* is 4, or .* for 2$"):
        check_world_size(2, 4, "2-1-1")


def test_devices_must_be_of_one_kind() -> None:
    cpu, gpu, other = ({"host": "a", "gpu": name} for name in (None, "GPU-1", "GPU-2"))
    check_devices("cpu", [cpu, cpu])
    check_devices("auto", [cpu, cpu])
    check_devices("auto", [gpu, gpu])
    check_devices("cuda", [gpu, other])
    with pytest.raises(
        UserError, match=r"engine.device: got cuda, and 2 of 2 .* \(rank 0 on a, rank 1 on a\); allowed"
    ):
        check_devices("cuda", [cpu, cpu])
    with pytest.raises(UserError, match=r"^engine.device: got auto, and 1 of 2 .* \(rank 1 on a\); allowed"):
        check_devices("auto", [gpu, cpu])


@pytest.mark.parametrize(("rank", "attempt", "printed"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_messages_are_printed_by_one_process(
    capsys: pytest.CaptureFixture[str], rank: int, attempt: int, printed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    where: Any = place(rank, 2, attempt=attempt)
    nothing: Any = None
    own_world = world.World(where, torch.device("cpu"), False, nothing, 1.0, nothing, "so it is")
    process_run._remark(own_world, restarted=process_run._is_restart(own_world))
    assert capsys.readouterr().err == ("pipebench: so it is\n" if printed else "")


@pytest.mark.parametrize(("local_rank", "printed"), [("0", True), ("1", False)])
def test_the_first_process_of_another_host_prints_that_it_has_joined(
    local_rank: str, printed: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    where: Any = place(1, 2)
    nothing: Any = None
    process_run._remark(world.World(where, torch.device("cpu"), False, nothing, 1.0, nothing), restarted=False)
    said = "pipebench: rank 1 of 2 has joined; rank 0 prints progress and result\n"
    assert capsys.readouterr().err == (said if printed else "")


@pytest.mark.parametrize(
    ("counted", "has_folder", "is_restart"),
    [("0", False, False), ("0", True, True), ("1", True, True), ("1", False, True)],
)
def test_a_restart_is_recognised_by_torchrun_s_store_too(
    counted: str, has_folder: bool, is_restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host whose own workers didn't fail torchrun counts no restart, and the run began anew in a new folder."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", counted)
    store: Any = HashStore()
    if has_folder:
        store.set(process_run._FOLDER_KEY, "pipebench-runs/before")
    for rank in (0, 1):
        own_world = world.World(replace(place(rank, 2), attempt=None), torch.device("cpu"), False, store, 1.0, store)
        assert process_run._is_restart(own_world) == (is_restart if rank == 0 else counted == "1")


def test_gloo_uses_an_interface_that_others_reach_if_the_host_name_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's 127.0.1.1, to which every host would connect."""
    monkeypatch.setattr(interfaces, "_names_itself", lambda: True)
    monkeypatch.setattr(interfaces, "address_towards", lambda other: "127.0.0.1" if other == "10.0.0.2" else "")
    addresses = ("", "10.0.0.3", "10.0.0.2")
    everyone = [{"host": f"host{rank}", "address": address} for rank, address in enumerate(addresses)]
    found: dict[str, str] = {}
    interfaces.choose_interface(found, everyone)  # the address is the loopback's, for want of another here
    assert found == {"GLOO_SOCKET_IFNAME": interfaces.interface_of("127.0.0.1")}
    assert found["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    with pytest.raises(UserError, match=r"environment: GLOO_SOCKET_IFNAME: it isn't set, .* leads to the loopback"):
        interfaces.choose_interface({}, everyone[:2])
    interfaces.choose_interface({}, everyone[:1])  # one host stands in for several
    given = {"GLOO_SOCKET_IFNAME": "eth7"}
    interfaces.choose_interface(given, everyone)
    monkeypatch.setattr(interfaces, "_names_itself", lambda: False)
    interfaces.choose_interface({}, everyone[:2])
    assert given == {"GLOO_SOCKET_IFNAME": "eth7"}


def test_a_route_has_an_address_unless_it_is_the_loopback_s() -> None:
    assert interfaces.address_towards("127.0.0.1") == interfaces.address_towards("nowhere.invalid") == ""
    assert interfaces.interface_of("192.0.2.1") == ""


def test_a_pair_s_options_reach_nccl_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def new_group(ranks: list[int], **how: Any) -> SimpleNamespace:
        found.append((how["backend"], how["pg_options"]))
        return SimpleNamespace(_enable_collectives_timing=lambda: None)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(nccl, "pair_options", lambda limit, num_pairs: f"one of {num_pairs}")
    nothing: Any = None
    joined = world.World(place(), torch.device("cpu"), True, nothing, 1.0, nothing)
    joined.new_group("gloo", [0, 1], num_pairs=3)
    joined.new_group("nccl", [0, 1])
    joined.new_group("nccl", [0, 1], num_pairs=3)
    assert found == [("gloo", None), ("nccl", None), ("nccl", "one of 3")]


def test_a_store_listens_on_its_address_only() -> None:
    store = serve("127.0.0.1")
    socket.create_connection(("127.0.0.1", store.port), timeout=PATIENCE_S).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=PATIENCE_S)
    everywhere = serve("127.0.0.1", one_host=False)
    socket.create_connection(("127.0.0.2", everywhere.port), timeout=PATIENCE_S).close()


@pytest.mark.parametrize("local_size", [2, 1])
def test_a_port_in_use_is_one_sentence(local_size: int) -> None:
    with taken_port() as port, pytest.raises(UserError, match=rf"127.0.0.1:{port}: Address already in use; give"):
        connect(place(0, 2, port, agent_store=False, local_size=local_size), PATIENCE_S)


def test_an_address_that_is_not_this_host_s_is_one_sentence() -> None:
    # 192.0.2.0/24 is kept for documentation.
    for address, reason in (("192.0.2.1", "Cannot assign requested address"), ("no.such.host.invalid", "")):
        with pytest.raises(UserError, match=rf"^can't serve the workers' store on {address}:0: {reason}[^;]*$"):
            serve(address)


def test_a_name_that_nothing_knows_is_one_sentence_on_several_hosts_too() -> None:
    """Rank 0 listened everywhere, and then failed to reach itself, with pages of torch's."""
    with pytest.raises(UserError, match=r"^can't serve the workers' store on no.such.host.invalid:0: [^;]*$"):
        serve("no.such.host.invalid", one_host=False)


def test_a_program_that_has_the_port_and_is_no_store_is_named() -> None:
    """A worker waited for its answer for as long as that program ran."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(UserError, match=rf"^rank 1 of 2: what answers at 127.0.0.1:{port} isn't the workers' "):
            connect(place(1, 2, port), 0.3)


def test_an_address_without_a_server_is_one_sentence() -> None:
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        with pytest.raises(UserError, match=rf"rank 1 of 2: nothing answers at 127.0.0.1:{port} after 0.3 s"):
            connect(place(1, 2, port), 0.3)


def meeting(port: int, ranks: list[int], size: int, limit_s: float = PATIENCE_S, **changes: Any) -> dict[int, Any]:
    """Let these ranks meet, each in a thread with its own connection; return their outcomes."""
    outcomes: dict[int, Any] = {}

    def attend(rank: int) -> None:
        mine = place(rank, size, port, **changes)
        try:
            outcomes[rank] = meet(connect(mine, PATIENCE_S), mine, {"of": rank}, limit_s)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=attend, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return outcomes


def test_workers_meet_and_learn_of_each_other() -> None:
    store = serve("127.0.0.1")
    outcomes = meeting(store.port, [2, 0, 1], 3, attempt=4)
    assert outcomes == {rank: (prefix(4), [{"of": 0}, {"of": 1}, {"of": 2}]) for rank in range(3)}


@pytest.mark.parametrize(("first", "others"), [(3, 2), (2, 3)])
def test_different_numbers_of_workers_are_reported_at_once(first: int, others: int) -> None:
    """They were reported as missing ranks after the limit to join, or met and then waited for each other."""
    store, outcomes = serve("127.0.0.1"), list[BaseException]()

    def attend(rank: int, size: int) -> None:
        mine = place(rank, size, store.port)
        try:
            meet(connect(mine, PATIENCE_S), mine, {}, PATIENCE_S)
        except (UserError, PeerLostError) as error:
            outcomes.append(error)

    threads = [threading.Thread(target=attend, args=each) for each in ((0, first), (1, others))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    expected = (
        f"environment: WORLD_SIZE: got {first} for rank 0 and {others} for rank 1, needed is the same for all ranks"
    )
    assert [str(each) for each in outcomes] == [expected] * 2
    assert {type(each) for each in outcomes} == {UserError, PeerLostError}


def test_workers_meet_on_a_store_used_by_an_ended_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_join, "_SLACK_S", 0.3)
    store = serve("127.0.0.1")
    tokens = [meeting(store.port, [0, 1, 2], 3)[0][0] for _ in range(3)]
    # Attempts that some workers never joined, as when one dies while the others start.
    for ranks in ([1, 2], [0, 1]):
        assert all(isinstance(each, PeerLostError | UserError) for each in meeting(store.port, ranks, 3, 0.1).values())
    outcomes = meeting(store.port, [0, 1, 2], 3)
    assert len({token for token, _ in outcomes.values()}) == 1
    assert outcomes[0][0] not in tokens
    assert outcomes[1][1] == [{"of": 0}, {"of": 1}, {"of": 2}]


def test_rank_0_ignores_the_hello_of_an_ended_attempt() -> None:
    store = serve("127.0.0.1")
    store.set("pipebench/join/hello/1", "a word of the dead")
    late = threading.Timer(0.2, lambda: found.update(meeting(store.port, [1], 2)))
    found: dict[int, Any] = {}
    late.start()
    outcome = meeting(store.port, [0], 2)[0]
    late.join()
    assert outcome[1] == [{"of": 0}, {"of": 1}]
    assert found[1] == outcome


def test_a_missing_worker_is_reported_once_with_the_number_that_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    store, ticks = serve("127.0.0.1"), threading.local()

    def now_s() -> float:
        """Stand still until rank 2 has joined, then advance at every call, per thread."""
        if store.check([f"pipebench/join/{prefix(0)}/here/2"]):
            ticks.now_s = getattr(ticks, "now_s", 0.0) + 0.1
        return getattr(ticks, "now_s", 0.0)

    monkeypatch.setattr(launch_join, "time", SimpleNamespace(monotonic=now_s, sleep=time.sleep))
    outcomes = meeting(store.port, [0, 2], 4, 0.5, attempt=0)
    expected = (
        f"2 of 4 workers joined at 127.0.0.1:{store.port} within 0.5 s (engine.join_limit_s); missing: ranks 1, 3"
    )
    assert (type(outcomes[0]), str(outcomes[0])) == (UserError, expected)
    assert (type(outcomes[2]), str(outcomes[2])) == (PeerLostError, expected)


def test_a_missing_rank_0_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_join, "_SLACK_S", 0.1)
    store = serve("127.0.0.1")
    outcome = meeting(store.port, [1], 2, 0.1)[1]
    assert isinstance(outcome, PeerLostError)
    assert "rank 0 doesn't answer" in str(outcome)


def test_a_folder_that_is_read_only_on_one_host_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.2.0: the run trained to its end and kept no checkpoint, nor its weights."""
    printed: Iterator[Any] = iter([["token", ""], {"sees": True, "problem": "", "host": "host0"}])
    second = SimpleNamespace(rank=1, size=2, exchange=lambda own: [next(printed), own])
    (tmp_path / "token").touch()

    def refuse(path: Path, text: str) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr("socket.gethostname", lambda: "host1")
    with pytest.raises(UserError) as raised:
        world.shared_folder_check(cast(World, second), tmp_path)
    assert str(raised.value) == (
        f"{tmp_path}: 1 of 2 workers can't write there (rank 1 on host1: Read-only file system); "
        "all write their parts of checkpoints"
    )
    assert [each.name for each in tmp_path.iterdir()] == ["token"]


def test_a_world_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        joined = world.join("cpu", limit_s=PATIENCE_S, place=place(port=port, agent_store=False, attempt=0))
    try:
        assert (joined.rank, joined.size, joined.place.local_rank, joined.device) == (0, 1, 0, torch.device("cpu"))
        assert world.current() is joined
        assert not joined.direct
        assert joined.exchange({"a": [1.5, None, "é"]}) == [{"a": [1.5, None, "é"]}]
        assert joined.new_group("gloo") is not joined.new_group("gloo", [0])
        assert [joined.first("x"), joined.first("x"), joined.first("y")] == [True, False, True]
        assert not joined.store.check(["started/0"])
        joined.mark_started()
        assert joined.store.check(["started/0"])
        world.shared_folder_check(joined, tmp_path / "new")
        assert list((tmp_path / "new").iterdir()) == []
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match=r"file/run: can't be written: Not a directory$"):
            world.shared_folder_check(joined, tmp_path / "file" / "run")
    finally:
        joined.close()
    joined.close()
    assert not dist.is_initialized()


def gathers_beside_sums(world: World) -> list[Any]:
    """Gather in a thread while the training thread sums; the last rank gives its value only afterwards."""
    gather, found = world.gathering(), list[Any]()
    thread = threading.Thread(target=lambda: found.extend(gather(world.rank)), daemon=True)
    if world.rank < world.size - 1:
        thread.start()
    for _ in range(50):
        total = torch.ones(4)
        dist.all_reduce(total)
        assert total.tolist() == [world.size] * 4
    if world.rank == world.size - 1:
        thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    return found


def test_parts_of_a_checkpoint_are_gathered_while_training_sums(two: Processes) -> None:
    """Torch's `async_save` hangs here on training's own Gloo group, whose operations it mixes with its own."""
    assert two.run("tests.distributed.test_world:gathers_beside_sums") == [[0, 1], []]
