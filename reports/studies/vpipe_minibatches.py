"""Print what makes small minibatches slow in vPipe's Table 3: `python -m reports.studies.vpipe_minibatches`.

The output is `vpipe_minibatches.md`: the table's times as a constant and a part that grows with the samples, and the
predictions of several explanations of the constant, each fitted on the Transformer's four times alone.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipebench.cluster import Cluster
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.devices import device_of
from pipebench.profile.model import LayerProfile
from pipebench.profile.request import ProfileRequest
from pipebench.recipe.load import load
from pipebench.report.fitting import Cell, Sought, fit
from pipebench.report.scores import geometric_mean_error
from pipebench.train.profiled_model import ProfiledModel, profile_model
from reports.studies.markdown import table

# Table 3, PipeDream without and with vPipe: samples to the seconds of forward and backward.
PUBLISHED: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "Transformer": {32: (0.31, 0.54), 128: (0.53, 0.97)},
    "BERT": {4: (0.29, 0.48), 16: (0.45, 0.75)},
    "AmoebaNet": {8: (0.51, 0.97), 32: (1.06, 2.07)},
    "GNMT": {32: (1.91, 3.42), 96: (2.38, 4.62)},
}
# Effective utilisation of those rows, the sum of 8 devices; recomputation doesn't count.
UTILISATION: Mapping[str, Mapping[int, float]] = {
    "Transformer": {32: 3.4, 128: 6.9},
    "BERT": {4: 2.7, 16: 7.0},
    "AmoebaNet": {8: 2.9, 32: 6.6},
    "GNMT": {32: 2.5, 96: 6.5},
}
RECIPES = {"Transformer": "transformer", "BERT": "bert", "AmoebaNet": "amoebanet", "GNMT": "gnmt16"}
FITTED_ON = "Transformer"
UNEXPLAINED = "GNMT"
NUM_STAGES = 8
START_S = {"pause": 3e-4, "launch": 4e-4, "layer": 4e-4, "minibatch": 0.3}
SLOW: Collection[str] = ("nothing", "launch")  # without a constant, or with a profile for every value that is tried

HEAD = f"""# Why small minibatches are slow in vPipe's Table 3

`python -m reports.studies.vpipe_minibatches` makes this page. Published are forward and backward of one minibatch over
all {NUM_STAGES} stages, of PipeDream at its small minibatches and with vPipe at large ones: two sizes per model.
Computed are analytic profiles of the models in `recipes/vpipe/` on the 2080 Ti; no pipeline is simulated.
`pipebench report vpipe_calibration` makes the whole table with a pause.
"""
LINES = """
## A constant and a part that grows

The line through both sizes. The part per sample equals the roofline's for the Transformer; computed, BERT's is 1.2 to
1.4 times as slow as published, AmoebaNet's 1.7 to 1.8 times as fast, GNMT's 6 to 8 times. The constant is what a
roofline lacks: launches of 10 us add up to a few milliseconds. A cost per byte of messages (copies to the host, Gloo)
would grow with the samples, so it isn't part of the constant.
"""
FORMS_TEXT = """
## What may be constant

