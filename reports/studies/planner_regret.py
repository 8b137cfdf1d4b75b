"""Print how much slower `plan: auto` is than the best plan there is: `python -m reports.studies.planner_regret`.

What it prints is `planner_regret.md`. Small chains of layers on small clusters, of which every plan is looked at: all
cuts, all replica counts, all placements on the servers, NOAM and one minibatch more in flight. The simulator is the
judge, so this is about the search alone. A plan is simulated unless a bound that holds in any simulator says that it is
slower than the best so far.

`--kept FOLDER` keeps what was judged there, so that the study goes on where it was stopped; with `--again` another
planner is asked about the same instances (remove the folder when the simulator has changed).
"""

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pipebench.cluster import Cluster, Level
from pipebench.errors import PlanError
from pipebench.planner.climb import climb
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.flat import SearchStage
from pipebench.planner.placements import placements
from pipebench.planner.planner import Planner
from pipebench.planner.plans import PlanEstimate, Request
from pipebench.profile.model import LayerProfile, Profile
from pipebench.schedule.orders import ONE_F_ONE_B
from pipebench.schedule.pipeline import Pipeline, chain, noam
from pipebench.simulate.steady import simulate_segment
from reports.studies.markdown import table

MODE = "pipedream"
INSTANCES = 200
FIRST_SEED = 200_000  # none from there on was looked at while the planner was made

WITHIN, AT_WORST, SHARE = 0.02, 0.05, 0.95  # the target: so close in such a share of each kind, and never further off
_LONGEST_S = 1e-9  # relative: rounding
_LONG = 4096  # minibatches until plans deeper than NOAM have settled, and over which their jitter is a thousandth

HEAD = """# How much slower `plan: auto` is than the best plan

`python -m reports.studies.planner_regret` makes this page. Regret is the simulated seconds per minibatch of the plan
that `plan: auto` chooses for mode pipedream, over those of the best plan there is, less one.
"""
ALONE = """
What the searches alone propose, from which the climb begins:
"""
BEYOND = """## Larger ones

Likewise, chains of 8 to 10 layers on 6 to 8 workers:
"""
READING = """
Each instance is a chain of 4 to 7 layers on 2 to 6 workers, in one level of links or in 2 or 3 servers, drawn by its
seed: bandwidths over two orders of magnitude, memory limited in a third of them. *Random*: times, activations and
parameters of every layer on their own. *CNN-like*: activations shrink, parameters grow. *RNN-like*: equal layers.
The best plan is that of all cuts, replica counts (idle workers too), placements on the servers that differ, and
depths NOAM and NOAM + 1, that fit in memory; one deeper than NOAM counts as it is after 4,096 minibatches, when
nothing in flight hides a slower stage any more. No instance was used while the planner was made. *Known*: how often
`pipebench plan` says itself that no plan is more than 2 % faster.
"""


class Sizes(NamedTuple):
    """Of what sizes instances are."""

    layers: range  # of the chain
    counts: tuple[tuple[int, ...], ...]  # components per level, innermost first


SMALL = Sizes(range(4, 8), ((2,), (3,), (4,), (5,), (6,), (2, 2), (2, 3), (3, 2)))
LARGER = Sizes(range(8, 11), ((6,), (7,), (8,), (2, 3), (3, 2), (2, 4), (4, 2)))


class Instance(NamedTuple):
    """One small planning problem."""

    kind: str
    seed: int
    request: Request


@dataclass(frozen=True)
class Judged:
    """What the planner chose for an instance, beside the best: plan, depth and seconds per minibatch."""

    kind: str
    seed: int
    searched_s: float  # of the best plan that searches alone propose
    chosen: str
    chosen_s: float
    best: str
    best_s: float
    at_least_s: float  # what the planner says that no plan is below

    @property
    def regret(self) -> float:
        """How much slower the chosen plan is."""
        return self.chosen_s / self.best_s - 1

    @property
    def searched_regret(self) -> float:
        """How much slower the best plan is that searches alone propose."""
        return self.searched_s / self.best_s - 1


def _random(draw: random.Random, count: int) -> list[tuple[float, float, float]]:
    return [(draw.expovariate(1e3), 10 ** draw.uniform(4, 6.5), 10 ** draw.uniform(4, 7.5)) for _ in range(count)]


def _like_cnn(draw: random.Random, count: int) -> list[tuple[float, float, float]]:
    activation, parameters = 10 ** draw.uniform(5.5, 7), 10 ** draw.uniform(4, 5.5)
    shrinks, grows = draw.uniform(0.3, 0.9), draw.uniform(1.2, 5)
    return [
        (draw.uniform(0.3e-3, 1.7e-3), activation * shrinks**index, parameters * grows**index) for index in range(count)
    ]


