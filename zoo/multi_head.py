"""Multi-head attention, operator by operator: what Transformer, BERT and GPT-2 are made of, every operator a layer.

Vaswani et al. (2017), "Attention is all you need", section 3.2 and figure 2. The products with the heads' matrices put
their results where the next product reads them, so that no layer does nothing but change a shape. What is hidden from
a query is computed where it is hidden, from the model's input: no mask crosses a cut.
"""

import torch
from torch import nn

from pipebench.zoo.attention import NEVER


class Heads(nn.Linear):
    """The matrices of all heads for the queries, the keys or the values.

    Args:
        width: of the model.
        num_heads: divides `width`.
        bias: whether each has one; the paper's haven't.
        features_first: keys stand as columns, ready to be multiplied with.
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
    """The heads side by side, and the matrix after them."""

    one_layer = True
    tensor_role = ("heads", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, heads, tokens, features] to [samples, tokens, width]."""
        return super().forward(x.transpose(1, 2).flatten(2))


class HidePadding(nn.Module):
    """Makes the scores of padding so low that their weights are exactly 0."""

    one_layer = True
    tensor_role = ("heads", "heads")

    def forward(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the scores, [samples, heads, queries, tokens]; lengths: tokens before the padding, [samples] int64."""
        is_padding = torch.arange(scores.shape[3], device=scores.device) >= lengths.unsqueeze(1)
        return scores.masked_fill(is_padding[:, None, None], NEVER)


class HideFuture(nn.Module):
    """Makes the scores of tokens after a query so low that their weights are exactly 0; the last query sees all."""

    one_layer = True
    tensor_role = ("heads", "heads")

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, [samples, heads, queries, tokens]; queries are the last of the tokens."""
        num_queries, num_tokens = scores.shape[2:]
        last_seen = torch.arange(num_tokens - num_queries, num_tokens, device=scores.device).unsqueeze(1)
        return scores.masked_fill(torch.arange(num_tokens, device=scores.device) > last_seen, NEVER)


class MultiHeadAttention(nn.Module):
    """Ten layers: three products with matrices, scores, scale, hiding, softmax, dropout, mean, product with a matrix.

    Args:
        width: of the model.
        num_heads: divides `width`.
        dropout: probability of dropping a weight. The Transformer's paper doesn't mention it; its authors' code and
            BERT have it.
        hide: makes scores of what a query mustn't see low; gets what `forward` gets as `hidden_by`.
        bias: whether the products have one.
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
        """Return what x, [samples, queries, width], attends to in the memory, [samples, tokens, width]."""
        return self.attend(self.query(x), self.key(memory), self.value(memory), *hidden_by)

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *hidden_by: torch.Tensor
    ) -> torch.Tensor:
        """Return [samples, queries, width] from what `query`, `key` and `value` make."""
        scores = self.hide(torch.matmul(queries, keys) * self.scale, *hidden_by)
        attended: torch.Tensor = self.output(torch.matmul(self.dropout(self.softmax(scores)), values))
        return attended


class AddLearntPositions(nn.Module):
    """Adds a learnt vector to every position, of which there are `max_tokens` at most."""

    one_layer = True

    def __init__(self, max_tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_tokens, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, [samples, tokens, width], plus the vectors of its positions.

        Raises:
            ValueError: there are fewer of them than tokens.
        """
        if x.shape[1] > len(self.weight):
            raise ValueError(f"the text has {x.shape[1]} tokens and the model {len(self.weight)} positions")
        return x + self.weight[: x.shape[1]]


class AddNorm(nn.Module):
    """What stands around every sub-layer: dropout of what it gives, the sum with what it read, normalised."""

    def __init__(self, width: int, dropout: float, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width, epsilon)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return the sum of x and what the sub-layer has given for it, normalised; all [samples, tokens, width]."""
        normalised: torch.Tensor = self.norm(x + self.dropout(given))
        return normalised
