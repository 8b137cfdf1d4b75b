"""Parallelism that compiled stages or channels last don't support: the sentence that says so."""

import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from pipebench.errors import PlanError, RecipeError
from pipebench.model.plan_layers import form_of
from pipebench.recipe.load import load
from pipebench.recipe.preflight import preflight
from pipebench.train.job import Job
from pipebench.train.prepare import prepare
from tests.recipe.conftest import VALID, Write

TEXT = """\
name: small
model: {name: gpt2, num_layers: 2, width: 16, num_heads: 4, vocabulary: 10000, max_tokens: 16}
dataset: {name: king_james, bptt: 16}
train: {minibatch_size: 32, optimizer: {name: sgd, lr: 0.02}, max_epochs: 10}
cluster: {name: cluster-a}
parallelism: {mode: dp}
"""
COMPILED = [
    (
        "parallelism={mode: gpipe, plan: 2-1-1}",
        "parallelism.recompute: got null, mode gpipe's own, with engine.compile, which .*: allowed is false, or engine",
    ),
    ("parallelism.recompute=true", "parallelism.recompute: got true with engine.compile, .*: allowed is false"),
    ("parallelism.recompute_layers=[head]", "parallelism.recompute_layers: got .* with engine.compile, which chooses"),
    ("parallelism.swap_layers=[head]", "parallelism.swap_layers: got .* with engine.compile, whose saved tensors"),
    (
        "parallelism={mode: pipedream, plan: straight, vpipe: {swap: false}}",
        "parallelism.vpipe: got .* with engine.compile, which makes one piece of a stage's layers: allowed is null",
    ),
    (
        "parallelism={mode: zero-bubble, plan: straight}",
        "parallelism.mode: got zero-bubble with engine.compile, which compiles a backward as one piece",
    ),
    (
        "parallelism={mode: auto, plan: auto}",
        "parallelism.mode: got auto with engine.compile, which some modes don't support",
    ),
    (
        "parallelism={mode: dp, plan: auto, tensor: 4}",
        "parallelism.tensor: got 4 with engine.compile, and slices exchange sums",
    ),
]


@pytest.mark.parametrize(("override", "message"), COMPILED)
def test_options_that_compiled_stages_do_not_support_are_refused(write: Write, override: str, message: str) -> None:
    path = write(TEXT if "tensor" in override else VALID)
    load(str(path), [override])
    with pytest.raises(RecipeError, match=message) as caught:
        load(str(path), [override, "engine.compile=true"])
    assert len(caught.value.faults) == 1, str(caught.value)


def test_an_independent_fault_is_reported_once(write: Write) -> None:
    """Until 0.2.0 the rule on compiled stages read slices that another rule had refused, and printed an object."""
    with pytest.raises(RecipeError) as caught:
        load(str(write(VALID)), ["parallelism.tensor=3", "engine.compile=true"])
    assert [fault.key for fault in caught.value.faults] == ["parallelism.tensor"]
    assert "object" not in str(caught.value)


@pytest.mark.parametrize(
    "override", ["parallelism={mode: zero1, plan: auto}", "parallelism={mode: dp, plan: auto, shard: gradients}"]
)
def test_channels_last_is_refused_with_shards(write: Write, override: str) -> None:
    path = write()
    load(str(path), [override])
    with pytest.raises(RecipeError, match=r"with engine\.channels_last, and shards are cut in the order of") as caught:
        load(str(path), [override, "engine.channels_last=true"])
    assert len(caught.value.faults) == 1, str(caught.value)


def test_a_plan_s_file_that_recomputes_is_refused_with_compiled_stages(write: Write) -> None:
    write()
    straight = ["cluster.servers=2", "cluster.count=1", "parallelism={mode: pipedream, plan: straight}"]
    setup = prepared(straight).setup
    form = form_of(setup.plan, [layer.name for layer in setup.graph.layers])
    form.stages[0].layers["features_1"] = "recompute"
    write(form.text(), "plan.json")
    of_file = [*straight[:2], "parallelism={mode: pipedream, plan: plan.json}"]
    assert "recompute" in prepared(of_file).setup.plan.stages[0].memory
    with pytest.raises(PlanError, match="got true with a plan that says recompute for layer features_1"):
        prepared([*of_file, "engine.compile=true"])


def prepared(overrides: list[str]) -> Job:
    loaded = load("r.yaml", overrides)
    return prepare(loaded.recipe, loaded.cluster, trains=False)


def test_a_missing_compiler_is_reported_before_the_run(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(str(write()), ["engine.compile=true", "engine.device=cpu"])
    monkeypatch.setenv("CXX", sys.executable)  # there, as no compiler need be
    preflight(loaded)
    monkeypatch.setenv("CXX", "no-such-compiler")
    preflight(loaded, trains=False)
    with pytest.raises(RecipeError, match=r"engine\.compile: got true, .* and no-such-compiler isn't here; allowed is"):
        preflight(loaded)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_missing_headers_of_python_are_reported_before_the_run(
    device: str, write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As of a system's own Python: the compiler's error came from within torch, when a stage was compiled."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, sys.executable)
    loaded = load(str(write()), ["engine.compile=true", f"engine.device={device}"])
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: {"include": str(tmp_path)}[name])
    with pytest.raises(
        RecipeError, match=r"engine\.compile: got true, .*Python\.h isn't here .*-dev has it\); allowed is"
    ):
        preflight(loaded)
    (tmp_path / "Python.h").touch()
    preflight(loaded)
