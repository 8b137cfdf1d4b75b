"""What is done to which run, and when: drawn by a seed, before anything runs."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from reports.studies.campaign.cases import CASES, EVERY, LAST, Case
from reports.studies.campaign.points import Moment

KILLS = ("kill a worker", "kill several workers", "kill the launcher", "kill all at once", "kill the process")
STOPS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGINT twice")
FULL, FREE, READ_ONLY, WRITABLE = "disk full", "disk free", "read-only", "writable"
SPOIL, TWICE, LIVING = "spoil the newest checkpoint", "resume twice at once", "resume a living run"
HOSTS = ("kill a host's processes", "take a host away", "unplug a host for good", "unplug a host for a moment")
# What follows another disturbance and ends it.
ENDINGS = (FREE, WRITABLE)
KINDS = (*KILLS, *STOPS, FULL, READ_ONLY, SPOIL, TWICE, LIVING, *HOSTS)
Make = Callable[[random.Random, Case, int], Sequence["Fault"]]  # what is done to a case, the how manieth of its sort
_PER_RUN = 4  # kills of one run, each a restart: its start is paid once
# Where training is stopped, and how often a point is drawn: checkpoints are the heart of it.
_TRAINING = {
    "segment": 2, "instruction": 4, "part": 2, "part written": 2, "manifest": 2, "committed": 2, "pruned": 1,
    "evaluation": 1, "evaluated": 1,
}  # fmt: skip
_OF_RANK_0 = ("manifest", "committed", "pruned", "finish", "finished")  # others never come there
_ENDING = ("result", "finish", "finished")


@dataclass(frozen=True)
class Fault:
    """One thing that is done to a run."""

    kind: str  # one of `KINDS`, or what ends one
    moment: Moment  # when
    victims: tuple[int, ...] = ()  # ranks that are killed, or the host


@dataclass(frozen=True)
class Trial:
    """A run and all that is done to it, in this order."""

    name: str  # tells it from others of a seed
    case: Case  # what is trained
    faults: tuple[Fault, ...]  # each comes when the one before is over

    @property
    def title(self) -> str:
        """Return case and disturbances, for people and for `--only`."""
        kinds = dict.fromkeys(fault.kind for fault in self.faults if fault.kind not in ENDINGS)
        return f"{self.case.name}: {', '.join(kinds)}"

    @property
    def on_hosts(self) -> bool:
        """Return whether it runs on two emulated hosts."""
        return any(fault.kind in HOSTS for fault in self.faults)

    @property
    def on_small_disk(self) -> bool:
        """Return whether its runs are on a disk of their own."""
        return any(fault.kind in (FULL, READ_ONLY) for fault in self.faults)


def draw(seed: int, num_kills: int, only: str = "") -> list[Trial]:
    """Return all trials of a campaign, the same of a seed.

    So many processes, or all processes of a run, are ended by SIGKILL; what else is done is in proportion. With `only`
    all of these kills are of trials whose title contains it.
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
    """Return how many kills are drawn."""
    return sum(fault.kind in KILLS for trial in trials for fault in trial.faults)


def _share(kills: int, per: int) -> int:
    return max(1, round(kills / per))


def _that_contain(trials: Iterator[Trial], text: str) -> Iterator[Trial]:
    """Yield those whose title contains a text; gives up where none does."""
    misses = 0
    for trial in trials:
        misses = 0 if text in trial.title else misses + 1
        if misses > 20 * len(CASES):
            return
        if not misses:
            yield trial


def _dealt(chance: random.Random, cases: Sequence[Case], name: str, make: Make) -> Iterator[Trial]:
    """Yield trials without end: every case once in some order, then in another."""
    number = 0
    while True:
        for case in chance.sample(cases, len(cases)):
            yield Trial(f"{name}-{number}", case, tuple(make(chance, case, number)))
            number += 1


def _killed(chance: random.Random, count: int, only: str) -> Iterator[Trial]:
    """Yield runs that are killed, so many times in all."""
    for trial in _that_contain(_dealt(chance, CASES, "kill", _kills), only):
        if count <= 0:
            return
        yield Trial(trial.name, trial.case, trial.faults[:count])
        count -= _PER_RUN


