"""GPT-2: blocks that read only what stands before, trained to tell the next token.

Radford et al. (2019), "Language models are unsupervised multitask learners", its four sizes from 124 M to 1.56 G
parameters, with the tanh form of GELU and the standard deviation of the authors' code. Every operator is a layer, 19 in
a block.
"""

from dataclasses import dataclass

import torch
from torch import nn

from pipebench.zoo.multi_head import AddLearntPositions, HideFuture, MultiHeadAttention
from pipebench.zoo.options import at_least, below_one

VOCABULARY = 50_257  # byte pairs
_INIT_STD = 0.02  # Differs: the authors' code draws the positions' vectors with 0.01; later copies of it don't


@dataclass(frozen=True)
class GPT2Options:
    """The options of `gpt2`, checked."""

    num_layers: int
    width: int
    num_heads: int
    vocabulary: int
    max_tokens: int
    dropout: float
    share_embedding: bool

    def __post_init__(self) -> None:
        at_least(1, "gpt2", num_layers=self.num_layers, width=self.width, num_heads=self.num_heads)
        at_least(1, "gpt2", vocabulary=self.vocabulary, max_tokens=self.max_tokens)
        if self.width % self.num_heads:
            raise ValueError(f"gpt2: width is {self.width}, allowed is a multiple of num_heads, {self.num_heads}")
        below_one("gpt2", dropout=self.dropout)


class Block(nn.Module):
    """Attention to the text so far, then two linear layers at every position; each normalises what it reads."""

    def __init__(self, options: GPT2Options) -> None:
        super().__init__()
        width, dropout = options.width, options.dropout
        self.before_attention = nn.LayerNorm(width)
        self.attention = MultiHeadAttention(width, options.num_heads, dropout, HideFuture(), bias=True)
        self.attention_dropout = nn.Dropout(dropout)
        self.before_wide = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU("tanh")
        self.narrow = nn.Linear(4 * width, width)
        self.narrow_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens, width] to the same shape; no position depends on a later one."""
        normalised = self.before_attention(x)
        x = x + self.attention_dropout(self.attention(normalised, normalised))
        y: torch.Tensor = x + self.narrow_dropout(self.narrow(self.gelu(self.wide(self.before_wide(x)))))
        return y


class GPT2(nn.Module):
    """The decoder; see `gpt2` for its options."""

    def __init__(self, options: GPT2Options) -> None:
        super().__init__()
        self.words = nn.Embedding(options.vocabulary, options.width)
        self.positions = AddLearntPositions(options.max_tokens, options.width)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.num_layers))
        self.norm = nn.LayerNorm(options.width)
        self.classifier = nn.Linear(options.width, options.vocabulary, bias=False)
        if options.share_embedding:
            self.classifier.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens] int64 to logits of every next token, [samples, tokens, vocabulary]."""
        x = self.dropout(self.positions(self.words(tokens)))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.classifier(self.norm(x))
        return logits


def gpt2(
    num_layers: int = 12,
    width: int = 768,
    num_heads: int = 12,
    vocabulary: int = VOCABULARY,
    max_tokens: int = 1024,
    dropout: float = 0.1,
    share_embedding: bool = False,
) -> GPT2:
    """Build GPT-2, by default the smallest of the paper (table 2), of 124 M parameters where the ends share a matrix.

    The others are 24 layers of 1024 with 16 heads (355 M), 36 of 1280 with 20 (774 M), 48 of 1600 with 25 (1,558 M).

    Args:
        num_layers: blocks.
        width: features of a token; four times as many between the two linear layers of a block.
        num_heads: of every attention; divides `width`.
        vocabulary: token ids.
        max_tokens: positions there are vectors for.
        dropout: probability of dropping a feature or an attention's weight, in [0, 1).
        share_embedding: the words' vectors are the matrix before the softmax, too, as in the paper; the default has
            two. In modes whose stages don't update together, pipedream for one, both ends are then in one stage.
    """
    model = GPT2(GPT2Options(num_layers, width, num_heads, vocabulary, max_tokens, dropout, share_embedding))
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    # What a block adds to what it reads begins smaller the more blocks there are (section 2.3).
    added = {id(each) for block in blocks for each in (block.attention.output, block.narrow)}
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | AddLearntPositions):
            std = _INIT_STD * (2 * num_layers) ** -0.5 if id(module) in added else _INIT_STD
            nn.init.normal_(module.weight, 0, std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model
