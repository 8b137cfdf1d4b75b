"""Tensor slices in processes: weights, bytes, memory and checkpoints, against the virtual engine."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn

from pipebench.checkpoint.state import CheckpointError, ModelState
from pipebench.distributed import world
from pipebench.distributed.launch_join import HostSlot
from pipebench.distributed.slices import joined
from pipebench.engine.virtual import VirtualEngine
from pipebench.errors import GraphError, PlanError
from pipebench.model.graph import trace
from pipebench.model.slice_modules import Alone, Cut, Slices
from pipebench.model.sliced import ProcessSlicer, Slicer
from pipebench.schedule.operations import Op
from pipebench.train.engines import on_virtual_clock
from pipebench.train.memory_forecast import MemoryForecast
from tests.distributed.sliced import TOKENS, VOCABULARY, Outcome, job_of
from tests.made_up_gpu import made_up_gpu
from tests.processes import Processes

SGD = {"name": "sgd", "lr": 0.5, "momentum": 0.9, "clip_norm": 0.05}
STRAIGHT = {"mode": "pipedream-flush", "plan": "1-1", "microbatches": 2}
SEGMENTS = (3, 2)


def recipe(
    parallelism: dict[str, Any], tensor: int, kind: str = "distributed", model: Any = (), **train: Any
) -> dict[str, Any]:
    """Return a recipe of a small GPT-2, a slice of which is as wide as a vector register: kernels round all alike."""
    slices = max(2, tensor)
    sizes = {"name": "gpt2", "num_layers": 2, "width": 16 * slices, "num_heads": 2 * slices, "vocabulary": VOCABULARY}
    return {
        "name": "sliced",
        "model": {**sizes, "max_tokens": TOKENS, **dict(model)},
        "dataset": {"target": "tests.distributed.sliced:text"},
        "train": {"minibatch_size": 4, "optimizer": SGD, "max_epochs": 1, **train},
        "cluster": {"name": "cluster-b", "servers": 1, "count": 2 * tensor},
        "engine": {"kind": kind, "threads": 1, "device": "cpu"},
        "parallelism": {**parallelism, "tensor": tensor},
    }


def virtually(given: dict[str, Any], segments: Sequence[int] = SEGMENTS) -> tuple[VirtualEngine, list[Any]]:
    """Train on the virtual engine; return it and the scores."""
    job = job_of({**given, "engine": {**given["engine"], "kind": "virtual"}})
    engine = on_virtual_clock(job)(lambda *loss: None, lambda *unit: None)
    assert isinstance(engine, VirtualEngine)
    done, scores = 0, []
    for count in segments:
        done += engine.train(done, count)
        scores.append(engine.evaluate())
    return engine, scores


def state_of(parts: Sequence[dict[str, Any]]) -> ModelState:
    """Return the model's state from the parts of a checkpoint."""
    return ModelState.joined(ModelState.from_plain(part) for part in parts)


def state_of_engine(engine: VirtualEngine) -> ModelState:
    return state_of([part.to_plain() for _, part in engine.parts()])


