"""The outcome of a comparison in sentences: which row is first, by how much, and what limits every row."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from pipebench.formats import listed, num_epochs, number, ratio, seconds
from pipebench.schedule.modes import MODES
from pipebench.schedule.syncs import SYNCS
from pipebench.show.comparison import ComparisonRow, RunGroup, groups, has_seeds, headings, markdown_table, notes, rows
from pipebench.show.sweep_lines import NONE, Sweep, sweep_of
from pipebench.train.result import RunResult

_MOST_NAMED = 6  # rows that a sentence names
_SEEN = 0.01  # relative difference below which times are equal, and share below which a part isn't mentioned
_SEED = "train.seed"
_MOSTLY = " with most seeds"  # added if some seeds missed the target
_WORKER_PARTS = ("compute_s", "waiting_s", "sending_s", "swapping_s", "other_s")


@dataclass(frozen=True)
class Limit:
    """How the slowest stage spends the time of a minibatch, in seconds."""

    minibatch_s: float  # seconds per minibatch, all workers together
    stage: int | None  # the stage that computes longest, of several
    compute_s: float  # seconds in which it computes
    transfer_s: float  # seconds in which it waits for bytes; an upper bound, as only the mean over workers is known
    wait_s: float  # the rest, in which it waits for other stages or for its data


def limit_of(run: RunResult) -> Limit | None:
    """Return what limits a run; None if its stages' times are unknown or changed while it ran."""
    rate = run.metrics.get("throughput_samples_per_s")
    size = run.recipe.get("train.minibatch_size", "")
    if not rate or not size.isdecimal():
        return None
    minibatch_s = int(size) / rate
    busy_s = _measured_s(run, minibatch_s) if run.workers else planned_s(run, int(size))
    stage = max(range(len(busy_s)), key=busy_s.__getitem__, default=0)
    if not busy_s or not 0 < busy_s[stage] <= minibatch_s * (1 + _SEEN):
        return None  # a stage that computes longer than a minibatch takes: the times are of other stages
    idle_s = max(0.0, minibatch_s - busy_s[stage])
    transfer_s = min(idle_s, run.metrics.get("comm_stall_fraction", 0.0) * minibatch_s)
    return Limit(minibatch_s, stage if len(busy_s) > 1 else None, busy_s[stage], transfer_s, idle_s - transfer_s)


def _measured_s(run: RunResult, minibatch_s: float) -> list[float]:
    """Return the seconds of every stage's busiest worker per minibatch."""
    shares: dict[int, float] = {}
    for row in run.workers:
        total_s = sum(row.get(part, 0.0) for part in _WORKER_PARTS)
        share = row.get("compute_s", 0.0) / total_s if total_s else 0.0
        shares[row["stage"]] = max(share, shares.get(row["stage"], 0.0))
    return [shares[stage] * minibatch_s for stage in sorted(shares)]


def planned_s(run: RunResult, minibatch_size: int) -> list[float]:
    """Return the seconds that every worker position computes per minibatch by the profile; empty if unknown.

    The stages of one position, as in interleaved schedules, count together.
    """
    parts = run.recipe.get("parallelism.microbatches", "1")
    needed = ("forward_s", "backward_s", "update_s", "replicas", "samples_per_update")
    if not parts.isdecimal() or any(stage.get(name) is None for stage in run.stages for name in needed):
        return []
    workers = sum(stage["replicas"] for stage in run.stages)
    each = [
        (stage["forward_s"] + stage["backward_s"]) * int(parts) / stage["replicas"]
        + (stage["update_s"] * minibatch_size / stage["samples_per_update"] if _updates(run) else 0.0)
        for stage in run.stages
    ]
    together: dict[int, float] = {}  # older records lack `first_worker`; their stages were dealt out in turn
    positions = max(1, round(len(each) * run.metrics.get("num_workers", workers) / workers)) if each else 1
    for index, stage in enumerate(run.stages):
        worker = stage.get("first_worker", index % positions)
        together[worker] = together.get(worker, 0.0) + each[index]
    return [*together.values()]


def _updates(run: RunResult) -> bool:
    """Return whether workers make the updates, and not a server beside them."""
    mode, given = MODES.get(run.mode), run.recipe.get("parallelism.sync", "null")
    sync = SYNCS.get(given if given != "null" or mode is None else mode.sync)
    return sync is None or sync.waits


def comparison_markdown(results: Sequence[RunResult]) -> str:
    """Return a Markdown table per group with its verdict, followed by a sentence on the outcome of every run."""
    parts = []
    for group in groups(results):
        table = markdown_table(headings(results), rows(results, group))
        parts += [f"**{group.title}**\n\n{table}" if group.title else table, *verdict(group)]
    seeded = has_seeds(results)
    sentences = (f"- {run.name}{f', seed {run.seed}' if seeded else ''}: {run.sentence}" for run in results)
    return "\n\n".join([*parts, "\n".join([*sentences, *(f"- {note}" for note in notes(results))])]) + "\n"


def verdict(group: RunGroup) -> list[str]:
    """Return sentences on a group of several rows: the first row and its lead, the limits of each, and remarks."""
    if len(group.rows) < 2:
        return []
    sweep = sweep_of(group)
    if sweep is not None and sweep.has_choice:
        # If the swept key is a choice such as a learning rate, and no condition such as a cluster's bandwidth, one row
        # is the first of all.
        chosen = all(entry.setting == group.entries[0].setting for entry in group.entries)
        along = [*_crossovers(sweep)]
        return [*along, *(_winner(group) if chosen or not along else ()), *_remarks(group)]
    return [*_winner(group), *_limits(group), *_remarks(group)]


