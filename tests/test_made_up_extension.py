"""An extension made up here, which clamps gradients before every update; this takes time.

It has a section of recipes with a rule, hooks for an update's execution and time, and a metric. No file of the core is
changed. Besides, tests of what a run without extensions must not load.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from pipebench.checkpoint.progress import Facts
from pipebench.engine.collectives import InProcessCollectives
from pipebench.engine.protocols import Collectives, EngineExtension, Transport, WorkerExtension
from pipebench.engine.worker import Worker
from pipebench.errors import RecipeError
from pipebench.hooks import EXTENSIONS
from pipebench.metrics import COLUMN, COUNT, LOWER, TRAINED, Metric, warn_of_unlisted
from pipebench.recipe.load import load
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.simulate.simulation import Simulation, SimulationExtension
from pipebench.simulate.steady import simulate_all
from pipebench.tracking.entries import logged_metrics
from pipebench.train.job import Job
from pipebench.train.prepare import prepare
from pipebench.train.result import RunResult
from pipebench.typed_json import read, shown, write
from tests.checkpoint.support import captured
from tests.support import make_engine
from tests.train.test_training import Silent, prepared, recipe, train


@dataclass(frozen=True)
class Clamp:
    """A recipe's section `clamp`: the largest element of a gradient, and the seconds that clamping takes."""

    largest: float = 1.0
    seconds: float = 0.0


def positive(largest: float) -> Iterator[tuple[str, str]]:
    if largest <= 0:
        yield "clamp.largest", f"got {largest:g}, allowed is a number above 0"


class ClampingWorker(WorkerExtension):
    def __init__(self, worker: Worker) -> None:
        self.worker, self.update, self.num_clamped = worker, worker.handlers[Op.UPDATE], 0
        self.handlers = {Op.UPDATE: self.clamp}

    def clamp(self, it: Instruction, transport: Transport, collectives: Collectives) -> None:
        largest = self.worker.setup.pipeline.extensions["clamp"].largest
        for gradient in self.worker.replicas[it.stage].gradients:
            if gradient is not None:
                self.num_clamped += int((gradient.abs() > largest).sum())
                gradient.clamp_(-largest, largest)
        self.update(it, transport, collectives)


class ClampingEngine(EngineExtension):
    def __init__(self, collectives: InProcessCollectives) -> None:
        self.clamping = [worker.extensions["clamp"] for worker in collectives.workers]
        self.before: list[int] = []

    def facts(self) -> list[int]:
        return [*self.before, *(each.num_clamped for each in self.clamping if isinstance(each, ClampingWorker))]

    def restore(self, facts: list[int]) -> None:
        self.before = facts


class ClampingTime(SimulationExtension):
    def __init__(self, simulation: Simulation) -> None:
        update, seconds = simulation.plays[Op.UPDATE], simulation.pipeline.extensions["clamp"].seconds
        self.plays = {Op.UPDATE: lambda worker, it, now_s: (update(worker, it, now_s) or 0.0) + seconds}


def clamped(counted: list[int]) -> dict[str, float]:
    return {"clamped_elements": sum(counted)}


RULES = ((("clamp.largest",), positive),)
ROWS = (Metric("clamped_elements", COUNT, LOWER, TRAINED, "of gradients, that were too large", COLUMN),)
HOOKS = {
    "section": "Clamp", "rules": "RULES", "play": "ClampingTime", "worker": "ClampingWorker",
    "in_process": "ClampingEngine", "rows": "ROWS", "metrics": "clamped",
}  # fmt: skip
# So much for the extension.

DP = ["model.width=0.0625"]


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTENSIONS, "clamp", {hook: f"{__name__}:{name}" for hook, name in HOOKS.items()})


def job_of(clamp: Clamp | None) -> Job:
    """Return the job of a small model with this section in its recipe."""
    job = prepared(recipe(target=None), plan=([4], [2, 1]))
    pipeline = replace(job.setup.pipeline, extensions={} if clamp is None else {"clamp": clamp})
    return replace(job, setup=replace(job.setup, pipeline=pipeline))


