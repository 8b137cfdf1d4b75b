"""A pair of PyTorch data sets as a data set of the zoo."""

import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pipebench.zoo.measures import COUNTS, LOSSES, METRICS, Metric, Top, cross_entropy_of_labels, num_labels
from pipebench.zoo.plain import DatasetPair
from pipebench.zoo.registry import DataError
from pipebench.zoo.samples import Fields
from tests.zoo.made import Made

POINTS, LABELS = torch.arange(24.0).reshape(8, 3), torch.arange(8) % 3


class Endless(IterableDataset[Any]):
    """No length, no order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def plain(
    make: Callable[[int], Any], loss: str = "cross_entropy", metrics: Mapping[str, Metric] = MappingProxyType({})
) -> DatasetPair:
    return DatasetPair(Made(make), Made(make, 4), LOSSES[loss], metrics)


def test_fields_are_fetched_by_index() -> None:
    data = DatasetPair(
        TensorDataset(POINTS, LABELS), TensorDataset(POINTS[:4], LABELS[:4]), LOSSES["cross_entropy"], METRICS
    )
    assert (data.num_train, data.num_eval, data.inputs, data.targets) == (8, 4, ("input",), ("target",))
    fetched = data.fetch("train", [5, 0], ["input", "target"])
    assert torch.equal(fetched["input"], POINTS[[5, 0]])
    assert torch.equal(fetched["target"], LABELS[[5, 0]])
    example = data.example(7)
    assert {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in example.items()} == {
        "input": ((7, 3), torch.float32, "meta"),
        "target": ((7,), torch.int64, "meta"),
    }
    assert data.metrics == {"top1": "max", "top5": "max", "mse": "min"}


def test_several_inputs_and_targets() -> None:
    data = plain(lambda i: ((POINTS[i], i), {"a": LABELS[i], "b": 2.0}))
    assert data.inputs == ("input.0", "input.1")
    assert data.targets == ("target.a", "target.b")
    seen: list[Any] = []
    data._loss = lambda output, target: seen.append(target) or output.sum()  # type: ignore[func-returns-value]
    targets = data.fetch("train", [1, 2], data.targets)
    assert float(data.loss(torch.ones(2, 3), targets)) == 12.0
    assert seen[0].keys() == {"a", "b"}


def test_inputs_in_a_dict_are_named_as_the_model_names_them() -> None:
    data = plain(lambda i: ({"mask": LABELS[i], "ids": POINTS[i]}, LABELS[i]))
    fed = data.feeding(["ids", "mask"])
    assert fed.inputs == ("input.ids", "input.mask")
    assert data.feeding(["ids"]).inputs == ("input.ids",)
    assert data.feeding(["x", "y"]) is data
    positional, named = data.arguments(data.fetch("train", [0], data.inputs))
    assert positional == []
    assert named.keys() == {"mask", "ids"}


class Reading(nn.Module):
    """Reads one tensor."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * scale


class ReadingAny(nn.Module):
    """Reads tensors by any names."""

    def forward(self, **given: torch.Tensor) -> torch.Tensor:
        return given["image"]


@pytest.mark.parametrize(
    ("keys", "model", "named"),
    [
        (["image"], Reading(), False),
        (["image"], nn.Sequential(Reading()), False),
        (["image", "mask"], Reading(), False),
        (["x"], Reading(), True),
        (["scale", "image"], Reading(), True),
        (["image"], ReadingAny(), True),
    ],
)
def test_inputs_in_a_dict_are_in_order_if_the_model_has_none_of_their_names(
    keys: list[str], model: nn.Module, named: bool
) -> None:
    """0.2.0: the dicts of Hugging Face's data sets didn't go into models of torchvision and timm, nor Sequential."""
    fields = Fields(keys, ["label"])
    samples = Made(lambda i: {"label": LABELS[i]} | {key: POINTS[i] + n for n, key in enumerate(keys)})
    data = DatasetPair(samples, samples, LOSSES["cross_entropy"], {}, fields=fields).for_model(model)
    fetched = data.fetch("train", [0], data.inputs)
    positional, by_name = data.arguments(fetched)
    assert [*data.argument_names] == (keys if named else [])
    assert [*by_name] == (keys if named else [])
    assert [float(each[0, 0]) for each in positional] == ([] if named else [float(n) for n in range(len(keys))])


