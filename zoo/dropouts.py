"""Dropout with masks that are shared: over the steps of a sequence, or over all occurrences of a word.

Gal and Ghahramani (2016), "A Theoretically Grounded Application of Dropout in Recurrent Neural Networks", as Merity,
Keskar and Socher (2018) use it (section 4). Masks are drawn from torch's default generator, while training only.
"""

import torch
from torch import nn


class VariationalDropout(nn.Module):
    """Dropout that drops the same features at every step of a sample; also called locked dropout.

    `p`: probability of dropping a feature; the kept ones are divided by 1 - p.
    """

    one_layer = True

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with one mask per sample, the same for all steps; x: [samples, steps, features]."""
        if not self.training or self.p == 0:
            return x
        return x * nn.functional.dropout(x.new_ones(x.shape[0], 1, x.shape[2]), self.p)

    def extra_repr(self) -> str:
        """Return the probability, for `print(model)`."""
        return f"p={self.p}"


class WordDropoutEmbedding(nn.Embedding):
    """An embedding that drops whole words while training: every occurrence in the minibatch becomes zeros.

    The mask is over the vocabulary, so the kept words are scaled by 1 / (1 - p) wherever they stand; `p` is the
    probability of dropping a word.
    """

    one_layer = True

    def __init__(self, num_embeddings: int, embedding_dim: int, p: float) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.p = p

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (nn.Embedding's name)
        """Return the words' features, [samples, steps, embedding_dim]; input: [samples, steps] int64."""
        embedded = super().forward(input)
        if not self.training or self.p == 0:
            return embedded
        mask = nn.functional.dropout(self.weight.new_ones(self.num_embeddings), self.p)
        return embedded * mask[input].unsqueeze(-1)  # as masking the rows of the table, which is far larger

    def extra_repr(self) -> str:
        """Return the options, for `print(model)`."""
        return f"{super().extra_repr()}, p={self.p}"
