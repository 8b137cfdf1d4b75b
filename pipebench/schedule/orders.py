"""Orders of work: the sequence of a worker's forwards and backwards. Each is a generator and a row of `ORDERS`.

A generator yields a worker's passes between two flushes, or two drains in a pipeline without flushes. Its arguments are
the pipeline, the worker, and the units of all replicas, ascending.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pipebench.errors import UserError
from pipebench.schedule.csv_form import CsvSchedule, is_csv, read_csv, write_csv
from pipebench.schedule.operations import Op
from pipebench.schedule.passes import Pass, forwards, numbered
from pipebench.schedule.pipeline import SPLIT, Pipeline
from pipebench.schedule.placement import DUALPIPE, DUALPIPEV, ZBV

ALL_FORWARDS, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = "all-forwards", "1f1b", "interleaved", "zero-bubble"
SEQUENTIAL = "sequential"
_Step = tuple[Op, int]  # forward or backward, unit


def sequential(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """Every unit through all of a worker's stages, one at a time: data parallelism in groups of layers."""
    stages = p.stages_of(worker)
    for unit in p.own_units(stages[0], worker, units):
        for stage in stages:
            yield Pass(stage, Op.FORWARD, unit)
        for stage in reversed(stages):
            yield Pass(stage, Op.BACKWARD, unit)


