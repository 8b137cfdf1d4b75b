"""The orders of work: in which order a worker runs the forwards and backwards it has. One file per order."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pipebench.schedule import all_forwards, from_file, interleaved, one_f_one_b, zero_bubble
from pipebench.schedule.csv_form import is_csv, read_csv
from pipebench.schedule.passes import Pass
from pipebench.schedule.pipeline import Pipeline

ALL_FORWARDS, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = "all-forwards", "1f1b", "interleaved", "zero-bubble"


@dataclass(frozen=True)
class Order:
    """An order of work.

    Attributes:
        summary: one line for people.
        passes: from (pipeline, worker, units) to the worker's passes, lazily: the units are those between two flushes
            (without a flush, between two drains), of all replicas, ascending.
        needs_flush: whether it has an end only where the pipeline is emptied at every update.
        takes_chunks: whether a worker may have several stages.
        splits: whether it tells the two parts of a backward apart, and lets the weight part wait.
        keeps_all: whether every unit of an update has run forward before the first runs backward.
    """

    summary: str
    passes: Callable[[Pipeline, int, Sequence[int]], Iterable[Pass]]
    needs_flush: bool = False
    takes_chunks: bool = False
    splits: bool = False
    keeps_all: bool = False


ORDERS: Final[dict[str, Order]] = {
    ALL_FORWARDS: Order(
        "all forwards, then all backwards, in reverse", all_forwards.passes, True, True, keeps_all=True
    ),
    ONE_F_ONE_B: Order("warm up, then one backward and one forward in turn", one_f_one_b.passes),
    INTERLEAVED: Order("1F1B over several stages per worker", interleaved.passes, True, True),
    ZERO_BUBBLE: Order("1F1B whose weight gradients wait for idle time", zero_bubble.passes, True, splits=True),
}


def order_of(name: str) -> Order:
    """Return the order of a name, or of a file.

    Raises:
        CsvError: the file can't be read, or isn't a schedule.
    """
    if not is_csv(name):
        return ORDERS[name]
    schedule = read_csv(name)
    return Order(name, partial(from_file.passes, schedule), True, True, schedule.splits)
