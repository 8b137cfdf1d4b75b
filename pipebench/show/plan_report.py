"""A plan as tables, and sentences that give the reasons for it; the plans of a sweep as a table with a row per run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipebench.cluster import Cluster, Level
from pipebench.errors import printable
from pipebench.formats import a_or_an, num_bytes, number, percent, ratio, seconds, shortened
from pipebench.model.plan import Plan, stay_together
from pipebench.planner.plans import PlanEstimate, StageTime
from pipebench.planner.searches import MOST_COMPONENTS, searches_levels
from pipebench.profile.graph_txt import UNKNOWN_DEVICE
from pipebench.schedule.modes import RECOMPUTE, SWAP
from pipebench.schedule.pipeline import MOST_BEYOND_NOAM
from pipebench.schedule.syncs import SYNCS
from pipebench.show.plan_answer import (
    ALMOST,
    PORT,
    WAITING,
    Bottleneck,
    PlanFindings,
    bottleneck_of,
    depth_is_lowered,
    quotient,
    ties,
)
from pipebench.show.tables import new_table, print_facts, print_table
from pipebench.show.terminal import print_plain
from pipebench.simulate.timeline import TRAINING_KINDS

_DIFFERS = 1.1  # ratio of two times from which on the reason for their difference is given
_SEEN = 5e-4  # relative difference below which two times are called equal
_HELPS = 1.02  # speed-up by one more minibatch in flight from which on more depth is suggested
_TIMES = "computes / transfers / waits, %"
_NAME_WIDTH, _PLAN_WIDTH = 16, 24
_ROOMY_WIDTH = 100


def print_plan(answer: PlanFindings, console: Console) -> None:
    """Print the best plan and the reasons for it."""
    best = answer.comparison.best
    print_plain(console, "")
    plan = (f"{best.plan} ({best.plan.mode})", "bold green")
    print_plain(console, Text.assemble(f"{printable(answer.name)}: ", plan))
    print_facts(console, _questions(answer))
    print_table(console, _stage_table(answer, narrow=console.width < _ROOMY_WIDTH), indent=2)
    print_facts(console, _reasons(answer))


def print_modes(answer: PlanFindings, console: Console) -> None:
    """Print the best plan of every other mode, if planned, and the time that planning took."""
    if answer.comparison.others and not answer.comparison.unplanned:
        print_table(console, _mode_table(answer), indent=2)
    print_facts(console, _rest(answer))


def _questions(answer: PlanFindings) -> Iterator[tuple[str, str]]:
    """Yield the facts of the request."""
    request, best = answer.request, answer.comparison.best
    profile, model = request.profile, request.model
    yield "cost model", f"{model.name}: {model.summary}"
    yield "times", f"{profile.source}: {profile.note}"
    device = "" if profile.device == UNKNOWN_DEVICE else f", times of {profile.device}"
    yield "cluster", f"{_cluster_text(request.cluster)}{device}"
    if answer.says_samples:
        parts = f", {best.microbatches} microbatches each" if best.microbatches > 1 else ""
        yield "minibatch", f"{request.minibatch_size} samples{parts}"
    else:
        yield "minibatch", "of a size that the file doesn't say; --minibatch-size N gives samples per second"
    yield "found by", best.found_by + ("; cuts anywhere, as in the papers" if answer.comparison.cuts_anywhere else "")
    if answer.comparison.at_most > 1.0:
        yield (
            "",
            (
                f"{answer.comparison.num_states:,} places to cut are too many to try all: searches look at some, then "
                f"at all near the best, and their bottlenecks are at most {answer.comparison.at_most:.4g}x the smallest"
            ),
        )
    if len(request.cluster.levels) > 1 and not searches_levels(request.cluster):
        yield "", f"hierarchical plans are searched up to {MOST_COMPONENTS} components per level, so not here"


def _stage_table(answer: PlanFindings, *, narrow: bool) -> Table:
    best, limit = answer.comparison.best, answer.request.cluster.memory_bytes
    slowest = bottleneck_of(answer, best).stages
    headings = ["stage", "layers", "replicas", "compute", "sync", "transfer", "in all"]
    headings.append(_TIMES if answer.times else "share")
    headings.append("memory (of limit)" if limit else "memory")
    table = new_table(*headings, "in flight")
    for column in table.columns:
        column.no_wrap = column.header != "layers"
    table.columns[1].justify = "left"
    width = _NAME_WIDTH // 2 if narrow else _NAME_WIDTH - 4 * (limit is not None)
    all_names = answer.layer_names
    for index, (place, stage) in enumerate(zip(best.plan.stages, best.stages, strict=True)):
        own = all_names[place.start : place.stop]
        first, last = (shortened(name, width) for name in (own[0], own[-1]))
        layers = shortened(own[0], 2 * width) if len(own) == 1 else f"{first.removesuffix('..')}..{last} ({len(own)})"
        table.add_row(
            f"{index}{' <' if index in slowest else ''}",
            layers,
            f"{place.replicas:,}",
            *(seconds(value) for value in (stage.compute_s, stage.sync_s, stage.transfer_s, stage.stage_s)),
            _shares(answer.times[index]) if answer.times else percent(quotient(stage.stage_s, best.bottleneck_s)),
            num_bytes(stage.memory_bytes) + (f" ({percent(stage.memory_bytes / limit)})" if limit else ""),
            f"{stage.in_flight}",
            style="bold" if index in slowest else "",
        )
    return table


def _shares(spent: StageTime) -> str:
    return " / ".join(f"{100 * each:.0f}" for each in astuple(spent))


def _reasons(answer: PlanFindings) -> Iterator[tuple[str, str]]:
    """Yield the reasons for the plan, and its predicted rates, bytes and depth."""
    comparison, cluster = answer.comparison, answer.request.cluster
    best, dp = comparison.best, comparison.dp
    bottleneck = bottleneck_of(answer, best)
    yield "bottleneck", f"{bottleneck}: {seconds(best.bottleneck_s)} per minibatch{_parts(best, bottleneck)}"
    if best.port_s > 0 and bottleneck.cause != PORT:
        yield "ports", f"the busiest between components takes {seconds(best.port_s)} per minibatch"
    yield "throughput", f"{_rate(answer, best)}: {_prediction(best)}"
    if answer.times:
        yield (
            "a stage's time",
            "computes / waits for transfers that computing doesn't hide / waits for others, simulated",
        )
    reason = _why_it_differs(answer, best)
    if reason:
        yield "", reason
    if best.at_least_s > 0:
        yield "at best", _at_best(answer, best)
    yield "data parallel", _beside_dp(answer, best, dp)
    if answer.given is not None:
        over = quotient(answer.given.minibatch_s, best.minibatch_s)
        config = shortened(str(answer.given.plan), _PLAN_WIDTH)
        text = f"{config}, {_rate(answer, answer.given)}: {_prediction(answer.given)}"
        yield "recipe's plan", text + (f"; the plan above is {ratio(over)} as fast" if over is not None else "")
    yield f"bytes per {answer.unit}", f"{_bytes_text(answer, best)}; data parallel: {_bytes_text(answer, dp)}"
    idle = cluster.num_workers - len(best.plan.devices)
    if idle:
        yield "workers idle", f"{idle:,} of {cluster.num_workers:,}: {_why_idle(answer, best)}"
    if depth_is_lowered(answer):
        yield "depth", f"{best.plan.depth}, below NOAM's {best.plan.noam}: more in flight doesn't fit in memory"
    elif answer.request.depth is None and best.plan.depth > best.plan.noam:
        yield "depth", f"{best.plan.depth}, more than NOAM's {best.plan.noam}: transfers wait less"
    if answer.over_memory:
        yield "memory", _over_memory(answer)
    if best.choices:
        yield "memory binds", _choices(answer, best)
    yield from _activations(best) if any(stage.virtual for stage in best.stages) else _not_kept(best.plan)
    yield from _ties(answer)


def _over_memory(answer: PlanFindings) -> str:
    """Return, as a sentence, which stage needs more than a device has in the simulator."""
    stage, peak = max(answer.over_memory.items(), key=lambda each: each[1])
    cluster = answer.request.cluster
    has = f"{num_bytes(cluster.memory_bytes or 0)} of {a_or_an(cluster.device)}"
    return (
        f"does not fit in the simulator, where more transfers can wait than two each way: stage {stage} needs "
        f"{num_bytes(peak)} of the {has}; pipebench run, with engine.kind=simulated, says what would fit"
    )


def _choices(answer: PlanFindings, best: PlanEstimate) -> str:
    """Return the memory choices that were compared, and the rate of the fastest plan that fits under each."""
    rates = (
        f"{each} {number(answer.size / each.minibatch_s) if each.minibatch_s else 'fits nowhere'}"
        for each in best.choices
    )
    return f"{answer.units}/s of the fastest plan that fits, by choice: {'; '.join(rates)}"


def _ties(answer: PlanFindings) -> Iterator[tuple[str, str]]:
    """Yield the parameters that several layers share, and the cost of their copies."""
    for tied in ties(answer):
        if len(tied.stages) == 1:
            yield "tied", stay_together(tied.layers, tied.parameter, tied.stages[0])
            continue
        text = f"{' and '.join(tied.layers)} share {tied.parameter}"
        sums = f", whose sums take {num_bytes(tied.bytes_per_update)} and {seconds(tied.update_s)} per update"
        held = f"stages {' and '.join(map(str, tied.stages))} have a copy each"
        yield "tied", f"{text}: {held}{sums if tied.bytes_per_update else ''}"


def _not_kept(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the number of layers whose activations a plan swaps or recomputes."""
    for policy, word in ((SWAP, "swapped"), (RECOMPUTE, "recomputed")):
        counts = [(index, stage.memory.count(policy), len(stage.memory)) for index, stage in enumerate(plan.stages)]
        if total := sum(count for _, count, _ in counts):
            own = ", ".join(f"{count} of {of} of stage {index}" for index, count, of in counts if count)
            yield word, f"the activations of {total:,} layers: {own}"


