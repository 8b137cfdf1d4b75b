"""The norm that gradients are clipped by: that of one update, in float64, with the same bits for every cut."""

import copy
import math
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipebench.engine.clipping import clip, gradient_norm, squared_norms
from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from pipebench.recipe.schema import LossScaleRecipe
from tests.checkpoint.support import captured, restored
from tests.engine.test_modes import images, momentum_fused
from tests.models import ConvNet
from tests.oracles import sequential
from tests.support import Blobs, Mlp, make_engine, make_setup, momentum, parameters_of

CPU = torch.device("cpu")
CLIP = 0.3
GROUP = 5  # minibatches of an update


def steep() -> Blobs:
    """Return four updates' minibatches whose gradients are long enough to be clipped, and differ in length."""
    data = Blobs(num_train=4 * 4 * GROUP)
    data._x *= torch.linspace(8, 0.5, len(data._x), dtype=torch.float64)[:, None]
    return data


def accumulating(order: str = "all-forwards", starts: tuple[int, ...] = (4,), **options: Any) -> Setup:
    """Return a flushing pipeline all of whose minibatches between two drains may be one update."""
    return make_setup(
        Mlp(), ([*starts], [1] * (len(starts) + 1)), order=order, weights="one", microbatches=2, accumulate=GROUP,
        dataset=steep(), make_optimizer=momentum_fused, clip_norm=CLIP, **options,
    )  # fmt: skip


def plainly(setup: Setup, num_updates: int, clip_norm: float | None = CLIP) -> dict[str, torch.Tensor]:
    """Train the same model in a plain loop."""
    model, data = copy.deepcopy(Mlp()), setup.dataset
    updates = []
    for update in range(num_updates):
        fields = [
            data.fetch("train", setup.sampler.indices(k), ["x", "label"])
            for k in range(update * GROUP, (update + 1) * GROUP)
        ]
        updates.append([((each["x"],), each["label"]) for each in fields])
    sequential.train(
        model, momentum(list(model.parameters())), updates,
        lambda output, target: functional.cross_entropy(output, target, reduction="sum"),
        lambda target: float(len(target)), clip_norm,
    )  # fmt: skip
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def drained(setup: Setup, *segments: int) -> VirtualEngine:
    """Train so many minibatches between drains."""
    engine, done = make_engine(setup), 0
    for count in segments:
        done += engine.train(done, count)
    return engine


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", ["all-forwards", "1f1b"])
@pytest.mark.parametrize("starts", [(4,), (2, 5)], ids=str)
@pytest.mark.parametrize("segments", [(5, 5, 5, 5), (10, 5, 5), (5, 10, 5), (20,)], ids=str)
def test_every_update_is_clipped_by_its_own_norm(
    order: str, starts: tuple[int, ...], segments: tuple[int, ...]
) -> None:
    """Rounds are numbered anew after a drain: a segment of one update must leave nothing under round 0's number."""
    setup = accumulating(order, starts)
    expected, unclipped = plainly(setup, 4), plainly(setup, 4, None)
    assert max(float((expected[name] - unclipped[name]).abs().max()) for name in expected) > 0.02
    for name, parameter in parameters_of(drained(setup, *segments)).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-12, atol=1e-13)


def test_a_run_resumed_after_one_update_ends_with_the_same_bits() -> None:
    setup = accumulating()
    engine = drained(setup, 5)
    again = restored(setup, captured(engine))
    for each in (engine, again):
        each.train(5, 5)
        each.train(10, 10)
    theirs = parameters_of(again)
    assert all(torch.equal(value, theirs[name]) for name, value in parameters_of(engine).items())


def test_a_scale_recovers_from_an_overflow_whatever_a_segment_s_length() -> None:
    """fp16 in two stages, one update between two drains: only the first updates are skipped."""
    data = Blobs(num_train=48, dtype=torch.float32)
    setup = make_setup(
        Mlp().float(), ([4], [1, 1]), order="all-forwards", weights="one", microbatches=2, dataset=data, sizes=(2, 4),
        precision="fp16", loss_scale=LossScaleRecipe(initial=2.0**20),
    )  # fmt: skip
    found = [drained(setup, *segments).evaluate() for segments in ([12], [1] * 12)]
    assert 0 < found[0]["skipped_updates"] < 8
    assert found[0] == found[1]


