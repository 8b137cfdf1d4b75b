"""The first page of a run's artifacts, and its advice."""

import math
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from matplotlib.figure import Figure

from pipebench.planner.plans import StageTime
from pipebench.recipe.load import load, load_each
from pipebench.run.advice import advice
from pipebench.run.deciding import prepare_job
from pipebench.run.drawings import record_drawn
from pipebench.run.request import RunRequest
from pipebench.run.story import PAGE, answer_of, comparison_story, story
from pipebench.run.suite import Suite
from pipebench.show.answers import Run
from pipebench.show.plan_picture import plan_figure
from pipebench.tracking.run_log import RunLog
from pipebench.train.result import COMPLETED, DIVERGED, MISSED, REACHED, Point
from tests.tracking.records import RESULT


class Page(HTMLParser):
    """Headings of a page, and the addresses that it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.sources: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "data", "srcset")]
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["h2"]:
            self.headings.append(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("plan", "timeline", "curves"):
        Figure(figsize=(1, 1)).savefig(tmp_path / f"{name}.png")
    return tmp_path


def request_of(*overrides: str) -> RunRequest:
    return RunRequest(load("quickstart/gpipe", overrides), "gpipe", Suite("quickstart", overrides))


def test_a_run_s_page_has_its_sections_and_fetches_nothing(folder: Path) -> None:
    request = request_of("train.seed=7")
    metrics = {**RESULT.metrics, "bubble_fraction": 0.45, "comm_stall_fraction": 0.05, "evaluation_time_s": 1.5}
    result = replace(RESULT, metrics=metrics, name="a <b>name</b>")
    text = story(request, request.loaded.recipe, result, folder)
    page = Page(text)
    assert not page.open
    assert page.headings == ["Recipe", "Plan", "Timeline", "Where the time went", "Curves", "What to try next"]
    assert sum(source.startswith("data:image/png;base64,") for source in page.sources) == 3
    assert all(source.startswith(("data:", "#")) for source in page.sources)
    assert "<b>name" not in text
    for said in (RESULT.sentence, "train.seed: 7", "pipebench run quickstart/gpipe train.seed=7", "40.0%", "25.0%"):
        assert said in text, said
    assert sorted([PAGE, "changes.diff", "environment.yaml", "comparison.json"])[0] == PAGE, "MLflow sorts by name"


def test_a_comparison_s_page_has_its_verdict_curves_and_a_link_to_each_seed(folder: Path) -> None:
    runs = [
        Run(replace(RESULT, name=name, mode=name, seed=seed, metrics={**RESULT.metrics, "time_to_accuracy_s": time_s}),
            mlflow_run_id=f"{name}{seed}")
        for name, time_s in (("dp", 6.0), ("gpipe", 3.0)) for seed in (0, 1)
    ]  # fmt: skip
    store = SimpleNamespace(experiment_id="7")
    parent: Any = SimpleNamespace(name="dp, gpipe", folder=folder, store=store, wait_for_id=lambda: "f00")
    text = comparison_story(parent, runs, ["curves.png"])
    page = Page(text)
    assert not page.open
    assert page.headings == ["Curves"]
    assert "gpipe is first to the target: in 3.00 s, 2.00x as fast as dp with 6.00 s" in text
    links = [source for source in page.sources if "/#/experiments/7/runs/" in source]
    assert [link.split("/runs/")[1].split("?")[0] for link in links] == ["gpipe0", "gpipe1", "dp0", "dp1"]
    assert sum(source.startswith("data:image/png;base64,") for source in page.sources) == 1


def test_a_picture_that_fails_does_not_end_the_run() -> None:
    """A RuntimeError of matplotlib's ended the worker that had trained: all were started again."""

    def fails(_: Path) -> None:
        raise RuntimeError("in FT2Font: can not load face")

    assert record_drawn(cast("RunLog", SimpleNamespace()), {"plan.png": fails}, "the plan") == []


def test_a_page_without_pictures_is_complete() -> None:
    request = request_of()
    page = Page(story(request, request.loaded.recipe, replace(RESULT, points=()), None))
    assert page.headings == ["Recipe", "Where the time went", "What to try next"]


WAITED = ["--seeds 0,1,2", "train.evaluate_every={epochs: 2}", "parallelism.microbatches=8"]
METRICS = {"total_time_s": 4.0, "evaluation_time_s": 2.0, "bubble_fraction": 0.5, "comm_stall_fraction": 0.2}