def _like_rnn(draw: random.Random, count: int) -> list[tuple[float, float, float]]:
    return [(draw.uniform(0.5e-3, 2e-3), 10 ** draw.uniform(4, 6.5), 10 ** draw.uniform(5, 7.5))] * count


KINDS = {"random": _random, "CNN-like": _like_cnn, "RNN-like": _like_rnn}  # forward seconds, activation, parameters


def instance(kind: str, seed: int, sizes: Sizes = SMALL) -> Instance:
    """Draw an instance; some plan of it fits in memory."""
    draw = random.Random(f"{kind} {seed}")
    layers = KINDS[kind](draw, draw.choice(sizes.layers))
    rows = [
        LayerProfile(
            *(f"layer{index}", "Linear", forward_s, 2 * forward_s, int(activation), int(activation)),
            reads=(index - 1,) if index else (),
            parameter_sizes={f"weight{index}": int(parameters)},
            saved_bytes=int(activation),
        )
        for index, (forward_s, activation, parameters) in enumerate(layers)
    ]
    loss = LayerProfile("loss", "loss", 0.0, 0.0, 0, 0, reads=(len(rows) - 1,))
    profile = Profile("chain", "drawn", "file", f"{kind} {seed}", {1: (*rows, loss)}, 1e-11, 0.0, {}, {})
    rate, counts = 10 ** draw.uniform(8.5, 10.5), draw.choice(sizes.counts)
    rates = (rate,) if len(counts) == 1 else (rate * draw.choice((2, 4, 10)), rate)
    levels = tuple(
        Level(name, count, each, 1e-5) for name, count, each in zip(("server", "cluster"), counts, rates, strict=False)
    )
    free = Request(profile, Cluster("drawn", "drawn", None, levels), COST_MODELS["overlap"], 1)
    share = draw.uniform(0.4, 1.2) if draw.random() < 1 / 3 else None
    if share is None:
        return Instance(kind, seed, free)
    planner = Planner(free, MODE)
    whole = planner.estimate("", (SearchStage(0, len(planner.work.states) - 1, 1),)).memory_bytes
    limited = Request(profile, Cluster("drawn", "drawn", int(share * whole), levels), free.model, 1)
    try:
        Planner(limited, MODE).proposed()
    except PlanError:
        return Instance(kind, seed, free)
    return Instance(kind, seed, limited)


class Candidate(NamedTuple):
    """A plan, and seconds per minibatch that no simulation of it is below."""

    bound_s: float
    stages: tuple[SearchStage, ...]
    devices: tuple[tuple[int, ...], ...]
    depth: int


def every_plan(planner: Planner, at_most_s: float = math.inf) -> Iterator[Candidate]:
    """Yield every plan of a chain whose bound is below so much, fewest stages first."""
    cluster, last = planner.request.cluster, len(planner.work.states) - 1
    count = cluster.num_workers
    for num_stages in range(1, min(count, last) + 1):
        for ends in itertools.combinations(range(1, count + 1), num_stages):
            replicas = [b - a for a, b in itertools.pairwise((0, *ends))]
            places = placements(cluster, replicas)
            for cuts in itertools.combinations(range(1, last), num_stages - 1):
                bounds = itertools.pairwise((0, *cuts, last))
                stages = tuple(SearchStage(a, b, m) for (a, b), m in zip(bounds, replicas, strict=True))
                for depth in (noam(replicas), noam(replicas) + 1) if num_stages > 1 else (1,):
                    if bound_s(planner, stages, None, depth) >= at_most_s:
                        continue
                    for own in places:
                        devices = tuple(map(tuple, own))
                        found_s = bound_s(planner, stages, devices, depth)
                        if found_s < at_most_s:
                            yield Candidate(found_s, stages, devices, depth)


