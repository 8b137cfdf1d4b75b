"""BERT: sizes by closed formulas, torch's own encoder as the oracle, padding, every cut, every mode."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipebench import zoo
from pipebench.model.graph import trace
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.devices import DEVICES
from pipebench.profile.request import ProfileRequest
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.zoo.bert import BERT, Block, bert_base
from pipebench.zoo.multi_head import AddLearntPositions
from pipebench.zoo.segments import SegmentOptions, Segments
from pipebench.zoo.text import BOS, EOS, PAD
from pipebench.zoo.wmt16_segments import wmt16_segments
from tests.evaluations import MODES
from tests.zoo.cuts import check_every_cut, num_parameters
from tests.zoo.modes import check_mode

SMALL: dict[str, Any] = {
    "num_layers": 2, "width": 8, "feed_forward": 12, "num_heads": 2, "vocabulary": 23, "max_tokens": 13, "dropout": 0.0,
}  # fmt: skip


class Counted(Segments):
    """Sentences of three to six arbitrary words."""

    def __init__(self) -> None:
        super().__init__(SegmentOptions("counted", {"train": 25, "eval": 7}, 23, 4, 13, 1, 0))

    def sentences(self, split: str, indices: Sequence[int]) -> list[list[int]]:
        return [[5 + (7 * i + 3 * j) % 18 for j in range(3 + i % 4)] for i in indices]


def make(**options: Any) -> BERT:
    torch.manual_seed(1)
    model = bert_base(**(SMALL | options)).double()
    for parameter in model.parameters():  # as if trained: otherwise all is near zero
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(
    ("name", "num_layers", "width", "published"), [("bert_base", 12, 768, 110e6), ("bert_large", 24, 1024, 340e6)]
)
def test_full_size_by_a_closed_formula(name: str, num_layers: int, width: int, published: float) -> None:
    """Section 3 of the paper; the matrix before the softmax is the embedding's there."""
    norm, linear = 2 * width, width * (width + 1)
    block = 4 * linear + (width + 1) * 4 * width + (4 * width + 1) * width + 2 * norm
    heads = linear + norm + linear + 2 * (width + 1)
    shared = (30_522 + 512 + 2) * width + norm + num_layers * block + heads + 30_522
    with torch.device("meta"):
        apart, tied = zoo.MODELS[name].make(), zoo.MODELS[name].make(share_embedding=True)
    assert num_parameters(tied) == shared
    assert num_parameters(apart) == shared + 30_522 * width
    assert shared == pytest.approx(published, rel=0.015)


def test_every_operator_of_a_block_is_a_layer() -> None:
    kinds = [layer.kind for layer in trace(make()).layers]
    attention = ["Heads"] * 3 + ["matmul", "mul", "HidePadding", "Softmax", "Dropout", "matmul", "Joined"]
    after = ["Dropout", "add", "LayerNorm"]
    embedding = ["Embedding", "Embedding", "add", "AddLearntPositions", "LayerNorm", "Dropout"]
    heads = ["AtPositions", "Linear", "GELU", "LayerNorm", "Linear", "getitem", "Linear", "Tanh", "Linear"]
    assert kinds == [*embedding, *[*attention, *after, "Linear", "GELU", "Linear", *after] * 2, *heads]


def as_torchs(block: Block) -> nn.TransformerEncoderLayer:
    """Return torch's own layer with a block's weights."""
    width, heads, wide = SMALL["width"], SMALL["num_heads"], SMALL["feed_forward"]
    theirs = nn.TransformerEncoderLayer(
        width, heads, wide, dropout=0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True
    ).double()
    products = [block.attention.query, block.attention.key, block.attention.value]
    theirs.self_attn.load_state_dict(
        {
            "in_proj_weight": torch.cat([each.weight for each in products]),
            "in_proj_bias": torch.cat([each.bias for each in products]),
            "out_proj.weight": block.attention.output.weight,
            "out_proj.bias": block.attention.output.bias,
        }
    )
    pairs = [(theirs.linear1, block.wide), (theirs.linear2, block.narrow)]
    pairs += [(theirs.norm1, block.after_attention.norm), (theirs.norm2, block.after_narrow.norm)]  # type: ignore[list-item]
    for other, ours in pairs:
        other.load_state_dict(ours.state_dict())
    return theirs


