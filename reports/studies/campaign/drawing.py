"""Draws, by a seed and before anything runs, which faults are injected into which runs, and when."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from reports.studies.campaign.cases import CASES, EVERY, LAST, Case, contains
from reports.studies.campaign.points import Moment

KILLS = ("kill a worker", "kill several workers", "kill the launcher", "kill all at once", "kill the process")
STOPS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGINT twice")
FULL, FREE, READ_ONLY, WRITABLE = "disk full", "disk free", "read-only", "writable"
SPOIL, TWICE, LIVING = "spoil the newest checkpoint", "resume twice at once", "resume a living run"
HOSTS = ("kill a host's processes", "take a host away", "unplug a host for good", "unplug a host for a moment")
ENDINGS = (FREE, WRITABLE)  # end the fault before them
KINDS = (*KILLS, *STOPS, FULL, READ_ONLY, SPOIL, TWICE, LIVING, *HOSTS)
# Draws the faults of a case, given the number of trials of the same sort before it.
Make = Callable[[random.Random, Case, int], Sequence["Fault"]]
_PER_RUN = 4  # kills of one run, which share its first start
# Weights of the points in training, by name: most faults are drawn at checkpoints.
_TRAINING = {
    "segment": 2, "instruction": 4, "part": 2, "part written": 2, "manifest": 2, "committed": 2, "pruned": 1,
    "evaluation": 1, "evaluated": 1,
}  # fmt: skip
_OF_RANK_0 = ("manifest", "committed", "pruned", "finish", "finished")  # points that only rank 0 reaches
_ENDING = ("result", "finish", "finished")


@dataclass(frozen=True)
class Fault:
    """One fault that is injected into a run."""

    kind: str  # one of `KINDS` or `ENDINGS`
    moment: Moment  # when
    victims: tuple[int, ...] = ()  # ranks that are killed, or the host


@dataclass(frozen=True)
class Trial:
    """A run and the faults that are injected into it, in this order."""

    name: str  # unique within a campaign
    case: Case  # the run
    faults: tuple[Fault, ...]  # each is injected after the one before it

    @property
    def title(self) -> str:
        """Case and kinds of faults: what is printed, and what `--only` is compared with."""
        kinds = dict.fromkeys(fault.kind for fault in self.faults if fault.kind not in ENDINGS)
        return f"{self.case.name}: {', '.join(kinds)}"

    @property
    def on_hosts(self) -> bool:
        """Whether it runs on two emulated hosts."""
        return any(fault.kind in HOSTS for fault in self.faults)

    @property
    def on_small_disk(self) -> bool:
        """Whether its runs are on a disk of their own."""
        return any(fault.kind in (FULL, READ_ONLY) for fault in self.faults)


def draw(seed: int, num_kills: int, only: str = "") -> list[Trial]:
    """Return all trials of a campaign, a pure function of the arguments.

    Args:
        seed: of the random numbers.
        num_kills: faults that kill processes; the numbers of other faults are in proportion.
        only: parts of titles, between commas; all trials have one of them. "" for any.
    """
    chance = random.Random(seed)
    kinds: tuple[tuple[str, int, Make, Callable[[Case], bool]], ...] = (
        ("stop", _share(num_kills, 8), _stops, _ends_with_known_bits),
        ("disk", _share(num_kills, 40), _disk, lambda case: case.in_processes and not case.races),
        ("spoil", _share(num_kills, 20), _spoilt, lambda case: True),
        ("twice", _share(num_kills, 25), _resumed, lambda case: not case.races),
        ("hosts", _share(num_kills, 40), _hosts, _fits_two_hosts),
    )
    trials = list(_killed(chance, num_kills, only))
    for name, count, make, fits in kinds:
        found = _dealt(chance, [case for case in CASES if fits(case)], name, make)
        trials += [trial for trial, _ in zip(_that_contain(found, only), range(count), strict=False)]
    return trials


def num_kills(trials: Sequence[Trial]) -> int:
    """Return the number of kills among the faults of trials."""
    return sum(fault.kind in KILLS for trial in trials for fault in trial.faults)


def _share(kills: int, per: int) -> int:
    return max(1, round(kills / per))


def _that_contain(trials: Iterator[Trial], only: str) -> Iterator[Trial]:
    """Yield the trials whose title contains one of some texts; end after many trials in a row whose title doesn't."""
    misses = 0
    for trial in trials:
        misses = 0 if contains(trial.title, only) else misses + 1
        if misses > 20 * len(CASES):
            return
        if not misses:
            yield trial


def _dealt(chance: random.Random, cases: Sequence[Case], name: str, make: Make) -> Iterator[Trial]:
    """Yield trials without end: every case once in random order, then again in another."""
    number = 0
    while True:
        for case in chance.sample(cases, len(cases)):
            yield Trial(f"{name}-{number}", case, tuple(make(chance, case, number)))
            number += 1


def _killed(chance: random.Random, count: int, only: str) -> Iterator[Trial]:
    """Yield trials with `count` kills in all."""
    for trial in _that_contain(_dealt(chance, CASES, "kill", _kills), only):
        if count <= 0:
            return
        yield Trial(trial.name, trial.case, trial.faults[:count])
        count -= _PER_RUN


