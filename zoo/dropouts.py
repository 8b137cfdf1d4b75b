"""Dropout with shared masks: over the steps of a sequence, or over all occurrences of a word.

Gal and Ghahramani (2016), "A Theoretically Grounded Application of Dropout in Recurrent Neural Networks", as Merity,
Keskar and Socher (2018) use it (section 4). Masks are drawn from torch's default generator, in training only.
"""

import torch
from torch import nn


class VariationalDropout(nn.Module):
    """Dropout that drops the same features at every step of a sample; also called locked dropout.

    `p` is the probability of dropping a feature; the others are divided by 1 - p.
    """

    one_layer = True

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, [samples, steps, features], with one mask per sample for all steps."""
        if not self.training or self.p == 0:
            return x
        return x * nn.functional.dropout(x.new_ones(x.shape[0], 1, x.shape[2]), self.p)

    def extra_repr(self) -> str:
        """Return the probability, for `print(model)`."""
        return f"p={self.p}"


class WordDropoutEmbedding(nn.Embedding):
    """An embedding that drops whole words in training: every occurrence in the minibatch becomes zeros.

    `p` is the probability of dropping a word; the others are divided by 1 - p.
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
        return embedded * mask[input].unsqueeze(-1)  # the same as masking the table's rows, which are far more

    def extra_repr(self) -> str:
        """Return the options, for `print(model)`."""
        return f"{super().extra_repr()}, p={self.p}"
