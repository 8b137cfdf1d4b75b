"""An extension made up here: it clamps gradients before every update, and takes time for that.

It brings a section of recipes with a rule, what an update does and takes, and a metric. No file of the core is touched.
Beside that, what a run that turns no extension on must not load.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

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
from pipebench.typed_json import read
from tests.checkpoint.support import captured
from tests.support import make_engine
from tests.train.test_training import prepared, recipe, train


@dataclass(frozen=True)
class Clamp:
    """A recipe's section `clamp`: the largest element of a gradient, and the seconds that looking for it takes."""

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
    """Return the job of a small model, as a recipe with such a section makes it of a large one."""
    job = prepared(recipe(target=None), plan=([4], [2, 1]))
    pipeline = replace(job.setup.pipeline, extensions={} if clamp is None else {"clamp": clamp})
    return replace(job, setup=replace(job.setup, pipeline=pipeline))


def test_its_section_is_read_and_written_like_those_of_the_core() -> None:
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
def test_what_is_wrong_with_its_section_is_told_likewise(change: str, problem: str) -> None:
    with pytest.raises(RecipeError) as found:
        load("quickstart/dp", [*DP, change])
    assert problem in str(found.value)


def test_it_changes_what_an_update_does_and_its_metric_is_one_of_the_run_s() -> None:
    plain, whole, none = (train(job_of(each))[0] for each in (None, Clamp(0.01), Clamp(1e9)))
    assert "clamped_elements" not in plain.metrics
    assert none.metrics["clamped_elements"] == 0
    assert none.points == plain.points
    assert whole.metrics["clamped_elements"] > 0
    assert whole.points != plain.points
    warn_of_unlisted(whole.metrics)
    assert logged_metrics(whole)["clamped_elements"] == whole.metrics["clamped_elements"]


def test_it_changes_what_an_update_takes() -> None:
    made = []
    for seconds in (0, 3):
        loaded = load("quickstart/dp", [*DP, "engine.kind=simulated", f"clamp.seconds={seconds}"])
        made.append(prepare(loaded.recipe, loaded.cluster).setup)
    without, with_it = (simulate_all(setup, 8).end_s for setup in made)
    assert with_it == pytest.approx(without + 3.0 * 8 / made[0].pipeline.block)


def test_a_checkpoint_keeps_what_it_has_counted() -> None:
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
SMALL = (*DP, "engine.timing=analytic", "dataset.num_train=64", "train.max_epochs=1")


def loaded_by(recipe: str, *words: str, runs: str = SIMULATED) -> set[str]:
    """Return the modules of extensions that a run has loaded, and of torch's compiler, as slow to import as torch."""
    script = (
        "import sys; from pipebench.recipe.load import load; from pipebench.train.prepare import prepare\n"
        f"loaded = load({recipe!r}, {[*words]!r}); job = prepare(loaded.recipe, loaded.cluster)\n{runs}\n"
        "print(); print(*(name for name in sys.modules if name.startswith(('pipebench.extensions', 'torch._dynamo'))))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {*found.stdout.splitlines()[-1].split()}


@pytest.mark.parametrize("runs", [SIMULATED, TRAINED], ids=["simulated", "trained"])
def test_a_run_without_an_extension_loads_none_of_its_modules(runs: str) -> None:
    kind = "simulated" if runs == SIMULATED else "virtual"
    loaded = load("quickstart/dp", [*SMALL, f"engine.kind={kind}"])
    prepare(loaded.recipe, loaded.cluster)  # computes the profile if none is cached, for which torch needs its compiler
    assert loaded_by("quickstart/dp", *SMALL, f"engine.kind={kind}", runs=runs) == set()


def test_a_resolved_recipe_whose_sections_are_null_loads_none_either(tmp_path: Path) -> None:
    path = tmp_path / "resolved.yaml"
    plain = {key: value for key, value in load("quickstart/dp", [*DP]).plain.items() if key != "clamp"}  # only here
    path.write_text(f"# as a run records it\n{json.dumps(plain)}")
    assert '"search": null' in path.read_text()
    assert loaded_by(str(path), *SMALL, "engine.kind=simulated") == set()


def test_a_run_loads_what_it_needs_of_an_extension_and_a_simulation_no_server() -> None:
    found = loaded_by("quickstart/dp", *DP, "engine.kind=simulated", "parallelism.mode=dp-asp")
    names = {name.rpartition(".")[2] for name in found}
    assert names >= {"asynchronous", "program"}
    assert not names & {"server", "processes", "record", "search"}


def test_a_search_loads_moves_beside_its_own_and_its_simulation_neither_loop_nor_pictures() -> None:
    found = loaded_by("search/trace", "engine.kind=simulated", "engine.timing=analytic")
    names = {name.rpartition(".")[2] for name in found}
    assert names >= {"search", "setup", "simulated"}
    assert not names & {"asynchronous", "loop", "record"}


VPIPE = ("engine.kind=simulated", "parallelism.plan=straight", "parallelism.vpipe.swap=false")


def test_a_simulation_of_moves_loads_nothing_that_executes_them() -> None:
    found = loaded_by("quickstart/pipedream", *SMALL, *VPIPE)
    names = {name.rpartition(".")[2] for name in found}
    assert names >= {"moves", "program", "simulated_engine", "balancing"}
    assert not names & {"asynchronous", "search", "worker", "migration", "in_process", "processes", "record"}


def test_policies_that_vpipe_chooses_need_no_extension_if_layers_stay() -> None:
    assert loaded_by("quickstart/pipedream", *SMALL, *VPIPE, "parallelism.vpipe.repartition=false") == set()
