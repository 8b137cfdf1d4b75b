"""Tensor slices in the virtual engine: weights, bytes, time and memory."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from pipebench.checkpoint.state import ModelState
from pipebench.engine.virtual import VirtualEngine
from pipebench.recipe.load import load_mapping
from pipebench.schedule.operations import Op
from pipebench.simulate.steady import simulate_segment
from pipebench.train.engines import on_virtual_clock
from pipebench.train.job import Job
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.prepare import prepare
from pipebench.train.simulated import simulate_epoch

RECIPE: dict[str, Any] = {
    "name": "sliced",
    "model": {"name": "gpt2", "num_layers": 2, "width": 16, "num_heads": 4, "vocabulary": 10_000, "max_tokens": 16},
    "dataset": {"name": "king_james", "bptt": 16, "train_tokens": 20_000, "eval_tokens": 1_000},
    "engine": {"kind": "virtual"},
}
SGD = {"lr": 0.5, "momentum": 0.9}


def ready(
    tensor: int,
    parallelism: dict[str, Any],
    workers: int = 2,
    on: str = "cluster-b",
    data: Mapping[str, Any] = MappingProxyType({}),
    **train: Any,
) -> tuple[Job, VirtualEngine]:
    """Return a job of so many workers and its engine."""
    trained = {"minibatch_size": 4, "streams": 4, "optimizer": SGD, "max_epochs": 1, **train}
    cluster = {"name": on, "servers": 1, "count": workers * tensor}
    given = {**RECIPE, "train": trained, "cluster": cluster, "parallelism": {**parallelism, "tensor": tensor}}
    given["dataset"] = {**RECIPE["dataset"], **data}
    (loaded,) = load_mapping(given)
    job = prepare(loaded.recipe, loaded.cluster)
    engine = on_virtual_clock(job)(lambda *loss: None, lambda *unit: None)
    assert isinstance(engine, VirtualEngine)
    return job, engine


def weights(engine: VirtualEngine) -> dict[str, torch.Tensor]:
    """Return copies of all weights by name."""
    engine.gather_or_free(Op.GATHER, Op.WAIT_GATHER)
    found = {name: tensor.detach().clone() for worker in engine.workers for name, tensor in worker.tensors().items()}
    engine.gather_or_free(Op.FREE)
    return found


def moved(job: Job, engine: VirtualEngine) -> dict[str, torch.Tensor]:
    """Train; return the change of every weight."""
    before = {name: tensor.detach().clone() for name, tensor in job.setup.graph.root.named_parameters()}
    engine.train(0, 4)
    return {name: tensor - before[name] for name, tensor in weights(engine).items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("parallelism", "train"),
    [
        ({"mode": "dp"}, {}),
        ({"mode": "fsdp"}, {"optimizer": {"name": "adam", "lr": 0.01, "clip_norm": 0.1}}),
        ({"mode": "pipedream", "plan": "1-1"}, {}),
        ({"mode": "gpipe", "plan": "1-1", "microbatches": 2}, {"optimizer": {"name": "lamb", "lr": 0.01}}),
        ({"mode": "zero-bubble", "plan": "1-1", "microbatches": 2}, {}),
        ({"mode": "pipedream-flush", "plan": "1-1", "microbatches": 2, "recompute": True}, {}),
        ({"mode": "pipedream-flush", "plan": "1-1", "microbatches": 2, "swap_layers": ["*"]}, {}),
    ],
)
def test_slices_train_the_same_weights(parallelism: dict[str, Any], train: dict[str, Any]) -> None:
    check(parallelism, train)


@pytest.mark.parametrize("columns", [{}, {"swap_layers": ["*"]}])
def test_backwards_of_slices_use_the_weights_that_a_policy_moves(columns: dict[str, Any]) -> None:
    """Matrices divided by rows used the weights of their forward."""
    check({"mode": "pipedream", "plan": "1-1", "weights": "none", **columns}, {})


def check(parallelism: dict[str, Any], train: dict[str, Any]) -> None:
    """Compare weights and scores with and without slices."""
    whole, sliced = (ready(tensor, parallelism, **train) for tensor in (1, 2))
    expected, found = moved(*whole), moved(*sliced)
    assert found.keys() == expected.keys()
    for name, step in expected.items():
        if name.endswith("key.bias"):  # adds the same to all scores of a query: its gradient is 0 but for rounding
            continue
        assert step.abs().max() > 0
        # Sums in another order: Adam's and LAMB's divisions make more of it where gradients are near 0.
        torch.testing.assert_close(found[name], step, rtol=1e-3, atol=2e-3 * float(step.abs().max()))
    ours, theirs = sliced[1].evaluate(), whole[1].evaluate()
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-4)


def test_the_last_device_may_have_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tokens among four devices: three each, and none for the last."""
    model: Any = RECIPE["model"]
    data = {"name": "synthetic_text", "columns": 8, "vocabulary": 9, "num_train": 16, "num_eval": 4}
    monkeypatch.setitem(RECIPE, "model", {**model, "width": 8, "vocabulary": 9})
    monkeypatch.setitem(RECIPE, "dataset", data)
    whole, sliced = (ready(tensor, {"mode": "dp"}, streams=None) for tensor in (1, 4))
    expected, found = moved(*whole), moved(*sliced)
    for name, step in expected.items():
        torch.testing.assert_close(found[name], step, rtol=1e-3, atol=2e-3 * float(step.abs().max()) + 1e-8)