def test_the_extension_s_section_is_read_and_written_like_those_of_the_core() -> None:
    loaded = load("quickstart/dp", [*DP, "clamp.largest=0.5"])
    assert loaded.plain["clamp"] == {"largest": 0.5, "seconds": 0.0}
    assert loaded.flat["clamp.largest"] == "0.5"
    assert getattr(loaded.recipe, "clamp") == Clamp(0.5)  # noqa: B009 # mypy knows no such section
    assert load("quickstart/dp", [*DP, "clamp={}"]).plain["clamp"] == {"largest": 1.0, "seconds": 0.0}
    for off in ([], ["clamp=null"]):
        assert {key for key in load("quickstart/dp", [*DP, *off]).flat if key.startswith("clamp.")} == set()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("clamp.largest=-1", "clamp.largest: got -1, allowed is a number above 0"),
        ("clamp.larges=1", "clamp.larges: unknown key, allowed here are largest, seconds; did you mean 'largest'?"),
        ("clamp.largest=small", "clamp.largest: got 'small', allowed is a number"),
        ("clam.largest=1", "search, clamp; did you mean 'clamp'?"),
    ],
)
def test_faults_of_the_extension_s_section_are_reported_likewise(change: str, problem: str) -> None:
    with pytest.raises(RecipeError) as found:
        load("quickstart/dp", [*DP, change])
    assert problem in str(found.value)


def test_the_extension_changes_updates_and_adds_its_metric_to_the_run() -> None:
    plain, whole, none = (train(job_of(each))[0] for each in (None, Clamp(0.01), Clamp(1e9)))
    assert "clamped_elements" not in plain.metrics
    assert none.metrics["clamped_elements"] == 0
    assert none.points == plain.points
    assert whole.metrics["clamped_elements"] > 0
    assert whole.points != plain.points
    warn_of_unlisted(whole.metrics)
    assert logged_metrics(whole)["clamped_elements"] == whole.metrics["clamped_elements"]