def _activations(best: PlanEstimate) -> Iterator[tuple[str, str]]:
    """Yield the stages that don't keep all activations, and the costs of that."""
    heading = "activations"
    for index, stage in enumerate(best.stages):
        virtual = stage.virtual
        if virtual is None or not virtual.swapped + virtual.recomputed:
            continue
        parts = [f"{virtual.kept} layers kept"]
        if virtual.swapped:
            where = "hidden in its" if virtual.is_hidden else f"{seconds(virtual.waits_s)} longer than its"
            parts.append(
                f"{virtual.swapped} swapped: {num_bytes(virtual.swapped_bytes)} there and back in "
                f"{seconds(virtual.copies_s)}, {where} window of {seconds(virtual.window_s)}"
            )
        if virtual.recomputed:
            parts.append(f"{virtual.recomputed} recomputed: {seconds(virtual.again_s)}")
        yield heading, f"stage {index}: {'; '.join(parts)}"
        heading = ""


def _mode_table(answer: PlanFindings) -> Table:
    best = answer.comparison.best
    table = new_table("mode", "plan", f"{answer.units}/s", "of the fastest", "memory", f"bytes/{answer.unit}")
    for column in table.columns:
        column.no_wrap = column.header != "plan"
    fastest_s = min(found.minibatch_s for found in (best, *answer.comparison.others))
    for found in (best, *answer.comparison.others):
        update = f", {found.microbatches} microbatches" if found.microbatches > 1 else ""
        update += f", update per {found.accumulate}" if found.accumulate > 1 else ""
        counts = str(found.plan) == "straight" or len(found.stages) > 8
        stages = f" ({len(found.stages)} stages)" if counts else ""
        table.add_row(
            found.plan.mode,
            f"{shortened(str(found.plan), _PLAN_WIDTH)}{stages}{update}",
            number(_per_s(answer, found)),
            percent(quotient(fastest_s, found.minibatch_s)),
            num_bytes(found.memory_bytes),
            num_bytes(sum(found.num_bytes.values()) / answer.size),
            style="bold" if found is best else "",
        )
    return table


