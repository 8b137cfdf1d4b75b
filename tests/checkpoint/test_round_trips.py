"""A run resumed from a checkpoint with the same plan ends with the bits of one that never stopped."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.checkpoint.share import own_names
from pipebench.checkpoint.state import CheckpointError, ModelState
from pipebench.checkpoint.store import Checkpoints
from pipebench.engine.replica_state import restore
from pipebench.engine.setup import Setup, share_of
from pipebench.engine.virtual import VirtualEngine
from pipebench.model.graph import trace
from tests.checkpoint.support import captured, restored
from tests.engine.test_streams import LanguageModel, text_setup
from tests.models import ConvNet, Tied
from tests.support import Blobs, Mlp, make_engine, make_setup

BEFORE, AFTER = 7, 5
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "fused-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "fused-adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
}
MLP_PLANS: Mapping[str, Any] = {
    "straight": (([2, 4], [1, 1, 1]), {}),
    "replicated": (([2, 4], [2, 1, 2]), {}),
    "vertical-sync": (([2, 4], [1, 1, 1]), {"weights": "stash-vertical-sync"}),
    "two-versions": (([2, 4], [1, 1, 1]), {"weights": "double-buffer", "accumulate": 4}),
    "naive": (([2, 4], [1, 1, 1]), {"weights": "none"}),
    "predicted": (([2, 4], [2, 1, 2]), {"weights": "predict"}),
    "predicted, cut": (([2, 4], [1, 1, 1]), {"weights": "predict", "microbatches": 3}),
    "corrected": (([2, 4], [1, 2, 1]), {"weights": "correct"}),
    "data-parallel": (([], [3]), {"depth": 1}),
    "asynchronous": (([], [3]), {"weights": "newest-pulled", "sync": "asynchronous", "depth": 1}),
    "gpipe": (([3], [1, 1]), {"weights": "one", "order": "all-forwards", "microbatches": 2, "recompute": True}),
}


def bits(state: ModelState) -> dict[str, Any]:
    """Return a state as one flat dictionary of raw bytes."""
    found: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = (value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).tolist())
        elif isinstance(value, dict | list | tuple):
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                walk(each, f"{name}/{key}")
        else:
            found[name] = value

    walk(vars(state), "")
    return found


def check_resuming(make: Callable[[], Setup], before: int = BEFORE, after: int = AFTER) -> None:
    """Compare a run of `before` and `after` minibatches with one that stops and starts anew in between."""
    whole = make_engine(make())
    whole.train(0, before)
    state = captured(whole)
    again = restored(make(), state)
    assert bits(captured(again)) == bits(state)
    whole.train(before, after)
    again.train(before, after)
    ended = bits(captured(whole))
    assert bits(captured(again)) == ended
    assert ended != bits(state)
    assert again.evaluate() == whole.evaluate()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_resumes(optimizer: str) -> None:
    check_resuming(lambda: make_setup(Mlp(), ([2, 4], [1, 2, 1]), make_optimizer=OPTIMIZERS[optimizer]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", MLP_PLANS)
@pytest.mark.parametrize("optimizer", ["fused-momentum", "fused-adam"])
def test_every_weight_policy_resumes(plan: str, optimizer: str) -> None:
    cut, columns = MLP_PLANS[plan]
    check_resuming(lambda: make_setup(Mlp(), cut, make_optimizer=OPTIMIZERS[optimizer], **columns))


def test_pipemare_s_mean_change_resumes_with_another_plan_or_starts_anew() -> None:
    columns: Any = {"weights": "correct", "make_optimizer": OPTIMIZERS["fused-momentum"]}
    engine = make_engine(make_setup(Mlp(), ([2, 4], [1, 1, 1]), **columns))
    engine.train(0, BEFORE)
    state = captured(engine)
    kept = state.mean_change
    assert kept.keys() == {f"body.{i}.{part}" for i in (0, 2) for part in ("weight", "bias")}, (
        "no delay, no mean change"
    )
    assert all(change.abs().max() > 0 for change in kept.values())
    other = make_setup(Mlp(), ([3], [1, 1]), **columns)
    (first, _) = restored(other, state).replicas
    assert first.moved is not None
    assert all(torch.equal(change, kept[name]) for name, change in first.moved.mean_change.items())
    state.mean_change = {}
    (first, _) = restored(other, state).replicas
    assert first.moved is not None
    assert all(not change.any() for change in first.moved.mean_change.values())


def average_all(model: nn.Module) -> nn.Module:
    """Let BatchNorm average over all batches there were: its counters matter then."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = None
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", [([4], [1, 1]), ([4], [2, 1]), ([], [2])], ids=str)
@pytest.mark.parametrize("wrap", [lambda model: model, average_all], ids=["moving", "cumulative"])
def test_running_statistics_and_counters_resume(plan: Any, wrap: Any) -> None:
    """After 7 minibatches the two replicas have counted 4 and 3."""
    data = Blobs(shape=(2, 8, 8), dtype=torch.float32)

    def make() -> Setup:
        return make_setup(wrap(ConvNet(dropout=0.3)), plan, dataset=data, make_optimizer=OPTIMIZERS["fused-momentum"])

    check_resuming(make)
    engine = make_engine(make())
    engine.train(0, BEFORE)
    counts = [
        int(r.module.get_buffer("features.1.num_batches_tracked"))
        for r in restored(make(), captured(engine)).replicas[: plan[1][0]]
    ]
    assert counts == ([7] if plan[1][0] == 1 else [4, 3])


