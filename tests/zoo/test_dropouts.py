"""Dropout with shared masks."""

import pytest
import torch

from pipebench.zoo.dropouts import VariationalDropout, WordDropoutEmbedding


def test_variational_mask_is_one_per_sample_and_feature() -> None:
    torch.manual_seed(0)
    x = torch.rand(40, 7, 50) + 1
    dropped = VariationalDropout(0.25)(x)
    mask = dropped / x
    torch.testing.assert_close(mask, mask[:, :1].expand_as(mask))  # the same at all steps
    kept = mask[:, 0] > 0
    torch.testing.assert_close(mask[:, 0][kept], torch.tensor(4 / 3).expand(int(kept.sum())))
    assert 0.7 < kept.float().mean().item() < 0.8
    assert not torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_variational_dropout_is_off_in_evaluation_and_at_0(p: float) -> None:
    x = torch.rand(2, 3, 4)
    layer = VariationalDropout(p)
    assert layer.eval()(x) is x
    assert (layer.train()(x) is x) == (p == 0)


def embedding(p: float) -> WordDropoutEmbedding:
    torch.manual_seed(0)
    return WordDropoutEmbedding(200, 3, p)


def test_all_occurrences_of_a_word_are_dropped() -> None:
    layer = embedding(0.5)
    tokens = torch.arange(200).repeat(2, 3)
    found = layer(tokens) / layer.weight[tokens]
    torch.testing.assert_close(found, found[:1, :200, :1].repeat(2, 3, 3))  # all features, all occurrences
    mask = found[0, :200, 0]
    assert sorted(mask.round().unique().tolist()) == [0, 2]
    assert 0.4 < (mask == 0).float().mean().item() < 0.6
    assert not torch.equal(layer(tokens), layer(tokens))


def test_dropped_words_get_no_gradient_and_others_are_scaled() -> None:
    layer = embedding(0.5)
    tokens = torch.arange(200).unsqueeze(0)
    dropped = layer(tokens)
    (gradient,) = torch.autograd.grad(dropped.sum(), [layer.weight])
    kept = (dropped[0] != 0).all(dim=1)
    assert 0 < int(kept.sum()) < 200
    assert torch.equal(gradient, kept.unsqueeze(1).expand(200, 3) * 2.0)


def test_without_dropout_it_equals_torch_s_embedding() -> None:
    tokens = torch.tensor([[1, 5, 5], [0, 199, 3]])
    for layer in (embedding(0.5).eval(), embedding(0.0)):
        assert torch.equal(layer(tokens), layer.weight[tokens])
    torch.manual_seed(0)
    assert torch.equal(embedding(0.5).weight, torch.nn.Embedding(200, 3).weight) is False  # another draw than the last
    torch.manual_seed(0)
    assert torch.equal(torch.nn.Embedding(200, 3).weight, embedding(0.5).weight)


@pytest.mark.parametrize("layer", [VariationalDropout(0.5), WordDropoutEmbedding(10, 4, 0.5)])
def test_draws_come_from_the_default_generator(layer: torch.nn.Module) -> None:
    x = torch.arange(8).reshape(2, 4)
    given = x if isinstance(layer, WordDropoutEmbedding) else torch.ones(2, 4, 64)
    torch.manual_seed(3)
    first = layer(given)
    second = layer(given)
    torch.manual_seed(3)
    assert torch.equal(layer(given), first)
    assert not torch.equal(first, second)
    layer.eval()
    before = torch.get_rng_state()
    layer(given)
    assert torch.equal(torch.get_rng_state(), before)
