"""Heartbeats between hosts, and the report when they end; time is simulated, except where threads run."""

import json
import threading
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch lists it nowhere

from pipebench.distributed.heartbeat import Heartbeat, SilenceMonitor
from pipebench.distributed.launch_failure import of_exception
from pipebench.distributed.launch_join import HostLostError, HostSlot, PeerLostError
from tests.patience import PATIENCE_S, wait_for

STORE = "the store at 10.0.0.1:29500, by which all hosts find each other, has not answered for 30 s"


def place(rank: int, size: int = 3) -> HostSlot:
    return HostSlot(rank, size, 0, 1, "10.0.0.1", 29500, agent_store=True, attempt=None)


def beat(count: int | str, rank: int) -> bytes:
    return json.dumps([count, f"node{rank}"]).encode()


@pytest.fixture
def monitor() -> SilenceMonitor:
    return SilenceMonitor(place(0), 30.0)


def first_report(
    monitor: SilenceMonitor, seconds: int, *, silent: tuple[int, ...] = (), store: bool = True, start: int = 0
) -> str:
    """Listen for `seconds`, half a second at a time; return the first report."""
    heard: dict[int, bytes] = {}

    def sentences() -> Iterator[str]:
        for tick in range(2 * seconds):
            now = start + tick // 2 if store else start
            heard.update({rank: beat(0 if rank in silent else now, rank) for rank in (1, 2)})
            yield monitor.listen(0.5, now, heard)

    return next((sentence for sentence in sentences() if sentence), "")


def test_a_worker_with_heartbeats_is_not_reported(monitor: SilenceMonitor) -> None:
    assert first_report(monitor, 3600) == ""


def test_a_silent_worker_is_reported_with_its_host_after_the_limit(monitor: SilenceMonitor) -> None:
    assert first_report(monitor, 30, silent=(2,)) == ""
    assert first_report(monitor, 1, silent=(2,), start=30) == (
        "rank 2 on node2 has not been heard of for 30 s (engine.silence_limit_s): "
        "the host, its network or the process hangs or is gone"
    )


def test_the_store_is_reported_at_the_limit(monitor: SilenceMonitor) -> None:
    heard = {rank: beat(1, rank) for rank in (1, 2)}
    assert monitor.listen(0.5, 1, heard) == ""
    assert monitor.listen(29.5, 1, heard) == ""
    assert monitor.listen(0.5, 1, heard).startswith(STORE)


def test_several_silent_workers_are_reported_together(monitor: SilenceMonitor) -> None:
    assert first_report(monitor, 40, silent=(1, 2)).startswith(
        "rank 1 on node1, rank 2 on node2 have not been heard of for 30 s"
    )


def test_a_worker_without_any_heartbeat_is_reported_without_its_host(monitor: SilenceMonitor) -> None:
    sentences = [monitor.listen(0.5, tick, {1: beat(tick, 1)}) for tick in range(70)]
    assert next(filter(None, sentences)).startswith("rank 2 on a host never heard of has not been heard of for 30 s")


def test_a_silent_store_is_reported_instead_of_the_workers(monitor: SilenceMonitor) -> None:
    assert first_report(monitor, 5) == ""
    assert first_report(monitor, 40, store=False, start=4).startswith(STORE)
    assert monitor.store_s >= 30


def test_a_break_below_the_limit_is_not_reported(monitor: SilenceMonitor) -> None:
    for start in (0, 100, 200):
        assert first_report(monitor, 10, start=start) == ""
        assert first_report(monitor, 29, store=False, start=start + 9) == ""


def test_a_worker_that_is_done_is_not_reported(monitor: SilenceMonitor) -> None:
    heard = {1: beat("done", 1), 2: beat("done", 2)}
    assert not any(monitor.listen(0.5, tick, heard) for tick in range(200))


def test_workers_hear_each_other_and_a_lost_one_is_reported_to_the_other() -> None:
    store, heard, over = HashStore(), list[tuple[str, bool]](), threading.Event()

    def on_silence(sentence: str, store_answers: bool) -> None:
        heard.append((sentence, store_answers))
        over.set()

    def nobody(sentence: str, store_answers: bool) -> None:
        raise AssertionError(sentence)

    with Heartbeat(store, place(0, 2), limit_s=2.0, on_silence=on_silence, beat_s=0.05) as left:
        with Heartbeat(store, place(1, 2), limit_s=PATIENCE_S, on_silence=nobody, beat_s=0.05) as other:
            while len(left._heard) < 2:
                assert not over.wait(0.01)
        assert json.loads(store.get("heartbeat/1"))[0] == "done"
        assert not over.wait(0.01)
        assert other._closed.is_set()
        store.set("heartbeat/1", beat(1, 1).decode())  # as if it had been killed instead
        assert over.wait(PATIENCE_S)
    assert [(sentence.partition(" has")[0], answers) for sentence, answers in heard] == [("rank 1 on node1", True)]


_BEAT_S = 0.01


def heartbeat(store: HashStore, rank: int) -> Heartbeat:
    return Heartbeat(store, place(rank, 2), limit_s=PATIENCE_S, on_silence=pytest.fail, beat_s=_BEAT_S)


def test_a_lost_connection_is_blamed_on_the_worker_without_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set("heartbeat/1", beat(7, 1).decode())
    with pytest.raises(HostLostError, match=r"^rank 1 on node1 is gone: lost a peer: closed$") as caught:
        lose(monkeypatch, store)
    assert of_exception(caught.value, 0).kind == "silent"


def test_a_lost_connection_stays_the_error_if_all_have_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    with heartbeat(store, 1) as other, pytest.raises(PeerLostError, match=r"^lost a peer: closed$") as caught:
        lose(monkeypatch, store, other)
    assert of_exception(caught.value, 0).kind == "lost"


def lose(monkeypatch: pytest.MonkeyPatch, store: HashStore, *others: Heartbeat) -> None:
    """Raise the error of a lost peer after its first heartbeat; without `others`, right after its last.

    Waits for heartbeats count them, since they come late on a busy machine.
    """
    with heartbeat(store, 0) as mine:
        wait_for(lambda: len(mine._heard) == 2)
        if not others:
            store.set("heartbeat/1", beat(8, 1).decode())
        wait = mine._closed.wait

        def wait_for_beats(seconds: float) -> bool:
            if threading.current_thread() is not threading.main_thread():
                return wait(seconds)
            for each in (*others, mine):  # what the others say comes first, so that it is heard
                until = each._num_answers + round(seconds / _BEAT_S)
                wait_for(lambda: each._num_answers >= until)  # noqa: B023
            return mine._closed.is_set()

        monkeypatch.setattr(mine._closed, "wait", wait_for_beats)
        raise PeerLostError("lost a peer: closed")
