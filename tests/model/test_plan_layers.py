"""A plan's layers against the model's: each fault is reported once, with its place."""

import random
from dataclasses import replace

import pytest

from pipebench.errors import RecipeError
from pipebench.model.graph import LayerGraph, trace
from pipebench.model.plan import make_plan
from pipebench.model.plan_layers import form_of, layer_problems, plan_of, refuse
from pipebench.recipe.plan_file import PlanForm, StageForm, parse_plan_file
from tests.models import SkipNet
from tests.support import Mlp


def graph() -> LayerGraph:
    return trace(SkipNet())


def form(starts: list[int]) -> PlanForm:
    return form_of(make_plan(graph(), starts, [1] * (len(starts) + 1)), [layer.name for layer in graph().layers])


def with_layers(*names: list[str]) -> PlanForm:
    stages = (StageForm(1, (index,), dict.fromkeys(own, "keep")) for index, own in enumerate(names))
    return PlanForm("pipedream", len(names), 1, tuple(stages))


def test_every_plan_is_read_back() -> None:
    draw, made = random.Random(0), graph()
    names = [layer.name for layer in made.layers]
    for _ in range(20):
        starts = sorted(draw.sample(range(1, len(names)), draw.randint(0, 3)))
        replicas = [draw.randint(1, 3) for _ in range(len(starts) + 1)]
        free = draw.sample(range(12), sum(replicas))
        devices = [[free.pop() for _ in range(count)] for count in replicas]
        memory = [draw.choice(["keep", "recompute"]) for _ in names]
        plan = make_plan(made, starts, replicas, devices=devices, depth=draw.randint(1, 5), memory=memory)
        assert plan_of(parse_plan_file(form_of(plan, names).text(), "plan.json"), made) == plan


def test_stages_of_one_worker_are_read_back_too() -> None:
    made = graph()
    plan = make_plan(made, [1, 2, 4], [2, 1, 2, 1], mode="interleaved", devices=[(4, 5), (0,)] * 2, chunks=2)
    assert [stage.devices for stage in plan.stages] == [(4, 5), (0,), (4, 5), (0,)]
    assert plan.devices == (4, 5, 0)
    assert str(plan) == "2-1"
    assert plan.depth == plan.noam == 2
    assert plan_of(form_of(plan, [layer.name for layer in made.layers]), made) == plan


def test_each_wrong_layer_is_named_once() -> None:
    names = [layer.name for layer in graph().layers]
    first, *_, last = names
    swapped = [*names[1:3], first, *names[3:]]
    cases = {
        f"stages[1].layers: got {last + 'x'!r}, and the model has no such layer; did you mean {last!r}?": with_layers(
            names[:2], [*names[2:], f"{last}x"]
        ),
        f"stages: missing are {names[2]!r}, allowed is every layer of the model once; {names[2]!r} comes after "
        f"{names[1]!r}": with_layers(names[:2], names[3:]),
        f"stages[1].layers: got {names[1]!r}, which stage 0 has too, allowed is every layer once": with_layers(
            names[:2], names[1:]
        ),
        f"stages[0].layers: got {first!r} out of order, in the model it comes first": with_layers(
            swapped[:4], swapped[4:]
        ),
    }
    for said, given in cases.items():
        assert [f"{where}: {problem}" for where, problem in layer_problems(given, graph())] == [said]
    everything = with_layers([*names[1:3], first, "nowhere"], names[4:])
    assert len([*layer_problems(everything, graph())]) == 3


def test_all_faults_come_out_together_and_name_the_file() -> None:
    names = [layer.name for layer in graph().layers]
    given = with_layers(["nowhere", *names[:2]], names[3:])
    with pytest.raises(RecipeError) as refused:
        refuse("mine.json", [("depth", "got 0"), *layer_problems(given, graph())], "; see there")
    assert [str(fault).partition(": got")[0].partition(": missing")[0] for fault in refused.value.faults] == [
        "mine.json: depth",
        "mine.json: stages[0].layers",
        "mine.json: stages",
    ]
    assert all(str(fault).endswith("; see there") for fault in refused.value.faults)


def test_a_cut_inside_a_tie_is_a_fault() -> None:
    model = Mlp()
    tied = trace(model)
    users = [layer for layer in tied.layers if layer.parameters]
    shared = replace(
        tied, layers=tuple(replace(each, parameters=("w",)) if each in users else each for each in tied.layers)
    )
    names = [layer.name for layer in tied.layers]
    cut = users[-1].index
    ((where, problem),) = layer_problems(with_layers(names[:cut], names[cut:]), shared)
    assert where == "stages"
    assert "parameter w is tied: layers" in problem
