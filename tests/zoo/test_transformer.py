"""The Transformer: sizes by closed formulas, torch's own as the oracle, padding, every cut, decoding."""

from typing import Any

import pytest
import torch
from torch import nn

from pipebench import zoo
from pipebench.model.graph import LayerGraph, trace
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.devices import DEVICES
from pipebench.profile.request import ProfileRequest
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.zoo.multi_head import MultiHeadAttention
from pipebench.zoo.text import BOS, PAD
from pipebench.zoo.transformer import AddPositions, DecoderBlock, EncoderBlock, Transformer, transformer
from tests.evaluations import MODES
from tests.zoo.cuts import check_every_cut, num_parameters
from tests.zoo.modes import check_mode
from tests.zoo.pairs import Pairs
from tests.zoo.translators import check_padding_of_the_source, check_translation, check_what_is_not_padding

SMALL: dict[str, Any] = {
    "num_layers": 2, "width": 8, "feed_forward": 12, "num_heads": 2, "source_vocabulary": 11, "target_vocabulary": 13,
    "dropout": 0.0,
}  # fmt: skip
ENCODER_BLOCK, DECODER_BLOCK = 20, 33  # layers, see zoo/transformer.py


def make(**options: Any) -> Transformer:
    torch.manual_seed(1)
    return transformer(**(SMALL | options)).double()


def traced(name: str, **options: Any) -> LayerGraph:
    with torch.device("meta"):
        return trace(zoo.MODELS[name].make(**options))


@pytest.mark.parametrize(
    ("name", "num_layers", "width", "feed_forward", "published"),
    [("transformer", 6, 512, 2048, 65e6), ("transformer_big", 6, 1024, 4096, 213e6)],
)
def test_full_size_by_a_closed_formula(
    name: str, num_layers: int, width: int, feed_forward: int, published: float
) -> None:
    """Table 3 of the paper has 37,000 tokens, all three matrices shared."""
    attention, norm = 4 * width**2, 2 * width
    linear = 2 * width * feed_forward + feed_forward + width
    blocks = num_layers * (3 * attention + 2 * linear + 5 * norm)
    with torch.device("meta"):
        apart = zoo.MODELS[name].make()
        shared = zoo.MODELS[name].make(source_vocabulary=37_000, target_vocabulary=37_000, share_embeddings=True)
    assert num_parameters(apart) == blocks + 3 * 32_320 * width
    assert num_parameters(shared) == blocks + 37_000 * width
    assert num_parameters(shared) == pytest.approx(published, rel=0.04)
    assert apart.classifier.in_features // apart.encoder[0].attention.query.num_heads == 64


def test_every_operator_of_a_block_is_a_layer() -> None:
    graph = trace(make())
    attention = ["Heads", "Heads", "Heads", "matmul", "mul", "hide", "Softmax", "Dropout", "matmul", "Joined"]
    feed_forward = ["Linear", "ReLU", "Dropout", "Linear"]
    after = ["Dropout", "add", "LayerNorm"]

    def hiding(kind: str) -> list[str]:
        return [kind if layer == "hide" else layer for layer in attention]

    encoder = [*hiding("HidePadding"), *after, *feed_forward, *after]
    decoder = [*hiding("HideFuture"), *after, *hiding("HidePadding"), *after, *feed_forward, *after]
    embedding = ["Embedding", "mul", "AddPositions", "Dropout"]
    assert [layer.kind for layer in graph.layers] == [
        *embedding, *encoder * 2, *embedding, *decoder * 2, "Linear",
    ]  # fmt: skip
    memory = graph.index_of("encoder_1_after_feed_forward_norm")
    readers = [layer.name for layer in graph.layers if memory in layer.reads]
    assert readers == [f"decoder_{block}_source_attention_{what}" for block in range(2) for what in ("key", "value")]
    hidden = [layer.inputs for layer in graph.layers if layer.kind == "HidePadding"]
    assert hidden == [("source_length",)] * 4  # loaded where it is read: no mask crosses a cut


