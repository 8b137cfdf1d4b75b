"""A run in the form of MLPerf Training's logs: a `:::MLLOG` line per event, on the run's clock.

The lines are for tools that read such logs, and are no submission. The checker of the package `mlperf-logging` accepts
them for models that one of its rulesets has, in the open division, where data, batch and optimizer may differ. The
ruleset is the newest that has the model.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pipebench.train.result import REACHED, RunResult

FILE = "mlperf.log"
_POINT, _START, _END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"


class _Benchmark(NamedTuple):
    """A benchmark of MLPerf Training."""

    name: str  # in MLPerf's logs
    ruleset: str  # the newest that has it
    metric: str  # of the data set, logged as MLPerf's `eval_accuracy`


_BENCHMARKS = {
    "resnet50": _Benchmark("resnet", "4.0.0", "top1"),
    **dict.fromkeys(("gnmt8", "gnmt16"), _Benchmark("gnmt", "0.7.0", "bleu")),
    **dict.fromkeys(("transformer", "transformer_big"), _Benchmark("transformer", "0.7.0", "bleu")),
    **dict.fromkeys(("bert_base", "bert_large"), _Benchmark("bert", "5.0.0", "nsp_accuracy")),
}
# MLPerf's names of the optimizer's keys, and a recipe's.
_OPTIMIZER = {"opt_name": "name", "opt_base_learning_rate": "lr", "opt_weight_decay": "weight_decay"}


def mlperf_log(result: RunResult, num_train: int, num_eval: int, began_ms: int) -> str:
    """Return the log of a run that trained; the first line is a comment on which ruleset accepts it, if any.

    Args:
        result: of the run, with its recipe.
        num_train: samples of an epoch.
        num_eval: samples of an evaluation.
        began_ms: when the run's clock started, milliseconds since the epoch.
    """
    model = result.recipe.get("model.name", "null")
    benchmark = _BENCHMARKS.get(model)
    checked = f"python -m mlperf_logging.compliance_checker --ruleset {benchmark.ruleset} {FILE}" if benchmark else ""
    about = (
        f"MLPerf Training {benchmark.ruleset}, {benchmark.name}, open division, no submission: {checked}"
        if benchmark
        else f"no ruleset of MLPerf Training has {'this model' if model == 'null' else model}: its checker refuses this"
    )
    events = [*_header(result, benchmark, num_train, num_eval), *_training(result, benchmark, num_train)]
    lines = [f"# {about} (times are of the {result.clock} clock)", *(_line(began_ms, *each) for each in events)]
    return "\n".join(lines) + "\n"


_Event = tuple[float, str, str, Any, Mapping[str, Any]]  # seconds, type, key, value, metadata


def _line(began_ms: int, at_s: float, kind: str, key: str, value: Any, metadata: Mapping[str, Any]) -> str:
    entry = {"namespace": "pipebench", "time_ms": began_ms + round(1000 * at_s), "event_type": kind}
    return f":::MLLOG {json.dumps({**entry, 'key': key, 'value': value, 'metadata': dict(metadata)})}"


def _header(result: RunResult, benchmark: _Benchmark | None, num_train: int, num_eval: int) -> Iterator[_Event]:
    """Yield the events before training."""
    recipe = result.recipe
    facts = {
        "cache_clear": False,  # the system's caches are not cleared
        "submission_org": "pipebench (no submission)",
        "submission_platform": f"{recipe.get('cluster.name', 'local')}: {result.timing}",
        "submission_division": "open",
        "submission_status": "research",
        "submission_benchmark": benchmark.name if benchmark else recipe.get("model.name", "null"),
        "seed": result.seed,
        "global_batch_size": int(result.metrics.get("samples_per_update", 0)),
        "train_samples": num_train,
        "eval_samples": num_eval,
        **{key: _number(recipe.get(f"train.optimizer.{name}", "null")) for key, name in _OPTIMIZER.items()},
    }
    yield 0.0, _START, "init_start", None, {}
    yield from ((0.0, _POINT, key, value, {}) for key, value in facts.items())
    yield 0.0, _END, "init_stop", None, {}


def _training(result: RunResult, benchmark: _Benchmark | None, num_train: int) -> Iterator[_Event]:
    """Yield the events of training: a block up to each evaluation, and its score."""
    clock = {"clock": result.clock, "mode": result.mode, "plan": result.plan}
    yield 0.0, _START, "run_start", None, clock
    began_s, seen = 0.0, 0
    metric = benchmark.metric if benchmark else result.recipe.get("train.target.metric", "")
    # A run that was resumed for another target has later points, too.
    reached_s = result.metrics.get("time_to_accuracy_s", math.inf)
    for point in result.points:
        if point.clock_s > reached_s:
            break
        name = metric if metric in point.metrics else next((each for each in point.metrics if "loss" not in each), "")
        if not name:
            continue
        first = 1 + seen // num_train
        block = {"first_epoch_num": first, "epoch_count": (point.samples - seen) / num_train}
        found = point.metrics[name] / (100 if name == "bleu" else 1)  # MLPerf's BLEU is a share
        score = found if math.isfinite(found) else None  # JSON has no NaN
        yield began_s, _START, "block_start", None, block
        yield point.clock_s, _POINT, "eval_accuracy", score, {"epoch_num": point.samples / num_train, "metric": name}
        yield point.clock_s, _END, "block_stop", None, {"first_epoch_num": first}
        began_s, seen = point.clock_s, point.samples
    # MLPerf's clock stops when the target is known to be reached: after the last evaluation, before its checkpoint.
    end_s = began_s if result.outcome == REACHED else result.metrics.get("total_time_s", began_s)
    yield end_s, _END, "run_stop", None, {**clock, "status": "success" if result.outcome == REACHED else "aborted"}


def _number(text: str) -> float | str | None:
    """Return a recipe's value: a number, a word, or None."""
    try:
        return None if text == "null" else float(text)
    except ValueError:
        return text
