"""A worker's current work in words, and the report on a stall."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import MOVE, OPERATIONS, RECEIVE, ROUND, WAIT, Op, with_role
from pipebench.schedule.pipeline import Pipeline

ADMIT, EXCHANGE, BARRIER = "admit", "exchange", "barrier"
NOTHING = "nothing"  # text of work without a name

_OTHER_WORK = {
    "": "is between two pieces of work",
    ADMIT: "waits for all workers to agree where the run stops",
    EXCHANGE: "waits for what the other workers say at a drain",
    BARRIER: "waits for all workers at a barrier",
}
_WAITS = (*with_role(RECEIVE, WAIT), Op.PUSH)
_STUCK_FRACTION = 0.25  # of the limit; a worker that has computed for less may only be slow


@dataclass(frozen=True)
class Activity:
    """A worker's current work."""

    text: str  # the instruction's text form, or the name of other work
    description: str  # the same in words, to end a sentence about the worker
    waits: bool  # for another worker
    since_s: float  # duration so far, when reported


def describe(
    pipeline: Pipeline, worker: int, instruction: Instruction | None, work: str, num_minibatches: int, since_s: float
) -> Activity:
    """Return a worker's current work in words.

    Args:
        pipeline: the pipeline.
        worker: its index.
        instruction: the current one, None for other work.
        work: the name of other work, or of what an instruction that isn't training belongs to.
        num_minibatches: of the segment.
        since_s: seconds for which the worker has been at it.
    """
    if instruction is None:
        waits = work in (ADMIT, EXCHANGE, BARRIER)
        return Activity(work or NOTHING, _OTHER_WORK.get(work, f"is at {work!r}"), waits, since_s)
    row = OPERATIONS[instruction.op]
    if row.counts != ROUND:
        unit = _unit(pipeline, instruction.number, whole=bool(work) or row.counts == MOVE)
        peer = pipeline.worker(instruction.peer, instruction.number)
        description = row.description.format(unit=unit, peer=peer)
    else:
        group = instruction.stage if instruction.peer < 0 else instruction.peer
        others = [str(peer) for peer in pipeline.members(group) if peer != worker]
        description = row.description.format(
            round=_round(pipeline, instruction.stage, instruction.number, num_minibatches),
            others=f"worker{'s' if len(others) > 1 else ''} {', '.join(others)}",
        )
    return Activity(
        str(instruction), description + (f" in {work!r}" if work else ""), instruction.op in _WAITS, since_s
    )


def _unit(pipeline: Pipeline, unit: int, *, whole: bool) -> str:
    minibatch, microbatch = (unit, 0) if whole else pipeline.minibatch(unit)
    return f"{'' if whole or pipeline.microbatches == 1 else f'microbatch {microbatch} of '}minibatch {minibatch}"


def _round(pipeline: Pipeline, stage: int, round_index: int, num_minibatches: int) -> str:
    minibatches = pipeline.round_minibatches(stage, round_index, num_minibatches)
    if len(minibatches) > 1:
        return f"round {round_index} (minibatches {minibatches[0]} to {minibatches[-1]})"
    return f"round {round_index}" + (f" (minibatch {minibatches[0]})" if minibatches else "")


def stall_report(
    pipeline: Pipeline,
    activities: Mapping[int, Activity],
    silent_s: Mapping[int, float],
    stall_limit_s: float,
    *,
    segment: int,
    notes: Sequence[str] = (),
) -> str:
    """Return the report on a stall: the worker that caused it, then a line per worker.

    The cause is the worker that has been silent for longest. If none is silent, it is the one that has been at its own
    work for longest; if all wait for each other, the one that has waited for longest.

    Args:
        pipeline: the pipeline.
        activities: the last known work of each worker that ever reported, by worker.
        silent_s: seconds since the last report of workers whose report is overdue, by worker.
        stall_limit_s: the limit, seconds.
        segment: index of the segment in which minibatches are numbered.
        notes: lines that follow the first one.
    """
    names = pipeline.worker_names
    lines = [_first_line(names, activities, silent_s, stall_limit_s, segment), *notes]
    for worker, name in enumerate(names):
        said = activities.get(worker)
        silence = f"not heard of for {silent_s[worker]:.0f} s" if worker in silent_s else ""
        if said is None:
            lines.append(f"  worker {worker} ({name}): {silence or 'not heard of yet'}")
        else:
            last = f"; {silence}" if silence else ""
            lines.append(f"  worker {worker} ({name}): {said.text} for {said.since_s:.1f} s: {said.description}{last}")
    return "\n".join(lines)


def _first_line(
    names: Sequence[str],
    activities: Mapping[int, Activity],
    silent_s: Mapping[int, float],
    stall_limit_s: float,
    segment: int,
) -> str:
    limit = f"the limit, engine.stall_limit_s, is {stall_limit_s:g} s"
    where = f"minibatches are those of segment {segment}, from 0"
    if silent_s:
        worker = max(silent_s, key=lambda worker: (silent_s[worker], -worker))
        last = (
            f"; last it was at {activities[worker].text}: {activities[worker].description}"
            if worker in activities
            else ""
        )
        silence = f"worker {worker} ({names[worker]}) has not been heard of for {silent_s[worker]:.0f} s"
        return f"{silence}{last}; {where}; {limit}"
    stuck = [w for w, d in activities.items() if not d.waits and d.since_s >= _STUCK_FRACTION * stall_limit_s]
    worker = max(stuck or activities, key=lambda worker: (activities[worker].since_s, -worker))
    activity = activities[worker]
    since = f"has been at {activity.text} for {activity.since_s:.1f} s"
    return f"worker {worker} ({names[worker]}) {since}: it {activity.description}; {where}; {limit}"
