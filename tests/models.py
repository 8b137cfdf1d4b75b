"""Small models with difficult features: skip connections, in-place operations, integers, tuples, BatchNorm, dropout."""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional


class ConvNet(nn.Module):
    """Convolutions, BatchNorm, in-place ReLU and dropout; float32, [n, 2, 8, 8] to [n, 4]."""

    def __init__(self, *, norm: bool = True, dropout: float = 0.0, seed: int = 3) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)
        self.features = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1),
            nn.BatchNorm2d(6) if norm else nn.Identity(),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 5, 3, padding=1),
            nn.BatchNorm2d(5) if norm else nn.Identity(),
            nn.ReLU(inplace=True),
        )
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(5 * 4 * 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.flatten(self.features(x), 1)))


class HalfFrozen(ConvNet):
    """A `ConvNet` with a buffer that a layer reads, and a BatchNorm that stays in evaluation mode."""

    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.linspace(0.1, 0.7, 2 * 8 * 8).view(2, 8, 8))
        self.features[5].running_mean.uniform_(0.1, 0.7)  # type: ignore[operator]

    def train(self, mode: bool = True) -> "HalfFrozen":
        """Set the mode of all but one BatchNorm."""
        super().train(mode)
        self.features[5].eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.offset)


class SkipNet(nn.Module):
    """Values that skip stages, are read by several, are overwritten in place, or are integers; double precision."""

    def __init__(self, *, seed: int = 3) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.relu = nn.ReLU(inplace=True)
        self.table = nn.Embedding(3, 6)
        self.head = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(6))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        first = self.a(x)
        bins = (x[:, 0] > 0).long() + 1
        hidden = self.relu(first)
        mixed = self.b(hidden) + first  # `first` was overwritten by the in-place ReLU
        left, right = mixed.chunk(2, dim=1)
        mixed = torch.cat([right, left], dim=1)
        mixed += hidden
        mixed = functional.relu(mixed, inplace=True) * self.scale
        return self.head(self.c(mixed) + self.table(bins) + first)


class Gated(nn.Module):
    """A gate whose output is only compared, so that no gradient reaches its layer; seven layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.gate, self.body, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        gate = self.gate(x)
        hidden = torch.tanh(self.body(x))
        return self.head(hidden * torch.gt(gate, 0))


class Tied(nn.Module):
    """Two layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.middle, self.two = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.head = nn.Linear(6, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        return self.head(self.two(self.middle(self.one(x))))


class TiedEnds(nn.Module):
    """The shape of a language model: both ends share a matrix, and two layers between them share another."""

    def __init__(self, *, seed: int = 3) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)
        self.words, self.one, self.norm = nn.Linear(6, 4, bias=False), nn.Linear(4, 4), nn.LayerNorm(4)
        self.two, self.three, self.classifier = nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.classifier.weight = self.words.weight
        self.two.weight = self.one.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        hidden = self.norm(torch.tanh(self.one(torch.tanh(self.words(x)))))
        return self.classifier(torch.tanh(self.three(torch.tanh(self.two(hidden)))))


class WideTied(nn.Module):
    """Both ends share a matrix, and so do three layers between them; shards cut both."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.words, self.down = nn.Linear(6, 300, bias=False), nn.Linear(300, 40)
        self.one, self.two, self.three = nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40)
        self.up, self.classifier = nn.Linear(40, 6), nn.Linear(6, 300)
        self.classifier.weight = self.words.weight
        self.two.weight = self.three.weight = self.one.weight
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 300]."""
        hidden = torch.tanh(self.down(torch.tanh(self.words(x))))
        hidden = torch.tanh(self.three(torch.tanh(self.two(torch.tanh(self.one(hidden))))))
        return self.classifier(self.up(hidden))


class Branching(nn.Module):
    """Control flow on data: torch.fx can't trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = BranchingInner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 6]."""
        return self.inner(x)


class BranchingInner(nn.Module):
    """The part that branches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 6]."""
        if x.sum() > 0:
            return x
        return self.linear(x)


class FunctionalDropout(nn.Module):
    """Dropout as a function, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        hidden = functional.dropout(self.a(x), 0.5, self.training)
        return self.b(functional.dropout(hidden, p=0.5, training=self.training))


class DropoutTwice(nn.Module):
    """One dropout module, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.drop(x), self.drop(x)])


class RandomNet(nn.Module):
    """A random graph of linear layers, sums and in-place activations; double precision, [n, 6] to [n, 4].

    `reads` has for every layer the earlier values (0 is the input) it adds up and reads.
    """

    def __init__(self, reads: list[list[int]]) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.reads = reads
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in reads)
        self.head = nn.Linear(6, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]; the head reads the last value and all values that no layer reads."""
        values = [x]
        for index, (layer, reads) in enumerate(zip(self.layers, self.reads, strict=True)):
            total = values[reads[0]]
            for read in reads[1:]:
                total = total + values[read]
            value = layer(total)
            values.append(functional.relu(value, inplace=True) if index % 3 == 2 else torch.tanh(value))
        unread = set(range(1, len(values))) - {read for reads in self.reads for read in reads}
        return self.head(sum(values[index] for index in sorted(unread | {len(values) - 1})))


class TiedImages(nn.Module):
    """Two early layers share one weight, so they have to share a stage; later layers take most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(1024, 64)
        self.one, self.middle, self.two = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)
        self.two.weight = self.one.weight
        self.wide, self.narrow, self.head = nn.Linear(64, 4096), nn.Linear(4096, 2048), nn.Linear(2048, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 1, 32, 32] to [n, 10]."""
        hidden = self.two(self.middle(self.one(self.read(torch.flatten(x, 1)))))
        return self.head(self.narrow(self.wide(hidden)))


class Halves(NamedTuple):
    """The output of `Halving`."""

    left: torch.Tensor
    rest: dict[str, torch.Tensor]
    note: str | None


class Halving(nn.Module):
    """A layer that returns a user's named tuple, with an ordered dictionary in it."""

    one_layer = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Halves:
        """Map [n, 6] to two halves of it."""
        left, right = self.inner(x).chunk(2, dim=1)
        return Halves(left, OrderedDict(right=right), None)


class Joining(nn.Module):
    """A layer that reads `Halves`."""

    one_layer = True

    def forward(self, halves: Halves) -> torch.Tensor:
        """Map two halves to [n, 6]."""
        assert halves._fields == ("left", "rest", "note")
        return torch.cat([halves.rest["right"], halves.left], dim=1)


class Structures(nn.Module):
    """Layers that return named tuples, `max` and `halving`, to cut after; double precision, [n, 6] to [n, 4]."""

    def __init__(self, halving: nn.Module | None = None, *, seed: int = 3) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)
        self.halving, self.joining = halving or Halving(), Joining()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best: Any = torch.max(self.body(x).reshape(-1, 6, 1) * x.reshape(-1, 1, 6), dim=2)
        return self.head(self.joining(self.halving(best.values + best.indices)))


class MixedTypes(nn.Module):
    """Parameters and statistics of three types, side by side; [n, 6] float64 to [n, 4] float64."""

    def __init__(self, *, seed: int = 3) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8, dtype=torch.bfloat16)
        self.norm, self.c = nn.BatchNorm1d(8), nn.Linear(8, 4, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.b(torch.relu(self.a(x.float())).bfloat16()) * self.scale)
        return self.c(self.norm(hidden.float()).double())


class FrozenPart(nn.Module):
    """A model whose first layers' output is detached, so that their parameters have no gradient; double precision."""

    def __init__(self, *, seed: int = 3) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        return self.c(torch.tanh(self.b(torch.relu(self.a(x)).detach())))
