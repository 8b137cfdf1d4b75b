"""GPT-2: published sizes, torch's own encoder as the oracle, causality, every cut, every mode."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipebench import zoo
from pipebench.model.graph import trace
from pipebench.zoo.gpt2 import GPT2, Block, gpt2
from pipebench.zoo.language import Text
from tests.evaluations import MODES
from tests.zoo.cuts import check_every_cut
from tests.zoo.modes import check_mode

SMALL: dict[str, Any] = {
    "num_layers": 2, "width": 8, "num_heads": 2, "vocabulary": 23, "max_tokens": 7, "dropout": 0.0,
}  # fmt: skip


class Counted(Text):
    """A repeating text of arbitrary ids."""

    def __init__(self) -> None:
        super().__init__("counted", 7, {"train": 25 * 7 + 1, "eval": 50}, 23)

    def text(self, split: str) -> torch.Tensor:
        numbers = torch.arange(self.num_tokens[split])
        return (5 * numbers + numbers**2 // 3) % 23


def make(**options: Any) -> GPT2:
    torch.manual_seed(1)
    model = gpt2(**(SMALL | options)).double()
    for parameter in model.parameters():  # as if trained: otherwise all is near zero
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(
    ("num_layers", "width", "num_heads", "published"),
    [
        (12, 768, 12, 124_439_808),
        (24, 1024, 16, 354_823_168),
        (36, 1280, 20, 774_030_080),
        (48, 1600, 25, 1557_611_200),
    ],
)
def test_full_sizes_equal_the_released_weights(num_layers: int, width: int, num_heads: int, published: int) -> None:
    sizes = {"num_layers": num_layers, "width": width, "num_heads": num_heads}
    with torch.device("meta"):
        apart, tied = zoo.MODELS["gpt2"].make(**sizes), zoo.MODELS["gpt2"].make(**sizes, share_embedding=True)
    assert sum(parameter.numel() for parameter in tied.parameters()) == published
    assert sum(parameter.numel() for parameter in apart.parameters()) == published + 50_257 * width


def test_every_operator_of_a_block_is_a_layer() -> None:
    kinds = [layer.kind for layer in trace(make()).layers]
    attention = ["Heads"] * 3 + ["matmul", "mul", "HideFuture", "Softmax", "Dropout", "matmul", "Joined"]
    block = ["LayerNorm", *attention, "Dropout", "add", "LayerNorm", "Linear", "GELU", "Linear", "Dropout", "add"]
    assert kinds == ["Embedding", "AddLearntPositions", "Dropout", *block * 2, "LayerNorm", "Linear"]


def as_torchs(block: Block) -> nn.TransformerEncoderLayer:
    """Return torch's own layer, normalising first, with a block's weights."""
    width, heads = SMALL["width"], SMALL["num_heads"]
    theirs = nn.TransformerEncoderLayer(
        *(width, heads, 4 * width), dropout=0.0, activation=nn.GELU("tanh"), batch_first=True, norm_first=True
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
    pairs: list[tuple[nn.Module, nn.Module]] = [(theirs.linear1, block.wide), (theirs.linear2, block.narrow)]
    pairs += [(theirs.norm1, block.before_attention), (theirs.norm2, block.before_wide)]
    for other, ours in pairs:
        other.load_state_dict(ours.state_dict())
    return theirs


def test_gpt2_equals_torch_s_encoder_with_a_causal_mask() -> None:
    model = make()
    tokens = Counted().fetch("train", range(5), ("tokens",))["tokens"]
    x = model.words.weight[tokens] + model.positions.weight
    mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.float64)
    for block in model.blocks:
        assert isinstance(block, Block)
        x = as_torchs(block)(x, src_mask=mask, is_causal=True)
    x = functional.layer_norm(x, (SMALL["width"],), model.norm.weight, model.norm.bias)
    torch.testing.assert_close(model(tokens), x @ model.classifier.weight.T, rtol=1e-9, atol=1e-11)


def test_no_position_reads_a_later_one() -> None:
    model, tokens = make(), torch.arange(7).unsqueeze(0)
    other = tokens.clone()
    other[0, 4] = 20
    found, expected = model(other), model(tokens)
    torch.testing.assert_close(found[:, :4], expected[:, :4], rtol=0, atol=0)
    assert all(not torch.allclose(found[:, position], expected[:, position]) for position in range(4, 7))


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = gpt2(num_layers=8, width=64, num_heads=4, vocabulary=500)
    block = model.blocks[3]
    assert isinstance(block, Block)
    for weight in (model.words.weight, model.positions.weight, block.wide.weight, model.classifier.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    for added in (block.narrow, block.attention.output):
        assert added.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)  # of 2 x 8 sums
        assert not added.bias.any()
    shared = gpt2(**SMALL, share_embedding=True)
    assert shared.classifier.weight is shared.words.weight


def test_every_cut_computes_the_whole() -> None:
    assert check_every_cut(make(), Counted(), 5, apart=10) == 2 * 19 + 5 - 1


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_as_its_plain_loop_does(mode: str) -> None:
    check_mode(make(), Counted(), mode)


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 0},
        {"width": 0},
        {"width": 20, "num_heads": 3},
        {"num_heads": 0},
        {"vocabulary": 0},
        {"max_tokens": 0},
        {"dropout": 1.0},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=rf"^gpt2: {next(iter(options))} is .* allowed is"):
        gpt2(**options)
