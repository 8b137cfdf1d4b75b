"""The Python API: the commands as functions that return objects."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from click.testing import CliRunner, Result
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import pipebench
from pipebench.cli import turns
from pipebench.cli.main import cli
from pipebench.recipe import objects
from pipebench.show.answers import Run
from tests.commands import run_copy
from tests.patience import wait_for
from tests.recipes import uniform_recipe

SIMULATED: dict[str, Any] = {"engine": {"kind": "simulated"}}
POINTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
DATA = (TensorDataset(POINTS[:48], POINTS[:48].argmax(1)), TensorDataset(POINTS[48:], POINTS[48:].argmax(1)))
SMALL: dict[str, Any] = {
    "name": "small",
    "dataset": {"target": DATA, "loss": nn.CrossEntropyLoss(), "metrics": ["top1"]},
    "train": {"minibatch_size": 12, "max_epochs": 2, "optimizer": {"name": "sgd", "lr": 0.1}},
    "cluster": {"name": "cluster-a"},
    "parallelism": {"mode": "pipedream", "plan": "straight"},
}


def silent(facts: dict[str, Any]) -> None:
    pass


def net(depth: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), *(nn.Linear(8, 8) for _ in range(depth)), nn.Linear(8, 4))


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Path("small.yaml").write_text(uniform_recipe(8, 2000, 250, minibatch_size=250))


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


def test_importing_the_api_is_cheap() -> None:
    code = (
        "import sys, pipebench; pipebench.__version__, dir(pipebench)\n"
        "assert not {'torch', 'numpy', 'rich', 'click', 'omegaconf', 'mlflow', 'pandas'} & {*sys.modules}\n"
        "import pipebench.profile.model\n"
        "assert callable(pipebench.profile) and callable(pipebench.run) and callable(pipebench.plan)\n"
        "assert not {'mlflow', 'pandas'} & {*sys.modules}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def senders() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "pipebench-tracking"}


def test_keys_are_sections_or_dotted_and_answers_are_rows_and_figures() -> None:
    before = senders()
    one = pipebench.simulate("small.yaml", train={"minibatch_size": 125}, **{"parallelism.mode": "dp"})
    assert (one.result.recipe["train.minibatch_size"], one.result.mode) == ("125", "dp")
    assert (one.result.engine, one.mlflow_run_id is None) == ("simulated", False)
    assert one.to_dict()["metrics"] == one.metrics
    assert f"{one.result.name}: simulated 1 epoch" in repr(one)
    assert f"{one.result.name}: " in one._repr_html_()
    assert isinstance(one.figure(), Figure)
    assert one.figure()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]

    both = pipebench.compare("small.yaml", parallelism={"mode": ["dp", "gpipe"]}, on_progress=silent, **SIMULATED)
    assert both.frame()["mode"].to_list() == ["dp", "gpipe"]
    found = both.to_dict()
    assert {*found["differences"]} >= {"parallelism.mode"}
    times_s = [run.metrics["epoch_time_s"] for run in both.runs]
    assert [row["epoch_time_s"] for row in found["rows"]] == times_s
    assert [row["vs_dp"] for row in found["rows"]] == [1.0, times_s[0] / times_s[1]]
    assert [row["parallelism.mode"] for row in both.rows()] == ["dp", "gpipe"]
    assert all(" ".join(line.split()) in " ".join(repr(both).split()) for line in found["verdict"])
    assert isinstance(both.figure(), Figure)
    again = pipebench.recorded(*(str(run.mlflow_run_id) for run in both.runs))
    assert [run.metrics for run in again.runs] == [run.metrics for run in both.runs]

    plan = pipebench.plan("small.yaml", others=False)
    shown = json.loads(invoke("plan", "small.yaml", "--no-others", "--json").stdout)
    made = json.loads(json.dumps(plan.to_dict()))
    assert {**made, "took_s": 0, "solve_s": 0} == {**shown, "took_s": 0, "solve_s": 0}
    assert isinstance(plan.frame(), pandas.DataFrame)
    assert isinstance(plan.figure(), Figure)
    # A notebook had a thread more with every run, for good.
    wait_for(lambda: senders() <= before)


def test_a_profile_equals_its_command_s() -> None:
    found = pipebench.profile("small.yaml")
    shown = invoke("profile", "small.yaml", "--json")
    assert json.loads(shown.stdout) == found.to_dict()
    assert not [*Path().glob("*.profile.*")]
    assert found.frame()["name"].to_list()[-1] == "loss"
    assert isinstance(found.figure(), Figure)
    assert "--samples: got 9, allowed are" in mistake(pipebench.profile, "small.yaml", samples=9)


def test_models_and_data_are_objects() -> None:
    given = net()
    first = given[0].get_parameter("weight").clone()
    runs = [pipebench.run(SMALL, model=given, on_progress=silent) for _ in range(2)]
    assert torch.equal(given[0].get_parameter("weight"), first), "each run trains a copy"
    curves = [run.frame()["eval_loss"].to_list() for run in runs]
    assert curves[0] == curves[1]
    assert runs[0].result.plan == "straight"
    assert runs[0].result.recipe["model.target"] == runs[1].result.recipe["model.target"]
    fresh = pipebench.run(SMALL, model={"target": net, "depth": 3}, on_progress=silent, train={"seed": 1})
    assert fresh.result.recipe["model.depth"] == "3"


def test_arguments_of_a_target_are_compared_by_a_recipe_each() -> None:
    """A list of them is a value: the target may take one."""

    def of_widths(widths: list[int] | int = 8) -> nn.Sequential:
        first, second = widths if isinstance(widths, list) else (widths, widths)
        return nn.Sequential(nn.Linear(4, first), nn.Linear(first, second), nn.Linear(second, 8), nn.Linear(8, 4))

    recipe = {**SMALL, "model": {"target": of_widths}, "engine": {"kind": "simulated"}}
    found = pipebench.compare(recipe, **{"model.widths": [6, 7], "train.seed": [0, 1]}, on_progress=silent)
    assert [run.result.recipe["model.widths"] for run in found.runs] == ["[6, 7]"] * 2
    each = (pipebench.load_recipe(recipe, name=f"width-{width}", model={"widths": width}) for width in (16, 32))
    found = pipebench.compare(*each, on_progress=silent)
    assert [run.result.name for run in found.runs] == ["width-16", "width-32"]
    assert [run.result.recipe["model.widths"] for run in found.runs] == ["16", "32"]


def test_loaders_give_the_data_and_objects_replace_a_file_s_section() -> None:
    train, held_out = (DataLoader(data, 12, shuffle=True) for data in DATA)
    dataset = {"target": (train, held_out), "loss": "cross_entropy", "metrics": ["top1"]}
    loaded = pipebench.load_recipe("quickstart/dp", model=net, dataset=dataset)
    assert {*loaded.recipe.model} == {"target"}
    assert loaded.recipe.train.max_epochs == pipebench.load_recipe("quickstart/dp").recipe.train.max_epochs
    assert pipebench.plan(loaded, others=False).rows()[0]["mode"] == "dp"
    drawn = DataLoader(DATA[0], 12, sampler=WeightedRandomSampler([1.0] * 48, 48))
    message = mistake(pipebench.plan, SMALL, model=net, dataset={**dataset, "target": (drawn, held_out)})
    assert "the loader of train has a sampler of its own" in message
    assert "give its data set, `loader.dataset`, or, to draw by weight, a data set whose __getitem__ does" in message
    whole = DataLoader(DATA[0], 12, drop_last=True)
    message = mistake(pipebench.plan, SMALL, model=net, dataset={**dataset, "target": (whole, held_out)})
    assert "the loader of train has drop_last=True, and every sample is read once an epoch" in message


def mistake(function: Any, *given: Any, **keys: Any) -> str:
    with pytest.raises(pipebench.UserError) as caught:
        function(*given, **keys)
    return str(caught.value)


@pytest.mark.parametrize("words", ["train.max_epoch=1", "parallelism.mode=gpip", "train.minibatch_size=0"])
def test_mistakes_have_the_command_s_sentences(words: str) -> None:
    """Except for the place of a key: 0.2.0 named the command line."""
    key, _, text = words.partition("=")
    value: object = int(text) if text.isdigit() else text
    message = mistake(pipebench.run, "quickstart", **{key: value})
    assert message.startswith(f"arguments: {key}: ")
    assert (
        invoke("run", "quickstart", words).stderr
        == f"pipebench: error: command line{message.removeprefix('arguments')}\n"
    )


def test_mistakes_with_objects() -> None:
    assert "model: got '3', allowed is a mapping" in mistake(pipebench.run, SMALL, model=3)
    assert "engine.kind: distributed starts processes" in mistake(
        pipebench.run, SMALL, model=net, engine={"kind": "distributed"}
    )
    message = mistake(pipebench.run, "quickstart", train={"seed": [0, 1]})
    assert message.startswith("arguments: train.seed: got a list, one value is needed here")
    message = mistake(pipebench.compare, SMALL, model=net, seeds=[0], train={"seed": 3})
    assert message.startswith(
        "arguments: train.seed: got 3, and seeds 0 replace it in every run: leave out one of the two"
    )
    assert "was an object of a process that has ended" in mistake(getattr, objects, "net_9")
    assert "give load_recipe this key, too" in mistake(pipebench.run, pipebench.load_recipe("quickstart"), name="x")
    for given in (net(), None, ["small.yaml"]):
        kind = type(given).__name__
        assert f"recipe: got an object of type {kind}, allowed is a name" in mistake(pipebench.run, given)
    for seeds in (3, "0,1", [0, 0], [-1], []):
        assert f"seeds: got {seeds!r}, allowed are" in mistake(pipebench.compare, SMALL, model=net, seeds=seeds)
    tokens = TensorDataset(torch.zeros(48, 7, dtype=torch.long), torch.zeros(48, 7, dtype=torch.long))
    data = {"target": (tokens, tokens), "loss": "cross_entropy"}
    assert "takes them second, logits.transpose(1, 2): " in mistake(
        pipebench.run, SMALL, model=nn.Embedding(9, 9), dataset=data
    )
    assert "on_progress: got True, allowed is a function" in mistake(pipebench.run, SMALL, model=net, on_progress=True)
    assert "in Python `pipebench.compare`" in mistake(pipebench.run, "small.yaml", train={"seed": [0, 1]})
    assert "is a folder; one recipe is needed" in mistake(pipebench.run, "recipes/quickstart")
    found = mistake(pipebench.run, SMALL, model=net, dataset={"target": object()})
    assert "dataset.target: got an object of type object" in found

    def fails(width: int = 4) -> nn.Module:
        raise KeyError("no weights")

    assert "can't make the model: KeyError: 'no weights'" in mistake(pipebench.run, SMALL, model=fails)


@pytest.mark.parametrize(("code", "raised"), [(130, KeyboardInterrupt), (3, pipebench.WorkersFailedError)])
def test_processes_that_ctrl_c_ends_are_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, code: int, raised: type[BaseException]
) -> None:
    """In 0.2.0 both were an error that the package doesn't name; the virtual engine was interrupted."""
    monkeypatch.setattr("pipebench.run.processes.run_workers", lambda *given, **keys: code)
    keys = {"engine.kind": "distributed", "cluster.count": 2, "parallelism.plan": "1-1"}
    with pytest.raises(raised):
        pipebench.run("small.yaml", on_progress=silent, **keys)


