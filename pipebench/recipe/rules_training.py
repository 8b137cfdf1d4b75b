"""Rules on combinations of training, parallelism and engine keys."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipebench.errors import Fault, PlanError, RecipeError, choice, nearest
from pipebench.lines import LinedFile
from pipebench.recipe.draft import Problems, rule
from pipebench.recipe.named import KINDS, OPTIMIZER
from pipebench.recipe.plan_file import form_problems, is_plan_file, load_plan
from pipebench.recipe.ranges import TRACKERS
from pipebench.recipe.schema import COLUMNS, LARGEST, OptimizerRecipe, ParallelismRecipe
from pipebench.recipe.suited import DIRECTED, gives_direction, moves_little, sends_weights
from pipebench.recipe.typecheck import shown
from pipebench.schedule.modes import AUTO, MODES
from pipebench.schedule.notation import parse_plan
from pipebench.schedule.orders import ORDERS, order_of
from pipebench.schedule.pipeline import SPLIT, WHOLE
from pipebench.schedule.syncs import SYNCS
from pipebench.schedule.weights import WEIGHT_POLICIES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
MAX_THREADS = 1024


@rule("name")
def _name(name: str) -> Problems:
    if not _NAME.fullmatch(name):
        yield "name", f"got {shown(name)}, allowed are letters, digits, '.', '_' and '-', at most 100"


@rule("tracking")
def _tracking(names: Sequence[str]) -> Problems:
    yield from (("tracking", choice(name[:60], TRACKERS)) for name in names if name not in TRACKERS)
    if "mlflow" not in names:
        why = "`pipebench compare`, reports and `--resume` read runs from it"
        yield "tracking", f"got {shown(names)}, mlflow has to be among them: {why}"


@rule("train.schedule.warmup_epochs", "train.max_epochs")
def _warmup(warmup_epochs: float, max_epochs: int) -> Problems:
    if warmup_epochs > max_epochs:
        yield "train.schedule.warmup_epochs", f"got {warmup_epochs:g}, allowed are 0 to max_epochs, {max_epochs}"


@rule("train.evaluate_every", "train.checkpoint_every", "train.schedule.step_every")
def _periods(
    evaluate_every: Mapping[str, Any], checkpoint_every: Mapping[str, Any] | None, step_every: Mapping[str, Any] | None
) -> Problems:
    periods = (
        ("evaluate_every", evaluate_every), ("checkpoint_every", checkpoint_every), ("schedule.step_every", step_every),
    )  # fmt: skip
    for name, period in periods:
        given = [key for key, value in (period or {}).items() if value is not None]
        if period is not None and len(given) != 1:
            both = "both" if given else "neither"
            yield f"train.{name}", f"got {both} of epochs and minibatches, allowed is exactly one"


@rule(*(f"parallelism.{name}" for name in ("mode", "plan", "depth", *COLUMNS)))
def _mode_auto(mode: str, plan: Any, depth: Any, *columns: Any) -> Problems:
    if mode != AUTO:
        return
    if plan != AUTO:
        yield "parallelism.plan", f"got {shown(plan)} with mode auto, which plans every mode: allowed is auto"
    if depth != AUTO:
        yield "parallelism.depth", f"got {shown(depth)} with mode auto: allowed is auto"
    for name, value in zip(COLUMNS, columns, strict=True):
        if value is not None:
            yield (
                f"parallelism.{name}",
                f"got {shown(value)} with mode auto, which takes rows as they are: allowed is null",
            )


@rule(
    "@cluster",
    *(f"parallelism.{name}" for name in ("mode", "plan", "cuts", "depth", "recompute", "chunks", "backward")),
    *(f"parallelism.{name}" for name in ("recompute_layers", "swap_layers")),
)
def _plan_in_file(
    cluster: Any,
    mode: str,
    given: Any,
    cuts: list[str] | None,
    depth: Any,
    recompute: bool | None,
    chunks: int | None,
    backward: str | None,
    recompute_layers: list[str] | None,
    swap_layers: list[str] | None,
) -> Problems:
    """Check a plan file as far as possible without the model."""
    if mode == AUTO or not is_plan_file(given):
        return
    says_itself = {
        "cuts": (cuts, "where stages begin"),
        "recompute_layers": (recompute_layers, "what is recomputed"),
        "swap_layers": (swap_layers, "what is swapped"),
    }
    for name, (value, what) in says_itself.items():
        if value is not None:
            why = f"got {shown(value)} with a plan's file, which says itself {what}"
            yield f"parallelism.{name}", f"{why}: allowed is null"
    try:
        form = load_plan(given)
    except RecipeError as error:
        yield from (("parallelism.plan", str(fault)) for fault in error.faults)
        return
    asked = ParallelismRecipe(mode, given, depth=depth, recompute=recompute, chunks=chunks, backward=backward)
    problems = form_problems(form, asked, cluster.num_workers)
    for where, problem in problems:
        yield "parallelism.plan", str(Fault(LinedFile(given), where, problem))


@rule("@cluster", "parallelism.mode", "parallelism.plan", "parallelism.cuts", "parallelism.chunks")
def _plan(cluster: Any, mode: str, plan: Any, cuts: list[str] | None, chunks: int | None) -> Problems:
    if is_plan_file(plan):
        return
    if mode == AUTO or (plan == AUTO and MODES[mode].shape not in ("one", "one-stage")):
        if cuts is not None:
            given = f"got {shown(cuts)} with plan auto, which cuts by itself"
            yield "parallelism.cuts", f"{given}: allowed is null, or a plan such as straight or 2-1-1"
        return
    try:
        replicas = parse_plan(plan, MODES[mode], cluster.num_workers)
    except PlanError as error:
        yield "parallelism.plan", f"{error} (mode {mode}, {cluster.num_workers} workers)"
        return
    if MODES[mode].shape == "one-stage" and chunks is None:
        return  # cuts say how many groups of layers there are
    per_worker = chunks or MODES[mode].chunks
    num_stages = len(replicas) * per_worker
    if cuts is not None and len(cuts) != num_stages - 1:
        stages = f"{num_stages} stages" + (f", {per_worker} per worker," if per_worker > 1 else "")
        needed = f"{num_stages - 1}, the first layer of every stage but the first"
        yield "parallelism.cuts", f"got {len(cuts)} cuts, a plan of {stages} needs {needed}"
    if cuts is not None and len(set(cuts)) != len(cuts):
        yield "parallelism.cuts", f"got {shown(cuts)}, allowed is every layer once"


@rule("parallelism.mode", "parallelism.recompute", "parallelism.recompute_layers")
def _recompute(mode: str, recompute: bool | None, layers: list[str] | None) -> Problems:
    if layers is None:
        return
    if mode == AUTO:
        given = f"got {shown(layers)} with mode auto, which takes rows as they are"
        yield "parallelism.recompute_layers", f"{given}: allowed is null"
    if recompute is not None:
        given = f"got {str(recompute).lower()} with recompute_layers, which says what is recomputed"
        yield "parallelism.recompute", f"{given}: allowed is null"


@rule("parallelism.mode", "parallelism.backward", "parallelism.swap_layers")
def _swap(mode: str, backward: str | None, layers: list[str] | None) -> Problems:
    if layers is None:
        return
    if mode == AUTO:
        given = f"got {shown(layers)} with mode auto, which takes rows as they are"
        yield "parallelism.swap_layers", f"{given}: allowed is null"
    elif (backward or MODES[mode].backward) == SPLIT:
        given = f"got {shown(layers)} with backward split, whose weight parts keep what the layers read"
        yield "parallelism.swap_layers", f"{given}: allowed is null"


@rule(*(f"parallelism.{name}" for name in ("mode", "sync", "push_order")))
def _push_order(mode: str, sync: str | None, given: str | None) -> Problems:
    """An order of pushes needs a sync that leaves the order open."""
    if given is not None and (mode == AUTO or SYNCS[sync or MODES[mode].sync].waits):
        syncs = " or ".join(name for name, each in SYNCS.items() if not each.waits)
        yield "parallelism.push_order", f"got {shown(given)}, which only sync {syncs} takes: allowed is null"


@rule("parallelism.depth")
def _depth(depth: Any) -> Problems:
    if depth != "auto" and (isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= 2**31):
        yield "parallelism.depth", f"got {shown(depth)}, allowed is auto (NOAM) or a whole number of at least 1"


@rule("parallelism.accumulate")
def _accumulate(accumulate: Any) -> Problems:
    is_count = isinstance(accumulate, int) and not isinstance(accumulate, bool) and 1 <= accumulate <= 2**31
    if accumulate not in (None, LARGEST) and not is_count:
        allowed = f"allowed is a whole number of at least 1, {LARGEST} or null{nearest(accumulate, [LARGEST])}"
        yield "parallelism.accumulate", f"got {shown(accumulate)}, {allowed}"


@rule(*(f"parallelism.{name}" for name in ("mode", "order", "flush", "weights", "sync", "chunks", "backward")))
def _columns(
    mode: str,
    order: str | None,
    flush: bool | None,
    weights: str | None,
    sync: str | None,
    chunks: int | None,
    backward: str | None,
) -> Problems:
    """Order, weights, sync, chunks, backward and flush must be compatible."""
    if mode == AUTO:
        return
    row = MODES[mode]
    names = ("order", "flush", "weights", "sync", "chunks", "backward")
    given = dict(zip(names, (order, flush, weights, sync, chunks, backward), strict=True))
    order, weights, sync = order or row.order, weights or row.weights, sync or row.sync
    flush, chunks = row.flush if flush is None else flush, chunks or row.chunks
    told = "a flush" if flush else "no flush"

    def blamed(*names: str) -> str:
        return f"parallelism.{next((name for name in names if given[name] is not None), names[0])}"

    work = order_of(order)
    if work.needs_flush and not flush:
        others = [name for name, each in ORDERS.items() if not each.needs_flush]
        allowed = f"flush: true, or order: {' or '.join(others)}"
        yield blamed("order", "flush"), f"got order {order} with {told}, it ends in one: allowed is {allowed}"
    if WEIGHT_POLICIES[weights].needs_flush != flush:
        others = [name for name, each in WEIGHT_POLICIES.items() if each.needs_flush == flush]
        allowed = f"flush: {str(not flush).lower()}, or weights: {' or '.join(others)}"
        yield blamed("weights", "flush"), f"got weights {weights} with {told}: allowed is {allowed}"
    waits = SYNCS[sync].waits
    if WEIGHT_POLICIES[weights].waits != waits:
        policies = [name for name, each in WEIGHT_POLICIES.items() if each.waits == waits]
        syncs = [name for name, each in SYNCS.items() if each.waits != waits]
        allowed = f"weights: {' or '.join(policies)}, or sync: {' or '.join(syncs)}"
        yield blamed("sync", "weights"), f"got sync {sync} with weights {weights}: allowed is {allowed}"
    elif not waits and row.shape != "one-stage":
        modes = " or ".join(name for name, each in MODES.items() if each.shape == "one-stage")
        yield blamed("sync"), f"got sync {sync} with mode {mode}, it is for data parallelism: allowed is mode {modes}"
    if not waits and (backward or row.backward) == SPLIT:
        told_sync = f"got backward {SPLIT} with sync {sync}, whose pushes end a backward"
        yield blamed("backward", "sync"), f"{told_sync}: allowed is backward: {WHOLE}"
    if work.chunks not in (None, chunks):
        others = [name for name, each in ORDERS.items() if each.chunks in (None, chunks)]
        allowed = f"chunks: {work.chunks}, or order: {' or '.join(others)}"
        yield blamed("chunks", "order"), f"got {chunks} chunks with order {order}: allowed is {allowed}"
    if work.splits and (backward or row.backward) != SPLIT:
        others = [name for name, each in ORDERS.items() if not each.splits]
        allowed = f"backward: {SPLIT}, or order: {' or '.join(others)}"
        given_with = f"got order {order} with backward {backward or row.backward}, it runs the parts of one apart"
        yield blamed("backward", "order"), f"{given_with}: allowed is {allowed}"


@rule(
    "parallelism.mode",
    "parallelism.flush",
    "parallelism.weights",
    "parallelism.microbatches",
    "parallelism.accumulate",
)
def _microbatches(
    mode: str, flush: bool | None, weights: str | None, microbatches: int, accumulate: int | None
) -> Problems:
    if mode == AUTO:
        return
    row = MODES[mode]
    flush, policy = row.flush if flush is None else flush, WEIGHT_POLICIES[weights or row.weights]
    takers = [name for name, each in MODES.items() if each.microbatches]
    if microbatches > 1 and not row.cuts(flush, weights):
        why = f"mode {mode} doesn't cut minibatches" if flush else f"mode {mode} has no flush here"
        yield "parallelism.microbatches", f"got {microbatches}, {why}: allowed is 1, or mode {' or '.join(takers)}"
    if (row.accumulate if accumulate is None else accumulate) != 1 and not flush and not policy.accumulates:
        others = [name for name, each in WEIGHT_POLICIES.items() if each.accumulates]
        allowed = f"1, flush: true, or weights: {' or '.join(others)}"
        given = "null, as many minibatches as are in flight" if accumulate is None else accumulate
        yield "parallelism.accumulate", f"got {given}, mode {mode} has no flush here: allowed is {allowed}"


@rule("parallelism.mode", "parallelism.weights", "train.optimizer")
def _direction(mode: str, weights: str | None, optimizer: Mapping[str, Any]) -> Problems:
    """Weight prediction needs an optimizer whose state has the direction of its next step."""
    if mode == AUTO or WEIGHT_POLICIES[weights or MODES[mode].weights].aim is None:
        return
    given = OptimizerRecipe(**optimizer)
    is_known = given.target if given.name is None else KINDS[OPTIMIZER].find(given.name)
    if is_known and not gives_direction(given):
        key, said = ("target", given.target) if given.name is None else ("name", given.name)
        said = f"{said} without momentum" if said == "sgd" else shown(said)
        needed = f"allowed are {', '.join(DIRECTED)}, or weights that aren't predicted, such as stash"
        predicted = f"weights {weights or MODES[mode].weights} are predicted by that"
        why = f"whose state doesn't say where weights go, and {predicted}"
        yield f"train.optimizer.{key}", f"got {said}, {why}: {needed}"


@rule("train.precision", "train.loss_scale")
def _loss_scale(precision: str, loss_scale: Any) -> Problems:
    if loss_scale is not None and precision != "fp16":
        yield "train.loss_scale", f"is for precision fp16, got {precision}: allowed is null"


@rule("parallelism.mode", "parallelism.weights", "parallelism.sync", "train.precision")
def _rounded(mode: str, weights: str | None, sync: str | None, precision: str) -> Problems:
    """Small weight changes vanish in 16 bits, and servers hold weights of one type."""
    if precision == "fp32" or mode == AUTO:
        return
    if why := moves_little(weights or MODES[mode].weights):
        yield "train.precision", f"got {precision}, and {why}: allowed is fp32, or weights such as stash"
    if why := sends_weights(sync or MODES[mode].sync):
        yield "train.precision", f"got {precision}, and {why}: allowed is fp32, or another sync"


@rule(
    "parallelism.mode",
    "parallelism.weights",
    "parallelism.annealing_epochs",
    "parallelism.correction_decay",
)
def _correction(mode: str, weights: str | None, annealing_epochs: float | None, decay: float | None) -> Problems:
    policy = None if mode == AUTO else weights or MODES[mode].weights
    if policy is not None and WEIGHT_POLICIES[policy].corrects:
        return
    takers = " or ".join(name for name, each in WEIGHT_POLICIES.items() if each.corrects)
    why = f"which only weights {takers} take; {'mode auto' if policy is None else f'weights {policy}'} needs null"
    for key, value in (("annealing_epochs", annealing_epochs), ("correction_decay", decay)):
        if value is not None:
            yield f"parallelism.{key}", f"got {value:g}, {why}"


@rule("train.minibatch_size", "parallelism.microbatches")
def _divisible(minibatch_size: int, microbatches: int) -> Problems:
    if minibatch_size % microbatches:
        divisors = [str(n) for n in range(1, min(minibatch_size, 4096) + 1) if minibatch_size % n == 0][:12]
        problem = f"got {microbatches}, which doesn't divide minibatch_size {minibatch_size}"
        yield "parallelism.microbatches", f"{problem}, allowed are {', '.join(divisors)}"


@rule("engine.threads")
def _threads(threads: Any) -> Problems:
    if threads != "auto" and (
        isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS
    ):
        yield "engine.threads", f"got {shown(threads)}, allowed is auto or a whole number from 1 to {MAX_THREADS}"
