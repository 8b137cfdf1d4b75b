"""Multi-head attention for Transformer, BERT and GPT-2, every operator a layer.

Vaswani et al. (2017), "Attention is all you need", section 3.2 and figure 2. The projections put out their results in
the layout that the next product reads, so that no layer only changes a shape. Masks are computed where they are used,
from the model's inputs, so that no mask crosses a cut.
"""

import torch
from torch import nn

from pipebench.zoo.attention import NEVER


def check_heads(name: str, width: int, num_heads: int) -> None:
    """Raise a ValueError unless the width of the model of this name is a multiple of the number of heads."""
    if width % num_heads:
        raise ValueError(f"{name}: width is {width}, allowed is a multiple of num_heads, {num_heads}")


class Heads(nn.Linear):
    """The projection to queries, keys or values, of all heads.

    Args:
        width: features of a token.
        num_heads: divides `width`.
        bias: whether the projection has one; the paper's hasn't.
        features_first: put out features before tokens, as keys are multiplied.
    """

    one_layer = True
    tensor_role = (None, "heads")

    def __init__(self, width: int, num_heads: int, *, bias: bool, features_first: bool = False) -> None:
        super().__init__(width, width, bias)
        self.num_heads = num_heads
        self.order = (0, 2, 3, 1) if features_first else (0, 2, 1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens, width] to [samples, heads, tokens, features] or [samples, heads, features, tokens]."""
        heads = super().forward(x).view(*x.shape[:2], self.num_heads, -1)
        return heads.permute(self.order).contiguous()


class Joined(nn.Linear):
    """The projection of all heads' outputs side by side."""

    one_layer = True
    tensor_role = ("heads", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, heads, tokens, features] to [samples, tokens, width]."""
        return super().forward(x.transpose(1, 2).flatten(2))


class HidePadding(nn.Module):
    """Masks padding: its scores become so low that their softmax is exactly 0."""

    one_layer = True
    tensor_role = ("heads", "heads")

    def forward(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return masked scores, [samples, heads, queries, tokens]; lengths: tokens before padding, [samples] int64."""
        is_padding = torch.arange(scores.shape[3], device=scores.device) >= lengths.unsqueeze(1)
        return scores.masked_fill(is_padding[:, None, None], NEVER)


class HideFuture(nn.Module):
    """Masks the tokens after each query: their scores become so low that their softmax is exactly 0."""

    one_layer = True
    tensor_role = ("heads", "heads")

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        """Return masked scores, [samples, heads, queries, tokens]; the queries are the last of the tokens."""
        num_queries, num_tokens = scores.shape[2:]
        last_seen = torch.arange(num_tokens - num_queries, num_tokens, device=scores.device).unsqueeze(1)
        return scores.masked_fill(torch.arange(num_tokens, device=scores.device) > last_seen, NEVER)


class MultiHeadAttention(nn.Module):
    """Multi-head attention, ten layers: three projections, scores, scale, mask, softmax, dropout, mean, projection.

    Args:
        width: features of a token.
        num_heads: divides `width`.
        dropout: probability of dropping an attention weight. The Transformer's paper doesn't mention it; its authors'
            code and BERT have it.
        hide: masks scores; gets them and `hidden_by` of `forward`.
        bias: whether the projections have one.
    """

    def __init__(self, width: int, num_heads: int, dropout: float, hide: nn.Module, *, bias: bool = False) -> None:
        super().__init__()
        self.query = Heads(width, num_heads, bias=bias)
        self.key = Heads(width, num_heads, bias=bias, features_first=True)
        self.value = Heads(width, num_heads, bias=bias)
        self.hide = hide
        self.softmax = nn.Softmax(dim=3)
        self.dropout = nn.Dropout(dropout)
        self.output = Joined(width, width, bias)
        self.scale = (width // num_heads) ** -0.5

    def forward(self, x: torch.Tensor, memory: torch.Tensor, *hidden_by: torch.Tensor) -> torch.Tensor:
        """Return [samples, queries, width], given x of that shape and the memory, [samples, tokens, width]."""
        return self.attend(self.query(x), self.key(memory), self.value(memory), *hidden_by)

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *hidden_by: torch.Tensor
    ) -> torch.Tensor:
        """Return [samples, queries, width] from the results of `query`, `key` and `value`."""
        scores = self.hide(torch.matmul(queries, keys) * self.scale, *hidden_by)
        attended: torch.Tensor = self.output(torch.matmul(self.dropout(self.softmax(scores)), values))
        return attended


class AddLearntPositions(nn.Module):
    """Adds a learnt vector to each of at most `max_tokens` positions."""

    one_layer = True

    def __init__(self, max_tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_tokens, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, [samples, tokens, width], plus the vectors of its positions.

        Raises:
            ValueError: x has more than `max_tokens` tokens.
        """
        if x.shape[1] > len(self.weight):
            raise ValueError(f"the text has {x.shape[1]} tokens and the model {len(self.weight)} positions")
        return x + self.weight[: x.shape[1]]


class AddNorm(nn.Module):
    """The residual connection around a sub-layer: dropout of its output, the sum with its input, LayerNorm."""

    def __init__(self, width: int, dropout: float, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width, epsilon)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return LayerNorm(x + dropout(given)), x being the sub-layer's input and `given` its output.

        All are [samples, tokens, width].
        """
        normalised: torch.Tensor = self.norm(x + self.dropout(given))
        return normalised