def as_torchs(model: Transformer) -> nn.Transformer:
    """Return torch's own Transformer with the model's weights; its attentions have biases, which are zeros then."""
    width, heads, linear = SMALL["width"], SMALL["num_heads"], SMALL["feed_forward"]
    options: dict[str, Any] = {"dim_feedforward": linear, "dropout": 0.0, "batch_first": True}
    encoder_layer = nn.TransformerEncoderLayer(width, heads, **options)
    decoder_layer = nn.TransformerDecoderLayer(width, heads, **options)
    theirs = nn.Transformer(
        width,
        heads,
        custom_encoder=nn.TransformerEncoder(encoder_layer, 2, enable_nested_tensor=False),
        custom_decoder=nn.TransformerDecoder(decoder_layer, 2),
        batch_first=True,
    ).double()

    def attention(ours: MultiHeadAttention, other: nn.MultiheadAttention) -> None:
        assert other.in_proj_weight is not None
        other.in_proj_weight.data = torch.cat((ours.query.weight, ours.key.weight, ours.value.weight))
        other.in_proj_bias.data.zero_()
        other.out_proj.load_state_dict({"weight": ours.output.weight, "bias": torch.zeros(width)})

    def rest(ours: EncoderBlock | DecoderBlock, other: Any) -> None:
        attention(ours.attention, other.self_attn)
        other.linear1.load_state_dict(ours.feed_forward.wide.state_dict())
        other.linear2.load_state_dict(ours.feed_forward.narrow.state_dict())
        other.norm1.load_state_dict(ours.after_attention.norm.state_dict())

    for ours, other in zip(model.encoder, theirs.encoder.layers, strict=True):
        assert isinstance(ours, EncoderBlock)
        rest(ours, other)
        other.norm2.load_state_dict(ours.after_feed_forward.norm.state_dict())
    for ours, other in zip(model.decoder, theirs.decoder.layers, strict=True):
        assert isinstance(ours, DecoderBlock)
        rest(ours, other)
        attention(ours.source_attention, other.multihead_attn)
        other.norm2.load_state_dict(ours.after_source_attention.norm.state_dict())
        other.norm3.load_state_dict(ours.after_feed_forward.norm.state_dict())
    return theirs


def test_the_model_equals_torch_s_transformer() -> None:
    model = make()
    for module in model.modules():  # weights that start as ones and zeros matter, too
        if isinstance(module, nn.LayerNorm | nn.Linear):
            for parameter in module.parameters(recurse=False):
                parameter.data += 0.3 * torch.randn_like(parameter)
    theirs = as_torchs(model)
    source, length = torch.tensor([[4, 5, 6, PAD, PAD], [7, 8, 9, 4, 5]]), torch.tensor([3, 5])
    target = torch.tensor([[BOS, 5, 6, 7], [BOS, 7, 12, 4]])
    future = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    output = theirs(
        model.source_embedding(source),
        model.target_embedding(target),
        tgt_mask=future,
        src_key_padding_mask=source == PAD,
        memory_key_padding_mask=source == PAD,
    )
    torch.testing.assert_close(model(source, length, target), model.classifier(output), rtol=1e-10, atol=1e-12)


def test_positions_equal_the_paper_s_sines() -> None:
    found = AddPositions()(torch.zeros(1, 7, 6, dtype=torch.float64), start=3)[0]
    for row in range(7):
        for pair in range(3):
            angle = torch.tensor((3 + row) / 10_000 ** (2 * pair / 6), dtype=torch.float64)
            assert found[row, 2 * pair].item() == pytest.approx(angle.sin().item())
            assert found[row, 2 * pair + 1].item() == pytest.approx(angle.cos().item())


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = transformer(num_layers=1, width=64, feed_forward=192, num_heads=4)
    assert model.source_embedding.table.weight.std().item() == pytest.approx(64**-0.5, rel=0.01)
    block = model.encoder[0]
    assert isinstance(block, EncoderBlock)
    wide = block.feed_forward.wide
    assert wide.weight.abs().max().item() == pytest.approx((6 / (64 + 192)) ** 0.5, rel=0.01)
    assert not wide.bias.any()
    torch.manual_seed(0)
    shared = transformer(num_layers=1, width=64, feed_forward=192, num_heads=4, share_embeddings=True)
    assert shared.classifier.weight is shared.source_embedding.table.weight is shared.target_embedding.table.weight
    assert shared.classifier.weight.std().item() == pytest.approx(64**-0.5, rel=0.01)