def test_targets_are_cached_when_inputs_are_read() -> None:
    read: list[int] = []
    data = plain(lambda i: (read.append(i) or POINTS[i], LABELS[i]))  # type: ignore[func-returns-value]
    read.clear()
    data.fetch("train", [1, 2], ["input"], draw=3)
    assert torch.equal(data.fetch("train", [1, 2], ["target"], draw=3)["target"], LABELS[[1, 2]])
    assert read == [1, 2]


def test_augmentation_is_a_function_of_the_draw_and_the_sample() -> None:
    def noisy(index: int) -> Any:
        noise = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
        return POINTS[index] + torch.tensor(noise), LABELS[index]

    data = plain(noisy)
    before = (torch.get_rng_state(), random.getstate())
    whole = data.fetch("train", [0, 1, 2, 3], ["input"], draw=5)["input"]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    parts = [data.fetch("train", indices, ["input"], draw=5)["input"] for indices in ([0, 1], [2, 3])]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(data.fetch("train", [0, 1, 2, 3], ["input"], draw=6)["input"], whole)
    assert len({tuple(row) for row in (whole - POINTS[:4]).tolist()}) == 4


def test_draws_from_a_private_generator_are_refused() -> None:
    """Samples would depend on those that a process has read before, so runs would differ."""
    own = numpy.random.default_rng(0)
    data = plain(lambda i: (POINTS[i] + own.random(), LABELS[i]))
    sentence = (
        "input of the samples 0, 4, 7 of train is another one when they are read again: a generator of its own draws"
    )
    with pytest.raises(DataError, match=sentence):
        data.check()
    plain(lambda i: (POINTS[i] + numpy.random.rand() + float("nan"), LABELS[i])).check()


@pytest.mark.parametrize("name", ["cross_entropy", "mse"])
def test_losses_equal_torch_s(name: str) -> None:
    function, target = (
        (nn.functional.cross_entropy, LABELS) if name == "cross_entropy" else (nn.functional.mse_loss, POINTS)
    )
    data = plain(lambda i: (POINTS[i], target[i]), loss=name)
    output = torch.randn(8, 3, requires_grad=True)
    targets = data.fetch("train", range(8), ["target"])
    torch.testing.assert_close(data.loss(output, targets) / 8, function(output, target))
    other = DatasetPair(Made(lambda i: (POINTS[i], target[i])), Made(lambda i: (POINTS[i], target[i])), function, {})
    torch.testing.assert_close(other.loss(output, targets), data.loss(output, targets))


@pytest.mark.parametrize("shape", [(4,), (4, 6)])
def test_labels_that_torch_ignores_are_refused(shape: tuple[int, ...]) -> None:
    """It divides by the number of the others, which isn't known before targets are read."""
    labels = torch.ones(shape, dtype=torch.long)
    labels[2] = -100
    data = TensorDataset(POINTS[:4], labels)
    with pytest.raises(DataError, match="sample 2 of train has a label -100, which torch ignores; loss: cross_entropy"):
        DatasetPair(data, data, LOSSES["cross_entropy"], {}).check()
    DatasetPair(data, data, nn.functional.cross_entropy, {}).check()


def test_labels_that_torch_ignores_count_nothing_in_a_mean_over_labels() -> None:
    points, labels = torch.randn(4, 3, 6, requires_grad=True), torch.randint(3, (4, 6))
    labels[2], labels[3, 4:] = -100, -100
    data = TensorDataset(points.detach(), labels)
    pairs = [
        DatasetPair(data, data, loss, {"first": Metric(lambda output, target: target[:, 0] > 0, "max")}, count=count)
        for loss, count in ((nn.functional.cross_entropy, COUNTS["labels"]), (cross_entropy_of_labels, num_labels))
    ]
    expected = nn.functional.cross_entropy(points, labels, reduction="sum")
    for pair in pairs:
        pair.check()
        assert [pair.weigh(pair.fetch("train", [index], ["target"])) for index in range(4)] == [6, 6, 0, 4]
        torch.testing.assert_close(pair.loss(points, {"target": labels}), expected)
        scores = {name: float(value) for name, value in pair.score(points, {"target": labels}).items()}
        assert pair.summarise(scores, 16.0) == {"first": float((labels[:, 0] > 0).sum()) / 4}
        nothing = pair.loss(points[2:3], {"target": labels[2:3]})
        (gradient,) = torch.autograd.grad(nothing, points, retain_graph=True)
        assert float(nothing.detach()) == 0.0
        assert not gradient.any()