def test_bert_equals_torch_s_encoder_with_the_paper_s_ends() -> None:
    model, dataset = make(), Counted()
    fields = dataset.fetch("train", range(6), dataset.inputs, draw=3)
    tokens, segments, length, positions = fields.values()
    x = model.embedding.words.weight[tokens] + model.embedding.segments.weight[segments]
    x = x + model.embedding.positions.weight[: tokens.shape[1]]
    norm = model.embedding.norm
    x = functional.layer_norm(x, (SMALL["width"],), norm.weight, norm.bias, 1e-12)
    for block in model.encoder:
        assert isinstance(block, Block)
        x = as_torchs(block)(x, src_key_padding_mask=tokens == PAD)
    assert (length < tokens.shape[1]).any()
    head = model.hidden_words
    hidden = torch.stack([x[row, positions[row]] for row in range(6)])
    words = head.classifier(head.norm(functional.gelu(head.transform(hidden))))
    pooled = model.next_sentence.pooler(x[:, 0]).tanh()
    found = model(tokens, segments, length, positions)
    torch.testing.assert_close(found, (words, model.next_sentence.classifier(pooled)), rtol=1e-9, atol=1e-11)


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = bert_base(num_layers=1, width=64, feed_forward=128, num_heads=4)
    for weight in (model.embedding.words.weight, model.embedding.positions.weight, model.hidden_words.transform.weight):
        assert weight.std().item() == pytest.approx(0.88 * 0.02, rel=0.03)  # cut at two sigma
        assert weight.abs().max() <= 0.04
    assert not model.hidden_words.classifier.bias.any()
    shared = bert_base(num_layers=1, width=64, feed_forward=128, num_heads=4, share_embedding=True)
    assert shared.hidden_words.classifier.weight is shared.embedding.words.weight


def test_padding_influences_nothing() -> None:
    model = make()
    tokens, length = torch.tensor([[BOS, 7, EOS, 9, EOS, PAD, PAD]]), torch.tensor([5])
    segments, positions = torch.tensor([[0, 0, 0, 1, 1, 0, 0]]), torch.tensor([[1, 3]])
    expected = model(tokens, segments, length, positions)
    other = tokens.clone()
    other[0, 5:] = 11
    torch.testing.assert_close(model(other, segments, length, positions), expected, rtol=1e-12, atol=1e-13)
    shorter = model(tokens[:, :5], segments[:, :5], length, positions)
    torch.testing.assert_close(shorter, expected, rtol=1e-12, atol=1e-13)
    other[0, 4] = 12
    assert not torch.allclose(model(other, segments, length, positions)[1], expected[1])


def test_a_text_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="the text has 3 tokens and the model 2 positions"):
        AddLearntPositions(2, 4)(torch.zeros(1, 3, 4))


def test_every_cut_computes_the_whole() -> None:
    num_layers = 2 * 19 + 15
    assert check_every_cut(make(), Counted(), 5, apart=5) == num_layers - 1
    assert check_every_cut(make(share_embedding=True), Counted(), 3, every=9) == 0  # refused: it would be torn


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_as_its_plain_loop_does(mode: str) -> None:
    """Hidden words are drawn again for every minibatch, by each stage that reads them."""
    check_mode(make(), Counted(), mode)


def test_a_v100_s_profile_counts_only_hidden_words() -> None:
    samples, columns, width, vocabulary, hidden = 16, 128, 1024, 32_320, 19
    with torch.device("meta"):
        graph = trace(zoo.MODELS["bert_large"].make(vocabulary=vocabulary))
    optimizer = OptimizerRecipe(name="adam", lr=1e-4)
    profile = analytic_profile(
        ProfileRequest(graph, wmt16_segments(columns=columns), [samples], optimizer, "large"), DEVICES["V100"]
    )
    rows = {row.name: row for row in profile.layers[samples]}
    assert rows["hidden_words_classifier"].output_bytes == samples * hidden * vocabulary * 4
    assert rows["encoder_7_attention_softmax"].output_bytes == samples * 16 * columns**2 * 4
    wide_s = 2 * samples * columns * width * 4 * width / (14e12 * 0.85)  # devices.py and efficiencies.py
    assert rows["encoder_7_wide"].forward_s == pytest.approx(wide_s, rel=0.1)
    gelu_bytes = 2 * samples * columns * 4 * width * 4
    assert rows["encoder_7_gelu"].forward_s == pytest.approx(gelu_bytes / (900e9 * 0.88), rel=0.01)
    assert rows["encoder_7_gelu"].backward_s == pytest.approx(1.5 * gelu_bytes / (900e9 * 0.88), rel=0.01)
    norm_bytes = 2 * samples * columns * width * 4
    assert rows["encoder_7_after_narrow_norm"].forward_s == pytest.approx(norm_bytes / (900e9 * 0.88), rel=0.05)


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 0},
        {"width": 0},
        {"width": 20, "num_heads": 3},
        {"feed_forward": 0},
        {"num_heads": 0},
        {"vocabulary": 3},
        {"max_tokens": 0},
        {"dropout": 1.0},
    ],
)
@pytest.mark.parametrize("name", ["bert_base", "bert_large"])
def test_options_out_of_range(name: str, options: dict[str, Any]) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=rf"^{name}: {next(iter(options))} is .* allowed is"):
        zoo.MODELS[name].make(**options)