def sent(facts: Sequence[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return sum(
        (Counter({(kind, level): count for kind, level, count in each["num_bytes"]}) for each in facts), Counter()
    )


def compare(found: list[Outcome], engine: VirtualEngine, scores: list[Any], tolerance: float = 0.0) -> None:
    """Compare with the virtual engine; a tolerance of 0 asks for the same bits."""
    ours, theirs = state_of([part for each in found for part in each.parts]), state_of_engine(engine)
    assert (ours.parameters.keys(), ours.optimizer.keys()) == (theirs.parameters.keys(), theirs.optimizer.keys())
    for name, expected in theirs.parameters.items():
        torch.testing.assert_close(ours.parameters[name], expected, rtol=tolerance, atol=tolerance)
        for key, kept in theirs.optimizer[name].items():
            torch.testing.assert_close(ours.optimizer[name][key], kept, rtol=tolerance, atol=tolerance)
    whole = {name: tensor for tensors in found[0].whole for name, tensor in tensors.items()}
    engine.gather_or_free(Op.GATHER, Op.WAIT_GATHER)
    for worker in engine.workers:  # what scores of the whole model are computed with
        for name, tensor in worker.tensors().items():
            torch.testing.assert_close(whole[name], tensor, rtol=tolerance, atol=tolerance)
    for each in found:
        for known, expected in zip(each.scores, scores, strict=True):
            assert known == pytest.approx(expected, rel=max(tolerance, 1e-12))


TWO: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "clipped": ({"mode": "single"}, {}, 0.0),
    "adam, tied": (
        {"mode": "single"},
        {"optimizer": {"name": "adam", "lr": 0.01}, "model": {"share_embedding": True}},
        0.0,
    ),
    "bf16": ({"mode": "single"}, {"precision": "bf16"}, 0.0),
    # Norms of whole tensors are added up of the devices'.
    "lamb": ({"mode": "single"}, {"optimizer": {"name": "lamb", "lr": 0.01, "clip_norm": 0.5}}, 1e-5),
    "lars": ({"mode": "single"}, {"optimizer": {"name": "lars", "lr": 0.5}}, 1e-5),
}
FOUR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp, clipped": ({"mode": "dp", "plan": "2"}, {}),
    "pipedream": ({"mode": "pipedream", "plan": "1-1"}, {}),
    "1F1B, clipped": (STRAIGHT, {}),
    "zero bubble, tied": ({**STRAIGHT, "mode": "zero-bubble"}, {"model": {"share_embedding": True}}),
    "1F1B, recomputed": ({**STRAIGHT, "recompute": True}, {}),
    "fsdp": ({"mode": "fsdp"}, {"optimizer": {"name": "adam", "lr": 0.01, "clip_norm": 0.05}}),
}


def check(processes: Processes, given: dict[str, Any], tolerance: float = 0.0, **options: Any) -> list[Outcome]:
    """Train in processes and on the virtual engine; compare weights, scores and bytes."""
    engine, scores = virtually(given)
    found: list[Outcome] = processes.run("tests.distributed.sliced:trained", given, SEGMENTS, **options)
    each_worker = found[:: given["parallelism"]["tensor"]]
    assert sent([each.facts for each in each_worker]) == sent([engine.facts()])
    compare(found, engine, scores, tolerance)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TWO)
def test_two_slices_have_the_virtual_engine_s_weights(two: Processes, name: str) -> None:
    parallelism, more, tolerance = TWO[name]
    check(two, recipe(parallelism, 2, **more), tolerance)


def test_slices_of_a_user_s_model_have_the_virtual_engine_s_weights(two: Processes) -> None:
    """0.2.0 in its beginnings: its dropout differed between processes for values that aren't sliced."""
    given = recipe({"mode": "single"}, 2)
    check(two, {**given, "model": {"target": "tests.distributed.sliced:Residual"}})


def test_three_slices_add_in_their_order(three: Processes) -> None:
    for shares_memory in (True, False):
        check(three, recipe({"mode": "single"}, 3), shares_memory=shares_memory)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FOUR)
def test_two_workers_of_two_slices_have_the_virtual_engine_s_weights(four: Processes, name: str) -> None:
    parallelism, more = FOUR[name]
    check(four, recipe(parallelism, 2, **more))


def test_slices_by_sockets(four: Processes) -> None:
    check(four, recipe(STRAIGHT, 2), shares_memory=False)


