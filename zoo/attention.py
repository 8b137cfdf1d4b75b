"""Bahdanau's attention in its normalised form, as in MLPerf's GNMT: all queries over a memory at once."""

import torch
from torch import nn
from torch.nn import functional

# Half precision's lowest number, as MLPerf's: far below any energy, and finite where a sample is padding only.
NEVER = -65504.0


class BahdanauAttention(nn.Module):
    """Additive attention: energy = direction . tanh(linear_q(query) + linear_k(memory) + bias).

    Bahdanau, Cho and Bengio (2015); the direction is normalised and has a learnt length (Salimans and Kingma, 2016).
    Queries, memory and what is compared are equally wide.
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
        """Return the mean of the memory that each query attends to, and its weights.

        Args:
            queries: [samples, queries, hidden].
            memory: padded on the right: [samples, source, hidden].
            keys: `linear_k` of the memory; given, so that they needn't be computed for every query again.
            lengths: of the memories: [samples] int64.

        Returns:
            [samples, queries, hidden], and [samples, queries, source], exactly 0 where padding is.
        """
        compared = torch.tanh(self.linear_q(queries).unsqueeze(2) + keys.unsqueeze(1) + self.normalize_bias)
        direction = self.linear_att / self.linear_att.norm() * self.normalize_scalar
        is_padding = torch.arange(memory.shape[1], device=memory.device) >= lengths.unsqueeze(1)
        energy = compared.matmul(direction).masked_fill(is_padding.unsqueeze(1), NEVER)
        weights = functional.softmax(energy, -1)
        return torch.bmm(weights, memory), weights
