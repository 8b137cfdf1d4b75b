"""Bahdanau's attention in its normalised form, as in MLPerf's GNMT, for all queries at once."""

import torch
from torch import nn
from torch.nn import functional

# Half precision's lowest number, as in MLPerf: far below any score, and finite, for samples that are padding only.
NEVER = -65504.0


class BahdanauAttention(nn.Module):
    """Additive attention: energy = direction . tanh(linear_q(query) + linear_k(memory) + bias).

    Bahdanau, Cho and Bengio (2015); the direction is normalised and has a learnt length (Salimans and Kingma, 2016).
    Queries, memory and the projections of both have `hidden_size` features.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear_q = nn.Linear(hidden_size, hidden_size, bias=False)
        self.linear_k = nn.Linear(hidden_size, hidden_size, bias=False)
        self.linear_att = nn.Parameter(torch.empty(hidden_size))
        self.normalize_scalar = nn.Parameter(torch.empty(1))
        self.normalize_bias = nn.Parameter(torch.empty(hidden_size))

    def forward(
        self, queries: torch.Tensor, memory: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each query's weighted mean of the memory, and the weights.

        Args:
            queries: [samples, queries, hidden].
            memory: padded on the right: [samples, source, hidden].
            keys: `linear_k(memory)`, which callers compute once for many queries.
            lengths: of the memories: [samples] int64.

        Returns:
            Means [samples, queries, hidden], and weights [samples, queries, source], exactly 0 at padding.
        """
        compared = torch.tanh(self.linear_q(queries).unsqueeze(2) + keys.unsqueeze(1) + self.normalize_bias)
        direction = self.linear_att / self.linear_att.norm() * self.normalize_scalar
        is_padding = torch.arange(memory.shape[1], device=memory.device) >= lengths.unsqueeze(1)
        energy = compared.matmul(direction).masked_fill(is_padding.unsqueeze(1), NEVER)
        weights = functional.softmax(energy, -1)
        return torch.bmm(weights, memory), weights
