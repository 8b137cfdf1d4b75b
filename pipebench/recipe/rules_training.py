"""Rules on training, on plans, and on the columns of the table of modes that a recipe changes."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipebench.errors import Fault, PlanError, RecipeError, nearest, shown
from pipebench.lines import LinedFile
from pipebench.recipe.draft import Draft, Problems, either, rule
from pipebench.recipe.named import KINDS, OPTIMIZER
from pipebench.recipe.plan_file import asked_replicas, form_problems, is_plan_file, load_plan
from pipebench.recipe.schema import COLUMNS, LARGEST, OptimizerRecipe, ParallelismRecipe
from pipebench.recipe.suited import DIRECTED, gives_direction, moves_little, sends_weights
from pipebench.schedule.modes import AUTO, MODES, Mode
from pipebench.schedule.notation import parse_plan
from pipebench.schedule.orders import ORDERS, order_of
from pipebench.schedule.pipeline import SPLIT, WHOLE
from pipebench.schedule.syncs import SYNCS
from pipebench.schedule.weights import WEIGHT_POLICIES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
MAX_THREADS = 1024


@rule
def _name(name: str) -> Problems:
    if not _NAME.fullmatch(name):
        yield "name", f"got {shown(name)}, allowed are letters, digits, '.', '_' and '-', at most 100"


@rule
def _tracking(tracking: Sequence[str]) -> Problems:
    if "mlflow" not in tracking:
        why = "`pipebench compare`, reports and `--resume` read runs from it"
        yield "tracking", f"got {shown(tracking)}, mlflow has to be among them: {why}"


@rule
def _warmup(warmup_epochs: float, max_epochs: int) -> Problems:
    if warmup_epochs > max_epochs:
        yield "train.schedule.warmup_epochs", f"got {warmup_epochs:g}, allowed are 0 to max_epochs, {max_epochs}"


@rule
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


@rule
def _mode_auto(draft: Draft, mode: str, plan: Any, depth: Any, accumulate: Any, engine__compile: bool) -> Problems:
    if mode != AUTO:
        return
    if engine__compile:
        yield "parallelism.mode", "got auto with engine.compile, which some modes don't support: allowed is a mode"
    if accumulate == LARGEST:
        why = f"got {LARGEST} with mode {AUTO}, which plans every mode"
        yield "parallelism.accumulate", f"{why}: allowed is a whole number"
    if plan != AUTO:
        yield "parallelism.plan", f"got {shown(plan)} with mode auto, which plans every mode: allowed is auto"
    if depth != AUTO:
        yield "parallelism.depth", f"got {shown(depth)} with mode auto: allowed is auto"
    for name, value in draft.given("parallelism", *COLUMNS, "recompute_layers", "swap_layers").items():
        why = f"got {shown(value)} with mode auto, which plans every mode as it is"
        yield f"parallelism.{name}", f"{why}: allowed is null"


# Keys for what a plan's file says itself.
_IN_FILES = {"cuts": "where stages begin", "recompute_layers": "what is recomputed", "swap_layers": "what is swapped"}


@rule
def _plan_in_file(draft: Draft, cluster: Any, mode: str, row: Mode, plan: Any, depth: Any) -> Problems:
    """Check a plan file as far as possible without the model."""
    if not is_plan_file(plan):
        return
    for name, value in draft.given("parallelism", *_IN_FILES).items():
        why = f"got {shown(value)} with a plan's file, which says itself {_IN_FILES[name]}"
        yield f"parallelism.{name}", f"{why}: allowed is null"
    try:
        form = load_plan(plan)
    except RecipeError as error:
        yield from (("parallelism.plan", str(fault)) for fault in error.faults)
        return
    asked = ParallelismRecipe(
        mode, plan, depth=depth, **draft.given("parallelism", "recompute", "chunks", "backward", "shard")
    )
    for where, problem in form_problems(form, asked, cluster.num_workers):
        yield "parallelism.plan", str(Fault(LinedFile(plan), where, problem))


@rule
def _plan(cluster: Any, mode: str, plan: Any, cuts: list[str] | None) -> Problems:
    if is_plan_file(plan):
        return
    if mode == AUTO or (plan == AUTO and not MODES[mode].is_one_stage):
        if cuts is not None:
            given = f"got {shown(cuts)} with plan auto, which cuts by itself"
            yield "parallelism.cuts", f"{given}: allowed is null, or a plan such as straight or 2-1-1"
        return
    try:
        parse_plan(plan, MODES[mode], cluster.num_workers)
    except PlanError as error:
        yield "parallelism.plan", f"{error} (mode {mode}, {cluster.num_workers} workers)"


@rule
def _cuts(cluster: Any, row: Mode, plan: Any, cuts: list[str] | None) -> Problems:
    """Check that there are cuts for all stages; with sharded data parallelism they give the number of groups, too."""
    if cuts is None or is_plan_file(plan):
        return
    try:
        replicas = asked_replicas(plan, row, cluster.num_workers)
    except PlanError:
        return
    if replicas is None:
        return
    num_stages = len(replicas) * row.chunks
    if len(cuts) != num_stages - 1:
        stages = f"{num_stages} stage{'s' * (num_stages > 1)}"
        stages += f", {row.chunks} per worker," if row.chunks > 1 else ""
        needed = f"{num_stages - 1}, the first layer of every stage but the first"
        yield "parallelism.cuts", f"got {len(cuts)} cut{'s' * (len(cuts) != 1)}, a plan of {stages} needs {needed}"
    if len(set(cuts)) != len(cuts):
        yield "parallelism.cuts", f"got {shown(cuts)}, allowed is every layer once"


@rule
def _recompute(recompute: bool | None, recompute_layers: list[str] | None) -> Problems:
    if recompute_layers is not None and recompute is not None:
        given = f"got {str(recompute).lower()} with recompute_layers, which says what is recomputed"
        yield "parallelism.recompute", f"{given}: allowed is null"


@rule
def _swap(row: Mode, swap_layers: list[str] | None) -> Problems:
    if swap_layers is not None and row.backward == SPLIT:
        given = f"got {shown(swap_layers)} with backward split, whose weight parts keep what the layers read"
        yield "parallelism.swap_layers", f"{given}: allowed is null"


@rule
def _push_order(mode: str, sync: str | None, push_order: str | None) -> Problems:
    """Check that an order of pushes goes with a sync that leaves this order open."""
    if push_order is not None and (mode == AUTO or SYNCS[sync or MODES[mode].sync].waits):
        syncs = either(SYNCS, lambda each: not each.waits)
        yield "parallelism.push_order", f"got {shown(push_order)}, which only sync {syncs} takes: allowed is null"


@rule
def _depth(depth: Any) -> Problems:
    if depth != "auto" and not (type(depth) is int and 1 <= depth <= 2**31):
        yield "parallelism.depth", f"got {shown(depth)}, allowed is auto (NOAM) or a whole number of at least 1"


@rule
def _accumulate(accumulate: Any) -> Problems:
    is_count = type(accumulate) is int and 1 <= accumulate <= 2**31
    if accumulate not in (None, LARGEST) and not is_count:
        allowed = f"allowed is a whole number of at least 1, {LARGEST} or null{nearest(accumulate, [LARGEST])}"
        yield "parallelism.accumulate", f"got {shown(accumulate)}, {allowed}"


def _blamed(given: Mapping[str, Any], *names: str) -> str:
    """Return the key of the first of some columns that the recipe gives, or of the first one."""
    return f"parallelism.{next((name for name in names if name in given), names[0])}"


@rule
def _work(draft: Draft, row: Mode) -> Problems:
    """Check what an order of work needs: a flush, a number of stages per worker, or backwards in two parts."""
    work, order, given = order_of(row.order), row.order, draft.given("parallelism", *COLUMNS)
    if work.needs_flush and not row.flush:
        allowed = f"flush: true, or order: {either(ORDERS, lambda each: not each.needs_flush)}"
        given_text = f"got order {order} without a flush, which it ends in"
        yield _blamed(given, "order", "flush"), f"{given_text}: allowed is {allowed}"
    if work.chunks not in (None, row.chunks):
        orders = either(ORDERS, lambda each: each.chunks in (None, row.chunks))
        allowed = f"chunks: {work.chunks}, or order: {orders}"
        yield _blamed(given, "chunks", "order"), f"got {row.chunks} chunks with order {order}: allowed is {allowed}"
    if work.splits and row.backward != SPLIT:
        allowed = f"backward: {SPLIT}, or order: {either(ORDERS, lambda each: not each.splits)}"
        given_with = f"got order {order} with backward {row.backward}, whose parts it runs apart"
        yield _blamed(given, "backward", "order"), f"{given_with}: allowed is {allowed}"


@rule
def _weights_and_sync(draft: Draft, mode: str, row: Mode) -> Problems:
    """Check that weights and sync go together, and both with the flush, the shape of the mode and its backward."""
    weights, sync, flush, waits = row.weights, row.sync, row.flush, SYNCS[row.sync].waits
    given = draft.given("parallelism", *COLUMNS)
    if WEIGHT_POLICIES[weights].needs_flush != flush:
        policies = either(WEIGHT_POLICIES, lambda policy: policy.needs_flush == flush)
        allowed = f"flush: {str(not flush).lower()}, or weights: {policies}"
        given_text = f"got weights {weights} with {'a flush' if flush else 'no flush'}"
        yield _blamed(given, "weights", "flush"), f"{given_text}: allowed is {allowed}"
    if WEIGHT_POLICIES[weights].waits != waits:
        policies = either(WEIGHT_POLICIES, lambda policy: policy.waits == waits)
        allowed = f"weights: {policies}, or sync: {either(SYNCS, lambda each: each.waits != waits)}"
        yield _blamed(given, "sync", "weights"), f"got sync {sync} with weights {weights}: allowed is {allowed}"
    elif not waits and row.shape != "one-stage":
        given_text = f"got sync {sync} with mode {mode}, which is for data parallelism only"
        modes = either(MODES, lambda each: each.shape == "one-stage")
        yield "parallelism.sync", f"{given_text}: allowed is mode {modes}"
    if not waits and row.backward == SPLIT:
        given_text = f"got backward {SPLIT} with sync {sync}, whose pushes end a backward"
        yield _blamed(given, "backward", "sync"), f"{given_text}: allowed is backward: {WHOLE}"


@rule
def _microbatches(mode: str, row: Mode, microbatches: int, accumulate: int | None) -> Problems:
    if microbatches > 1 and not row.takes_microbatches(row.flush, row.weights):
        why = f"mode {mode} doesn't cut minibatches" if row.flush else f"mode {mode} has no flush here"
        modes = either(MODES, lambda each: each.microbatches)
        yield "parallelism.microbatches", f"got {microbatches}, {why}: allowed is 1, or mode {modes}"
    accumulates = row.flush or WEIGHT_POLICIES[row.weights].accumulates
    if (row.accumulate if accumulate is None else accumulate) != 1 and not accumulates:
        allowed = f"1, flush: true, or weights: {either(WEIGHT_POLICIES, lambda policy: policy.accumulates)}"
        given = "null, as many minibatches as are in flight" if accumulate is None else accumulate
        yield "parallelism.accumulate", f"got {given}, mode {mode} has no flush here: allowed is {allowed}"


@rule
def _direction(row: Mode, optimizer: Mapping[str, Any]) -> Problems:
    """Check that predicted weights go with an optimizer whose state has the direction of its next step."""
    if WEIGHT_POLICIES[row.weights].aim is None:
        return
    given = OptimizerRecipe(**optimizer)
    is_known = given.target if given.name is None else KINDS[OPTIMIZER].find(given.name)
    if is_known and not gives_direction(given):
        key, said = ("target", given.target) if given.name is None else ("name", given.name)
        said = f"{said} without momentum" if said == "sgd" else shown(said)
        needed = f"allowed are {', '.join(DIRECTED)}, or weights that aren't predicted, such as stash"
        why = f"whose state has no direction of the next step, by which weights {row.weights} are predicted"
        yield f"train.optimizer.{key}", f"got {said}, {why}: {needed}"


@rule
def _loss_scale(precision: str, loss_scale: Any) -> Problems:
    if loss_scale is not None and precision != "fp16":
        yield "train.loss_scale", f"is for precision fp16, got {precision}: allowed is null"


@rule
def _rounded(row: Mode, precision: str) -> Problems:
    """Check that 16 bits suffice: small changes of weights vanish in them, and servers hold weights of one type."""
    if precision == "fp32":
        return
    if why := moves_little(row.weights):
        yield "train.precision", f"got {precision}, and {why}: allowed is fp32, or weights such as stash"
    if why := sends_weights(row.sync):
        yield "train.precision", f"got {precision}, and {why}: allowed is fp32, or another sync"


@rule
def _correction(draft: Draft, mode: str, weights: str | None) -> Problems:
    policy = None if mode == AUTO else weights or MODES[mode].weights
    if policy is not None and WEIGHT_POLICIES[policy].corrects:
        return
    takers = either(WEIGHT_POLICIES, lambda each: each.corrects)
    why = f"which only weights {takers} take; {'mode auto' if policy is None else f'weights {policy}'} needs null"
    for key, value in draft.given("parallelism", "annealing_epochs", "correction_decay").items():
        yield f"parallelism.{key}", f"got {value:g}, {why}"


@rule
def _divisible(minibatch_size: int, microbatches: int) -> Problems:
    if minibatch_size % microbatches:
        divisors = [str(n) for n in range(1, min(minibatch_size, 4096) + 1) if minibatch_size % n == 0][:12]
        problem = f"got {microbatches}, which doesn't divide minibatch_size {minibatch_size}"
        yield "parallelism.microbatches", f"{problem}, allowed are {', '.join(divisors)}"


@rule
def _threads(threads: Any) -> Problems:
    if threads != "auto" and not (type(threads) is int and 1 <= threads <= MAX_THREADS):
        yield "engine.threads", f"got {shown(threads)}, allowed is auto or a whole number from 1 to {MAX_THREADS}"