@pytest.mark.slow
def test_processes_do_not_print_the_returned_result(capfd: pytest.CaptureFixture[str]) -> None:
    keys = {"train.max_epochs": 1, "engine.kind": "distributed", "cluster.count": 2, "parallelism.plan": "1-1"}
    assert pipebench.run("small.yaml", on_progress=silent, **keys).to_dict()["engine"] == "distributed"
    assert capfd.readouterr().out == ""


def test_only_json_is_printed_on_standard_output() -> None:
    """By processes of the run, too."""
    assert json.loads(invoke("run", "small.yaml", "engine.kind=simulated", "--json").stdout)["outcome"] == "completed"
    keys = ("train.max_epochs=1", "engine.kind=distributed", "cluster.count=2", "parallelism.plan=1-1")
    done = run_copy(["run", "small.yaml", *keys, "--json-lines"], Path.cwd())
    assert done.returncode == 0, done.stderr
    message = [json.loads(line) for line in done.stdout.splitlines()]
    assert (message[-1]["event"], message[-1]["engine"]) == ("result", "distributed")
    assert {each["name"] for each in message} == {message[-1]["name"]}
    assert {"progress", "evaluation"} <= {each["event"] for each in message}, done.stderr
    lines = invoke("run", "small.yaml", "train.max_epochs=1", "--json-lines").stdout.splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert events[-1] == "result"
    assert "evaluation" in events
    largest = json.loads(invoke("largest", "small.yaml", "--json").stdout)
    assert largest["minibatch_size"] in [trial["minibatch_size"] for trial in largest["trials"]]