def test_a_process_holds_a_slice_and_sends_megatron_s_bytes(two: Processes) -> None:
    given = recipe({"mode": "single"}, 2, model={"dropout": 0.0})
    first, second = two.run("tests.distributed.sliced:trained", given, SEGMENTS)
    b, s, h, blocks, k = 4, TOKENS, 32, 2, 2
    # Per minibatch 8 b s h (k - 1) elements a block (SC'21, section 3.2), sums behind the embedding and before the
    # classifier, and gathered logits.
    of_one = 4 * b * s * (k - 1) * (blocks * 8 * h + 2 * 2 * h + VOCABULARY)
    assert sent([first.facts])["tensor", "server"] == sum(SEGMENTS) * of_one
    # Matrices and their biases, but those of matrices divided by rows; else every process has all.
    divided = 2 * VOCABULARY * h + blocks * (4 * h * h + 3 * h + 2 * 4 * h * h + 4 * h)
    others = TOKENS * h + 2 * h + blocks * (2 * 2 * h + 2 * h)
    assert [first.held_bytes, second.held_bytes] == [4 * (divided // k + others)] * 2
    assert first.facts["peak_bytes"] == [MemoryForecast(job_of(given)).memory.peaks[0].num_bytes]


def test_bytes_of_gathered_logits_have_no_padding(two: Processes) -> None:
    """0.2.0 in its beginnings: they had, where slices don't divide the vocabulary, unlike the virtual engine's."""
    check(two, recipe({"mode": "single"}, 2, model={"vocabulary": VOCABULARY + 1}), 1e-5)


def test_checkpoints_go_on_with_and_without_slices(two: Processes) -> None:
    given = recipe({"mode": "single"}, 2, optimizer={"name": "adam", "lr": 0.01})
    before, _ = virtually({**given, "parallelism": {"mode": "single", "tensor": 1}}, SEGMENTS[:1])
    of_whole = state_of_engine(before).to_plain()
    found = two.run("tests.distributed.sliced:trained", given, [], of_whole)
    mine = state_of([part for each in found for part in each.parts])
    for name, tensor in of_whole["parameters"].items():
        assert torch.equal(mine.parameters[name], tensor)
        assert torch.equal(mine.optimizer[name]["exp_avg"], of_whole["optimizer"][name]["exp_avg"])
    assert not mine.slices  # in one piece, as any plan restores it
    with pytest.raises(CheckpointError, match="found 512 elements, expected of all slices are 1,024"):
        state_of(found[1].parts)


PIPEDREAM = {"mode": "pipedream", "plan": "1-1"}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "moves": ({**PIPEDREAM, "vpipe": {"repartition": True}}, SGD, "can't move layers in slices: allowed is 1"),
    "pushes": ({"mode": "dp-asp", "plan": "2"}, {}, "sync asynchronous, whose updates every slice"),
    "whole tensors": ({"mode": "single"}, {"name": "adafactor"}, "tensors that adafactor adapts whole steps to"),
    "shards of them": ({"mode": "zero1"}, {"name": "lamb"}, "shard optimizer, whose processes have pieces"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_slices_in_processes_do_not_support(name: str) -> None:
    parallelism, optimizer, said = REFUSED[name]
    train: dict[str, Any] = {"optimizer": {"lr": 0.1, **optimizer, "clip_norm": None}}
    with pytest.raises(PlanError, match=f"parallelism.tensor: got 2 with engine distributed.*{said}"):
        job_of(recipe(parallelism, 2, **train))
    job_of(recipe(parallelism, 2, "virtual", **train))


def test_a_function_that_draws_for_pieces_is_refused() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(nn.functional.dropout(self.a(x)))

    for slicer in (ProcessSlicer(Alone(2)), Slicer(Alone(2), in_processes=True)):  # of a process, and of the costs
        with pytest.raises(
            GraphError, match="got 2, and layer dropout draws random numbers for pieces by the function"
        ):
            trace(Dropping(), rewrite=slicer)
    trace(Dropping(), rewrite=Slicer(Alone(2)))


def test_slices_of_gpus_are_put_together_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.2.0 in its beginnings: rank 0's were on its GPU beside the others' on the host, which torch doesn't join."""
    first, second, rows = torch.ones(2, 3), torch.zeros(2, 3), [["w", "float32", [2, 3]]]
    slot, store = HostSlot(0, 2, 0, 2, "", 0, agent_store=False, attempt=None), cast("Any", None)
    monkeypatch.setattr(world.World, "exchange", lambda self, value: [rows, rows])
    monkeypatch.setattr(torch.distributed, "recv", lambda tensor, rank: tensor.copy_(second))
    with made_up_gpu():
        local = world.World(slot, torch.device("cuda"), direct=True, store=store, operation_limit_s=1, connection=store)
        gathered = local.gather({"w": first.to("cuda")})
        (whole,) = joined(gathered, Slices(Alone(2), {"w": Cut(0, 0, (4, 3), 2)}))
    assert whole["w"].tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2
