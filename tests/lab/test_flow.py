"""A study without a lab: predictions come before measurements, and the ladder is around the crossing."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from pipebench.profile.stored import write_profile
from pipebench.recipe.load import load
from pipebench.run.deciding import prepare_job
from pipebench.simulate.costs import NO_HOST_COSTS
from pipebench.train.result import COMPLETED, RunResult
from tests.lab import measuring, study
from tests.lab.findings import Case, Options, Passed, Wire, label
from tests.lab.report import leads, markdown
from tests.lab.trials import cluster_words

RECIPES = ("lab/dp", "lab/pipedream")
WORDS = ("train.target=null",)


class MadeUpTrials:
    """Emulated trials: wires have exactly their limits, and training is exactly as fast as predicted."""

    def __init__(self, lab: object, options: Options, say: object) -> None:
        self._options = options
        self.free = Wire(None, 2e9, 5e-6)
        self.tried: list[tuple[str, str]] = []
        made.append(self)

    def overrides(self, bandwidth_bytes_per_s: float) -> list[str]:
        return cluster_words(self._options, bandwidth_bytes_per_s, self.free.latency_s)

    def limit(self, bandwidth_bytes_per_s: float) -> Wire:
        return Wire(bandwidth_bytes_per_s, 0.95 * bandwidth_bytes_per_s, 5e-6)

    def measure(self, module: str, folder: Path) -> None:
        assert module == "tests.lab.measuring"
        listed = json.loads((folder / measuring.RECIPES).read_text())
        found = {}
        for name, (path, _) in listed.items():
            # A V100's times stand for measured ones.
            job = prepare_job(load(path, [*WORDS, "cluster.name=cluster-a", "engine.kind=simulated"]), trains=False)
            (folder / f"{name}.json").write_text(write_profile(job.profile))
            found[name] = {"profile": f"{name}.json", "host": asdict(NO_HOST_COSTS)}
        (folder / measuring.MEASURED).write_text(json.dumps(found))

    def train(self, case: Case, words: Sequence[str]) -> tuple[RunResult, Passed]:
        written = json.loads((self._options.folder / "predictions.json").read_text())["predictions"]
        name = next(word.removeprefix("name=") for word in words if word.startswith("name="))
        bandwidth = name.removeprefix(f"{case.name}-")
        row = next(row for row in written if (row["recipe"], row["bandwidth"]) == (case.name, bandwidth))
        self.tried.append((case.name, bandwidth))
        metrics = {"throughput_samples_per_s": row["throughput_samples_per_s"]}
        return RunResult(name, case.mode, row["plan"], "distributed", "wall", "", 0, COMPLETED, "", metrics), Passed(
            2, 0, 1
        )


made: list[MadeUpTrials] = []


@pytest.mark.slow
def test_every_recipe_at_every_bandwidth_then_the_ladder_around_the_crossing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "Trials", MadeUpTrials)
    loaded = [load(name, WORDS) for name in RECIPES]
    cases = [Case(each.recipe.name, each.path, WORDS, each.recipe.parallelism.mode) for each in loaded]
    options = Options(2, 1, (1.25e8, 1.25e7), True, tmp_path)
    found = study.Study(None, cases, options, "lab", lambda text: None).run()  # type: ignore[arg-type] # no lab

    assert found.crossing is not None
    assert (found.crossing.pipeline, found.crossing.data_parallel) == ("lab-pipedream", "lab-dp")
    at, ladder = found.crossing.bandwidth_bytes_per_s, found.crossing.ladder
    assert ladder[2] < at < ladder[3]
    expected = [(name, each) for each in ("100Mbit", "1Gbit") for name in ("lab-dp", "lab-pipedream")]
    expected += [(name, label(rung)) for rung in ladder for name in ("lab-dp", "lab-pipedream")]
    assert made[-1].tried == expected
    assert [wire.bandwidth_bytes_per_s for wire in found.wires] == sorted({1.25e7, 1.25e8, *ladder})

    measured = [lead for _, lead, _ in leads(found)]
    assert (measured[2] > 0) != (measured[3] > 0)  # it is as predicted
    assert f"between {label(ladder[2])} and {label(ladder[3])}, the predicted step." in markdown(found)
    assert all(curve[0][0] < 1.25e7 and curve[-1][0] > 1.25e8 for curve in found.curves.values())