def test_json_of_listings() -> None:
    assert json.loads(invoke("show", "quickstart/dp", "--json").stdout)["name"] == "quickstart-dp"
    assert json.loads(invoke("show", "cluster-a", "--json").stdout)["device"]
    assert {*json.loads(invoke("ls", "--json", "modes").stdout)["modes"]} >= {"dp", "gpipe"}


def test_a_file_after_json_is_refused_with_advice() -> None:
    assert "to write q.json, say --out q.json" in invoke("profile", "quickstart", "--json", "q.json").stderr


class ObservedLock:
    """A lock that says when a thread finds it taken, and so waits."""

    def __init__(self) -> None:
        self.lock, self.is_waited_for = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.is_waited_for.set()
            self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def test_calls_in_several_threads_run_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 0.2.0 they drew from the same generators, and returned other numbers than alone."""
    lock, log, runs = ObservedLock(), list[str](), list[Run]()
    monkeypatch.setattr(turns, "_turn", lock)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    alone = pipebench.run(SMALL, model=model, on_progress=silent).frame()["eval_loss"].to_list()

    def second() -> None:
        runs.append(pipebench.run(SMALL, model=model, on_progress=lambda facts: log.append("second")))

    thread = threading.Thread(target=second)

    def hear(facts: dict[str, Any]) -> None:
        log.append("first")
        if log == ["first"]:
            assert pipebench.load_recipe("quickstart").recipe.name == "quickstart", "a call within a call has its turn"
            thread.start()
            assert lock.is_waited_for.wait(60)

    first = pipebench.run(SMALL, model=model, on_progress=hear)
    thread.join()
    assert log == sorted(log)
    assert {*log} == {"first", "second"}
    assert [run.frame()["eval_loss"].to_list() for run in (first, *runs)] == [alone, alone]


@pytest.mark.slow
def test_progress_of_processes_may_call_while_the_run_waits() -> None:
    """It comes in another thread."""
    keys = {"train.max_epochs": 1, "engine.kind": "distributed", "cluster.count": 2, "parallelism.plan": "1-1"}
    plans = list[str]()
    pipebench.run("small.yaml", on_progress=lambda facts: plans.append(repr(pipebench.plan("small.yaml"))), **keys)
    assert plans
