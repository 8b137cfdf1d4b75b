"""Dynamic loss scaling: against a plain loop with a scaler, across stages, replicas and checkpoints."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional

from pipebench.engine.loss_scale import LossScale
from pipebench.engine.virtual import VirtualEngine
from pipebench.errors import PlanError
from pipebench.recipe.load import load
from pipebench.recipe.schema import LossScaleRecipe
from pipebench.train.prepare import prepare
from tests.checkpoint.support import captured, restored
from tests.engine.test_precision import LR, blobs, constant, masters_of, sgd
from tests.evaluations import mode_setup, trained
from tests.oracles.mixed_precision import Mixed
from tests.support import Mlp, make_engine

# A scale that overflows at first, and then grows and overflows again within a few updates.
QUICK = LossScaleRecipe(initial=2.0**24, growth=4.0, backoff=0.25, growth_interval=2)


def setup_of(mode: str, scaling: LossScaleRecipe = QUICK, **options: Any) -> Any:
    return mode_setup(
        Mlp().float(), mode, [4], dataset=blobs(), precision="fp16", loss_scale=scaling,
        **({"make_optimizer": sgd, "lr": constant} | options),
    )  # fmt: skip


def by_hand(setup: Any, num_updates: int, clip_norm: float | None = None) -> tuple[Mixed, list[float], int]:
    """Train one minibatch per update with a scaler written out; return the model, every scale, the skipped updates."""
    mixed = Mixed(Mlp().float(), torch.float16)
    scale, good, skipped, scales = 2.0**24, 0, 0, []
    for k in range(num_updates):
        fields = blobs().fetch("train", setup.sampler.indices(k), ["x", "label"])
        mixed.zero_grad()
        loss = functional.cross_entropy(mixed(fields["x"]), fields["label"], reduction="sum") / len(fields["label"])
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        scales.append(scale)
        parameters = list(mixed.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            scale, good, skipped = scale / 4, 0, skipped + 1
            continue
        for gradient in gradients:
            gradient.div_(scale)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(LR * gradient)
        good += 1
        if good == 2:
            scale, good = scale * 4, 0
    return mixed, scales, skipped


def states(engine: VirtualEngine) -> list[list[float]]:
    return [replica.scale.state().tolist() for replica in engine.replicas if replica.scale is not None]


@pytest.mark.parametrize("mode", ["single", "model"])
def test_scaled_updates_equal_a_plain_loop_s(mode: str) -> None:
    setup = setup_of(mode)
    engine = trained(setup, 16)
    expected, scales, skipped = by_hand(setup, 16)
    assert 4 < skipped < 12
    assert len({*scales}) > 4
    found = masters_of(engine)
    for name, master in expected.inner.named_parameters():
        assert torch.equal(found[name], master), name
    assert {row[2] for row in map(tuple, states(engine))} == {skipped}
    assert {replica.weights.newest.number for replica in engine.replicas} == {16}  # a skipped one is a version, too
    metrics = engine.evaluate()
    assert metrics["skipped_updates"] == skipped
    assert metrics["loss_scale"] == states(engine)[0][0]


def test_clipping_takes_gradients_without_their_scale() -> None:
    setup = setup_of("single", clip_norm=0.25)
    expected, _, _ = by_hand(setup, 12, clip_norm=0.25)
    found = masters_of(trained(setup, 12))
    for name, master in expected.inner.named_parameters():
        torch.testing.assert_close(found[name], master, rtol=0, atol=LR * 2**-11, msg=name)


@pytest.mark.parametrize("mode", ["model", "gpipe", "pipedream-flush"])
def test_all_stages_of_a_flushing_pipeline_skip_the_same_updates(mode: str) -> None:
    engine = make_engine(setup_of(mode))
    last = engine.replicas[-1]
    seen = []
    for k in range(0, 12, 2):
        engine.train(k, 2)
        seen.append(states(engine))
    assert all(len({*map(tuple, rows)}) == 1 for rows in seen)
    assert last.scale is not None
    assert last.scale.num_skipped > 2


@pytest.mark.parametrize("mode", ["dp", "pipedream-replicated"])
def test_replicas_of_a_stage_agree(mode: str) -> None:
    engine = trained(setup_of(mode), 16)
    by_stage: dict[int, set[tuple[float, ...]]] = {}
    for replica in engine.replicas:
        assert replica.scale is not None
        by_stage.setdefault(replica.stage.index, set()).add(tuple(replica.scale.state().tolist()))
    assert all(len(found) == 1 for found in by_stage.values())
    masters_of(engine)  # checks that replicas hold the same


def test_without_a_flush_a_stage_skips_alone_and_gradients_arrive_in_its_scale() -> None:
    """With scales that are powers of two and too small to overflow, they change no bit of the weights."""
    plain = masters_of(trained(setup_of("pipedream", LossScaleRecipe(initial=1024.0)), 12))
    setup = setup_of("pipedream", LossScaleRecipe(initial=1024.0))
    engine = make_engine(setup)
    first = engine.replicas[0]
    assert first.scale is not None
    first.scale.value = 256.0
    engine.train(0, 12)
    found = masters_of(engine)
    for name, master in found.items():
        # Small gradients are rounded coarser where the scale is smaller: denormal numbers of fp16 are 2^-24 apart.
        torch.testing.assert_close(master, plain[name], rtol=0, atol=12 * LR * 2**-24, msg=name)
    engine = make_engine(setup)
    last = engine.replicas[-1]
    assert last.scale is not None
    last.scale.value = 2.0**30
    engine.train(0, 12)
    skipped = [replica.scale.num_skipped for replica in engine.replicas if replica.scale is not None]
    assert all(number > 0 for number in skipped)  # what overflows in a later stage arrives as an infinity


@pytest.mark.parametrize("weights", ["stash", "none"])
def test_updates_are_skipped_while_minibatches_are_in_flight(weights: str) -> None:
    """Their backwards use the weights of then: a skipped update changes none."""
    engine = trained(setup_of("pipedream", weights=weights), 16)
    skipped = [replica.scale.num_skipped for replica in engine.replicas if replica.scale is not None]
    assert all(4 < number < 12 for number in skipped)
    assert {replica.weights.newest.number for replica in engine.replicas} == {16}


@pytest.mark.parametrize("mode", ["single", "dp", "model", "gpipe", "pipedream", "pipedream-replicated"])
def test_a_checkpoint_holds_scale_and_counters(mode: str) -> None:
    engine = trained(setup_of(mode), 8)
    again = restored(setup_of(mode), captured(engine))
    assert states(again) == states(engine)
    engine.train(8, 8)
    again.train(8, 8)
    assert states(again) == states(engine)
    before, after = masters_of(engine), masters_of(again)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_of_several_scales_restores_the_smallest() -> None:
    engine = trained(setup_of("pipedream"), 8)
    first, last = (replica.scale for replica in engine.replicas)
    assert first is not None
    assert last is not None
    first.value, last.value, last.num_skipped = 64.0, 8.0, 99
    again = restored(setup_of("single"), captured(engine))
    ((value, _, skipped),) = states(again)
    assert (value, skipped) == (8.0, 99.0)


def test_the_rule_is_torch_s_grad_scaler_s() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    ours = LossScale(LossScaleRecipe(initial=1024.0, growth_interval=3))
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    overflows: Mapping[int, bool] = dict.fromkeys([2, 3, 8, 15], True)
    for step in range(20):
        theirs.scale(parameter.sum()).backward()  # type: ignore[no-untyped-call]
        assert parameter.grad is not None
        if overflows.get(step):
            parameter.grad.fill_(float("inf"))
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(finite=not overflows.get(step, False))
        assert ours.value == theirs.get_scale(), step
    defaults = torch.amp.GradScaler("cpu")
    assert LossScaleRecipe() == LossScaleRecipe(
        defaults.get_scale() or 65536.0, defaults.get_growth_factor(), defaults.get_backoff_factor(),
        defaults.get_growth_interval(),
    )  # fmt: skip


def test_a_stage_without_parameters_cannot_decide_alone() -> None:
    loaded = load("quickstart/model")
    names = [layer.name for layer in prepare(loaded.recipe, loaded.cluster, trains=False).setup.graph.layers]
    lone = names.index("features_2")  # a ReLU
    cuts = f"parallelism.cuts=[{names[lone]}, {names[lone + 1]}]"
    again = load("quickstart", ["train.precision=fp16", "parallelism.plan=1-1-2", cuts])
    with pytest.raises(PlanError, match=r"stage 1 \(.*\) has no parameters, and without a flush train.precision fp16"):
        prepare(again.recipe, again.cluster, trains=False)