@pytest.mark.parametrize(
    ("plan", "columns"),
    [
        (([2, 3], [1, 1, 1]), {}),
        (([2], [2, 1]), {}),
        (([2], [1, 2]), {}),
        (([2], [1, 1]), {"weights": "one", "order": "all-forwards", "microbatches": 2}),
    ],
    ids=str,
)
def test_streams_resume(plan: Any, columns: Any) -> None:
    check_resuming(lambda: text_setup(plan, dropout=0.2, make_optimizer=OPTIMIZERS["fused-adam"], **columns), 6, 8)


def same_weights(engine: VirtualEngine, other: VirtualEngine, exactly: bool) -> None:
    found, expected = captured(engine).parameters, captured(other).parameters
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], **({"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-10, "atol": 1e-12})
        )


@pytest.mark.parametrize(
    ("plan", "columns"),
    [
        (([2], [1, 1]), {"weights": "one", "depth": 1}),
        (([1, 3, 5], [1, 1, 1, 1]), {"weights": "one", "order": "all-forwards", "microbatches": 2}),
        (([], [1]), {"weights": "one", "depth": 1}),
    ],
    ids=["model", "gpipe", "single"],
)
@pytest.mark.parametrize("optimizer", ["fused-momentum", "fused-adam"])
def test_a_checkpoint_of_pipedream_loads_under_any_other_plan(plan: Any, columns: Any, optimizer: str) -> None:
    """Modes without staleness continue alike, wherever they are cut."""
    make = OPTIMIZERS[optimizer]
    pipedream = make_engine(make_setup(Mlp(), ([3, 6], [2, 1, 1]), make_optimizer=make))
    pipedream.train(0, BEFORE)
    state = captured(pipedream)
    loop = restored(make_setup(Mlp(), ([], [1]), make_optimizer=make, weights="one", depth=1), state)
    other = restored(make_setup(Mlp(), plan, make_optimizer=make, **columns), state)
    same_weights(other, pipedream, exactly=True)
    for engine in (loop, other):
        engine.train(BEFORE, AFTER)
    same_weights(other, loop, exactly="microbatches" not in columns)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_streams_are_cut_into_other_microbatches(before: int, after: int) -> None:
    def setup(microbatches: int, plan: Any) -> Any:
        return text_setup(plan, weights="one", order="all-forwards", microbatches=microbatches)

    engine = make_engine(setup(before, ([2], [1, 1])))
    engine.train(0, 4)
    other = restored(setup(after, ([1, 3], [1, 1, 1])), captured(engine))
    for each in (engine, other):
        each.train(4, 4)
    same_weights(other, engine, exactly=False)


def test_tied_weights_have_the_models_first_name_under_every_cut() -> None:
    """`other.t` is used before `first.t`, to which it is tied."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.other, self.start = Pair(), Pair(), nn.Linear(6, 6)
            self.other.t.weight = self.first.t.weight
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.other.t(self.start(x))
            return self.first.p(self.first.t(y))

    for make in (Late, Tied):
        wanted = set(dict(make().named_parameters())) - {"other.p.weight", "other.p.bias"}
        for starts in ([], [1], [1, 3]) if make is Late else ([],):
            setup = make_setup(make(), (starts, [1] * (len(starts) + 1)), make_optimizer=OPTIMIZERS["momentum"])
            engine = make_engine(setup)
            engine.train(0, BEFORE)
            assert captured(engine).parameters.keys() == wanted
            assert captured(engine).optimizer.keys() == wanted
        other = restored(make_setup(make(), ([], [1])), captured(engine))
        same_weights(other, engine, exactly=True)


class Pair(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.t = nn.Linear(6, 4), nn.Linear(6, 6)


class Frozen(nn.Module):
    """A frozen layer, a buffer that isn't saved by torch, and one that counts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)
        self.fixed, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.fixed.requires_grad_(False)
        self.register_buffer("scale", torch.rand(6), persistent=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        return self.head(self.fixed(x) * self.scale)


def test_untrained_tensors_are_restored_too() -> None:
    """Another seed stands for a library that draws other initial weights."""
    engine = make_engine(make_setup(Frozen(1), ([1], [1, 1])))
    engine.train(0, BEFORE)
    other = restored(make_setup(Frozen(2), ([], [1])), captured(engine))
    assert bits(captured(other)) == bits(captured(engine))
    assert {"fixed.weight", "head.weight"} <= captured(engine).parameters.keys()


def test_a_restored_replica_shares_nothing_with_the_state() -> None:
    make = partial(make_setup, Mlp(), ([2], [2, 1]), make_optimizer=OPTIMIZERS["fused-adam"])
    engine = make_engine(make())
    engine.train(0, BEFORE)
    state = captured(engine)
    before = bits(state)
    restored(make(), state).train(BEFORE, AFTER)
    assert bits(state) == before


def test_a_live_replica_can_be_set_back() -> None:
    """Restarting without a new process: versions that were alive don't come back."""
    setup = make_setup(Mlp(), ([2, 4], [1, 1, 1]), make_optimizer=OPTIMIZERS["fused-momentum"])
    engine = make_engine(setup)
    engine.train(0, BEFORE)
    state = captured(engine)
    engine.train(BEFORE, AFTER)
    ended = bits(captured(engine))
    for worker in engine.workers:
        worker.restore(state)
    engine.train(BEFORE, AFTER)
    assert bits(captured(engine)) == ended


def test_states_are_unchanged_by_files(tmp_path: Any) -> None:
    setup = partial(text_setup, ([2], [2, 1]), make_optimizer=OPTIMIZERS["fused-adam"])
    engine = make_engine(setup())
    engine.train(0, 6)
    store = Checkpoints(tmp_path / "checkpoints")
    parts = [store.write_part(6, name, state) for name, state in engine.parts()]
    store.commit(6, parts, {"epoch": 0.6})
    checkpoint, skipped = store.latest()
    assert checkpoint is not None
    assert not skipped
    assert (checkpoint.step, checkpoint.progress) == (6, {"epoch": 0.6})
    assert bits(checkpoint.load()) == bits(captured(engine))
    again = restored(setup(), checkpoint.load())
    for each in (again, engine):
        each.train(6, 4)
    assert bits(captured(again)) == bits(captured(engine))


def test_a_state_of_another_model_is_refused_by_name() -> None:
    state = captured(make_engine(make_setup(Mlp(), ([], [1]))))
    weight = state.parameters.pop("body.4.weight")
    engine = make_engine(make_setup(Mlp(seed=9), ([2], [1, 1])))
    before = bits(captured(engine))
    share = share_of(engine.setup, 1, 0)
    with pytest.raises(CheckpointError, match=r"no body\.4\.weight, which the model has"):
        restore(engine.replicas[1], state, share)
    state.parameters["body.4.weight"] = weight[:2]
    with pytest.raises(CheckpointError, match=r"body\.4\.weight has the shape \[2, 8\] .* \[5, 8\] in the model"):
        restore(engine.replicas[1], state, share)
    assert bits(captured(engine)) == before


def test_streams_that_cant_be_found_or_cut_are_refused() -> None:
    engine = make_engine(text_setup(([2], [1, 1])))
    engine.train(0, 4)
    state = captured(engine)
    lost = ModelState(
        state.parameters, state.optimizer, state.buffers, {}, {k: v for k, v in state.carried.items() if "two" not in k}
    )
    with pytest.raises(CheckpointError, match="no state of module two for stream 0"):
        restored(text_setup(([2], [1, 1])), lost)
    for key in list(state.carried):
        state.carried[key] = tuple(torch.zeros(4, 4) for _ in range(2))
    with pytest.raises(CheckpointError, match=r"2 of its dimensions \[4, 4\] have that size"):
        restored(text_setup(([2], [1, 1]), weights="one", order="all-forwards", microbatches=2), state)


def test_names_that_tracing_adds_are_stored() -> None:
    graph = trace(LanguageModel(0.5))
    names = own_names(graph)
    assert set(names.values()) == set(dict(graph.model.named_parameters()))


class Resting(nn.Module):
    """A stateful module fed with samples that don't follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), Counting()
        self.head = nn.Linear(6, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        return self.head(self.second(self.first(x)))


class Counting(nn.Module):
    """Carries its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.carried_state: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.carried_state = x.detach()
        return x


def test_states_that_are_not_continued_do_not_prevent_resuming() -> None:
    """The last minibatch of an epoch is short: it has fewer samples than there are microbatches."""
    data = Blobs(num_train=17)
    engine = make_engine(make_setup(Resting(), ([1], [1, 1]), dataset=data))
    engine.train(0, 5)
    state = captured(engine)
    assert state.carried == {}
    columns: dict[str, Any] = {"weights": "one", "order": "all-forwards", "microbatches": 4, "dataset": data}
    restored(make_setup(Resting(), ([2], [1, 1]), **columns), state).train(5, 5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gpu_resumes_from_its_own_and_from_the_cpu_s_checkpoints(optimizer: str) -> None:
    def make(device: str) -> Setup:
        made = OPTIMIZERS[optimizer]
        return replace(make_setup(Mlp(), ([2, 4], [1, 2, 1]), make_optimizer=made), device=torch.device(device))

    check_resuming(lambda: make("cuda"))
    engine = make_engine(make("cpu"))
    engine.train(0, BEFORE)
    restored(make("cuda"), captured(engine)).train(BEFORE, AFTER)
