"""A lab's study: predicts and measures every recipe at every bandwidth.

Predictions are written to a file before any training at their bandwidth, and never adjusted.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from pipebench.errors import WorkersFailedError
from pipebench.recipe.load import LoadedRecipe, load
from pipebench.run.request import RunRequest
from pipebench.run.runner import RUNS
from pipebench.run.suite import Suite
from pipebench.tracking.run_log import Tracking
from pipebench.train.result import INTERRUPTED
from tests.lab import measuring
from tests.lab.findings import Case, Findings, LinkFinding, Options, Run, Wire, label
from tests.lab.hosts import Lab
from tests.lab.ladder import STEP, crossing, rungs
from tests.lab.predicting import LabSchedule, Predicted, Predictor, at_bandwidth, read_measured
from tests.lab.trials import Trials

_PREDICTIONS = "predictions.json"
_POINTS_PER_STEP = 2  # of a predicted curve
_INTERRUPTED = 130


class Study:
    """Studies recipes in a lab.

    Args:
        lab: the hosts and wires.
        cases: the recipes.
        options: of the command.
        suite: name of the experiment in MLflow.
        say: prints a line of progress.
    """

    def __init__(
        self, lab: Lab, cases: Sequence[Case], options: Options, suite: str, say: Callable[[str], None]
    ) -> None:
        self._cases, self._options, self._suite, self._say = cases, options, suite, say
        self._trials = Trials(lab, options, say)
        self._wires: dict[float, Wire] = {}
        self._limit: float | None = None

    def run(self) -> Findings:
        """Predict, measure, and return the results.

        Raises:
            UserError: a recipe can't be run in this lab.
            WorkersFailedError: a run ended without a result; the reason has been printed.
        """
        options, bandwidths = self._options, sorted(self._options.bandwidths)
        self._profiled = self._measure()
        self._schedules = {case.name: self._schedule(case) for case in self._cases}
        found = self._crossing() if options.climbs else None
        ladder = () if found is None else found.ladder
        self._write_predictions(sorted({*bandwidths, *ladder}), found)
        runs = [self._train(case, each) for each in bandwidths for case in self._cases]
        climbed: list[Run] = []
        if found is not None:
            pair = [case for case in self._cases if case.name in (found.pipeline, found.data_parallel)]
            climbed = [
                self._train(case, each, "train.target=null", "train.max_epochs=2") for each in ladder for case in pair
            ]
        wires = tuple(self._wires[each] for each in sorted(self._wires))
        curves = self._curves([*bandwidths, *ladder])
        return Findings(
            options, tuple(self._cases), self._trials.free, wires, curves, tuple(runs), found, tuple(climbed)
        )  # fmt: skip

    def _loaded(self, case: Case, *words: str) -> LoadedRecipe:
        slowest = min(self._options.bandwidths)
        return load(str(case.path), [*case.words, *self._trials.overrides(slowest), *words])

    def _measure(self) -> dict[str, str]:
        """Measure profiles and host costs for predictions; return the profiles' files by recipe."""
        recipes = {case.name: self._loaded(case) for case in self._cases}
        for loaded in recipes.values():  # invalid recipes are reported before anything runs
            at_bandwidth(loaded, min(self._options.bandwidths))
        workers = self._options.num_hosts * self._options.workers_per_host
        self._say(f"measures layers and messages in {workers} processes at once, wires unlimited")
        folder = self._options.folder
        listed = {
            case.name: [str(case.path), [*case.words, *self._trials.overrides(min(self._options.bandwidths))]]
            for case in self._cases
        }
        (folder / measuring.RECIPES).write_text(json.dumps(listed))
        self._trials.measure(measuring.__name__, folder)
        profiles, hosts = read_measured(folder)
        timed = {case.name: self._loaded(case, f"engine.timing={profiles[case.name]}") for case in self._cases}
        self._predictor = Predictor(timed, hosts)
        return {name: str(path) for name, path in profiles.items()}

    def _schedule(self, case: Case) -> LabSchedule:
        """Train a recipe that has a target on the virtual clock, to find the number of epochs to it."""
        loaded = self._loaded(case, *self._words(case, "virtual"), "engine.kind=virtual")
        if loaded.recipe.train.target is None:
            return LabSchedule(None, 0.0)
        self._say(f"{loaded.recipe.name}: how many epochs to the target, on the virtual clock")
        request = RunRequest(loaded, loaded.recipe.name, Suite(self._suite))
        result = RUNS["virtual"](request, Tracking(self._suite)).result
        if result.outcome == INTERRUPTED:
            raise WorkersFailedError(_INTERRUPTED)
        metrics = result.metrics
        return LabSchedule(metrics.get("epochs_to_target"), float(metrics["evaluation_time_s"]))

    def _crossing(self) -> LinkFinding | None:
        """Return the bandwidth at which the fastest pipeline and data parallelism are predicted to be equally fast."""

        def fastest(bandwidth: float, *, pipelined: bool) -> tuple[float, str]:
            found = ((self._predictor.predict(case.name, bandwidth), case.name) for case in self._cases)
            return max(
                ((each.throughput_samples_per_s, name) for each, name in found if (each.num_stages > 1) == pipelined),
                default=(0.0, ""),
            )

        def ahead(bandwidth: float) -> float:
            return fastest(bandwidth, pipelined=True)[0] - fastest(bandwidth, pipelined=False)[0]

        where = crossing(ahead)
        if where is None:
            return None
        pipeline, whole = (fastest(where, pipelined=pipelined)[1] for pipelined in (True, False))
        return LinkFinding(pipeline, whole, where, tuple(rungs(where)))

    def _write_predictions(self, bandwidths: Sequence[float], found: LinkFinding | None) -> None:
        rows = [
            {"bandwidth": label(each), "recipe": case.name, **asdict(self._predictor.predict(case.name, each))}
            for each in bandwidths
            for case in self._cases
        ]
        predictions = {"predictions": rows, "crossing": None if found is None else asdict(found)}
        (self._options.folder / _PREDICTIONS).write_text(json.dumps(predictions, indent=1) + "\n")
        if found is not None:
            self._say(
                f"predicted: {found.pipeline} and {found.data_parallel} are equally fast at "
                f"{label(found.bandwidth_bytes_per_s)}; the ladder is {', '.join(map(label, found.ladder))}"
            )

    def _words(self, case: Case, suffix: str) -> list[str]:
        name = f"{case.name}-{suffix}".replace("=", "-")
        return [f"engine.timing={self._profiled[case.name]}", f"name={name}"]

    def _train(self, case: Case, bandwidth: float, *more: str) -> Run:
        if self._limit != bandwidth:
            self._limit, self._wires[bandwidth] = bandwidth, self._trials.limit(bandwidth)
        predicted = self._predictor.predict(case.name, bandwidth)
        words = [*self._trials.overrides(bandwidth), *self._words(case, label(bandwidth)), *more]
        result, passed = self._trials.train(case, words)
        predicted_s = None if more else self._schedules[case.name].time_to_accuracy_s(predicted)
        run = Run(case, bandwidth, predicted, predicted_s, result, passed)
        error = run.throughput_samples_per_s / predicted.throughput_samples_per_s - 1
        self._say(
            f"{result.name}: {run.throughput_samples_per_s:,.0f} samples/s, predicted "
            f"{predicted.throughput_samples_per_s:,.0f} ({100 * error:+.1f}%)"
        )
        return run

    def _curves(self, bandwidths: Sequence[float]) -> dict[str, list[tuple[float, Predicted]]]:
        """Return predictions of every recipe from below the lowest bandwidth to above the highest."""
        step = STEP ** (1 / _POINTS_PER_STEP)
        points, last = [min(bandwidths) / STEP], max(bandwidths) * STEP
        while points[-1] < last:
            points.append(points[-1] * step)
        return {
            case.name: [(each, self._predictor.predict(case.name, each)) for each in points] for case in self._cases
        }
