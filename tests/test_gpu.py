"""What only a GPU can show: the same invariants hold there."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from pipebench.device import torch_settings
from pipebench.engine.setup import Setup
from pipebench.recipe.schema import EngineRecipe
from tests.models import ConvNet
from tests.support import make_engine, make_setup, parameters_of
from zoo.mnist5k import mnist5k
from zoo.vgg import vgg16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with torch_settings(EngineRecipe()):
        yield


def digits(starts: list[int], replicas: list[int], **columns: object) -> Setup:
    torch.default_generator.manual_seed(0)
    model = vgg16(
        width=0.125, batch_norm=True, dropout=0.2, num_classes=10, in_channels=1, image_size=32, init="kaiming"
    )
    setup = make_setup(model, (starts, replicas), dataset=mnist5k(), minibatch_size=32, **columns)  # type: ignore[arg-type]
    return Setup(**{**setup.__dict__, "device": torch.device("cuda")})


def test_model_parallelism_has_the_bits_of_a_single_worker() -> None:
    found = []
    for starts in ([], [14, 27, 40]):
        engine = make_engine(digits(starts, [1] * (len(starts) + 1), weights="one", depth=1))
        engine.train(0, 8)
        found.append(parameters_of(engine))
    assert all(value.is_cuda for value in found[0].values())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_run_repeats_itself_to_the_bit() -> None:
    def flat() -> torch.Tensor:
        engine = make_engine(digits([14, 27, 40], [2, 1, 1, 1]))
        engine.train(0, 10)
        return engine.replicas[0].weights.newest.flats[0]

    assert torch.equal(flat(), flat())


def test_weight_versions_are_held_in_gpu_memory() -> None:
    engine = make_engine(digits([14, 27, 40], [1, 1, 1, 1]))
    engine.train(0, 10)
    assert [replica.weights.most_alive for replica in engine.replicas] == [4, 3, 2, 1]
    assert all(replica.weights.newest.flats[0].is_cuda for replica in engine.replicas)


def test_recomputation_draws_the_same_dropout_masks() -> None:
    found = []
    for recompute in (False, True):
        engine = make_engine(digits([40], [1, 1], recompute=recompute))
        engine.train(0, 6)
        found.append(parameters_of(engine))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_gpu_and_cpu_agree_within_float_tolerance() -> None:
    model = ConvNet()
    x, target = torch.randn(4, 2, 8, 8), torch.randint(4, (4,))
    on_gpu = copy.deepcopy(model).cuda()
    here = functional.cross_entropy(model(x), target)
    there = functional.cross_entropy(on_gpu(x.cuda()), target.cuda())
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)
