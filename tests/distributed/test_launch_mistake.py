"""Who reports a mistake that is found before workers have joined."""

import threading
from contextlib import closing
from dataclasses import replace

import pytest

from pipebench.distributed.launch_join import HostSlot, connect, serve
from pipebench.distributed.launch_mistake import found_none, is_rank_0s, tell_the_others
from tests.patience import PATIENCE_S
from tests.processes import reserved_port

ALL = ("the recipe is wrong",) * 3


def places(port: int) -> list[HostSlot]:
    first = HostSlot(0, 3, 0, 3, "127.0.0.1", port, agent_store=False, attempt=None)
    return [replace(first, rank=rank, local_rank=rank) for rank in range(3)]


@pytest.mark.parametrize(
    ("found", "silent"),
    [
        (ALL, [True, True]),
        ((ALL[0], "data are missing", ALL[0]), [False, True]),
        (("data are missing", *ALL[1:]), [False] * 2),
    ],
)
def test_what_rank_0_has_found_it_reports_alone(found: tuple[str, ...], silent: list[bool]) -> None:
    with closing(reserved_port()) as reserved:
        first, *others = places(reserved.getsockname()[1])
        answers: dict[int, bool] = {}

        def ask(place: HostSlot) -> None:
            answers[place.rank] = is_rank_0s(found[place.rank], place, PATIENCE_S)

        asking = [threading.Thread(target=ask, args=[each]) for each in others]
        for each in asking:
            each.start()
        tell_the_others(found[0], first, PATIENCE_S)  # it waits for the others
        for each in asking:
            each.join()
    assert [answers[rank] for rank in (1, 2)] == silent


def test_a_mistake_of_one_alone_is_reported_while_rank_0_joins() -> None:
    store = serve("127.0.0.1")
    first, second, _ = places(store.port)
    found_none(store, first)
    assert not is_rank_0s("data are missing", second, PATIENCE_S)


def test_rank_0_waits_for_none_that_joins() -> None:
    with closing(reserved_port()) as reserved:
        first, *others = places(reserved.getsockname()[1])
        telling = threading.Thread(target=tell_the_others, args=("so", first, PATIENCE_S))
        telling.start()
        for each in others:
            found_none(connect(each, PATIENCE_S), each)
        telling.join()


def test_a_mistake_is_reported_where_rank_0_does_not_answer() -> None:
    with closing(reserved_port()) as reserved:
        assert not is_rank_0s("so", places(reserved.getsockname()[1])[1], 0.1)
    store = serve("127.0.0.1")
    first, second, _ = places(store.port)
    assert not is_rank_0s("so", second, 0.1)
    assert not is_rank_0s("so", first)
    assert not is_rank_0s("so", replace(second, connection=9))