def _crossovers(sweep: Sweep) -> Iterator[str]:
    """Yield a sentence on which line of a sweep is first at which values."""
    what = "first to the target" if sweep.metric == "time_to_accuracy_s" else "highest in throughput"
    if sweep.is_partial:
        what += _MOSTLY
    places = [*sweep.first_places()]
    where = [
        f"{name} {f'from {since} to {until}' if since != until else f'at {since}'}" for name, since, until in places
    ]
    if [name for name, *_ in places] == [NONE]:
        return
    if len(places) == 1:
        name = places[0][0]
        are = "is" if name in sweep.lines else "are"
        yield f"{name} {are} {what} at every {sweep.key} of the sweep."
    elif places:
        yield f"Along {sweep.key}, {what}: {', '.join(where)}."


def _winner(group: RunGroup) -> Iterator[str]:
    """Yield which row is first to the target, or in throughput if there is none, and by how much."""
    ranked = sorted((row for row in group.rows if row.time_to_accuracy_s is not None), key=_target_s)
    recipes = (entry.runs[0].recipe for entry in group.entries)
    goals = {(each.get("train.target.metric", "the target"), each.get("train.target.value", "")) for each in recipes}
    goal = " ".join(goals.pop()).rstrip() if len(goals) == 1 else "its own target"
    if any(row.is_partial for row in group.rows):
        goal += _MOSTLY
    tied = [row for row in ranked if _target_s(row) <= _target_s(ranked[0]) * (1 + _SEEN)]
    if len(tied) > 1:
        yield _tie(tied, goal)
    elif len(ranked) > 1:
        (first, second), (one, other) = ranked[:2], map(_target_s, ranked[:2])
        yield (
            f"{first.name} is first to {goal}: in {seconds(one)}, {ratio(other / one)} as fast as {second.name} with "
            f"{seconds(other)} ({_epochs(first)}, against {_epochs(second)})."
        )
    elif ranked:
        yield f"Only {ranked[0].name} reached {goal}: in {seconds(ranked[0].time_to_accuracy_s)}."
    elif any(row.num_targeted for row in group.rows):
        yield f"None reached {goal}."
    else:
        rates = sorted(
            ((row.throughput_samples_per_s or 0.0, row.name) for row in group.rows), key=itemgetter(0), reverse=True
        )
        (most, name), (less, following) = rates[:2]
        fastest = [each for rate, each in rates if most < rate * (1 + _SEEN)]
        if len(fastest) == len(rates):
            yield f"None is faster than another: {number(most)} samples/s."
        elif len(fastest) > 1:
            yield f"{listed(fastest, _MOST_NAMED)} have the highest throughput: {number(most)} samples/s."
        elif less:
            text = f"{number(most)} samples/s, {ratio(most / less)} as fast as {following} with {number(less)}"
            yield f"{name} has the highest throughput: {text}."


def _tie(tied: Sequence[ComparisonRow], goal: str) -> str:
    """Return which rows are first together; equal times may be different numbers of epochs."""
    names, both = [row.name for row in tied], "both" if len(tied) == 2 else "all"
    times = dict.fromkeys(seconds(row.time_to_accuracy_s) for row in (tied[0], tied[-1]))
    who = " and ".join(names) if len(tied) == 2 else listed(names, _MOST_NAMED)
    epochs = ", against ".join(dict.fromkeys(map(_epochs, tied[:_MOST_NAMED])))
    return f"{who} are first to {goal}, {both} in {' to '.join(times)} ({epochs})."


def _target_s(row: ComparisonRow) -> float:
    return row.time_to_accuracy_s or 0.0


def _epochs(row: ComparisonRow) -> str:
    return f"{num_epochs(row.epochs_to_target or 0)} of {seconds(row.epoch_time_s)}"


def _limits(group: RunGroup) -> Iterator[str]:
    """Yield how every row's slowest stage spends the time of a minibatch, in milliseconds."""
    sentences = []
    sizes = [entry.runs[0].recipe.get("train.minibatch_size", "") for entry in group.entries[:_MOST_NAMED]]
    of_one = len({*sizes}) == 1
    for row, entry, size in zip(group.rows, group.entries, sizes, strict=False):
        limit = limit_of(entry.runs[0])
        if limit is not None:
            stage = "" if limit.stage is None else f" in stage {limit.stage}"
            parts = (
                (f"computing{stage}", limit.compute_s),
                ("waiting for transfers", limit.transfer_s),
                ("waiting for others", limit.wait_s),
            )
            decimals = max(0, 2 - math.floor(math.log10(1e3 * limit.minibatch_s)))
            seen = [f"{1e3 * s:.{decimals}f} {what}" for what, s in parts if s >= _SEEN * limit.minibatch_s]
            own = "" if of_one else f", of {size},"
            sentences.append(f"{row.name}{own} {1e3 * limit.minibatch_s:.{decimals}f} = {' + '.join(seen)}")
    if sentences:
        common = f" of {sizes[0]}" if of_one else ""
        yield f"Milliseconds per minibatch{common}, of each one's slowest stage: {'; '.join(sentences)}."


def _remarks(group: RunGroup) -> Iterator[str]:
    """Yield explanations of the table's marks, and that rows have different seeds unless the seed is swept."""
    found = group.rows
    seeds = {frozenset(run.seed for run in entry.runs) for entry in group.entries if _SEED not in entry.varied}
    if len(seeds) > 1 and any(row.num_targeted for row in found):
        yield "Rows have other seeds, which change how many epochs it takes to a target."
    marked = [row.name for row in found if row.is_marked]
    if marked:
        yield (
            f"{listed(marked, _MOST_NAMED)} (*): not {found[0].name}'s {found[0].samples_per_update:g} samples per "
            "update, so the epochs to a target may differ."
        )
    for row in found:
        if row.is_dp:
            yield f"{row.name}: the plan is data parallelism on all workers, so {row.mode} adds nothing here."