def bound_s(
    planner: Planner, stages: Sequence[SearchStage], devices: Sequence[Sequence[int]] | None, depth: int
) -> float:
    """Return seconds per minibatch that a plan of a chain can't be below; without devices, on none.

    A replica computes its minibatches one by one; what a port carries takes as long as its bytes; and from each stage
    on no more minibatches are under way than its depth, each for as long as its computing and transfers take.
    """
    states, cluster = planner.work.states, planner.request.cluster
    both_s, update = states.forward_s + states.backward_s, planner.work.update_s_per_byte
    replicas = tuple(stage.replicas for stage in stages)
    depths = Pipeline(replicas, chain(len(stages)), ONE_F_ONE_B, False, depth).warmups
    slowest, under_way_s = 0.0, 0.0
    for index in reversed(range(len(stages))):
        start, stop, m = stages[index]
        compute_s = float(both_s[stop] - both_s[start])
        under_way_s += compute_s
        if index + 1 < len(stages):
            num_bytes = float(states.sent_bytes[stop] + states.returned_bytes[stop])
            pairs = itertools.product(devices[index], devices[index + 1]) if devices else ()
            levels = [cluster.levels[cluster.level_between(a, b)] for a, b in pairs] or cluster.levels
            under_way_s += min(num_bytes / level.goodput_bytes_per_s + 2 * level.latency_s for level in levels)
        update_s = update * float(states.parameter_bytes[stop] - states.parameter_bytes[start])
        slowest = max(slowest, (compute_s + update_s) / m, under_way_s / (depths[index] * m))
    return slowest if devices is None else max(slowest, *_ports_s(planner, stages, devices))


def _ports_s(planner: Planner, stages: Sequence[SearchStage], devices: Sequence[Sequence[int]]) -> Iterator[float]:
    """Yield the seconds per minibatch of every port, for its bytes alone."""
    states, cluster = planner.work.states, planner.request.cluster
    load: dict[tuple[int, int, bool], float] = {}

    def add(sender: int, receiver: int, num_bytes: float) -> None:
        level = cluster.level_between(sender, receiver)
        for key in (
            (level, cluster.component(sender, level), True),
            (level, cluster.component(receiver, level), False),
        ):
            load[key] = load.get(key, 0.0) + num_bytes

    for (start, stop, m), own in zip(stages, devices, strict=True):
        if m > 1:
            around = 2 * (m - 1) / m * float(states.parameter_bytes[stop] - states.parameter_bytes[start]) / m
            ring = sorted(own)
            for sender, receiver in zip(ring, [*ring[1:], ring[0]], strict=True):
                add(sender, receiver, around)
    for (_, stop, _), own, others in zip(stages, devices, devices[1:], strict=False):
        cycle = math.lcm(len(own), len(others))
        for k in range(cycle):
            add(own[k % len(own)], others[k % len(others)], float(states.sent_bytes[stop]) / cycle)
            add(others[k % len(others)], own[k % len(own)], float(states.returned_bytes[stop]) / cycle)
    yield 0.0
    for (level, _, _), num_bytes in load.items():
        yield num_bytes / cluster.levels[level].goodput_bytes_per_s


def best_plan(planner: Planner, at_most_s: float) -> tuple[PlanEstimate | None, int]:
    """Return the best plan faster than so many seconds per minibatch, and how many were simulated to find it."""
    limit = planner.request.cluster.memory_bytes
    best, simulated = None, 0
    for candidate in sorted(every_plan(planner, at_most_s)):
        if candidate.bound_s >= at_most_s * (1 - _LONGEST_S):
            break
        found = planner.estimate("every plan", candidate.stages, candidate.devices, depth=candidate.depth)
        if limit is not None and found.memory_bytes > limit:
            continue
        found = planner.with_prediction(found)
        simulated += 1
        if found.minibatch_s < at_most_s and found.plan.depth > found.plan.noam:
            found = replace(found, minibatch_s=in_the_long_run_s(planner, found))
        if found.minibatch_s < at_most_s:
            best, at_most_s = found, found.minibatch_s
    return best, simulated


def in_the_long_run_s(planner: Planner, found: PlanEstimate) -> float:
    """Return the seconds per minibatch after many more minibatches than the planner's predictions simulate.

    Where a stage is slower than a later one by less than a hundredth, what is in flight hides it for hundreds.
    """
    workload, _ = planner.workload(found)
    shorter, longer = (simulate_segment(workload, count).end_s for count in (_LONG, 2 * _LONG))
    return (longer - shorter) / _LONG


def _text(found: PlanEstimate) -> str:
    sizes = "+".join(str(stage.stop - stage.start) for stage in found.plan.stages)
    beyond = found.plan.depth - found.plan.noam
    placed = "" if found.plan.devices == tuple(range(len(found.plan.devices))) else f" on {found.plan.devices}"
    return f"{'-'.join(map(str, found.plan.replicas))} ({sizes}, depth NOAM{beyond:+d}){placed}"


