"""Lists of sharded replicas: gathers one pass ahead, frees, scatters one backward later; and short rounds."""

from itertools import islice

import pytest

from pipebench.schedule.instructions import COPIES
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.schedule.programs import programs
from tests.instruction_text import parse, render


def pipeline(shard: str, replicas: int = 2, **columns: object) -> Pipeline:
    shape = {
        "order": "sequential",
        "flushes": True,
        "depth": 1,
        "chunks": 3,
        "weights": "one",
        "shard": shard,
        **columns,
    }
    return Pipeline((replicas,) * 3, chain(3), **shape)  # type: ignore[arg-type]


LISTS = {
    "optimizer": "0L0 0F0@0 1F0@0 2F0@0 2B0+0@0 1B0+0@0 0B0+0@0 2RS0 1RS0 0RS0 0U0@1 1U0@1 2U0@1 0AG0 1AG0 2AG0 "
    "0WG0 1WG0 2WG0",
    "gradients": "0L0 0F0@0 1F0@0 2F0@0 2B0+0@0 1B0+0@0 2RS0 0B0+0@0 1RS0 0RS0 0U0@1 1U0@1 2U0@1 0AG0 1AG0 2AG0 "
    "0WG0 1WG0 2WG0",
    "parameters": "0AG0 1AG0 0WG0 0L0 0F0@0 0FW0 2AG0 1WG0 1F0@0 1FW0 2WG0 2F0@0 2FW0 2AG0 1AG0 2WG0 2B0+0@0 2FW0 0AG0 "
    "1WG0 1B0+0@0 1FW0 2RS0 0WG0 0B0+0@0 0FW0 1RS0 0RS0 0U0@1 1U0@1 2U0@1",
}


@pytest.mark.parametrize("shard", LISTS)
def test_the_list_of_a_round(shard: str) -> None:
    found = [*programs(pipeline(shard), 2)[0]]
    assert render(found) == LISTS[shard]
    assert [parse(text) for text in LISTS[shard].split()] == found


def test_parameters_that_stay_are_gathered_once_and_freed_after_the_backward() -> None:
    found = render(programs(pipeline("parameters", reshards=False), 2)[0])
    assert found.startswith(
        "0AG0 1AG0 0WG0 0L0 0F0@0 2AG0 1WG0 1F0@0 2WG0 2F0@0 2B0+0@0 2FW0 1B0+0@0 1FW0 2RS0 0B0+0@0"
    )


@pytest.mark.parametrize("shard", LISTS)
@pytest.mark.parametrize("reshards", [True, False])
def test_copies_to_the_host_and_back_gather_no_weights(shard: str, reshards: bool) -> None:
    kept, swapped = (programs(pipeline(shard, reshards=reshards, swaps=swaps), 4)[0] for swaps in ((), (0, 2)))
    found = [*swapped]
    assert sum(it.op in COPIES for it in found) == 8
    assert [it for it in found if it.op not in COPIES] == [*kept]


@pytest.mark.parametrize("shard", LISTS)
@pytest.mark.parametrize("reshards", [True, False])
def test_all_replicas_start_the_same_collectives_in_the_same_order(shard: str, reshards: bool) -> None:
    """Whatever the number of minibatches; lists of fewer periods are the beginnings of longer ones."""
    for replicas in (2, 3):
        p = pipeline(shard, replicas, reshards=reshards, accumulate=2)
        for count in range(1, 14):
            together = [
                [(it.op, it.stage) for it in program if it.op in (Op.GATHER, Op.FREE, Op.WAIT_SCATTER)]
                for program in programs(p, count)
            ]
            assert all(each == together[0] for each in together) or shard == "optimizer"
            assert {op for own in together for op, _ in own} >= {Op.GATHER, Op.WAIT_SCATTER}
    whole, part = (programs(pipeline(shard), count)[1] for count in (8, 4))
    begun = [*part]
    last = max(index for index, it in enumerate(begun) if it.op is Op.UPDATE)
    assert [*islice(whole, last + 1)] == begun[: last + 1]
