"""Compiled stages (`engine.compile`): the same results, the bytes of what is saved, no second compilation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.engine.replica import Replica
from pipebench.engine.virtual import VirtualEngine
from pipebench.errors import UserCodeError
from pipebench.schedule.operations import Op
from pipebench.simulate.simulation import TimelineEvent
from tests.models import ConvNet
from tests.support import Blobs, Mlp, make_engine, make_setup, parameters_of

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch's compiler says of itself


@pytest.fixture(autouse=True, scope="module")
def _one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile once for all tests here, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        yield


class Drops(nn.Module):
    """Linear layers, LayerNorm and dropout; double precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.body = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.4), nn.LayerNorm(8), nn.Linear(8, 4)
        ).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        return self.body(x)


def saved_bytes(replica: Replica, unit: int) -> int:
    """Return the bytes of the storages that a unit's graph saves, besides parameters and buffers."""
    item = replica._in_flight[unit]
    own = {t.untyped_storage().data_ptr() for t in (*item.version.flats, *replica.module.buffers())}
    found: dict[int, int] = {}
    nodes: list[Any] = [edge.node for edges in (*item.results.values(), item.of_loss) for edge in edges]
    seen = set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names = [name for name in dir(node) if name.startswith("_saved_")]
        if "Div" in node.name():
            names.remove("_saved_other")  # the loss's divisor, a number
        saved = [getattr(node, name) for name in names]
        saved += list(getattr(node, "saved_tensors", ()))
        for tensor in saved:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        nodes += [following for following, _ in node.next_functions]
    return sum(size for address, size in found.items() if address not in own)


def trained(model: nn.Module, *, compiled: bool, **columns: Any) -> VirtualEngine:
    """Return an engine that has trained, evaluated and trained; compares what every forward saves."""
    compared: list[Any] = []

    def look(event: TimelineEvent) -> None:
        it = event.instruction
        if it.op is Op.FORWARD and not engine.meter.evaluating:
            replica = engine.workers[event.worker].replicas[it.stage]
            assert replica._in_flight[it.number].saved_bytes == saved_bytes(replica, it.number)
            compared.append(it)

    engine = make_engine(make_setup(model, **columns, compiled=compiled), look)
    engine.train(0, 6)
    engine.evaluate()
    engine.train(6, 4)
    assert len(compared) >= 10
    return engine


def same(made: Any, **columns: Any) -> None:
    compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    plain, compiled = (trained(made(), compiled=each, **columns) for each in (False, True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > compilations
    theirs, ours = parameters_of(plain), parameters_of(compiled)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5 if value.dtype is torch.float32 else 1e-12)
    assert [sorted(w.tensors()) for w in compiled.workers] == [sorted(w.tensors()) for w in plain.workers]
    assert compiled.num_bytes == plain.num_bytes
    assert compiled.evaluate() == pytest.approx(plain.evaluate(), rel=1e-5)


@pytest.mark.parametrize("makes_kernels", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_stages_train_the_same_weights_and_are_compiled_once(
    makes_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every minibatch has another version of the weights, other targets and another draw: none compiles anew.

    Without generating kernels, torch's compiler takes seconds; torch's operations run its graphs.
    """
    if not makes_kernels:
        to_compile = torch.compile
        monkeypatch.setattr(torch, "compile", lambda module, options: to_compile(module, backend="aot_eager"))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    same(Drops, plan=([3], [1, 1]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 3  # two pieces around dropout, one stage


MODES: dict[str, dict[str, Any]] = {
    "1F1B with a flush": {"plan": ([4], [1, 1]), "weights": "one", "microbatches": 2},
    "all forwards": {"plan": ([4], [1, 1]), "weights": "one", "order": "all-forwards", "microbatches": 2},
    "dp": {"plan": ([], [2]), "weights": "one"},
    "interleaved": {
        "plan": ([2, 4, 6], [1] * 4),
        "weights": "one",
        "order": "interleaved",
        "chunks": 2,
        "microbatches": 2,
    },
    "two buffers": {"plan": ([4], [1, 1]), "weights": "double-buffer", "accumulate": 2},
    "predicted": {
        "plan": ([4], [1, 1]),
        "weights": "predict",
        "make_optimizer": lambda p: torch.optim.SGD(p, 0.1, 0.9),
    },
    "optimizer shared out": {"plan": ([], [2]), "weights": "one", "shard": "optimizer"},
    "a short minibatch": {"plan": ([4], [1, 1]), "dataset": Blobs(num_train=22)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_modes_train_the_same_weights_with_compiled_stages(name: str) -> None:
    same(Mlp, **MODES[name])


@pytest.mark.slow
@pytest.mark.parametrize("last", [False, True])
def test_images_train_the_same_weights_with_compiled_stages(last: bool) -> None:
    data = Blobs(num_train=46, shape=(2, 8, 8), dtype=torch.float32)
    same(lambda: ConvNet(norm=False), plan=([4], [1, 1]), dataset=data, channels_last=last)


def test_a_failure_of_torch_s_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("conflicting declaration")

    to_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, options: to_compile(module, backend=fails))
    engine = make_engine(make_setup(Mlp(), ([3], [1, 1]), compiled=True))
    with pytest.raises(UserCodeError) as failed:
        engine.train(0, 1)
    assert failed.value.key == "engine.compile"
    assert "torch.compile fails; allowed for these layers is false" in failed.value.problem
    assert "conflicting declaration" in failed.value.problem