def _rest(answer: PlanFindings) -> Iterator[tuple[str, str]]:
    comparison = answer.comparison
    yield from comparison.refused.items()
    rest_s = max(0.0, answer.total_s - sum(comparison.took_s.values()))
    parts = {**comparison.took_s, "model, profile and the rest": rest_s}
    text = ", ".join(f"{name} {seconds(value)}" for name, value in parts.items())
    yield "took", f"{seconds(answer.total_s)}: {text}"


def _parts(found: PlanEstimate, bottleneck: Bottleneck) -> str:
    if not bottleneck.stages:
        return ""
    mine = [found.stages[index] for index in bottleneck.stages]
    of_workers = (stages for stages in found.by_position if stages[0] is not mine[0])
    others = sorted((sum(stage.stage_s for stage in stages) for stages in of_workers), reverse=True)
    following = "the next stage takes" if len(mine) == 1 else "those of the next worker take"
    compute_s, sync_s, transfer_s = (
        sum(getattr(stage, part) for stage in mine) for part in ("compute_s", "sync_s", "transfer_s")
    )
    whole_s, computed_s = sum(stage.stage_s for stage in mine), compute_s + sync_s
    if bottleneck.cause != WAITING and whole_s > computed_s * (1 + ALMOST):  # the rest, which includes latencies
        transfer_s = max(transfer_s, whole_s - computed_s)
    parts = f"computing {seconds(compute_s)}"
    parts += f", gradient sum {seconds(sync_s)}" if sync_s else ""
    parts += f", transfers {seconds(transfer_s)}" if transfer_s else ""
    return f" ({parts})" + (f"; {following} {seconds(others[0])}" if others else "")


