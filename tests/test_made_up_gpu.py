"""The emulated GPU: what it refuses, and that training never mixes its tensors with the host's nor forgets to wait."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

import pipebench
from pipebench.checkpoint.state import ModelState
from pipebench.engine.engine import CUDA_LOSS_EVERY
from pipebench.engine.virtual import VirtualEngine
from pipebench.model.device import torch_settings
from pipebench.model.optimizer import make_optimizer
from pipebench.recipe.catalog import recipes_folder
from pipebench.recipe.schema import EngineRecipe, OptimizerRecipe
from pipebench.simulate.network import Network
from pipebench.train import checkpointing
from tests.distributed.cases import compare, virtually
from tests.distributed.test_equality import THREE, THREE_REPLICAS, TWO
from tests.made_up_gpu import made_up_gpu
from tests.races import RaceError
from tests.shortcuts import evaluate_few_digits
from tests.support import Mlp, make_engine, make_setup

CASES = {**TWO, **THREE, **THREE_REPLICAS}
# What another engine runs, and what a search of plans leads to
MODES = sorted({path.stem for path in (recipes_folder() / "modes").glob("*.yaml")} - {"pipedream-relay", "auto"})


def on_host() -> torch.Tensor:
    return torch.ones(4, 3)


def on_gpu() -> torch.Tensor:
    return torch.ones(4, 3, device="cuda")


@pytest.mark.parametrize(
    "mixes",
    [
        lambda: on_host() + on_gpu(),
        lambda: nn.Linear(3, 2)(on_gpu()),
        lambda: nn.Linear(3, 2).to("cuda")(on_host()),
        lambda: torch.cat([on_host(), on_gpu()]),
        lambda: on_host()[torch.tensor([0], device="cuda")],
        lambda: on_host() * torch.tensor(2.0, device="cuda"),
        lambda: on_gpu().add_(on_host()),
        lambda: torch._foreach_add([on_gpu()], [on_host()]),
    ],
)
def test_the_emulated_gpu_refuses_what_cuda_refuses(mixes: Callable[[], Any]) -> None:
    with made_up_gpu(), pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mixes()


@pytest.mark.parametrize("refused", [lambda: on_gpu().numpy(), lambda: on_gpu().pin_memory()])
def test_the_host_s_functions_refuse_tensors_of_the_emulated_gpu(refused: Callable[[], Any]) -> None:
    with made_up_gpu(), pytest.raises((TypeError, RuntimeError)):
        refused()


@pytest.mark.parametrize(
    ("makes", "device"),
    [
        (on_gpu, "cuda"),
        (lambda: on_gpu().sum(), "cuda"),
        (lambda: on_gpu() + torch.tensor(2.0), "cuda"),
        (lambda: on_gpu()[torch.tensor([0])], "cuda"),
        (lambda: on_gpu().T, "cuda"),
        (lambda: on_gpu().new_zeros(2), "cuda"),
        (lambda: torch.zeros_like(on_gpu(), device="cpu"), "cpu"),
        (lambda: torch.zeros_like(on_host(), device="cuda"), "cuda"),
        (lambda: torch.as_tensor(on_host(), device="cuda"), "cuda"),
        (lambda: on_host().to(on_gpu()), "cuda"),
        (lambda: on_gpu().to(torch.float64), "cuda"),
        (lambda: on_gpu().cpu(), "cpu"),
        (lambda: torch.empty(4, 3, pin_memory=True).copy_(on_gpu()), "cpu"),
    ],
)
def test_results_are_where_their_arguments_are(makes: Callable[[], Any], device: str) -> None:
    with made_up_gpu():
        assert makes().device.type == device
        assert torch.zeros(1).device.type == "cpu"


def copied_beside(*, out_waits: bool = True, waits_for_out: bool = True) -> torch.Tensor:
    """Copy a result to pinned memory on another stream; return it, to be read by the host."""
    out, host = torch.cuda.Stream(), torch.empty(4, 3, pin_memory=True)  # type: ignore[no-untyped-call]
    result = on_gpu() * 2
    if out_waits:
        out.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(out):
        host.copy_(result, non_blocking=True)
    result.record_stream(out)
    if waits_for_out:
        out.synchronize()
    return host


def read_by_the_host(host: torch.Tensor) -> None:
    host.sum()


def used_again(*, records: bool) -> None:
    """Free a tensor while another stream may still use it, and allocate another one."""
    beside, freed = torch.cuda.Stream(), on_gpu()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        freed.sum()
    if records:
        freed.record_stream(beside)
    del freed
    on_gpu()


def copied_into_a_new_tensor(*, waits: bool) -> None:
    """Its memory may be that of a tensor that the current stream still uses."""
    beside, host = torch.cuda.Stream(), on_host().pin_memory()  # type: ignore[no-untyped-call]
    made = torch.empty(4, 3, device="cuda")
    if waits:
        beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        made.copy_(host, non_blocking=True)
    torch.cuda.current_stream().wait_event(beside.record_event())
    made.sum()


def filled_again(*, waits: bool) -> None:
    """Fill pinned memory from which a copy was made."""
    host = on_host().pin_memory()
    host.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    host.zero_()


@pytest.mark.parametrize(
    ("races", "name"),
    [
        (lambda: copied_beside(out_waits=False), "copy_.default on stream"),
        (lambda: read_by_the_host(copied_beside(waits_for_out=False)), "sum.default on the host"),
        (lambda: copied_beside(waits_for_out=False).numpy(), "numpy on the host"),
        (lambda: used_again(records=False), "an allocation in freed memory"),
        (lambda: copied_into_a_new_tensor(waits=False), "copy_.default on stream"),
        (lambda: filled_again(waits=False), "zero_.default on the host"),
    ],
)
def test_accesses_that_no_wait_orders_are_an_error(races: Callable[[], Any], name: str) -> None:
    with made_up_gpu(), pytest.raises(RaceError, match=name):
        races()


@pytest.mark.parametrize(
    "waits",
    [
        lambda: read_by_the_host(copied_beside()),
        lambda: read_by_the_host(on_gpu().cpu()),
        lambda: on_host().pin_memory().copy_(on_gpu()).numpy(),
        lambda: used_again(records=True),
        lambda: torch.zeros_like(copied_beside(waits_for_out=False)),
        lambda: copied_into_a_new_tensor(waits=True),
        lambda: filled_again(waits=True),
    ],
)
def test_accesses_that_waits_order_are_none(waits: Callable[[], Any]) -> None:
    with made_up_gpu():
        waits()


def test_gradients_and_moments_are_on_the_emulated_gpu() -> None:
    with made_up_gpu():
        layer = nn.Linear(3, 2).to("cuda")
        optimizer = torch.optim.Adam(layer.parameters())
        targets = torch.tensor([0, 1, 1, 0], device="cuda")
        loss = functional.cross_entropy(layer(on_gpu()), targets, ignore_index=0, label_smoothing=0.1, reduction="sum")
        (loss / 3).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert layer.weight.grad is not None
        held = [layer.weight, layer.weight.grad, *optimizer.state[layer.weight].values()]
        assert [each.device.type for each in held if each.dim() > 0] == ["cuda"] * 4


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_training_keeps_to_one_device(name: str) -> None:
    """With the CPU's numbers, but for the order in which torch sums a norm over several tensors on GPUs."""
    with torch_settings(EngineRecipe()):
        expected = virtually(CASES[name], "cpu")
        with made_up_gpu():
            found = virtually(CASES[name], "cuda")
    compare([found], expected, 1e-12)


