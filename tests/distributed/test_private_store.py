"""The launcher's store behaves like torch's, for processes that have inherited a connection."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import Pipe
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # torch lists them nowhere

from pipebench.distributed.launch_join import lost, serve
from pipebench.distributed.private_store import PrivateStore, StoreServer
from tests.patience import PATIENCE_S


@pytest.fixture
def ours() -> Iterator[PrivateStore]:
    store = PrivateStore(StoreServer().connect())
    yield store
    store.close()


@pytest.fixture
def theirs() -> TCPStore:
    return serve("127.0.0.1")


@pytest.mark.parametrize("prefix", ["", "attempt-0"])
def test_the_store_answers_as_torch_s_does(prefix: str, ours: PrivateStore, theirs: TCPStore) -> None:
    def answers_of(given: Store) -> list[object]:
        store: Any = PrefixStore(prefix, given) if prefix else given  # torch's types don't list all that they do
        other = store.clone()
        store.set("text", "one")
        answers = [other.get("text"), store.add("number", 3), other.add("number", -1), store.get("number")]
        answers += [store.compare_set("new", "", "first"), other.compare_set("new", "", "second"), store.get("new")]
        answers += [store.compare_set("new", "first", "third"), store.compare_set("none", "some", "other")]
        store.set("a", "1")
        other.set("b", "2")
        other.wait(["a", "b"])
        answers += [
            other.multi_get(["a", "b"]),
            store.check(["a", "b"]),
            store.check(["a", "c"]),
            store.check(["none"]),
        ]
        return answers

    assert answers_of(ours) == answers_of(theirs)


def test_a_wait_for_a_value_ends_at_the_timeout(ours: PrivateStore) -> None:
    ours.set_timeout(timedelta(seconds=PATIENCE_S))
    other = ours.clone()
    setting = threading.Timer(0.05, other.set, ("late", b"here"))
    setting.start()
    assert ours.get("late") == b"here"
    ours.set_timeout(timedelta(seconds=0.05))
    for store in (ours, PrefixStore("a", ours)):
        with pytest.raises(RuntimeError, match=r"timed out after 0.05 s waiting for (a/)?never") as raised:
            store.get("never")
        assert lost(raised.value)


def test_a_lost_launcher_raises_torch_s_error() -> None:
    ours, theirs = Pipe()
    store = PrivateStore(ours)
    theirs.close()
    with pytest.raises(RuntimeError, match="the launcher's store has closed the connection") as raised:
        store.check(["key"])
    assert lost(raised.value)
    store.close()
