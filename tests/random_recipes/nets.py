"""Models and data of random recipes: small graphs, described as steps, and rows that record the minibatches.

A recipe names both as targets, so that its file describes the run completely.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pipebench.zoo.registry import Dataset

WIDTH, CLASSES, NUM_IDS, SECOND = 6, 3, 5, 4


class Recurrent(nn.Module):
    """An LSTM over two halves of the features."""

    one_layer = True

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH // 2, WIDTH // 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, WIDTH] to the same."""
        output: torch.Tensor = self.lstm(x.reshape(-1, 2, WIDTH // 2))[0]
        return output.reshape(-1, WIDTH)


class Halves(nn.Module):
    """A linear layer that returns a dictionary: one half of the features, and the other half with a fixed factor."""

    one_layer = True
    factor: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        """Map [n, WIDTH] to two times [n, WIDTH // 2], and the factor as [1, 1]."""
        first, second = self.linear(x).chunk(2, 1)
        return {"first": first, "rest": (second, self.factor.reshape(1, 1))}


def _norm(momentum: float | None) -> nn.Module:
    """Return BatchNorm of a linear layer between two nonlinear functions; momentum None averages all minibatches.

    BatchNorm subtracts a bias of the layer again, so its gradient would be rounding errors, which Adam amplifies.
    """
    linear = nn.Linear(WIDTH, WIDTH, bias=False)
    return nn.Sequential(nn.Tanh(), linear, nn.BatchNorm1d(WIDTH, momentum=momentum), nn.ReLU())


class Net(nn.Module):
    """A sequence of steps, each of which maps the value before it to [n, WIDTH], and a linear head.

    Steps that map the value: `linear`; `frozen`, a linear layer that isn't trained; `norm`, BatchNorm with a linear
    layer and nonlinear functions; `mean`, the same with statistics that average all minibatches; `layernorm`; `tanh`;
    `relu`, in place if no other step reads the value; `conv`; `lstm`; `dropout P`; `tied I`, a linear layer with the
    weight of linear step I; `twice I`, linear step I again.

    Steps that add to the value: `add I`, the output of step I; `branch I`, a linear map of that; `second`, a linear map
    of the second input; `embed`, rows of a table; `detach`, a linear map of the value without its gradient; `halves`,
    two halves from a dictionary. I = -1 is the input.

    `aux` leaves the value as it is, and adds scores of it to the net's output.

    Args:
        steps: names of steps with their arguments.
        dtype: `float64` or `float32`.
    """

    def __init__(self, steps: Sequence[str], dtype: str = "float64") -> None:
        super().__init__()
        self.steps = [step.split() for step in steps]
        for index, (kind, *given) in enumerate(self.steps):
            made = self._module(index, kind, given[0] if given else "")
            if made is not None:
                self.add_module(f"{kind}{index}", made)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.to(getattr(torch, dtype))

    def _module(self, index: int, kind: str, given: str) -> nn.Module | None:
        """Return the module of a step, or None for a sum."""
        if kind == "tied":
            tied = nn.Linear(WIDTH, WIDTH)
            tied.weight = self.get_submodule(f"linear{given}").weight  # type: ignore[assignment]
            return tied
        if kind == "relu":
            read_again = any(own[0] in ("add", "branch") and int(own[1]) == index - 1 for own in self.steps)
            # The backward of these steps doesn't need their output, so it may be overwritten.
            overwritable = index > 0 and self.steps[index - 1][0] in ("linear", "add", "branch", "second", "embed")
            return nn.ReLU(inplace=overwritable and not read_again)
        makers: dict[str, Callable[[], nn.Module]] = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "branch": lambda: nn.Linear(WIDTH, WIDTH),
            "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
            "norm": lambda: _norm(0.1),
            "mean": lambda: _norm(None),
            "halves": Halves,
            "detach": lambda: nn.Linear(WIDTH, WIDTH),
            "aux": lambda: nn.Linear(WIDTH, CLASSES),
            "layernorm": lambda: nn.LayerNorm(WIDTH),
            "tanh": nn.Tanh,
            "conv": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 3, padding=1), nn.Flatten()),
            "lstm": Recurrent,
            "dropout": lambda: nn.Dropout(float(given)),
            "second": lambda: nn.Linear(SECOND, WIDTH),
            "embed": lambda: nn.Embedding(NUM_IDS, WIDTH),
        }
        return makers[kind]() if kind in makers else None

    def run(self, x: torch.Tensor, others: Mapping[str, torch.Tensor]) -> Any:
        """Run the steps; `others` are the second input and the ids, by the name of the step that reads them."""
        values, besides = [x], []
        for index, (kind, *given) in enumerate(self.steps):
            if kind == "aux":
                besides.append(getattr(self, f"aux{index}")(values[-1]))
            values.append(self.step(index, kind, given, values, others))
        output: torch.Tensor = self.head(values[-1])
        return {"scores": output, "besides": besides} if besides else output

    def step(
        self,
        index: int,
        kind: str,
        given: Sequence[str],
        values: Sequence[torch.Tensor],
        others: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the output of a step, given the input and those of the steps before it."""
        before = values[-1]
        module = getattr(self, f"linear{given[0]}" if kind == "twice" else f"{kind}{index}", None)
        if kind == "add":
            return before + values[int(given[0]) + 1]
        assert module is not None
        if kind == "aux":
            return before
        if kind == "halves":
            made = module(before)
            both: torch.Tensor = torch.cat([made["first"], made["rest"][0]], 1) * made["rest"][1]
            return before + both
        reads = {"branch": lambda: values[int(given[0]) + 1], "detach": before.detach}
        read = reads.get(kind, lambda: others.get(kind))()
        output: torch.Tensor = module(before if read is None else read)
        return output if read is None else before + output


def first_layers(steps: Sequence[str]) -> list[str]:
    """Return the name of every step's first layer, as torch.fx gives it."""
    names, taken = [], Counter[str]()

    def named(name: str) -> str:
        taken[name] += 1
        return name if taken[name] == 1 else f"{name}_{taken[name] - 1}"

    for index, (kind, *given) in enumerate(step.split() for step in steps):
        if kind in ("add", "detach"):
            names.append(named(kind))
        elif kind == "twice":
            names.append(named(f"linear{given[0]}"))
        else:
            names.append(named(f"{kind}{index}_0" if kind in ("norm", "mean", "conv") else f"{kind}{index}"))
        if kind in ("branch", "second", "embed", "detach", "halves"):
            named("add")
    return names


class OneInput(Net):
    """A net that reads features."""

    def forward(self, x: torch.Tensor) -> Any:
        """Map [n, WIDTH] to [n, CLASSES]."""
        return self.run(x, {})


class Features(Net):
    """A net that reads features twice."""

    def forward(self, x: torch.Tensor, second: torch.Tensor) -> Any:
        """Map [n, WIDTH] and [n, SECOND] to [n, CLASSES]."""
        return self.run(x, {"second": second})


class Ids(Net):
    """A net that reads features and ids."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> Any:
        """Map [n, WIDTH] and [n] to [n, CLASSES]."""
        return self.run(x, {"embed": ids})


class ThreeInputs(Net):
    """A net that reads features twice and ids."""

    def forward(self, x: torch.Tensor, second: torch.Tensor, ids: torch.Tensor) -> Any:
        """Map [n, WIDTH], [n, SECOND] and [n] to [n, CLASSES]."""
        return self.run(x, {"second": second, "embed": ids})


def net(steps: list[str], dtype: str = "float64") -> Net:
    """Return the net of some steps: an instance of the class with the inputs that they read."""
    kinds = {step.split()[0] for step in steps}
    made = {(False, False): OneInput, (True, False): Features, (False, True): Ids, (True, True): ThreeInputs}
    return made["second" in kinds, "embed" in kinds](steps, dtype)


class Rows(Dataset):
    """Random rows with random labels.

    Args:
        num_train: training rows.
        num_eval: evaluation rows.
        steps: of the net, which decide the inputs.
        dtype: of features and weights.
        uneven: whether rows have different weights in the loss.
        noise: factor of the noise, seeded by a minibatch's draw, that is added to features in training. Different
            weights then depend on the draw, too.
        buckets: number of buckets of training rows; 0 for none.
    """

    metrics: Mapping[str, str] = {"top1": "max"}
    # Rows whose targets were fetched in training, by the draw of their minibatch.
    fetched: dict[int, list[int]] = {}  # noqa: RUF012 (of all runs: comparisons clear it)

    def __init__(
        self,
        num_train: int,
        num_eval: int,
        steps: Sequence[str],
        dtype: str = "float64",
        *,
        uneven: bool = False,
        noise: float = 0.0,
        buckets: int = 0,
    ) -> None:
        kinds = {step.split()[0] for step in steps}
        self.inputs = ("x", *(name for name, kind in (("second", "second"), ("ids", "embed")) if kind in kinds))
        self.targets = ("label", "weight")
        self.num_train, self.num_eval = num_train, num_eval
        self._noise, self._num_buckets, self.weighs_targets = noise, buckets, uneven and noise > 0
        generator, n = torch.Generator().manual_seed(1), num_train + num_eval
        real = getattr(torch, dtype)
        self._fields = {
            "x": torch.randn(n, WIDTH, generator=generator, dtype=torch.float64).to(real),
            "second": torch.randn(n, SECOND, generator=generator, dtype=torch.float64).to(real),
            "ids": torch.randint(NUM_IDS, (n,), generator=generator),
            "label": torch.randint(CLASSES, (n,), generator=generator),
            "weight": torch.randint(1, 4, (n,), generator=generator).to(real) if uneven else torch.ones(n, dtype=real),
        }

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(num_samples, *field.shape[1:], dtype=field.dtype, device="meta")
            for name, field in self._fields.items()
        }

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return fields of rows; training rows whose labels are fetched are recorded."""
        if split == "train" and "label" in fields:
            seen = self.fetched.setdefault(draw, [])
            seen += [i for i in indices if not self.weighs_targets or i not in seen]  # weighed, and trained on
        rows = torch.tensor([i + (self.num_train if split == "eval" else 0) for i in indices], dtype=torch.long)
        found = {name: self._fields[name][rows] for name in fields}
        if self._noise and split == "train" and "x" in found:
            found["x"] = found["x"] + self._noise * (draw % 1000) / 1000
        if self.weighs_targets and split == "train" and "weight" in found:
            found["weight"] = found["weight"] + (rows + draw % 1000) % 3
        return found

    def weight(self, split: str, indices: Sequence[int]) -> float:
        return float(sum(self._fields["weight"][i + (self.num_train if split == "eval" else 0)] for i in indices))

    def weigh(self, targets: Mapping[str, torch.Tensor]) -> float:
        return float(targets["weight"].sum())

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return summed, weighted cross-entropy."""
        scores, besides = (output["scores"], output["besides"]) if isinstance(output, dict) else (output, [])
        losses = [functional.cross_entropy(each, targets["label"], reduction="none") for each in (scores, *besides)]
        each = losses[0] + 0.3 * sum(losses[1:])
        return (each * targets["weight"].to(each.dtype)).sum()

    def score(self, output: Any, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scores = output["scores"] if isinstance(output, dict) else output
        return {"top1": ((scores.argmax(1) == targets["label"]) * targets["weight"]).sum()}

    def buckets(self) -> Sequence[int] | None:
        return [i % self._num_buckets for i in range(self.num_train)] if self._num_buckets else None