def test_padding_of_the_source_influences_nothing() -> None:
    """Neither other tokens in its place nor more of it change an output or a gradient."""
    check_padding_of_the_source(make(), rtol=1e-11, atol=1e-12)


def test_tokens_that_are_not_padding_matter() -> None:
    check_what_is_not_padding(make())


def test_every_cut_computes_the_whole() -> None:
    """Sources of different lengths; the encoder's output crosses every cut of the decoder."""
    num_layers = 2 * (ENCODER_BLOCK + DECODER_BLOCK) + 9
    assert check_every_cut(make(), Pairs(), 5, apart=5) == num_layers - 1
    assert check_every_cut(make(), Pairs((12, 10)), 4, num_stages=5, num_random=2) == 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_as_its_plain_loop_does(mode: str) -> None:
    check_mode(make(), Pairs((12, 10), num_train=24), mode)


def test_cuts_inside_shared_matrices_are_refused() -> None:
    assert check_every_cut(make(share_embeddings=True, source_vocabulary=13), Pairs(), 3, every=9) == 0


def test_carried_keys_translate_like_the_whole_forward() -> None:
    model = make(width=16).eval()
    for block in model.decoder:  # outputs that differ from sentence to sentence without training
        assert isinstance(block, DecoderBlock)
        block.source_attention.output.weight.data *= 3
        block.source_attention.key.weight.data *= 3
    for table in (model.source_embedding.table, model.target_embedding.table):
        table.weight.data *= 3
    check_translation(model)


def test_a_v100_s_profile_counts_the_products() -> None:
    """From shapes only. Seconds of the larger products are those of a roofline computed by hand."""
    samples, tokens, width, vocabulary = 64, 50, 512, 32_320
    graph = traced("transformer")
    optimizer = OptimizerRecipe(name="adam", lr=5e-4)
    profile = analytic_profile(
        ProfileRequest(graph, Pairs(typical=(tokens, tokens)), [samples], optimizer, "base"), DEVICES["V100"]
    )
    rows = {row.name: row for row in profile.layers[samples]}
    assert rows["encoder_3_attention_key"].output_bytes == samples * tokens * width * 4
    assert rows["matmul"].output_bytes == samples * 8 * tokens**2 * 4
    assert rows["classifier"].output_bytes == samples * tokens * vocabulary * 4
    rate = 14e12 * 0.85  # devices.py and efficiencies.py
    classifier_s = 2 * samples * tokens * width * vocabulary / rate
    assert rows["classifier"].forward_s == pytest.approx(classifier_s, rel=0.05)
    assert rows["classifier"].backward_s == pytest.approx(2 * classifier_s, rel=0.05)
    softmax_bytes = 2 * samples * 8 * tokens**2 * 4
    assert rows["encoder_0_attention_softmax"].forward_s == pytest.approx(softmax_bytes / (900e9 * 0.88), rel=0.05)
    assert rows["encoder_0_attention_softmax"].backward_s == pytest.approx(
        1.5 * softmax_bytes / (900e9 * 0.88), rel=0.05
    )


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 0},
        {"width": 0},
        {"width": 20},
        {"width": 7, "num_heads": 1},
        {"feed_forward": 0},
        {"num_heads": 0},
        {"source_vocabulary": 3},
        {"target_vocabulary": 3},
        {"dropout": 1.0},
        {"share_embeddings": True, "source_vocabulary": 10},
    ],
)
@pytest.mark.parametrize("name", ["transformer", "transformer_big"])
def test_options_out_of_range(name: str, options: dict[str, Any]) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=rf"^{name}: {next(iter(options))} is .* allowed is"):
        zoo.MODELS[name].make(**options)