MOVE = {"at": {"minibatches": 12}, "cuts": ["features_11", "features_23", "features_35"]}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_in_every_mode_keeps_to_one_device(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the recipe to checkpoints and metrics, on the virtual clock."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    evaluate_few_digits(monkeypatch, 64)
    expected = run(mode, "cpu")
    with made_up_gpu():
        assert run(mode, "cuda") == expected


def run(mode: str, device: str) -> list[dict[str, float]]:
    """Return the metrics after two short epochs, the second from the state that the first left."""
    moves = {"parallelism": {"vpipe": {"moves": [MOVE]}}} if mode == "pipedream-moved" else {}  # its own is later
    made = pipebench.run(
        f"modes/{mode}", on_progress=lambda _: None, model={"width": 0.0625}, dataset={"num_train": 256},
        train={"max_epochs": 2, "target": None, "evaluate_every": {"epochs": 2}},
        engine={"device": device, "kind": "virtual"}, **moves,
    )  # fmt: skip
    return [dict(point.metrics) for point in made.result.points]


def test_the_device_is_set_by_its_number() -> None:
    with made_up_gpu(), pytest.raises(ValueError, match="with a specified index or an integer"):
        torch.cuda.set_device(torch.device("cuda"))


@pytest.mark.parametrize(("optimizer", "device"), [("rmsprop", "cpu"), ("adam", "cuda")])
def test_steps_are_counted_where_the_optimizer_counts_them(optimizer: str, device: str) -> None:
    """Also if they come from another GPU, with layers: on the GPU every update would wait to read them."""
    make = partial(make_optimizer, OptimizerRecipe(name=optimizer, lr=0.01))
    with torch_settings(EngineRecipe()), made_up_gpu():
        setup = replace(make_setup(Mlp(), ([], [1]), make_optimizer=make), device=torch.device("cuda"))
        engine = make_engine(setup)
        engine.train(0, 2)
        (worker,) = engine.workers
        state = ModelState.merge(part for _, part in worker.parts())
        for kept in state.optimizer.values():
            kept.update({key: value.to("cuda") for key, value in kept.items()})
        worker.restore(state)
        (replica,) = engine.replicas
        assert replica.weights.optimizer is not None
        states = replica.weights.optimizer.state.values()
        assert {each["step"].device.type for each in states} == {device}
        assert {v.device.type for each in states for key, v in each.items() if key != "step"} == {"cuda"}
        assert engine.train(2, 2) == 2


def test_progress_shows_the_loss_that_was_read_last() -> None:
    """It was shown as NaN during the whole run, as if training had diverged."""
    setup, shown = make_setup(Mlp(), ([], [1])), list[float]()
    read: list[float] = []
    with torch_settings(EngineRecipe()), made_up_gpu():
        network = Network(setup.cluster, setup.devices)
        engine = VirtualEngine(
            replace(setup, device=torch.device("cuda")), network,
            on_loss=lambda loss, n, weight, s: read.append(float(loss) / weight),
            on_unit=lambda samples, loss, s: shown.append(loss),
        )  # fmt: skip
        engine.train(0, 60)
    assert shown == [read[0]] * CUDA_LOSS_EVERY + [read[CUDA_LOSS_EVERY]] * (60 - CUDA_LOSS_EVERY)


def test_checkpoints_are_written_when_their_copies_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on at once, in the memory that was copied, while a thread writes the copies."""
    copies, store = list[torch.Tensor](), SimpleNamespace(commit=lambda *_: None)

    def write(_: Any, step: int, parts: Sequence[tuple[str, ModelState]]) -> list[Any]:
        copies.extend(each for _, state in parts for each in state.parameters.values())
        gpu.races.use(gpu.races.HOST, "writing", copies, [])
        return []

    monkeypatch.setattr(checkpointing, "_written", write)
    setup = make_setup(Mlp(), ([], [1]))
    with torch_settings(EngineRecipe()), made_up_gpu() as gpu:
        engine = make_engine(replace(setup, device=torch.device("cuda")))
        engine.train(0, 2)
        writer = checkpointing.CheckpointWriter(engine, cast(Any, None))
        writer.write(cast(Any, store), 2, lambda facts: {})
        engine.train(2, 2)
        writer.wait()
        assert copies
        assert all(map(gpu.pinned.has, copies))
