"""Synthetic samples: shapes, determinism, loss."""

import math

import pytest
import torch

from pipebench import zoo
from pipebench.recipe.load import load
from pipebench.recipe.preflight import preflight
from pipebench.zoo.synthetic import synthetic, synthetic_text


def test_published_sizes_and_no_metric() -> None:
    dataset = zoo.DATASETS["synthetic"].make()
    dataset.check()
    assert (dataset.num_train, dataset.num_eval) == (1_281_167, 50_000)
    assert dict(dataset.metrics) == {}
    assert dataset.example(2)["image"].shape == (2, 3, 224, 224)


@pytest.mark.parametrize("shape", [(3, 8, 9), (5,)])
def test_fields_match_the_example(shape: tuple[int, ...]) -> None:
    dataset = synthetic(shape=shape, num_classes=7)
    for field, meta in dataset.example(3).items():
        fetched = dataset.fetch("eval", [0, 1, 2], [field])
        assert list(fetched) == [field]
        assert (fetched[field].shape, fetched[field].dtype) == (meta.shape, meta.dtype)
        assert meta.is_meta


def test_fetch_is_a_pure_function_of_indices() -> None:
    dataset = synthetic(shape=(1, 4, 4), num_classes=10)
    torch.manual_seed(1)
    first = dataset.fetch("train", [1_000_000, 3], ["image", "label"])
    torch.manual_seed(2)
    assert torch.equal(dataset.fetch("train", [3], ["image"])["image"][0], first["image"][1])
    assert torch.equal(dataset.fetch("train", [3], ["label"])["label"][0], first["label"][1])
    first["image"].zero_()
    assert dataset.fetch("train", [3], ["image"])["image"].any()


def test_samples_differ_and_labels_cover_the_classes() -> None:
    fields = synthetic(shape=(1, 16, 16), num_classes=5).fetch("train", range(64), ["image", "label"])
    assert len({tuple(row.tolist()) for row in fields["image"].flatten(1)}) == 64
    assert sorted({*fields["label"].tolist()}) == [0, 1, 2, 3, 4]
    assert fields["image"].mean().item() == pytest.approx(0, abs=0.05)
    assert fields["image"].std().item() == pytest.approx(1, abs=0.05)


def test_loss_is_the_sum() -> None:
    dataset = synthetic(num_classes=4)
    logits, targets = torch.eye(4) * 3, {"label": torch.tensor([0, 1, 2, 0])}
    expected = 4 * torch.nn.functional.cross_entropy(logits, targets["label"])
    assert torch.allclose(dataset.loss(logits, targets), expected)
    assert dataset.weight("train", range(4)) == 4


@pytest.mark.parametrize("options", [{"shape": ()}, {"shape": (3, 0)}, {"num_classes": 0}, {"num_train": 0}])
def test_options_out_of_range(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^synthetic: {next(iter(options))} is .* allowed"):
        zoo.DATASETS["synthetic"].make(**options)


def test_unknown_split() -> None:
    with pytest.raises(ValueError, match="split is 'test', allowed are train, eval"):
        synthetic().fetch("test", [0], ["label"])


def test_text_is_the_same_row_and_its_next_tokens() -> None:
    dataset = synthetic_text(columns=5, vocabulary=11)
    fields = dataset.fetch("train", [3, 8], ["tokens", "next_tokens"])
    assert {name: each.shape for name, each in fields.items()} == dict.fromkeys(fields, (2, 5))
    assert torch.equal(fields["tokens"][0, 1:], fields["next_tokens"][1, :-1])
    assert {name: each.shape for name, each in dataset.example(2).items()} == dict.fromkeys(fields, (2, 5))
    even = torch.zeros(2, 5, 11)
    assert dataset.loss(even, fields).item() == pytest.approx(10 * math.log(11))
    with pytest.raises(ValueError, match="synthetic_text: split"):
        dataset.fetch("test", [0], ["tokens"])


def test_a_full_size_recipe_is_profiled_on_noise_if_its_data_is_missing() -> None:
    noise = ("dataset.name=synthetic", "dataset.shape=[3,224,224]", "train.target=null", "cluster.name=local")
    preflight(load("vgg16/single", noise, builds=False), trains=False)
