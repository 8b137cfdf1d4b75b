"""GPT-2: a decoder-only Transformer, trained to predict the next token.

Radford et al. (2019), "Language models are unsupervised multitask learners", in its four sizes from 124 M to 1.56 G
parameters, with the tanh form of GELU and the standard deviation of the authors' code. Every operator is a layer, 19 in
a block.
"""

import torch
from torch import nn

from pipebench.zoo.multi_head import AddLearntPositions, HideFuture, MultiHeadAttention, check_heads
from pipebench.zoo.options import at_least, below_one

VOCABULARY = 50_257  # byte pairs
_INIT_STD = 0.02  # Differs: the authors' code draws the positions' vectors with 0.01; later copies of it don't


class Block(nn.Module):
    """Causal self-attention, then two linear layers at every position; each normalises its input."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = MultiHeadAttention(width, num_heads, dropout, HideFuture(), bias=True)
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

    def __init__(
        self,
        num_layers: int,
        width: int,
        num_heads: int,
        vocabulary: int,
        max_tokens: int,
        dropout: float,
        share_embedding: bool,
    ) -> None:
        super().__init__()
        at_least(1, "gpt2", num_layers=num_layers, width=width, num_heads=num_heads)
        at_least(1, "gpt2", vocabulary=vocabulary, max_tokens=max_tokens)
        check_heads("gpt2", width, num_heads)
        below_one("gpt2", dropout=dropout)
        self.words = nn.Embedding(vocabulary, width)
        self.positions = AddLearntPositions(max_tokens, width)
        self.dropout = nn.Dropout(dropout)
        blocks = [Block(width, num_heads, dropout) for _ in range(num_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, vocabulary, bias=False)
        if share_embedding:
            self.classifier.weight = self.words.weight
        self._initialise(blocks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens] int64 to logits of every next token, [samples, tokens, vocabulary]."""
        x = self.dropout(self.positions(self.words(tokens)))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.classifier(self.norm(x))
        return logits

    def _initialise(self, blocks: list[Block]) -> None:
        # The layers that end in a residual sum begin smaller, the more of them there are (section 2.3).
        residual = {id(each) for block in blocks for each in (block.attention.output, block.narrow)}
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | AddLearntPositions):
                std = _INIT_STD * len(residual) ** -0.5 if id(module) in residual else _INIT_STD
                nn.init.normal_(module.weight, 0, std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def gpt2(
    num_layers: int = 12,
    width: int = 768,
    num_heads: int = 12,
    vocabulary: int = VOCABULARY,
    max_tokens: int = 1024,
    dropout: float = 0.1,
    share_embedding: bool = False,
) -> GPT2:
    """Build GPT-2, by default the smallest of the paper (table 2), which has 124 M parameters with `share_embedding`.

    The others are 24 layers of 1024 with 16 heads (355 M), 36 of 1280 with 20 (774 M), 48 of 1600 with 25 (1,558 M).

    Args:
        num_layers: blocks.
        width: features of a token; there are four times as many between the two linear layers of a block.
        num_heads: of every attention; divides `width`.
        vocabulary: number of token ids.
        max_tokens: length of the longest text, in tokens.
        dropout: probability of dropping a feature or an attention weight, in [0, 1).
        share_embedding: whether the words' vectors are the matrix before the softmax, too, as in the paper. In modes
            whose stages don't update together, such as pipedream, both are then in one stage.
    """
    return GPT2(num_layers, width, num_heads, vocabulary, max_tokens, dropout, share_embedding)