Each form has one constant, fitted on the Transformer's four times; the others are predicted. *Pause*: the device stands
idle after every kernel that the host issues (not between cuDNN's own). *Launch*: no kernel is shorter, and long ones
hide it. *Layer*: a pause after every layer, as a profiler makes that waits for each. *Minibatch*: once per pass, as
something that every stage does once for each minibatch would be, an eighth of it per stage.

Large over small is how much faster a sample is in the large minibatch than in the small one: what vPipe gains over
PipeDream where nothing is computed again. Errors are geometric means over forward and backward, predicted ones those of
BERT and AmoebaNet; GNMT's column is the mean of computed over published.

Pause and minibatch do about as well, so the table can't tell them apart. A pause meets the Transformer's times best; a
cost per stage and minibatch of some 36 ms meets all four gains within 11 %, GNMT's, too, whose times it misses.
Neither is known to be there: a launch by eager PyTorch takes 10 us, a message's latency 0.1 ms.
"""
OWN_TEXT = """
## Is it a constant?

The constant of each form, fitted on each model by itself. A constant of the testbed would be the same for all. GNMT,
whose times grow 6 to 8 times as fast with the samples as a roofline's, fits no form.
"""


BUSY_TEXT = """
## What the table's utilisation says of its times

Nothing is fitted here. A minibatch's busy time is its forward and backward times the share of the devices that is
busy. Per sample it is the same in small and large minibatches within 20 %: the table agrees with itself. It is 1.3 to
2.0 times a roofline's, for GNMT 11 to 15 times. For the rest of a minibatch's time devices are idle, and 1.7 to 3.4
times less in large minibatches. With a pause after every kernel, or a cost per minibatch, they would be idle for as
long in both; only what long kernels hide, such as launches, becomes less. So utilisation, which nothing above was
fitted on, is evidence against the pause, which fits the times best.
"""


@dataclass(frozen=True)
class Pass:
    """One forward or backward of a model."""

    seconds: float  # by the roofline, without pauses
    kernels: int  # that the host launches
    layers: int  # with at least one of these kernels


Times = Mapping[int, tuple[float, float]]  # seconds of forward and backward, by minibatch size


class Model:
    """A model's published and computed passes at its two minibatch sizes."""

    def __init__(self, name: str) -> None:
        self.published = PUBLISHED[name]
        self._loaded = load(f"vpipe/{RECIPES[name]}/pipedream")
        self._known: ProfiledModel = profile_model(self._loaded.recipe, self._loaded.cluster)
        plain, paused = self._rows(self._loaded.cluster), self._rows(replace(self._loaded.cluster, pause_s=1.0))
        self.passes = {n: tuple(_pass(plain[n], paused[n], each) for each in (0, 1)) for n in self.published}

    def with_launch(self, launch_s: float) -> Times:
        """Return the times of passes in which no kernel takes less than `launch_s`."""
        rows = self._rows(replace(self._loaded.cluster, launch_s=launch_s))
        return {n: (sum(_seconds(rows[n], 0)), sum(_seconds(rows[n], 1))) for n in self.published}

    def adding(self, constant_s: float, count: Callable[[Pass], int]) -> Times:
        """Return the times of passes with `constant_s` added `count` times."""
        found = {n: [each.seconds + count(each) * constant_s for each in passes] for n, passes in self.passes.items()}
        return {n: (forward, backward) for n, (forward, backward) in found.items()}

    def ratios(self, times: Times) -> list[float]:
        """Return computed over published times: of forward and backward at each size."""
        return [mine / theirs for n in times for mine, theirs in zip(times[n], self.published[n], strict=True)]

    def _rows(self, cluster: Cluster) -> Mapping[int, Sequence[LayerProfile]]:
        known, optimizer = self._known, self._loaded.recipe.train.optimizer
        return analytic_profile(
            ProfileRequest(known.graph, known.dataset, [*self.published], optimizer, ""), device_of(cluster)
        ).layers


def _seconds(rows: Sequence[LayerProfile], index: int) -> list[float]:
    return [(row.forward_s, row.backward_s)[index] for row in rows]


def _pass(plain: Sequence[LayerProfile], paused: Sequence[LayerProfile], index: int) -> Pass:
    """Return the forward (index 0) or backward (1).

    Args:
        plain: the layers.
        paused: the layers with a pause of 1 s after every kernel: what that adds is the number of kernels.
        index: which pass.
    """
    seconds = _seconds(plain, index)
    kernels = [round(with_s - s) for s, with_s in zip(seconds, _seconds(paused, index), strict=True)]
    return Pass(sum(seconds), sum(kernels), sum(count > 0 for count in kernels))


# Explanations of the constant: each returns a model's times with a constant [s] of this form.
FORMS: Mapping[str, Callable[[Model, float], Times]] = {
    "nothing": lambda model, _: model.adding(0.0, lambda each: 0),
    "pause": lambda model, pause_s: model.adding(pause_s, lambda each: each.kernels),
    "launch": lambda model, launch_s: model.with_launch(launch_s),
    "layer": lambda model, layer_s: model.adding(layer_s, lambda each: each.layers),
    "minibatch": lambda model, pass_s: model.adding(pass_s, lambda each: 1),
}
FORMS_HEAD = ("form", "constant", "error, fitted", "error, predicted", "GNMT")
BUSY_HEAD = (
    "model",
    "busy per sample, small",
    "large",
    "roofline, small",
    "large",
    "idle per minibatch, small",
    "large",
)
LINES_HEAD = ("model", "pass", "constant, published", "computed", "per sample, published", "computed")


def main(names: Sequence[str] = tuple(PUBLISHED), forms: Sequence[str] = tuple(FORMS)) -> None:
    """Print the page, of some models, `FITTED_ON` among them, and of some forms."""
    models = {name: Model(name) for name in names}
    print(HEAD)
    print(LINES + "\n" + table(LINES_HEAD, _lines(models)))
    constants = {form: fitted(form, models[FITTED_ON]) for form in forms}
    head = (*FORMS_HEAD, *(f"{name}, large over small" for name in names))
    published = ("published", "", "", "", "", *(f"{_gain(model.published):.2f}" for model in models.values()))
    rows = [_judged(form, constant_s, models) for form, constant_s in constants.items()]
    print(FORMS_TEXT + "\n" + table(head, [published, *rows]))
    print(OWN_TEXT + "\n" + table(("form", *names), _own(models, forms)))
    print(BUSY_TEXT + "\n" + table(BUSY_HEAD, _busy(models)))


def _lines(models: Mapping[str, Model]) -> Iterator[tuple[str, ...]]:
    for name, model in models.items():
        for index, which in enumerate(("forward", "backward")):
            theirs = _line({n: times[index] for n, times in model.published.items()})
            mine = _line({n: passes[index].seconds for n, passes in model.passes.items()})
            yield name, which, theirs[0], mine[0], theirs[1], mine[1]


def _line(times: Mapping[int, float]) -> tuple[str, str]:
    """Return constant and slope per sample of the line through the seconds at two sizes, as text."""
    (small, small_s), (large, large_s) = times.items()
    slope = (large_s - small_s) / (large - small)
    return f"{(small_s - slope * small) * 1e3:.0f} ms", f"{slope * 1e3:.2f} ms"


def fitted(form: str, model: Model) -> float:
    """Return the constant [s] of a form that fits a model's four published times best."""
    if form == "nothing":
        return 0.0
    cells: list[Cell] = [(str(n), str(index)) for n in model.published for index in (0, 1)]

    def error(values: Mapping[str, float], cell: Cell) -> float:
        n, index = int(cell[0]), int(cell[1])
        return math.log(FORMS[form](model, values[form])[n][index] / model.published[n][index])

    return fit([Sought(form, 1e-6, 10.0, tuple(cells))], error, {form: START_S[form]})[form]


def _judged(form: str, constant_s: float, models: Mapping[str, Model]) -> tuple[str, ...]:
    times = {name: FORMS[form](model, constant_s) for name, model in models.items()}
    ratios = {name: model.ratios(times[name]) for name, model in models.items()}
    predicted = [ratio for name, each in ratios.items() if name not in (FITTED_ON, UNEXPLAINED) for ratio in each]
    unexplained = ratios.get(UNEXPLAINED)
    return (
        form,
        _text(constant_s) if constant_s else "-",
        f"{geometric_mean_error(ratios[FITTED_ON]):.1%}",
        f"{geometric_mean_error(predicted):.1%}" if predicted else "-",
        f"{statistics.geometric_mean(unexplained):.2f}" if unexplained else "-",
        *(f"{_gain(each):.2f}" for each in times.values()),
    )


def _gain(times: Times) -> float:
    """Return the throughput at the large size over that at the small one."""
    (small, small_s), (large, large_s) = ((n, sum(both)) for n, both in times.items())
    return large / large_s * small_s / small


def _busy(models: Mapping[str, Model]) -> Iterator[tuple[str, ...]]:
    """Yield a row per model: busy seconds per sample, published and by the roofline; idle seconds per minibatch."""
    for name, model in models.items():
        shares = {n: UTILISATION[name][n] / NUM_STAGES for n in model.published}
        roofline = {n: sum(each.seconds for each in passes) for n, passes in model.passes.items()}
        yield (
            name,
            *(f"{1e3 * shares[n] * sum(model.published[n]) / n:.1f} ms" for n in shares),
            *(f"{1e3 * roofline[n] / n:.1f} ms" for n in shares),
            *(f"{1e3 * (1 - shares[n]) * sum(model.published[n]):.0f} ms" for n in shares),
        )


def _own(models: Mapping[str, Model], forms: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for form in forms:
        if form not in SLOW:
            yield form, *(_text(fitted(form, model)) for model in models.values())


def _text(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-2 else f"{seconds * 1e3:.0f} ms"


if __name__ == "__main__":
    main()