def test_slices_train_in_sixteen_bits() -> None:
    whole, sliced = (ready(tensor, {"mode": "dp"}, precision="bf16") for tensor in (1, 2))
    expected, found = moved(*whole), moved(*sliced)
    for name, step in expected.items():
        assert (found[name].float() - step.float()).norm() < 0.1 * step.float().norm() + 1e-6


def test_time_and_memory_equal_the_simulation_s_and_bytes_megatron_s() -> None:
    parallelism = {"mode": "pipedream-flush", "plan": "1-1", "microbatches": 2}
    job, engine = ready(2, parallelism)
    engine.train(0, 6)
    facts = engine.facts()
    sent = {kind: count for kind, _, count in facts["num_bytes"]}
    b, s, h, vocabulary = 4, 16, 16, 10_000
    # Per minibatch 8 b s h (k - 1) elements a block (SC'21, section 3.2), sums behind the embedding and before the
    # classifier, and gathered logits.
    assert sent["tensor"] == 6 * 4 * b * s * (2 * 8 * h + 2 * 2 * h + vocabulary)
    assert sent["activation"] == sent["gradient"] == 6 * 2 * 4 * b * s * h  # both devices send what both have
    peaks = MemoryForecast(job).memory.peaks
    assert facts["peak_bytes"] == [peak.num_bytes for peak in peaks]
    assert max(facts["peak_bytes"]) < 0.7 * max(engine.peak_bytes)  # a device holds half of most
    engine.evaluate()
    again = {kind: count for kind, _, count in engine.facts()["num_bytes"]}
    assert {kind: again[kind] for kind in sent} == sent
    assert again["evaluation"] > 0


def test_a_segment_takes_its_simulated_time() -> None:
    job, engine = ready(4, {"mode": "pipedream", "plan": "1-1"})
    engine.train(0, 12)
    assert engine.clock_s == pytest.approx(simulate_segment(job.setup, 12).end_s)


@pytest.mark.parametrize("parallelism", [{"mode": "dp"}, {"mode": "pipedream-flush", "plan": "1-1"}])
def test_messages_of_slices_cross_pcie_too(parallelism: dict[str, Any]) -> None:
    job, engine = ready(2, parallelism, on="cluster-a", data={"train_tokens": 2_000})
    engine.train(0, job.setup.sampler.minibatches_per_epoch)
    sent = sum(count for kind, _, count in engine.facts()["num_bytes"] if kind != "evaluation")
    could = 2 * 2 * engine.clock_s * 15.76e9
    simulated, _ = simulate_epoch(job)
    for found in (engine.measured(engine.clock_s).metrics, simulated.metrics):
        assert found["pcie_out_fraction"] == pytest.approx(sent / could, rel=1e-4)


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_checkpoints_resume_with_other_slices(first: int, then: int, tmp_path: Path) -> None:
    _, one = ready(first, {"mode": "dp"})
    _, whole_way = ready(first, {"mode": "dp"})
    one.train(0, 2)
    state = ModelState.merge(part for _, part in one.parts())
    _, other = ready(then, {"mode": "dp"})
    other.restore(state, None, 0.0)
    other.train(2, 2)
    whole_way.train(0, 4)
    expected = weights(whole_way)
    for name, tensor in weights(other).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)