def judge(asked: Instance, known: Judged | None = None) -> Judged:
    """Return what the planner chooses for an instance beside the best plan; `known`: another planner's, the best there.

    A plan outside what is looked at may be better, one deeper than NOAM + 1 for instance.
    """
    planner = Planner(asked.request, MODE)
    proposed = planner.proposed()
    searched_s, chosen = min(each.minibatch_s for each in proposed), climb(planner, proposed)  # as `planner.best()`
    if known is not None:
        best_text, best_s = known.best, known.best_s
    else:
        best = best_plan(planner, chosen.minibatch_s)[0] or chosen
        best_text, best_s = _text(best), best.minibatch_s
    if chosen.minibatch_s < best_s:
        best_text, best_s = _text(chosen), chosen.minibatch_s
    return Judged(
        asked.kind, asked.seed, searched_s, _text(chosen), chosen.minibatch_s, best_text, best_s, chosen.at_least_s
    )


def judge_all(sizes: Sizes, instances: int, kept: Path | None = None, *, again: bool = False) -> list[Judged]:
    """Judge so many instances of every kind, adding what isn't there to the file `kept`, if any.

    With `again` the planner is asked again where the file has the best plan.
    """
    before = json.loads(kept.read_text()) if kept is not None and kept.is_file() else []
    known = {(each.kind, each.seed): each for each in (Judged(**values) for values in before)}
    found = []
    for seed, kind in itertools.product(range(FIRST_SEED, FIRST_SEED + instances), KINDS):
        own = known.get((kind, seed))
        if own is None or again:
            own = known[kind, seed] = judge(instance(kind, seed, sizes), own)
            if kept is not None:
                kept.write_text(json.dumps([asdict(each) for each in known.values()]))
        found.append(own)
    return found


def distribution(judged: Sequence[Judged], regret: Callable[[Judged], float], *, known: bool) -> str:
    """Return the table of the distribution of a regret, a line for each kind.

    With `known` it says how often the planner knew that no plan is more than 2 % faster.
    """
    head = ("kind", "instances", "within 2 %", "more than 2 %", "more than 5 %", "mean", "worst", "known", "target")
    lines = []
    for kind in KINDS:
        own = [each for each in judged if each.kind == kind]
        regrets = [regret(each) for each in own]
        within = sum(each <= WITHIN for each in regrets) / len(regrets)
        sure = sum(each.chosen_s <= (1 + WITHIN) * each.at_least_s for each in own) / len(own)
        lines.append(
            (
                *(kind, len(own), f"{100 * within:.1f} %", sum(each > WITHIN for each in regrets)),
                *(sum(each > AT_WORST for each in regrets), f"{100 * statistics.mean(regrets):.2f} %"),
                *(f"{100 * max(regrets):.1f} %", f"{100 * sure:.1f} %" if known else "-"),
                "met" if within >= SHARE and max(regrets) <= AT_WORST else "missed",
            )
        )
    return table(head, lines)


def _largest(judged: Sequence[Judged]) -> str:
    largest = sorted(judged, key=lambda each: -each.regret)[:12]
    return table(
        ("instance", "chosen", "best", "regret"),
        [(f"{e.kind} {e.seed}", e.chosen, e.best, f"{100 * e.regret:.1f} %") for e in largest if e.regret > 0],
    )


def page(small: Sequence[Judged], larger: Sequence[Judged]) -> str:
    """Return the page."""
    broken = sum(each.best_s < (1 - _LONGEST_S) * each.at_least_s for each in (*small, *larger))
    parts = [HEAD, distribution(small, lambda each: each.regret, known=True), ALONE]
    parts += [distribution(small, lambda each: each.searched_regret, known=False), READING]
    parts += [f"Plans faster than that bound: {broken} in {len(small) + len(larger)} instances.\n"]
    if larger:
        parts += [BEYOND, distribution(larger, lambda each: each.regret, known=True) + "\n"]
    parts += ["## The largest regrets\n", _largest(small)]
    if larger:
        parts += ["", "## The largest of 8 to 10 layers\n", _largest(larger)]
    return "\n".join(parts)


def main(instances: int = INSTANCES, larger: int = 0, kept: Path | None = None, *, again: bool = False) -> None:
    """Print the page, of so many instances of each kind, and so many of 8 to 10 layers; see `judge_all`."""
    files = [None, None] if kept is None else [kept / "small.json", kept / "larger.json"]
    found = [judge_all(*each, again=again) for each in zip((SMALL, LARGER), (instances, larger), files, strict=True)]
    print(page(*found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", type=int, default=INSTANCES, help="of each kind")
    parser.add_argument("--larger", type=int, default=0, help="of each kind, of 8 to 10 layers on 6 to 8 workers")
    parser.add_argument("--kept", type=Path, default=None, help="a folder that keeps what was judged")
    parser.add_argument("--again", action="store_true", help="ask the planner again where the folder has the best plan")
    options = parser.parse_args()
    main(options.instances, options.larger, options.kept, again=options.again)
