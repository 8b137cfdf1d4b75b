"""Compares a run with its prediction, the simulated epoch.

Both are metrics under the same names: those of `simulated.predicted_metrics` and those of a run's result.
"""

from collections.abc import Mapping

from pipebench.formats import is_share, measure
from pipebench.metrics import METRICS, PREDICTED

# Metrics that both have, in the order of the table.
_COMPARED = tuple(row.name for row in METRICS if PREDICTED in row.shown)


def compare(measured: Mapping[str, float], predicted: Mapping[str, float]) -> dict[str, float]:
    """Return metrics that compare a run with its prediction, the simulated epoch's metrics.

    Returns:
        `predicted_<metric>`, and `prediction_error`: measured epoch time over predicted, minus 1, so above 0 if the run
            was slower than predicted; left out if either time is missing.
    """
    metrics = {f"predicted_{name}": predicted[name] for name in _COMPARED if name in predicted}
    measured_s, predicted_s = measured.get("epoch_time_s"), predicted.get("epoch_time_s")
    if measured_s is not None and predicted_s:
        metrics["prediction_error"] = measured_s / predicted_s - 1
    return metrics


def prediction_markdown(metrics: Mapping[str, float], note: str = "") -> str:
    """Return a Markdown table of measured and predicted metrics (see `compare`), and below it a note."""
    lines = ["| | measured | predicted | difference |", "| --- | ---: | ---: | ---: |"]
    for name in _COMPARED:
        measured, predicted = metrics.get(name), metrics.get(f"predicted_{name}")
        if measured is None and predicted is None:
            continue
        cells = (name, measure(name, measured), measure(name, predicted), _difference(name, measured, predicted))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *(["", note] if note else [])]) + "\n"


def prediction_line(metrics: Mapping[str, float]) -> str:
    """Return predicted and measured epoch time in a few words; "" without a prediction."""
    measured_s, predicted_s = metrics.get("epoch_time_s"), metrics.get("predicted_epoch_time_s")
    if measured_s is None or predicted_s is None:
        return ""
    sentence = f"epoch {measure('epoch_time_s', predicted_s)} predicted, {measure('epoch_time_s', measured_s)} measured"
    difference = _difference("epoch_time_s", measured_s, predicted_s)
    return f"{sentence} ({difference})" if difference else sentence


def _difference(name: str, measured: float | None, predicted: float | None) -> str:
    """Return measured minus predicted, as text: in per cent of predicted or, for shares, in percentage points."""
    if measured is None or predicted is None:
        return ""
    if is_share(name):
        return f"{100 * (measured - predicted):+.1f} points"
    if predicted == 0:
        return "none" if measured == 0 else ""
    return f"{100 * (measured / predicted - 1):+.1f}%"