def _kills(chance: random.Random, case: Case, number: int) -> list[Fault]:
    """Draw `_PER_RUN` kills of a run, each at least one checkpoint after the one before."""
    steps = sorted(chance.sample(range(2 * EVERY, LAST - EVERY, EVERY), _PER_RUN))
    faults: list[Fault] = []
    for step in steps:
        kind = _kill_of(chance, case, first=not faults)
        faults.append(Fault(kind, _moment(chance, case, step), _victims(chance, case, kind)))
    begins = chance.choice(("restored", "model", ""))
    if begins:  # the second kill comes during the start-up after the first
        moment = Moment(begins, 0, chance.randrange(case.num_processes))
        faults[1] = Fault(faults[1].kind, moment, faults[1].victims)
    if chance.random() < 0.3:
        point = chance.choice(_ENDING)
        faults[-1] = Fault(faults[-1].kind, Moment(point, LAST, 0), faults[-1].victims)
    return faults


def _kill_of(chance: random.Random, case: Case, *, first: bool) -> str:
    if not case.in_processes:
        return KILLS[-1]
    if first:
        return KILLS[0]
    return chance.choices(KILLS[:-1] if case.num_processes > 1 else (KILLS[0], *KILLS[2:-1]), k=1)[0]


def _victims(chance: random.Random, case: Case, kind: str) -> tuple[int, ...]:
    ranks = range(case.num_processes)
    if kind == KILLS[0]:
        return (chance.choice(ranks),)
    if kind == KILLS[1]:
        return tuple(sorted(chance.sample(ranks, chance.randint(2, len(ranks)))))
    return tuple(ranks) if kind == "kill all at once" else ()


def _moment(chance: random.Random, case: Case, step: int) -> Moment:
    """Draw a moment in training, after `step` minibatches."""
    points = dict(_TRAINING)
    if case.moves:
        points["recut" if "repartitions" in case.special else "hand over"] = 9
    if case.shards:
        points["shards"] = 4
    return _moment_at(chance, case, step, chance.choices([*points], [*points.values()])[0])


def _moment_at(chance: random.Random, case: Case, step: int, point: str) -> Moment:
    rank = 0 if point in _OF_RANK_0 else chance.randrange(case.num_processes)
    return Moment(point, step, rank, chance.randrange(30) if point == "instruction" else 0)


def _stops(chance: random.Random, case: Case, number: int) -> list[Fault]:
    """Draw two requests to stop, at two moments of training."""
    steps = sorted(chance.sample(range(2 * EVERY, LAST - EVERY, EVERY), 2))
    points = ("segment", "instruction", "part written", "committed", "evaluation")
    moments = [_moment_at(chance, case, step, chance.choice(points)) for step in steps]
    return [Fault(STOPS[(2 * number + index) % len(STOPS)], moment) for index, moment in enumerate(moments)]


def _disk(chance: random.Random, case: Case, number: int) -> list[Fault]:
    """Draw a disk that can't be written for some time; half of them with a kill meanwhile; and a kill afterwards."""
    kind, end = ((FULL, FREE), (READ_ONLY, WRITABLE))[number % 2]
    ranks = range(case.num_processes)
    begins = Moment(chance.choice(("segment", "part")), 2 * EVERY, chance.choice(ranks))
    ends = Moment("segment", 4 * EVERY, chance.choice(ranks))
    meanwhile = Fault(KILLS[0], Moment("instruction", 3 * EVERY, chance.choice(ranks), 5), (chance.choice(ranks),))
    later = Fault(KILLS[0], Moment("segment", 6 * EVERY, chance.choice(ranks)), (chance.choice(ranks),))
    kills = [meanwhile] if chance.random() < 0.5 else []
    return [Fault(kind, begins), *kills, Fault(end, ends), later]


def _spoilt(chance: random.Random, case: Case, number: int) -> list[Fault]:
    """Draw two kills, each followed by damage to the newest checkpoint."""
    steps = sorted(chance.sample(range(3 * EVERY, LAST - EVERY, EVERY), 2))
    return [Fault(SPOIL, Moment("segment", step, 0)) for step in steps]


def _resumed(chance: random.Random, case: Case, number: int) -> list[Fault]:
    """Draw a second command on a running run, or two commands at once that resume a killed one."""
    rank = chance.randrange(case.num_processes)
    return [Fault((LIVING, TWICE)[number % 2], Moment("segment", chance.choice((2, 4, 6)) * EVERY, rank))]


def _ends_with_known_bits(case: Case) -> bool:
    """Return whether the final bits are known of a run that is stopped between its own drains.

    They aren't if another segment changes the order of asynchronous updates, if the stop meets a live move of layers,
    or if a ring sums running statistics once more, which rounds.
    """
    return not (case.races or case.adds_in_a_ring or "live" in case.special)


def _fits_two_hosts(case: Case) -> bool:
    return case.in_processes and case.num_processes == 2 and not case.races and not case.moves


def _hosts(chance: random.Random, case: Case, number: int) -> list[Fault]:
    """Draw a fault of one of two hosts."""
    moment = Moment(chance.choice(("segment", "instruction")), 4 * EVERY, chance.randrange(2))
    return [Fault(HOSTS[number % len(HOSTS)], moment, (chance.randrange(2),))]