def _prediction(found: PlanEstimate) -> str:
    if not found.is_simulated and found.minibatch_s == found.bottleneck_s:
        return "the bottleneck, as so large a plan isn't simulated"
    source = "in the simulator" if found.is_simulated else "by the cost model, as so large a plan isn't simulated"
    times = ratio(quotient(found.minibatch_s, found.bottleneck_s))
    return f"{seconds(found.minibatch_s)} per minibatch {source}, {times} the bottleneck"


def _why_it_differs(answer: PlanFindings, found: PlanEstimate) -> str:
    """Return why the simulated time differs from the bottleneck by more than a tenth; "" if it doesn't."""
    if not found.is_simulated or found.minibatch_s <= found.bottleneck_s * _DIFFERS:
        faster = found.is_simulated and found.minibatch_s * _DIFFERS < found.bottleneck_s
        return "faster than the bottleneck: the cost model charges for what the simulator overlaps" if faster else ""
    if answer.mode.flush and len(found.stages) > 1:
        every = f"{found.accumulate} minibatches" if found.accumulate > 1 else "minibatch"
        if answer.mode.depth == 1:
            return "slower than the bottleneck: one minibatch at a time, so one stage works and the others wait"
        return f"slower than the bottleneck: the pipeline fills and drains at every update, every {every}"
    if not SYNCS[answer.mode.sync].waits:
        return "slower than the bottleneck: all gradients and weights pass the port of one server"
    if len(found.stages) == 1:
        return "slower than the bottleneck: gradients that are summed late are not hidden behind the backward"
    if answer.spare_s is not None and answer.spare_s > found.minibatch_s / _HELPS:
        return "slower than the bottleneck: transfers of several stages take turns, which the cost model doesn't count"
    reason = (
        f"slower than the bottleneck: minibatches wait for transfers, and with {found.plan.depth} in flight per "
        f"input-stage replica ({'NOAM' if found.plan.depth == found.plan.noam else 'depth'}) none is to spare"
    )
    if answer.spare_s is not None:
        reason += f"; with parallelism.depth={found.plan.depth + 1} it would be {seconds(answer.spare_s)}"
    return reason


def _why_idle(answer: PlanFindings, best: PlanEstimate) -> str:
    given, used = answer.given, len(best.plan.devices)
    if given is not None and given.minibatch_s < best.minibatch_s and len(given.plan.devices) > used:
        return f"the recipe's plan uses {len(given.plan.devices):,} and is faster"
    return "no plan was found that fits, uses more and is faster"


def _at_best(answer: PlanFindings, best: PlanEstimate) -> str:
    """Return, as a sentence, by how much any other plan can be faster than this one."""
    gap = best.minibatch_s / best.at_least_s - 1
    more = f"more than {percent(gap)} faster" if gap >= _SEEN else "faster"
    if best.tried_all:
        in_flight = answer.request.depth or f"NOAM or {MOST_BEYOND_NOAM} more"
        return f"no plan with {in_flight} in flight is {more}: all that fit were simulated or ruled out"
    least = seconds(best.at_least_s)
    return f"no plan is {more}: computing and gradient sums of its slowest stage take at least {least}"


def _beside_dp(answer: PlanFindings, best: PlanEstimate, dp: PlanEstimate) -> str:
    fits = "" if "dp" not in answer.comparison.refused else ", and does not fit in memory"
    text = f"{_rate(answer, dp)}, {seconds(dp.minibatch_s)} per minibatch{fits}; "
    if best.plan.replicas == dp.plan.replicas and best.minibatch_s == dp.minibatch_s:
        return f"{text}the best plan is data parallelism on all workers"
    predicted, modelled = quotient(dp.minibatch_s, best.minibatch_s), quotient(dp.bottleneck_s, best.bottleneck_s)
    if predicted is None or modelled is None:
        return f"{text}no speed-up can be given"
    text += f"the plan is {ratio(predicted)} as fast"
    far = max(predicted, modelled) > min(predicted, modelled) * _DIFFERS
    return text + (f" ({ratio(modelled)} by the bottlenecks alone, {seconds(dp.bottleneck_s)} for dp)" if far else "")