def counted(name: str, target: Any) -> torch.Tensor:
    function = COUNTS[name]
    assert function is not None
    found: torch.Tensor = function(target)
    return found


@pytest.mark.parametrize(
    ("target", "counts"),
    [
        (torch.tensor([[1, -100, 2], [-100, -100, 0]]), {"labels": [2, 1], "next_labels": [1, 1]}),
        ({"a": torch.ones(1), "labels": torch.tensor([[1, 0]])}, {"labels": [2], "next_labels": [1]}),
        ({"y": torch.tensor([[1, -100]])}, {"labels": [1], "next_labels": [0]}),
        (torch.tensor([[156, 2]], dtype=torch.uint8), {"labels": [2]}),
        (torch.tensor([1, -100]), {"labels": [1, 0]}),
    ],
)
def test_labels_are_counted(target: Any, counts: Mapping[str, list[int]]) -> None:
    assert {name: counted(name, target).tolist() for name in counts} == counts


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("labels", torch.ones(2)),
        ("labels", {"a": LABELS, "b": LABELS}),
        ("labels", torch.tensor(1)),
        ("next_labels", LABELS),
    ],
)
def test_what_is_no_label_is_not_counted(name: str, target: Any) -> None:
    with pytest.raises(ValueError, match=r"needed are labels \[samples, .*\], whole numbers: the only target, or the"):
        counted(name, target)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (lambda target: torch.ones(2), r"the count of 3 samples is a tensor \[2\] float32, needed is a number from 0"),
        (lambda target: -torch.ones(3), r"the count of 3 samples is \[-1.0, -1.0, -1.0\], needed is a number from 0"),
        (lambda target: float("nan"), "the count of 3 samples is nan, needed is a number from 0"),
        (lambda target: None, r"counting fails on the target, a tensor \[3\] int64"),
    ],
)
def test_counts_that_do_not_suit_are_refused(count: Callable[[Any], Any], message: str) -> None:
    data = TensorDataset(POINTS, LABELS)
    pair = DatasetPair(data, data, nn.functional.cross_entropy, {}, count=count)
    with pytest.raises(DataError, match=message):
        pair.weigh(pair.fetch("train", [0, 1, 2], ["target"]))


def test_targets_that_are_weighed_and_then_trained_on_are_read_once() -> None:
    read: list[int] = []

    def masked(index: int) -> Any:
        read.append(index)
        return POINTS[index], torch.where(torch.rand(5) < 0.5, 1, -100)

    data = DatasetPair(Made(masked), Made(masked), nn.functional.cross_entropy, {}, count=num_labels)
    read.clear()
    for _ in range(2):
        weights = [data.weigh(data.fetch("train", [1, 2], ["target"], draw)) for draw in range(8)]
        assert len({*weights}) > 2
        assert read == [1, 2] * 8
    data.fetch("train", [1, 2], ["input", "target"], 0)
    data.fetch("train", [1, 2], ["target"], 0)
    assert read == [1, 2] * 9


def test_metrics_of_all_forms_are_means() -> None:
    right: list[Callable[..., Any]] = [
        lambda output, target: (output.argmax(1) == target).float().mean(),
        lambda output, target: output.argmax(1) == target,
        lambda output, target: float((output.argmax(1) == target).double().mean()),
    ]
    given = {f"right{i}": Metric(function, "max") for i, function in enumerate(right)}
    metrics = {"top1": METRICS["top1"], "top2": Metric(Top(2), "max"), **given}
    data = plain(lambda i: (POINTS[i], LABELS[i]), metrics=metrics)
    output = nn.functional.one_hot(LABELS.roll(3), 3).float() + torch.tensor([0.0, 0.1, 0.0])
    sums = {k: float(v) for k, v in data.score(output, data.fetch("train", range(8), ["target"])).items()}
    expected = float((output.argmax(1) == LABELS).sum())
    second = float((output.argsort(1, descending=True)[:, 1] == LABELS).sum())
    assert sums == {"top1": expected, "top2": expected + second, **dict.fromkeys(given, expected)}
    assert data.summarise(sums, 8.0)["top1"] == expected / 8