def all_forwards(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """GPipe's order: all forwards, then all backwards in reverse. Paper: GPipe (2019), figure 2c."""
    first = list(forwards(p, worker, units))
    yield from first
    for stage, _, unit in reversed(first):
        yield Pass(stage, Op.BACKWARD, unit)


def one_f_one_b(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """1F1B: d_s forwards, then a backward and a forward in turn, then the remaining backwards.

    Paper: PipeDream (SOSP'19) section 3.2, 1F1B-RR. An epoch's last group of units between two flushes may be short,
    see `_short_group_orders`.
    """
    (stage,) = p.stages_of(worker)
    if p.flushes and len(units) < p.period * p.microbatches:
        for op, unit in _short_group_orders(p.replicas, p.warmups, units)[worker]:
            yield Pass(stage, op, unit)
        return
    own, warmup = p.own_units(stage, worker, units), p.warmups[stage]
    for unit in own[:warmup]:
        yield Pass(stage, Op.FORWARD, unit)
    for index, unit in enumerate(own):
        yield Pass(stage, Op.BACKWARD, unit)
        if index + warmup < len(own):
            yield Pass(stage, Op.FORWARD, own[index + warmup])


def _short_group_orders(replicas: Sequence[int], depths: Sequence[int], units: Sequence[int]) -> list[list[_Step]]:
    """Return every worker's passes in a group of so few units that replicas have unequal shares.

    Then warm-ups of a fixed depth may deadlock: a replica may wait for more forwards than it has units. So the order is
    read off a simulated execution in which every pass takes one time step. In each step a worker runs its next backward
    if it can, else its next forward, unless d_s units (`depths`) are in flight on it. Lists read off a finished
    execution can't deadlock, and this one always finishes, because the oldest unfinished unit is first in line at every
    worker. Unit u belongs to replica u mod r.
    """
    last = len(replicas) - 1
    places = [(stage, replica) for stage, r in enumerate(replicas) for replica in range(r)]  # per worker
    own = [[unit for unit in units if unit % replicas[stage] == replica] for stage, replica in places]
    orders: list[list[_Step]] = [[] for _ in places]
    forwarded = [0] * len(places)
    returned = [0] * len(places)
    reached = dict.fromkeys(units, -1)  # the last stage a unit has run forward at
    back_at = dict.fromkeys(units, last + 1)  # the first stage it has run backward at
    while any(count < len(mine) for count, mine in zip(returned, own, strict=True)):
        chosen: list[tuple[int, _Step]] = []
        for worker, (stage, _) in enumerate(places):
            mine, started, ended = own[worker], forwarded[worker], returned[worker]
            if ended < started and back_at[mine[ended]] == stage + 1 and reached[mine[ended]] == last:
                chosen.append((worker, (Op.BACKWARD, mine[ended])))
            elif started < len(mine) and started - ended < depths[stage] and reached[mine[started]] == stage - 1:
                chosen.append((worker, (Op.FORWARD, mine[started])))
        for worker, (op, unit) in chosen:
            orders[worker].append((op, unit))
            if op is Op.FORWARD:
                forwarded[worker] += 1
                reached[unit] += 1
            else:
                returned[worker] += 1
                back_at[unit] -= 1
    return orders


def interleaved(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """Interleaved 1F1B: every worker has several stages, which shortens filling and draining.

    Paper: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (SC'21) section 2.2. With P
    positions and v stages per worker, a worker at position p runs 2 (P - p - 1) + (v - 1) P forwards, then one forward
    and one backward in turn; units pass a stage in groups of P. The bubble is 1/v of 1F1B's.

    Differs: the paper requires P to divide the number of units. Here the last group is padded to P units, and the
    padding's passes are left out of the list, which can't deadlock.
    """
    stages, positions, chunks = p.stages_of(worker), p.num_positions, p.chunks
    own = p.own_units(stages[0], worker, units)
    total = -(-len(own) // positions) * positions * chunks

    def step(op: Op, index: int) -> Iterator[Pass]:
        group, within = divmod(index, positions * chunks)
        chunk, place = divmod(within, positions)
        number = group * positions + place
        if index < total and number < len(own):
            yield Pass(stages[chunk if op is Op.FORWARD else chunks - 1 - chunk], op, own[number])

    warmup = min(2 * (positions - stages[0] - 1) + (chunks - 1) * positions, total)
    for index in range(warmup):
        yield from step(Op.FORWARD, index)
    for index in range(total):
        yield from step(Op.FORWARD, index + warmup)
        yield from step(Op.BACKWARD, index)


def zero_bubble(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """ZB-H1: 1F1B with split backwards, whose weight parts fill time that would be idle.

    Paper: Qi et al., Zero Bubble Pipeline Parallelism (ICLR'24) section 2.1 and figure 2. Forwards and input parts are
    in 1F1B's order. A stage of depth d_s delays its weight parts by depth - d_s units, so that no stage has more units
    in flight than the first stage under 1F1B. With p equal stages the bubble is (p - 1) (T_F + T_B - T_W).
    """
    waiting: deque[Pass] = deque()  # weight parts
    for stage, op, unit in one_f_one_b(p, worker, units):
        if op is Op.FORWARD:
            yield Pass(stage, op, unit)
            continue
        yield Pass(stage, Op.BACKWARD_INPUT, unit)
        waiting.append(Pass(stage, Op.BACKWARD_WEIGHT, unit))
        if len(waiting) > p.depth - p.warmups[stage]:
            yield waiting.popleft()
    yield from waiting


def zbv(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """ZB-V: two stages per worker, in a V, and split backwards; no worker is idle if all passes take equally long.

    Paper: Qi et al., Zero Bubble Pipeline Parallelism (ICLR'24) section 6. Worker w of P holds stages w and 2P - 1 - w,
    so that the last stage's backward begins on the worker of the first stage. No worker has more than 2P units in
    flight over both stages, which is 1F1B's memory. The order is that of torch.distributed.pipelining's
    ScheduleZBVZeroBubble.
    """
    down, up = p.stages_of(worker)
    own = p.own_units(down, worker, units)
    after = p.num_positions - 1 - down  # positions behind this one
    # Units beyond those that fill the pipeline. If there are fewer, `numbered` leaves the last ones out.
    steady = max(0, len(own) - 2 * p.num_positions + 1)
    forward, backward, inputs, weights = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
    steps = [
        *[(down, forward)] * (2 * after + 1),
        *[(up, forward), (down, forward)] * down,
        *[(up, forward), (up, backward)] * (after + 1),
        *[(down, forward), (down, backward), (up, forward), (up, backward)] * (steady + down),
        *[(down, backward), (up, forward), (up, backward)] * after,
        *[(down, inputs), (up, inputs)] * down,
        *[(down, inputs), (down, weights)] * (after + 1),
        *[(up, weights)] * down,
        *[(down, weights)] * down,
    ]
    yield from numbered(steps, {down: own, up: own})


def dualpipev(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """DualPipeV: two stages per worker, in a V; in the steady state every forward is beside the other stage's backward.

    Paper: DeepSeek-V3 (2024) section 3.2.1, DualPipe, cut in half (Qi et al., "DualPipe could be better without the
    Dual"). Worker w of P holds stages w and 2P - 1 - w. The order is that of torch.distributed.pipelining's
    ScheduleDualPipeV.

    Differs: a forward and a backward that the paper overlaps run one after the other. Fewer than 2P units are allowed.
    """
    down, up = p.stages_of(worker)
    forward, backward, inputs, weights = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
    own = {stage: p.own_units(stage, worker, units) for stage in (down, up)}
    after = p.num_positions - 1 - down  # positions behind this one
    # Units beyond those that fill the pipeline. If there are fewer, `numbered` leaves the last ones out.
    steady = max(0, max(map(len, own.values())) - 2 * p.num_positions)
    # The stages of the last backwards: the first ones run whole; of the others the weight parts fill the end.
    ending = [up, down] * (down + 1) + [down] * after
    whole, waiting = ending[: down + 1], ending[down + 1 :]
    steps = [
        *[(down, forward)] * (2 * after),
        *[(down, forward), (up, forward)] * (down + 1),
        *[(up, inputs), (up, weights), (up, forward)] * after,
        *[(down, forward), (up, backward), (up, forward), (down, backward)] * (steady + down + 1),
        *[(up, backward), (up, forward), (down, backward)] * after,
        *[(stage, backward) for stage in whole],
        *[(stage, inputs) for stage in waiting[: down + 1]],
        *[step for stage in waiting[:after] for step in ((stage, weights), (down, inputs))],
        *[(stage, weights) for stage in waiting[after:]],
    ]
    yield from numbered(steps, own)


def from_file(schedule: CsvSchedule, p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """The order of a file; leaving out its microbatches beyond the worker's last unit can't deadlock."""
    first, *_ = p.stages_of(worker)
    own = p.own_units(first, worker, units)
    for _, stage, op, microbatch in schedule.rows[schedule.placement[first]]:
        if microbatch < len(own):
            yield Pass(stage, op, own[microbatch])


@dataclass(frozen=True)
class Order:
    """An order of work."""

    summary: str  # one line, for lists
    passes: Callable[[Pipeline, int, Sequence[int]], Iterable[Pass]]  # the generator
    needs_flush: bool = False  # whether it requires a flush at every update
    chunks: int | None = 1  # stages per worker; None: any number
    splits: bool = False  # whether backwards are split, and weight parts may wait
    keeps_all: bool = False  # whether every unit of an update runs forward before the first runs backward


ORDERS: Final[dict[str, Order]] = {
    ALL_FORWARDS: Order("all forwards, then all backwards, in reverse", all_forwards, True, None, keeps_all=True),
    ONE_F_ONE_B: Order("warm up, then one backward and one forward in turn", one_f_one_b),
    SEQUENTIAL: Order("one unit at a time through all of a worker's stages", sequential, True, None),
    INTERLEAVED: Order("1F1B over several stages per worker", interleaved, True, None),
    ZERO_BUBBLE: Order("1F1B whose weight gradients wait for idle time", zero_bubble, True, splits=True),
    ZBV: Order("two stages per worker in a V; weight gradients fill all idle time", zbv, True, 2, splits=True),
    DUALPIPE: Order("DualPipeV in two directions, between replicas", dualpipev, True, 2, splits=True),
    DUALPIPEV: Order("two stages per worker in a V; forwards beside backwards", dualpipev, True, 2, splits=True),
}


def order_of(name: str) -> Order:
    """Return the order of a name or of a file's path; raises a CsvError if the file isn't a schedule."""
    if not is_csv(name):
        return ORDERS[name]
    schedule = read_csv(name)
    return Order(name, partial(from_file, schedule), True, None, schedule.splits)


def as_csv(p: Pipeline) -> str:
    """Return the passes between two flushes in torch's CSV form: a row per position, of its first replica.

    Raises:
        UserError: the form can't express the schedule; says why.
    """
    if not p.flushes:
        raise UserError("torch's CSV form holds what is between two flushes, and this schedule has none")
    if len({*p.replicas}) > 1:
        plan = "-".join(map(str, p.replicas))
        raise UserError(f"torch's CSV form has a row per stage or more, replicated alike, and this plan is {plan}")
    if any(own != tuple(sorted(own)) for own in p.places):
        raise UserError("torch's CSV form has one direction, and replicas of this schedule run in two")
    replicas, units, passes = p.replicas[0], range(p.period * p.microbatches), order_of(p.order).passes
    rows: list[list[tuple[int, Op, int]]] = []
    for worker in range(0, p.num_workers, replicas):
        rows.append([])
        for stage, op, unit in passes(p, worker, units):
            is_split = op is Op.BACKWARD and p.backward == SPLIT
            ops = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if is_split else (op,)
            rows[-1] += [(stage, each, unit // replicas) for each in ops]
    return write_csv(rows)