def _rate(answer: PlanFindings, found: PlanEstimate) -> str:
    return f"{number(_per_s(answer, found))} {answer.units}/s"


def _per_s(answer: PlanFindings, found: PlanEstimate) -> float:
    return answer.size / found.minibatch_s


def _bytes_text(answer: PlanFindings, found: PlanEstimate) -> str:
    sent = {kind: found.num_bytes.get(kind, 0.0) for kind in TRAINING_KINDS}
    kinds = [f"{kind} {num_bytes(total / answer.size)}" for kind, total in sent.items() if total]
    total = sum(found.num_bytes.values()) / answer.size
    return f"{num_bytes(total)}{' (' + ', '.join(kinds) + ')' if len(kinds) > 1 else ''}" if kinds else "nothing"


def _cluster_text(cluster: Cluster) -> str:
    levels = ", then ".join(
        f"{level.count} at {num_bytes(level.bandwidth_bytes_per_s)}/s"
        + (f" x {level.efficiency:g}" if level.efficiency != 1 else "")
        + (f" and {seconds(level.latency_s)}" if level.latency_s else "")
        + _limits_text(level)
        for level in cluster.levels
    )
    memory = "no memory limit" if cluster.memory_bytes is None else f"{num_bytes(cluster.memory_bytes)} each"
    return f"{cluster.num_workers:,} workers: {levels}; {memory}"


def _limits_text(level: Level) -> str:
    limits = {
        "a connection": level.flow_bytes_per_s,
        "a message": level.p2p_bytes_per_s,
        "a sum": level.ring_bytes_per_s,
        "a stage's sum": level.stage_ring_bytes_per_s,
        "copied to hosts": level.host_copy_bytes_per_s,
    }
    given = ", ".join(f"{what} {num_bytes(rate)}/s" for what, rate in limits.items() if rate is not None)
    return f" ({given})" if given else ""


_OF_RUNS = (
    *("run", "plan", "mode", "workers", "depth"),
    *("samples/s", "vs first", "memory", "sent/sample", "bottleneck", "of"),
)


def print_plans(answers: Sequence[PlanFindings], refused: Mapping[str, str], console: Console) -> None:
    """Print a row per run with its plan: the recipe's if it names one, else the best.

    Args:
        answers: one per run.
        refused: runs without a plan, and the reason.
        console: where to print.
    """
    print_table(console, _run_table(answers))
    print_facts(console, refused.items())


def _run_table(answers: Sequence[PlanFindings]) -> Table:
    named = any(answer.given is not None for answer in answers)
    table = new_table(*_OF_RUNS, *(("best", "as fast") if named else ()))
    taken = [answer.given or answer.comparison.best for answer in answers]
    for answer, found in zip(answers, taken, strict=True):
        best = answer.comparison.best
        cells = [
            answer.name,
            shortened(str(found.plan), _PLAN_WIDTH),
            found.plan.mode,
            f"{len(found.plan.devices):,}",
            f"{found.plan.depth}",
            number(_per_s(answer, found)),
            ratio(_per_s(answer, found) / _per_s(answers[0], taken[0])),
            num_bytes(found.memory_bytes),
            num_bytes(sum(found.num_bytes.values()) / answer.size),
            seconds(found.bottleneck_s),
            str(bottleneck_of(answer, found)),
        ]
        if named:
            cells += [_best_beside(found, best), ratio(_per_s(answer, best) / _per_s(answer, found))]
        table.add_row(*cells)
    return table


def _best_beside(found: PlanEstimate, best: PlanEstimate) -> str:
    """Return the best plan, and how it differs from the row's own plan if both have the same notation."""
    text, own, other = shortened(str(best.plan), _PLAN_WIDTH), found.plan, best.plan
    if str(own) != str(other):
        return text
    if own.replicas != other.replicas:  # straight ones
        return f"{text} ({len(other.positions)} stages)"
    if own.depth != other.depth:
        return f"{text}, depth {other.depth}"
    return text if own.stages == other.stages else f"{text}, cut elsewhere"