def _kills(chance: random.Random, case: Case, number: int) -> list[Fault]:
    """Return several kills of a run, each at least one checkpoint after the one before."""
    steps = sorted(chance.sample(range(2 * EVERY, LAST - EVERY, EVERY), _PER_RUN))
    faults: list[Fault] = []
    for step in steps:
        kind = _kill_of(chance, case, first=not faults)
        faults.append(Fault(kind, _moment(chance, case, step), _victims(chance, case, kind)))
    begins = chance.choice(("restored", "model", ""))
    if begins and faults:  # in the start-up after another kill
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
    """Return a moment in training, when so many minibatches are done."""
    moving = {} if not case.moves else {"recut": 9} if "repartitions" in case.special else {"hand over": 9}
    points = _TRAINING | moving
    point = chance.choices([*points], [*points.values()])[0]
    rank = 0 if point in _OF_RANK_0 else chance.randrange(case.num_processes)
    return Moment(point, step, rank, chance.randrange(30) if point == "instruction" else 0)


def _stops(chance: random.Random, case: Case, number: int) -> list[Fault]:
    """Return two requests to stop, at two moments of training."""
    steps = sorted(chance.sample(range(2 * EVERY, LAST - EVERY, EVERY), 2))
    points = ("segment", "instruction", "part written", "committed", "evaluation")
    faults: list[Fault] = []
    for step in steps:
        point = chance.choice(points)
        rank = 0 if point in _OF_RANK_0 else chance.randrange(case.num_processes)
        nth = chance.randrange(30) if point == "instruction" else 0
        faults.append(Fault(STOPS[(2 * number + len(faults)) % len(STOPS)], Moment(point, step, rank, nth)))
    return faults


def _disk(chance: random.Random, case: Case, number: int) -> list[Fault]:
    """Return a disk that takes nothing for some time, a kill meanwhile or afterwards, and a second one."""
    kind, end = ((FULL, FREE), (READ_ONLY, WRITABLE))[number % 2]
    ranks = range(case.num_processes)
    begins = Moment(chance.choice(("segment", "part")), 2 * EVERY, chance.choice(ranks))
    ends = Moment("segment", 4 * EVERY, chance.choice(ranks))
    meanwhile = Fault(KILLS[0], Moment("instruction", 3 * EVERY, chance.choice(ranks), 5), (chance.choice(ranks),))
    later = Fault(KILLS[0], Moment("segment", 6 * EVERY, chance.choice(ranks)), (chance.choice(ranks),))
    kills = [meanwhile] if chance.random() < 0.5 else []
    return [Fault(kind, begins), *kills, Fault(end, ends), later]


def _spoilt(chance: random.Random, case: Case, number: int) -> list[Fault]:
    """Return two kills, each followed by damage to the newest checkpoint."""
    steps = sorted(chance.sample(range(3 * EVERY, LAST - EVERY, EVERY), 2))
    return [Fault(SPOIL, Moment("segment", step, 0)) for step in steps]


def _resumed(chance: random.Random, case: Case, number: int) -> list[Fault]:
    """Return a second command on a run that is there, or two at once on one that was killed."""
    rank = chance.randrange(case.num_processes)
    return [Fault((LIVING, TWICE)[number % 2], Moment("segment", chance.choice((2, 4, 6)) * EVERY, rank))]


def _ends_with_known_bits(case: Case) -> bool:
    """Return whether it is known what a run ends with that was stopped where it has no drain of its own.

    Otherwise the order of updates was that of another segment, layers have moved where it stopped, or running
    statistics are equal to rounding, being summed in a ring once more.
    """
    return not (case.races or case.adds_in_a_ring or "live" in case.special)


def _fits_two_hosts(case: Case) -> bool:
    return case.in_processes and case.num_processes == 2 and not case.races and not case.moves


def _hosts(chance: random.Random, case: Case, number: int) -> list[Fault]:
    """Return one thing that happens to one of two hosts."""
    moment = Moment(chance.choice(("segment", "instruction")), 4 * EVERY, chance.randrange(2))
    return [Fault(HOSTS[number % len(HOSTS)], moment, (chance.randrange(2),))]
