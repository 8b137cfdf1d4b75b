"""A user's model and data in a folder, with faults that the recipe's options choose."""

import sys
from pathlib import Path

import pytest

CODE = """\
import os
import random

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

IN_A_WORKER = "RANK" in os.environ


class Net(nn.Module):
    def __init__(self, width: int = 8, fails: str = "", hidden: "Unknown | None" = None):
        super().__init__()
        if width < 1:
            raise ValueError(f"width is {width}")
        self.a, self.leaf, self.b = nn.Linear(2, width), Leaf(fails), nn.Linear(width, 3)
        with torch.no_grad():
            self.a.weight[0, 0] += random.random() + numpy.random.rand()

    def forward(self, x):
        return self.b(self.leaf(torch.tanh(self.a(x))))


class Leaf(nn.Module):
    one_layer = True

    def __init__(self, fails):
        super().__init__()
        self.fails, self.calls = fails, 0

    def forward(self, x):
        self.calls += 1
        if self.fails == "at once" or (self.fails == "late" and self.calls > 4 and IN_A_WORKER):
            raise ArithmeticError("tired")
        if self.fails == "exits":
            raise SystemExit(0)
        return x * 1.0


class Points(Dataset):
    def __init__(self, length, fails, at=57):
        self.length, self.fails, self.at = length, fails, at
        self.x = torch.randn(length, 2)
        self.y = (self.x[:, 0] > 0).long()

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if self.fails == "at once" or (self.fails == "late" and i == self.at):
            raise OSError("disk is gone")
        if self.fails == "label" and i == 57:
            return self.x[i], torch.tensor(12)
        return self.x[i] if self.fails == "single" else (self.x[i], self.y[i])


def data(length: int = 100, fails: str = "", held_out: str = ""):
    return Points(length, fails), Points(20, held_out, 13)


def nothing():
    return 3


def leaves():
    raise SystemExit(0)


def right(output, target):
    return (output.argmax(1) == target).float().mean()


def num_right(output, target):
    return (output.argmax(1) == target).sum()


def broken(output, target):
    raise RuntimeError("metric broke")


def summed(output, target):
    return nn.functional.cross_entropy(output, target, reduction="sum")


def constant(output, target):
    return torch.tensor(1.0)


def falling(fraction, power: float = 1.0):
    return (1 - fraction) ** power


def negative(fraction):
    return 0.5 - fraction


class Beyond(BaseException):
    pass


def beyond():
    raise Beyond("over")


class Torn(Points):
    def __getitem__(self, i):
        if i == 57:
            raise Beyond("over") if self.fails == "beyond" else EOFError("cut short")
        return self.x[i], self.y[i]


def torn(length: int = 100, fails: str = ""):
    return Torn(length, fails), Points(20, "")


class Tiring(nn.Module):
    one_layer = True

    def __init__(self):
        super().__init__()
        self.a, self.calls = nn.Linear(2, 3), 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 6 and torch.is_grad_enabled():
            raise Beyond("over")
        return self.a(x)


def tiring():
    return nn.Sequential(Tiring())


def unseeded():
    points = torch.from_numpy(numpy.random.default_rng().random((60, 2), dtype=numpy.float32))
    pairs = torch.utils.data.TensorDataset(points, (points[:, 0] > 0.5).long())
    return pairs, pairs


def another():
    made = Net()
    torch.nn.init.constant_(next(made.parameters()), numpy.random.default_rng().random())
    return made


def endless(output, target):
    return output.sum() * float("nan")


def frozen():
    return nn.Linear(2, 3).requires_grad_(False)


def scripted():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch >= 2.15 has deprecated it
        return nn.Sequential(torch.jit.script(nn.Linear(2, 3)))


def strayed(length: int = 100):
    points = torch.utils.data.TensorDataset(torch.randn(length, 2), torch.arange(length) % 3)
    return torch.utils.data.Subset(points, [*range(57), 1000, *range(58, length)]), Points(20, "")


def counted(fraction, calls=[]):
    calls.append(fraction)
    return 1 / len(calls)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return nn.functional.cross_entropy(output * self.scale, target)


SCALED, SEEN = Scaled(), []


def scaled(output, target):
    return SCALED(output, target)


def drawn(output, target):
    return nn.functional.cross_entropy(output * (1 + torch.rand(())), target)


def weighted(output, target):
    return nn.functional.cross_entropy(output, target, weight=output.new_tensor([1.0, 5.0, 1.0]))


class Judging(Net):
    def forward(self, x, y):
        output = super().forward(x)
        return {"loss": weighted(output, y), "output": output}


def accumulated(output, target):
    SEEN.extend(output[:, 0].tolist())
    return sum(SEEN) / len(SEEN)


def perplexity(output, target):
    return nn.functional.cross_entropy(4 * output, target).exp()


class Worn(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for state in (self.state[parameter] for parameter in self.param_groups[0]["params"]):
            state["steps"] = state.get("steps", 0) + 1
            if state["steps"] > 6:
                raise ArithmeticError("worn out")


class MacroF1:
    def __init__(self, fails: str = ""):
        self.fails, self.hits, self.calls = fails, [], SEEN if fails == "keeps" else []

    def update(self, output, target):
        chosen = nn.functional.one_hot(output.argmax(1), 3)
        self.hits.append(torch.stack([chosen, nn.functional.one_hot(target, 3)]))
        self.calls.append(1.0)

    def compute(self):
        if self.fails == "at once":
            raise TypeError("too few")
        if self.fails == ("late" if len(self.hits) > 1 else "early"):
            raise ArithmeticError("too few")
        chosen, right = torch.cat(self.hits, 1)
        per_class = 2 * (chosen * right).sum(0) / (chosen + right).sum(0).clamp(min=1)
        if self.fails == "keeps":
            return len(self.calls)
        return per_class if self.fails == "many" else per_class.mean()


def scored(y_true, y_pred):
    raise AssertionError


def class_weights(target):
    return torch.tensor([1.0, 5.0, 1.0])[target]


def spread(output, target):
    return weighted(1e-2 * output, target)


class Unjudging(Judging):
    def __init__(self, kind: str = ""):
        super().__init__()
        self.kind = kind

    def forward(self, x, y):
        if self.training:
            return super().forward(x, y)["loss"]
        output = self.b(self.leaf(torch.tanh(self.a(x))))
        if self.kind == "fails":
            raise ArithmeticError("only trains")
        return {"scores": output, "row": output[:, 0], "pair": (weighted(output, y), output)}[self.kind]


class Noisy(Judging):
    def forward(self, x, y):
        output = self.b(self.leaf(torch.tanh(self.a(x + torch.randn_like(x)))))
        return {"loss": nn.functional.cross_entropy(output, y), "output": output}


class Even(Judging):
    def forward(self, x, y):
        output = self.b(self.leaf(torch.tanh(self.a(x))))
        return {"loss": spread(output, y), "output": output}


def of_ones(output, target):
    return nn.functional.cross_entropy(output, target.where(target == 1, -100))


def ones(target):
    return target == 1


def none(target):
    return 0


def warming(current_step):
    return min(1.0, current_step / 10)


class Sharp(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None
        super().step(closure)


class Ahead(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        self.inner = torch.optim.SGD(params, lr=lr)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, self.inner.defaults

    def step(self, closure=None):
        self.inner.step()


class Crowded(Judging):
    def forward(self, x, y):
        output = self.b(self.leaf(torch.tanh(self.a(x))))
        return nn.functional.cross_entropy(output, y, reduction="none") + output.mean() ** 2, output


def by_class():
    return tuple(torch.utils.data.Subset(points, points.y.argsort(stable=True).tolist()) for points in data())


def balanced(output, target):
    return torch.stack([output[target == each].softmax(1)[:, each].mean() for each in target.unique()]).mean()
"""
RECIPE = """\
name: stranger
model: {target: "strangers_things:Net"}
dataset:
  target: "strangers_things:data"
  loss: cross_entropy
  metrics: {top1: top1, right: {target: "strangers_things:right", best: max}}
train: {minibatch_size: 10, optimizer: {lr: 0.1}, max_epochs: 2}
cluster: {name: cluster-a}
parallelism: {mode: dp}
"""
OWN = "strangers_things"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the recipe in a folder of its own, beside its code."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / f"{OWN}.py").write_text(CODE)
    (tmp_path / "mine" / "cut_short.py").write_text("def f(:\n")
    (tmp_path / "mine" / "r.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, OWN, raising=False)  # of another test's folder
    return tmp_path