REFUSED: list[tuple[Callable[[int], Any], str]] = [
    (lambda i: POINTS[i], r"sample 0 of train is a tensor \[3\] float32, needed is a pair"),
    (lambda i: (POINTS[i], LABELS[i], 1), "sample 0 of train is a tuple of .*needed is a pair"),
    (lambda i: {"text": "a", "ids": POINTS[i], "y": 1}, r"is whose in dataset: `inputs: \[ids\], targets: \[y\]`"),
    (lambda i: (POINTS[i], "a"), "target of the samples is a list of a str, needed is a tensor or number|target.0 of"),
    (lambda i: ((POINTS[i], {"x": POINTS[i]}), LABELS[i]), "input.1 of the samples is a dict of x: a tensor"),
    (lambda i: (POINTS[i], object()), r"sample 0 of train doesn't go into a minibatch .*a tuple of .*, an object"),
    (lambda i: ((), LABELS[i]), "the input of a sample is empty"),
    (
        lambda i: (POINTS[i][: 3 - i // 4], LABELS[i]),
        r"input of sample 4 of train is a tensor \[2\] float32, needed is a tensor \[3\] float32 .*: pad samples",
    ),
    (lambda i: (POINTS[i] if i < 6 else POINTS[i].double(), LABELS[i]), "input of sample 7 of train .*float64, needed"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_samples_that_make_no_minibatch_are_named(make: Callable[[int], Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        plain(make).check()


def padded(samples: list[Any], length: int = 5) -> Any:
    """Return texts of many lengths, padded to one, with their masks, and their labels."""
    texts = torch.stack([nn.functional.pad(text, (0, length - len(text)), value=-1) for text, _ in samples])
    return (texts, texts >= 0), torch.tensor([label for _, label in samples])


def to_the_longest(samples: list[Any]) -> Any:
    return padded(samples, max(len(text) for text, _ in samples))


class Texts(Made):
    """Samples of 1 to 4 numbers, with a collate function of its own or none."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None = None) -> None:
        super().__init__(lambda i: (torch.arange(1 + i % 4), i))
        self.collate_fn = collate_fn


@pytest.mark.parametrize("in_loader", [False, True])
def test_a_collate_fn_makes_minibatches(in_loader: bool) -> None:
    """0.2.0: a loader's was refused, that of a data set ignored."""
    given = DataLoader(Texts(), 4, collate_fn=padded) if in_loader else Texts(padded)
    data = DatasetPair(given, given, LOSSES["cross_entropy"], {})
    data.check()
    assert (data.inputs, data.targets) == (("input.0", "input.1"), ("target",))
    assert [*data.example(7)["input.0"].shape] == [7, 5]
    fetched = data.fetch("train", [5, 2], [*data.inputs, "target"])
    assert fetched["input.0"].tolist() == [[0, 1, -1, -1, -1], [0, 1, 2, -1, -1]]
    assert fetched["input.1"].sum(1).tolist() == [2, 3]
    assert fetched["target"].tolist() == [5, 2]


def test_a_collate_fn_may_return_a_dict_of_inputs_and_targets() -> None:
    def named(samples: list[Any]) -> Any:
        (texts, _), labels = padded(samples)
        return {"ids": texts, "labels": labels}

    data = DatasetPair(Texts(named), Texts(named), LOSSES["model"], {})
    assert (data.inputs, data.targets) == (("input.ids", "input.labels"), ("target",))


def test_a_collate_fn_may_pad_to_the_longest_of_a_minibatch() -> None:
    data = DatasetPair(Texts(to_the_longest), Texts(padded), LOSSES["cross_entropy"], {})
    data.check()
    assert [*data.fetch("train", [4, 1], ["input.0"])["input.0"].shape] == [2, 2]
    assert [*data.fetch("eval", [4, 1], ["input.0"])["input.0"].shape] == [2, 5]
    # Costs are of samples that are spread over the training set; tracing also meets another length, which isn't 1.
    lengths = [[each[field].shape[1] for field in ("input.0", "input.1")] for each in data.examples(7)]
    assert lengths == [[4, 4], [2, 2]]
    assert [*data.example(3)["input.0"].shape] == [3, 4]
    assert data.example_note == "minibatches differ in shape, costs are of input.0 [n, 4], input.1 [n, 4]"
    assert not DatasetPair(Texts(padded), Texts(padded), LOSSES["mse"], {}).example_note


def test_what_a_collate_fn_never_varied_stays_as_it_was() -> None:
    class Rare(Made):
        def collate_fn(self, samples: list[Any]) -> Any:
            points, labels = zip(*samples, strict=True)
            length = 2 + len(samples) % 2
            return torch.stack(points).unsqueeze(1).repeat(1, length, 1), torch.tensor(labels)

    samples = Rare(lambda i: (torch.zeros(2 if i == 5 else 3), i), 64)
    data = DatasetPair(samples, samples, LOSSES["cross_entropy"], {})
    assert data.fetch("train", [1, 2], ["input"])["input"].shape == (2, 2, 3)
    with pytest.raises(
        DataError, match=r"input of sample 5 of train is a tensor \[3, 2\] .* needed is a tensor \[2, 3\]"
    ):
        data.fetch("train", [5], ["input"])


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda samples: 1 / 0, "the collate_fn of train fails on 1 samples"),
        (lambda samples: padded(samples)[0][0], "what the collate_fn of train makes of 1 samples is a tensor .*a pair"),
        (lambda samples: (padded(samples)[0], [0]), "target.0 in what .* is an int, needed is a tensor with a row per"),
        (lambda samples: (torch.zeros(3, 1), torch.zeros(3)), r"input in what .* is a tensor \[3, 1\] float32, needed"),
    ],
)
def test_collate_fns_that_do_not_suit_are_refused(collate: Callable[[list[Any]], Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        DatasetPair(Texts(collate), Texts(collate), LOSSES["cross_entropy"], {}).check()


def test_lengths_beyond_all_memory_are_refused() -> None:
    """0.2.0: a run ended with exit code 3 when it drew the order of an epoch."""
    with pytest.raises(DataError, match="the data set of train has 1,000,000,000,000,000 samples, and memory"):
        DatasetPair(Made(lambda i: (POINTS[0], 0), 10**15), Made(lambda i: None), LOSSES["mse"], {})


def test_objects_other_than_data_sets_are_refused() -> None:
    good = TensorDataset(POINTS, LABELS)
    with pytest.raises(DataError, match="the data set of train is a Endless, needed is one with a length"):
        DatasetPair(Endless(), good, LOSSES["mse"], {})
    with pytest.raises(DataError, match="the data set of eval has no sample"):
        DatasetPair(good, Made(lambda i: None, 0), LOSSES["mse"], {})


def test_losses_that_do_not_suit_are_refused() -> None:
    data = plain(lambda i: (POINTS[i], LABELS[i]), loss="mse")
    targets = data.fetch("train", [0, 1], ["target"])
    with pytest.raises(DataError, match=r"the loss fails on the output, a tensor \[2, 3\] float32") as caught:
        data.loss(torch.ones(2, 3), targets)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(("name", "shape"), [("top1", (2, 1)), ("top1", (2,)), ("top5", (2, 5)), ("top5", (2, 3))])
def test_the_best_k_of_k_outputs_are_refused(name: str, shape: tuple[int, ...]) -> None:
    """With one logit, top1 was the share of class 0; with five classes, top5 was always 1."""
    data = plain(lambda i: (POINTS[i], LABELS[i]), metrics={name: METRICS[name]})
    with pytest.raises(DataError, match=f"the metric {name} fails") as caught:
        data.score(torch.ones(shape), data.fetch("train", [0, 1], ["target"]))
    least = int(name[3]) + 1
    sentence = f"{name} needs an output per class, {least} at least, and is given {[*shape]}"
    assert str(caught.value.__cause__) == sentence


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (torch.ones(2, 3), r"a tensor \[2, 3\] float32"),
        (None, "None"),
        ("good", "a str"),
        ((torch.tensor(1.0), torch.tensor(2.0)), r"a tuple of a tensor \[\] float32, a tensor \[\] float32"),
    ],
    ids=str,
)
def test_invalid_numbers_of_samples_are_refused_with_the_allowed_ones(value: Any, sentence: str) -> None:
    data = plain(lambda i: (POINTS[i], LABELS[i]), loss="mse")
    data._loss, data._means = lambda _, __: value, {"sure": Metric(lambda _, __: value, "max")}
    targets = data.fetch("train", [0, 1], ["target"])
    for what, measure in (("loss", data.loss), ("metric sure", data.score)):
        with pytest.raises(
            DataError, match=f"the {what} gives {sentence} for 2 samples, needed is a number, their mean"
        ):
            measure(torch.ones(2, 3), targets)
