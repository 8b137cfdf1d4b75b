"""Print how much slower `plan: auto` is than the best of all plans: `python -m reports.studies.planner_regret`.

The output is `planner_regret.md`. Instances are small chains of layers on small clusters, of which every plan is
considered: all cuts, replica counts and placements on the servers, with a depth of NOAM and of one more. Both plans are
compared by simulated seconds, so the regret is the search's alone. A plan is simulated unless a lower bound, which
holds in any simulator, says that it is slower than the best plan so far.

`--kept FOLDER` stores the results there, so that an interrupted study resumes. With `--again` a changed planner plans
the same instances, whose best plans are taken from the folder; remove the folder when the simulator has changed.
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
FIRST_SEED = 200_000  # the planner was developed on instances of smaller seeds

# The target: of each kind, a share of SHARE has a regret of at most WITHIN, and no instance one of more than AT_WORST.
WITHIN, AT_WORST, SHARE = 0.02, 0.05, 0.95
_ROUNDING = 1e-9  # relative
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
    """The sizes that instances are drawn from."""

    layers: range  # numbers of layers of the chain
    counts: tuple[tuple[int, ...], ...]  # of clusters: components per level, innermost first


SMALL = Sizes(range(4, 8), ((2,), (3,), (4,), (5,), (6,), (2, 2), (2, 3), (3, 2)))
LARGER = Sizes(range(8, 11), ((6,), (7,), (8,), (2, 3), (3, 2), (2, 4), (4, 2)))


class Instance(NamedTuple):
    """One small planning problem."""

    kind: str  # of layers, a key of `KINDS`
    seed: int  # that it was drawn with
    request: Request  # for the planner


@dataclass(frozen=True)
class Judged:
    """The plan that the planner chose for an instance beside the best plan; times are seconds per minibatch."""

    kind: str  # of the instance
    seed: int  # of the instance
    searched_s: float  # of the best plan that the searches propose, from which the climb begins
    chosen: str  # plan and depth that the planner chose
    chosen_s: float  # of that plan
    best: str  # plan and depth of the best plan
    best_s: float  # of that plan
    at_least_s: float  # the planner's lower bound for any plan

    @property
    def regret(self) -> float:
        """How much slower the chosen plan is than the best, relative."""
        return self.chosen_s / self.best_s - 1

    @property
    def searched_regret(self) -> float:
        """How much slower the searches' best plan is than the best, relative."""
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


# Each draws, for `count` layers, forward seconds, bytes of the activation and bytes of parameters.
KINDS = {"random": _random, "CNN-like": _like_cnn, "RNN-like": _like_rnn}


def instance(kind: str, seed: int, sizes: Sizes = SMALL) -> Instance:
    """Draw an instance; memory is limited in a third of them, so that at least one plan fits."""
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
    """A plan with a lower bound of its time."""

    bound_s: float  # seconds per minibatch that no simulation of the plan is below
    stages: tuple[SearchStage, ...]  # layers and number of replicas of every stage
    devices: tuple[tuple[int, ...], ...]  # of the replicas of every stage
    depth: int  # minibatches in flight per input-stage replica


def every_plan(planner: Planner, at_most_s: float = math.inf) -> Iterator[Candidate]:
    """Yield the plans of a chain whose bound is below `at_most_s`, those with the fewest stages first."""
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
    """Return a lower bound of a plan's seconds per minibatch, in any simulator; without `devices`, for any placement.

    The bound is the largest of three. A replica computes its minibatches one after another. A port transmits its bytes
    one after another. From each stage on, at most as many minibatches are in flight as the stage's depth allows, each
    for at least the sum of its computing and transfers.
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
    """Yield, for every port, the seconds per minibatch that its bytes take."""
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
    """Return the best plan, None if none is faster than `at_most_s` per minibatch; and how many plans were simulated.

    Plans are simulated in the order of their bounds, until a bound exceeds the best time.
    """
    limit = planner.request.cluster.memory_bytes
    best, simulated = None, 0
    for candidate in sorted(every_plan(planner, at_most_s)):
        if candidate.bound_s >= at_most_s * (1 - _ROUNDING):
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
    """Return the seconds per minibatch in a steady state that is reached later than the planner's predictions simulate.

    If a stage is slower than a later one by less than a hundredth, minibatches in flight hide it for hundreds of
    minibatches.
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
    """Plan an instance, and compare with the best plan.

    The planner's plan may be better than the best of those considered, for example if it is deeper than NOAM + 1; then
    it counts as the best.

    Args:
        asked: the instance.
        known: an earlier result, whose best plan is reused; None to search for the best plan.
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
    """Judge `instances` of every kind.

    Args:
        sizes: of the instances.
        instances: number per kind.
        kept: a file with results, which aren't computed again; new ones are added. None for no file.
        again: plan instances in the file again, and reuse only their best plans.
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
    """Return a table of the distribution of a regret, one row per kind.

    `known` fills the column that says how often the planner's own bound shows that no plan is more than 2 % faster.
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
    broken = sum(each.best_s < (1 - _ROUNDING) * each.at_least_s for each in (*small, *larger))
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
    """Print the page, of `instances` of each kind and `larger` ones of 8 to 10 layers; `kept` is a folder."""
    files = [None, None] if kept is None else [kept / "small.json", kept / "larger.json"]
    found = [judge_all(*each, again=again) for each in zip((SMALL, LARGER), (instances, larger), files, strict=True)]
    print(page(*found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", type=int, default=INSTANCES, help="of each kind")
    parser.add_argument("--larger", type=int, default=0, help="of each kind, of 8 to 10 layers on 6 to 8 workers")
    parser.add_argument("--kept", type=Path, default=None, help="a folder for the results")
    parser.add_argument("--again", action="store_true", help="plan again, with the best plans of the folder")
    options = parser.parse_args()
    main(options.instances, options.larger, options.kept, again=options.again)