ODD = LossScaleRecipe(initial=3.0 * 2**10, growth=1.7, growth_interval=3)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, None), (torch.float64, None), (torch.float32, ODD)])
def test_model_parallelism_has_a_single_worker_s_bits(dtype: torch.dtype, scale: LossScaleRecipe | None) -> None:
    """Whatever the cut; also in fp16, where the loss has a scale that is no power of two."""
    data = images(num_train=32)
    data._x = data._x.to(dtype)
    found = []
    for starts in ((), (4,), (1,), (2, 5, 8)):
        setup = make_setup(
            ConvNet().to(dtype), ([*starts], [1] * (len(starts) + 1)), weights="one", depth=1, dataset=data, sizes=(4,),
            precision="fp32" if scale is None else "fp16", loss_scale=scale, clip_norm=0.05,
            make_optimizer=momentum_fused,
        )  # fmt: skip
        engine = make_engine(setup)
        engine.train(0, 8)
        engine.train(8, 8)
        found.append(parameters_of(engine))
        assert engine.num_bytes == engine.network.num_bytes
    for one, other in pairwise(found):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("starts", [(), (4,)], ids=["single", "model"])
def test_gradients_whose_squares_overflow_in_fp32_are_clipped(starts: tuple[int, ...]) -> None:
    """A norm above 1e20 isn't infinite, which would scale gradients to 0."""
    data = Blobs(num_train=8)
    data._x = data._x.float() * 1e21
    setup = make_setup(
        nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(5)], nn.Linear(6, 4)),
        ([*starts], [1] * (len(starts) + 1)),
        weights="one", depth=1, dataset=data, clip_norm=CLIP, lr=lambda stage, before, own: 1.0,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, 1.0),
    )  # fmt: skip
    engine = make_engine(setup)
    before = parameters_of(engine)
    engine.train(0, 1)
    moved = [value - before[name] for name, value in parameters_of(engine).items()]
    assert math.sqrt(math.fsum(float(each.double().square().sum()) for each in moved)) == pytest.approx(CLIP, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (7,), (40, 50), (3, 40_000), (0, 4)], ids=str)
def test_the_norm_is_that_of_exact_sums(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A few hundred thousand squares added up in fp32 would be wrong in their fourth digit."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    others = torch.linspace(0, 3, 9).to(dtype)
    exact = math.sqrt(math.fsum(float(x) ** 2 for x in (*values.flatten().tolist(), *others.tolist())))
    given = [values, None, others]
    assert float(gradient_norm(given, CPU)) == pytest.approx(exact, rel=1e-7)
    assert float(gradient_norm(given, CPU, 4.0)) == pytest.approx(exact / 4, rel=1e-7)
    assert gradient_norm(given[::-1], CPU) == gradient_norm(given, CPU)
    turned = values.t() if values.dim() == 2 else values
    assert float(gradient_norm([turned, others, None], CPU)) == pytest.approx(exact)


@pytest.mark.parametrize("offset", [0, 2])
def test_a_gpu_takes_norms_of_aligned_memory(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels add in another order where a piece of a message begins elsewhere than in the whole."""
    seen: list[int] = []
    norms = torch._foreach_norm

    def noting(given: list[torch.Tensor], *how: Any) -> Any:
        seen.extend(each.data_ptr() % 64 for each in given)
        return norms(given, *how)

    monkeypatch.setattr(torch, "_foreach_norm", noting)
    piece = torch.ones(40, dtype=torch.float64)[offset : offset + 36]
    (square,) = squared_norms([piece], torch.device("meta"))
    assert (float(square), seen) == (36.0, [0])


def test_missing_and_infinite_gradients() -> None:
    assert gradient_norm([], CPU) == gradient_norm([None], CPU) == 0
    for count in (3, 100_000):
        for bad, is_bad in ((math.inf, torch.isinf), (math.nan, torch.isnan)):
            gradient = torch.ones(count)
            gradient[1] = bad
            assert is_bad(gradient_norm([gradient, None], CPU))
        large = torch.full((count,), 2e38)
        assert float(gradient_norm([large], CPU)) == pytest.approx(2e38 * math.sqrt(count))


def test_gradients_are_freed_one_by_one_while_they_are_clipped() -> None:
    """All at once took as much memory again as the gradients: 0.9 GB beside the 2.55 GB of a stage of GNMT-8."""
    alive: list[int] = []
    tensors = [torch.full((4,), float(k)) for k in range(1, 4)]
    expected = [tensor * 0.5 for tensor in tensors]
    seen = [weakref.ref(tensor) for tensor in tensors]

    class Watched(list[Any]):
        def __setitem__(self, *given: Any) -> None:
            super().__setitem__(*given)
            alive.append(sum(each() is not None for each in seen))

    gradients = Watched(tensors)
    del tensors
    clip(gradients, range(3), torch.tensor(2.0, dtype=torch.float64), 1.0)
    assert alive == [3, 2, 1]
    assert all(torch.allclose(one, other) for one, other in zip(gradients, expected, strict=True))