@pytest.mark.parametrize("value", ["many", None, math.nan, math.inf, [1.0]], ids=str)
def test_a_metric_that_is_no_finite_number_is_left_out_and_its_extension_named(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2.0 wrote such a value into the result, which then couldn't be read back, nor be sent to MLflow."""
    monkeypatch.setitem(EXTENSIONS["clamp"], "metrics", f"{__name__}:{value}")
    monkeypatch.setitem(
        globals(), str(value), lambda counted: {"clamped_elements": value, "clamped_rows": np.float32(2)}
    )
    notes: list[str] = []
    monkeypatch.setattr(Silent, "note", lambda _, text: notes.append(text))
    result, _, _ = train(job_of(Clamp(0.01)))
    assert "clamped_elements" not in result.metrics
    assert result.metrics["clamped_rows"] == 2
    assert read(RunResult, write(result)) == result
    wrong = "metric clamped_elements of extension clamp is left out"
    assert notes == [f"{wrong}: got {shown(value)}, allowed is a finite number"]


def test_the_extension_changes_the_time_of_an_update() -> None:
    made = []
    for seconds in (0, 3):
        loaded = load("quickstart/dp", [*DP, "engine.kind=simulated", f"clamp.seconds={seconds}"])
        made.append(prepare(loaded.recipe, loaded.cluster).setup)
    without, with_it = (simulate_all(setup, 8).end_s for setup in made)
    assert with_it == pytest.approx(without + 3.0 * 8 / made[0].pipeline.block)


def test_a_checkpoint_holds_the_extension_s_count() -> None:
    engine = make_engine(job_of(Clamp(0.01)).setup)
    engine.train(0, 4)
    facts = read(Facts, json.loads(json.dumps(engine.facts())))
    again = make_engine(job_of(Clamp(0.01)).setup)
    again.restore(captured(engine), facts, engine.clock_s)
    assert sum(again.facts()["extensions"]["clamp"]) == sum(engine.facts()["extensions"]["clamp"]) > 0


SIMULATED = "from pipebench.train.engines import simulate; simulate(job)"
TRAINED = """
from pipebench.show.progress import Silent
from pipebench.train.engines import on_virtual_clock
from pipebench.train.loop import TrainingLoop
TrainingLoop(job, on_virtual_clock(job), Silent(), print).run()
"""
VPIPE = ("engine.kind=simulated", "parallelism.plan=straight", "parallelism.vpipe.swap=false")
SMALL = (*DP, "engine.timing=analytic", "dataset.num_train=64", "train.max_epochs=1")


SIMULATED_DP = (*SMALL, "engine.kind=simulated")
RUNS: dict[str, tuple[str, Sequence[str], str]] = {  # a recipe, its overrides and what it does
    "simulated": ("quickstart/dp", SIMULATED_DP, SIMULATED),
    "resolved": ("resolved.yaml", SIMULATED_DP, SIMULATED),
    "policies": ("quickstart/pipedream", (*SMALL, *VPIPE, "parallelism.vpipe.repartition=false"), SIMULATED),
    "trained": ("quickstart/dp", (*SMALL, "engine.kind=virtual"), TRAINED),
    "asynchronous": ("quickstart/dp", (*DP, "engine.kind=simulated", "parallelism.mode=dp-asp"), SIMULATED),
    "search": ("search/trace", ("engine.kind=simulated", "engine.timing=analytic"), SIMULATED),
    "moves": ("quickstart/pipedream", (*SMALL, *VPIPE), SIMULATED),
}
IMPORTS = """
import os, sys, sympy, torch  # sympy comes with the first backward
from pipebench.recipe.load import load
from pipebench.train import engines, loop
from pipebench.train.prepare import prepare
"""
IN_A_COPY = """
if os.fork() == 0:
    loaded = load({recipe!r}, {words!r})
    job = prepare(loaded.recipe, loaded.cluster)
    {does}
    found = [each for each in sys.modules if each.startswith(("pipebench.extensions", "torch._dynamo"))]
    print("\\n: {name}", *found, flush=True)
    os._exit(0)
assert os.wait()[1] == 0, {name!r}
"""


@pytest.fixture(scope="module")
def loaded_by(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return, by run, the modules of extensions, and of torch's compiler, that it has loaded.

    Runs are forks of one process.
    """
    folder = tmp_path_factory.mktemp("loading")
    plain = {key: value for key, value in load("quickstart/dp", [*DP]).plain.items() if key != "clamp"}  # only here
    (folder / "resolved.yaml").write_text(f"# as a run records it\n{json.dumps(plain)}")
    assert '"search": null' in (folder / "resolved.yaml").read_text()
    for name in ("simulated", "policies"):
        loaded = load(RUNS[name][0], [*RUNS[name][1]])
        prepare(loaded.recipe, loaded.cluster)  # computes its profile if none is cached, which needs torch._dynamo
    script = IMPORTS + "".join(
        IN_A_COPY.format(name=name, recipe=recipe, words=[*words], does=does.strip().replace("\n", "\n    "))
        for name, (recipe, words, does) in RUNS.items()
    )
    found = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    lines = [line.split() for line in found.stdout.splitlines() if line.startswith(": ")]
    return {name: {*modules} for _, name, *modules in lines}


def names(modules: set[str]) -> set[str]:
    return {each.rpartition(".")[2] for each in modules}


@pytest.mark.parametrize("run", ["simulated", "resolved", "policies", "trained"])
def test_a_run_without_an_extension_loads_none_of_its_modules(run: str, loaded_by: dict[str, set[str]]) -> None:
    """Nor does a run of a resolved recipe, whose sections are null, or one with vPipe's policies but without moves."""
    assert loaded_by[run] == set()


def test_a_run_loads_only_the_needed_modules_of_an_extension_and_a_simulation_no_server(
    loaded_by: dict[str, set[str]],
) -> None:
    found = names(loaded_by["asynchronous"])
    assert found >= {"asynchronous", "program"}
    assert not found & {"server", "processes", "record", "search"}


def test_a_search_loads_moves_too_and_its_simulation_neither_the_loop_nor_pictures(
    loaded_by: dict[str, set[str]],
) -> None:
    found = names(loaded_by["search"])
    assert found >= {"search", "setup", "simulated"}
    assert not found & {"asynchronous", "loop", "record"}


def test_a_simulation_of_moves_loads_no_module_that_executes_them(loaded_by: dict[str, set[str]]) -> None:
    found = names(loaded_by["moves"])
    assert found >= {"moves", "program", "simulated_engine", "balancing"}
    assert not found & {"asynchronous", "search", "worker", "migration", "in_process", "processes", "record"}