@pytest.mark.parametrize(
    ("outcome", "engine", "metrics", "tried"),
    [
        (MISSED, "virtual", {}, ["train.max_epochs=20"]),
        (DIVERGED, "virtual", {}, ["train.optimizer.lr=0.01"]),
        (COMPLETED, "virtual", {"best_top1": 0.987}, ["train.target={metric: top1, value: 0.987}"]),
        (COMPLETED, "simulated", {}, ["engine.kind=virtual"]),
        (REACHED, "virtual", METRICS, [*WAITED, "parallelism.plan=auto"]),
        (
            REACHED,
            "virtual",
            {**METRICS, "comm_bytes_total": 3.0, "comm_bytes_all_reduce": 2.0},
            [*WAITED, "train.minibatch_size=64"],
        ),
    ],
)
def test_the_advice_is_a_command_that_the_recipe_accepts(
    outcome: str, engine: str, metrics: dict[str, float], tried: list[str]
) -> None:
    overrides = ["parallelism.plan=straight", "train.seed=3"]
    loaded = load("quickstart/gpipe", overrides)
    result = replace(RESULT, outcome=outcome, engine=engine, metrics=metrics)
    steps = advice(loaded, loaded.recipe, result, overrides)
    lines = [shlex.split(line) for _, line in steps]
    changed = [" ".join(word for word in words[3:] if word not in overrides) for words in lines]
    assert changed == [*tried, ""]
    assert [words[:3] for words in lines[:-1]] == [["pipebench", "run", "quickstart/gpipe"]] * len(tried)
    assert lines[-1] == ["pipebench", "plan", "quickstart/gpipe", *overrides]
    for words in lines:
        assert load_each(loaded.path, [word for word in words[3:] if "=" in word])


@pytest.mark.parametrize(
    ("recipe", "metric", "values", "advised"),
    [
        ("quickstart/gpipe", "top1", (0.5, 0.9625, 0.9), 0.962),
        ("quickstart/gpipe", "top1", (0.961, 0.5), 0.961),
        ("small/gpt2/gpipe", "perplexity", (91.0, 12.3456), 12.4),
        ("small/gpt2/gpipe", "perplexity", (2345.6, math.inf), 2350.0),
        ("small/gpt2/gpipe", "perplexity", (math.nan, 12.3456, 91.0), 12.4),
        ("small/gpt2/gpipe", "perplexity", (12.3456,), 12.3456),  # lower or higher: nothing says
    ],
)
def test_a_target_that_is_advised_is_one_that_the_run_reached(
    recipe: str, metric: str, values: tuple[float, ...], advised: float
) -> None:
    numbers = [value for value in values if not math.isnan(value)]
    best = max(numbers) if metric == "top1" else min(numbers)
    points = tuple(Point(k, float(k), {metric: value}) for k, value in enumerate(values))
    result = replace(RESULT, outcome=COMPLETED, metrics={f"best_{metric}": best}, points=points)
    loaded = load(recipe)
    found = [line for _, line in advice(loaded, loaded.recipe, result, []) if "train.target" in line]
    assert found == [f"pipebench run {recipe} 'train.target={{metric: {metric}, value: {advised}}}'"]


def test_a_key_that_is_advised_replaces_the_command_s() -> None:
    overrides = ["train.evaluate_every={epochs: 1}", "train.max_epochs=3"]
    loaded = load("quickstart/gpipe", overrides)
    result = replace(RESULT, outcome=MISSED, metrics={"total_time_s": 4.0, "evaluation_time_s": 2.0})
    lines = [shlex.split(line)[3:] for _, line in advice(loaded, loaded.recipe, result, overrides)]
    assert lines[0] == ["train.evaluate_every={epochs: 1}", "train.max_epochs=6"]
    assert lines[1] == ["train.max_epochs=3", "train.evaluate_every={epochs: 2}"]
    overrides = ["train.seed=3", "train.max_epochs=3"]
    reached = advice(load("quickstart/gpipe", overrides), loaded.recipe, RESULT, overrides)
    assert reached[0][1].endswith("train.max_epochs=3 --seeds 0,1,2")
    assert "train.seed" not in reached[0][1], "which --seeds would be refused beside"


def test_options_that_a_recipe_refuses_are_not_advised() -> None:
    overrides = ["train.minibatch_size=32", "parallelism.microbatches=32"]
    loaded = load("quickstart/gpipe", overrides)
    steps = advice(loaded, loaded.recipe, replace(RESULT, metrics={"bubble_fraction": 0.5}), overrides)
    assert not [line for _, line in steps if "microbatches=64" in line]


@pytest.mark.parametrize(("recipe", "unit"), [("quickstart", "minibatch"), ("quickstart/gpipe", "microbatch")])
def test_the_plan_s_picture_names_the_unit_of_its_bytes(recipe: str, unit: str) -> None:
    """Those of a microbatch were called those of a minibatch."""
    layers = plan_figure(answer_of(prepare_job(load(recipe), trains=False))).axes[0]
    assert f"cross it per {unit}" in layers.get_xlabel()
    assert layers.get_ylabel().endswith(f"per {unit}")


def test_the_plan_s_picture_has_a_legend() -> None:
    answer = answer_of(prepare_job(load("quickstart"), trains=False))
    simulated = replace(answer, times=tuple(StageTime(0.5, 0.25, 0.25) for _ in answer.comparison.best.stages))
    drawn, with_times = (
        {
            text.get_text()
            for axes in plan_figure(each).axes
            if (legend := axes.get_legend()) is not None
            for text in legend.get_texts()
        }
        for each in (answer, simulated)
    )
    assert drawn == {"in all, by the cost model", "bottleneck", "computing", "gradient sum", "transfers"}
    assert with_times - drawn == {"simulated: computes", "waits for transfers", "waits for others"}
