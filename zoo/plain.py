"""A user's pair of PyTorch data sets as a `Dataset`; minibatches are collated as torch's DataLoader does.

It ensures what an engine relies on: samples fetched by index, of one shape unless a function of the user's own collates
them, random augmentation that depends on the caller's number only, and a loss and metrics that are sums over samples.
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from pipebench.zoo.measures import (
    IGNORED,
    Count,
    Measure,
    Metric,
    OfWholeSet,
    beside_loss,
    cross_entropy,
    loss_of_model,
)
from pipebench.zoo.pair_forms import Forms, Seen, form_of
from pipebench.zoo.pair_sources import Collate, by_split, epoch_setters, length_of
from pipebench.zoo.registry import DataError, Dataset, SetMetric
from pipebench.zoo.samples import INPUT, TARGET, Fields, Structure, apart, flat, how_to_name, in_words, tensor_names
from pipebench.zoo.seeding import seeded

_Key = tuple[str, tuple[int, ...], int]  # split, samples and draw of a minibatch or microbatch
_TRIED = 16  # samples of a split that tell whether the user's own collate function gives minibatches of one shape
_KEPT_TARGETS = 32  # minibatches whose inputs have been fetched and whose targets may be, by the same process
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment, which gives neighbouring samples very different seeds


class DatasetPair(Dataset):
    """Two PyTorch data sets, or loaders of them, with a loss and metrics.

    Fields are `input` and `target`, or `input.0`, `input.1`, ... and `input.NAME` if samples have several tensors in a
    tuple or dict. The loss and the metrics get the target in the samples' structure. The keys of inputs in a dict are
    names of the arguments of the model's `forward`, unless it has none of them.

    Args:
        train: samples (input, target) by index, with a length.
        held_out: the same, for evaluations.
        loss: returns the mean over the samples of a minibatch, or one number per sample.
        metrics: by name.
        loader_processes: see `Dataset`.
        fields: the inputs and targets of samples that aren't pairs (input, target); None: they are pairs.
        count: counts what the loss is a mean over, such as tokens without padding; the loss then returns that mean, or
            one sum per sample. None: samples.

    Raises:
        DataError: the first sample is something else.
    """

    targets_apart = False
    remake: Callable[[], tuple[Any, Any]] | None = None  # makes both data sets as new, with no open files

    def __init__(
        self,
        train: Any,
        held_out: Any,
        loss: Measure,
        metrics: Mapping[str, Metric | OfWholeSet],
        loader_processes: int = 0,
        fields: Fields | None = None,
        count: Count | None = None,
    ) -> None:
        self._splits = by_split(train, held_out)
        self._begun: dict[str, int] = {}  # the epoch of the training data set; shared by copies, as that is
        self._fields = Fields() if fields is None and loss is loss_of_model else fields
        self.num_train, self.num_eval = (length_of(split, data) for split, (data, _) in self._splits.items())
        self._loss, self._count = loss, count
        self._means = {name: metric for name, metric in metrics.items() if isinstance(metric, Metric)}
        self._of_whole_set = {name: metric for name, metric in metrics.items() if isinstance(metric, OfWholeSet)}
        self.metrics = {name: metric.best for name, metric in metrics.items()}
        self.loader_processes = loader_processes
        self.begin_epoch(0)
        first = self._collated("train", [0], 0)
        self._inputs, self._target = tuple(tensor_names(INPUT, first[INPUT])), Structure.of(TARGET, first[TARGET])
        self._targets = self._target.fields
        self.inputs, self.targets = self._inputs, self._targets
        self._names_inputs = isinstance(first[INPUT], Mapping)
        self._forms = Forms(self._seen("train"), self._seen("eval"), self._inputs)
        self._kept: OrderedDict[_Key, dict[str, torch.Tensor]] = OrderedDict()
        self.weighs_targets = count is not None

    def check(self) -> None:
        """Try the first, the middle and the last samples of each split.

        Raises:
            DataError: they can't be collated, or differ when they are read again.
        """
        for split, (data, _) in self._splits.items():
            length, fields = length_of(split, data), [*self._inputs, *self._targets]
            indices = sorted({0, length // 2, length - 1})
            once, again = (self.fetch(split, indices, fields) for _ in range(2))
            for name in fields:
                if not torch.allclose(once[name], again[name], rtol=0, atol=0, equal_nan=True):
                    raise DataError(
                        f"{name} of the samples {', '.join(map(str, indices))} of {split} is another one when they are "
                        "read again: a generator of its own draws it, or how often it was read; draw as with "
                        "torch.rand, numpy.random.rand or random.random, which are seeded for every sample"
                    )

    def renew(self) -> None:
        """See `Dataset`; copies by `feeding` share the data sets, and are renewed, too."""
        if self.remake is not None:
            self._begun.clear()
            self._splits.clear()  # before the new ones are made: memory may be enough for one pair only
            self._splits.update(by_split(*self.remake()))

    @property
    def argument_names(self) -> Sequence[str]:
        """The names of the model's arguments that the inputs are for: the keys, if samples have inputs in a dict."""
        return [name.removeprefix(f"{INPUT}.") for name in self._inputs] if self._names_inputs else ()

    def feeding(self, names: Sequence[str]) -> Dataset:
        """Return this data set with its inputs in the order of these arguments, if samples have inputs in a dict."""
        wanted = [f"{INPUT}.{name}" for name in names]
        if not self._names_inputs or not set(wanted) <= set(self._inputs):
            return self
        ordered = copy.copy(self)
        ordered.inputs = tuple(wanted)
        return ordered

    def for_model(self, model: nn.Module) -> Dataset:
        """See `Dataset`: as samples of data sets of others, such as {image, label}, are given to a forward(x)."""
        taken = inspect.signature(model.forward).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        if takes_any or not taken.keys().isdisjoint(self.argument_names):
            return self
        in_order = copy.copy(self)
        in_order._names_inputs = False
        return in_order

    def arguments(self, fields: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Return the arguments of a call of the whole model; they are named if samples have inputs in a dict."""
        if not self._names_inputs:
            return super().arguments(fields)
        return [], {name.removeprefix(f"{INPUT}."): fields[name] for name in self._inputs}

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return every field of `num_samples` samples on the meta device."""
        return self.examples(num_samples)[0]

    def examples(self, num_samples: int) -> list[dict[str, torch.Tensor]]:
        """Return `example`, and another one if minibatches differ in more than their number of samples."""
        return [
            {name: like.new_empty((num_samples, *like.shape[1:])) for name, like in form.items()}
            for form in (self._forms.of_costs, self._forms.smallest)
            if form is not None
        ]

    @property
    def example_note(self) -> str:
        """See `Dataset`."""
        return self._forms.note

    def begin_epoch(self, epoch: int) -> None:
        """Call the training data set's `set_epoch`, if it has one, as `Dataset.begin_epoch` says."""
        if self._begun.get("train") != epoch:
            self._begun["train"] = epoch
            for setter in epoch_setters(self._splits["train"][0]):
                setter(epoch)

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return fields of samples; see `Dataset.fetch`.

        A worker that reads a minibatch's inputs often reads its targets soon after. Targets of the last few minibatches
        are stored, so that their samples aren't read twice.

        Raises:
            DataError: a sample can't be read, or has other shapes or dtypes than the first one; names it.
        """
        key = (split, tuple(indices), draw)
        kept = self._kept.pop(key, {})
        if not set(fields) <= kept.keys():
            kept = flat(self._collated(split, indices, draw))
            self._check_alike(split, indices, kept)
            self._check_labels(split, indices, kept)
        if self.weighs_targets or not set(fields) & set(self._targets):
            self._kept[key] = {name: kept[name] for name in self._targets}
            while len(self._kept) > _KEPT_TARGETS:
                self._kept.popitem(last=False)
        return {name: kept[name] for name in fields}

    def weigh(self, targets: Mapping[str, torch.Tensor]) -> float:
        """Return how many there are of what the loss is a mean over.

        Raises:
            DataError: counting fails, or returns neither a number of at least 0 nor one per sample.
        """
        return float(self._counted(targets))

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss summed over the samples, or what else it is a mean over.

        Raises:
            DataError: the loss fails, or returns neither a number nor one per sample.
        """
        return self._sum("loss", self._loss, output, targets, self._counted(targets))

    def score(self, output: Any, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return every metric that is a mean, summed over the samples.

        Raises:
            DataError: a metric fails, or returns neither a number nor one per sample.
        """
        output = self._judged(output) if self._means else output
        count = _num_samples(targets)
        return {
            name: self._sum(f"metric {name}", metric.function, output, targets, count).detach()
            for name, metric in self._means.items()
        }

    def summarise(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return the metrics, means over the held-out samples, whatever the loss is a mean over."""
        return super().summarise(sums, weight if self._count is None else self.num_eval)

    def whole_set_metrics(self) -> dict[str, SetMetric]:
        """See `Dataset`."""
        return {name: metric.make() for name, metric in self._of_whole_set.items()}

    def for_metrics(self, output: Any, targets: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        """Return the output without a loss in it, and the target in the samples' structure."""
        return self._judged(output), self._target.with_tensors(targets)

    def _judged(self, output: Any) -> Any:
        """Return the part of a model's output that metrics get."""
        return beside_loss(output) if self._loss is loss_of_model else output

    def _counted(self, targets: Mapping[str, torch.Tensor]) -> int | torch.Tensor:
        """Return how many there are of what the loss is a mean over.

        Raises:
            DataError: counting fails, or returns neither a number nor one per sample.
        """
        num_samples = _num_samples(targets)
        if self._count is None:
            return num_samples
        target = self._target.with_tensors({name: value.clone() for name, value in targets.items()})
        try:
            counted = torch.as_tensor(self._count(target), device=next(iter(targets.values())).device)
        except Exception as error:
            raise DataError(f"counting fails on the target, {in_words(target)}") from error
        needed = "needed is a number from 0, or one per sample"
        if tuple(counted.shape) not in ((), (num_samples,)) or counted.is_complex():
            raise DataError(f"the count of {num_samples} samples is {in_words(counted)}, {needed}")
        if counted.device.type == "cpu" and not (counted.isfinite() & (counted >= 0)).all():
            raise DataError(f"the count of {num_samples} samples is {counted.tolist()}, {needed}")
        return counted.sum()

    def _sum(
        self, what: str, measure: Measure, output: Any, targets: Mapping[str, torch.Tensor], count: int | torch.Tensor
    ) -> torch.Tensor:
        num_samples = _num_samples(targets)
        try:
            value = measure(output, self._target.with_tensors(targets))
        except Exception as error:
            raise DataError(f"the {what} fails on the output, {in_words(output)}") from error
        if not isinstance(value, torch.Tensor | tuple):
            with suppress(TypeError, ValueError, RuntimeError):  # such as for None and strings
                value = torch.as_tensor(value, dtype=torch.float64)
        if isinstance(value, torch.Tensor) and tuple(value.shape) in ((), (num_samples,)):
            if value.dim():
                return value.sum()
            # The mean over nothing is NaN, such as where no token of a microbatch is to be predicted.
            return value * count if isinstance(count, int) else (value * count).where(count > 0, 0.0)
        raise DataError(
            f"the {what} gives {in_words(value)} for {num_samples} samples, needed is a number, their mean, or a "
            "tensor of one number per sample"
        )

    def _seen(self, split: str) -> Seen:
        """Return the forms of some samples of a split, of several if the user's own function collates them."""
        data, collate = self._splits[split]
        if collate is default_collate:
            form = form_of(flat(self._collated(split, [0], 0)))
            return Seen([form], form, collates=False)
        indices = sorted({k * length_of(split, data) // _TRIED for k in range(_TRIED)})
        alone, together = [[k] for k in indices], indices
        *forms, of_all = (form_of(flat(self._collated(split, each, 0))) for each in (*alone, together))
        return Seen(forms, of_all, collates=True)

    def _collated(self, split: str, indices: Sequence[int], draw: int) -> dict[str, Any]:
        data, collate = self._splits[split]
        samples = []
        with seeded(draw) as seed:
            for index in indices:
                seed((draw + _GOLDEN * (index + 1)) % 2**63)
                try:
                    samples.append(data[index])
                except Exception as error:  # by the user's code, or by a library that doesn't name the sample
                    raise DataError(f"sample {index} of {split} can't be read") from error
            if collate is not default_collate:
                return self._collated_by(collate, split, samples)
        pairs = [self._pair(f"sample {index} of {split}", each) for index, each in zip(indices, samples, strict=True)]
        try:
            with torch.no_grad():  # a loader process collates into shared memory, which takes no gradients
                return dict(zip((INPUT, TARGET), default_collate(pairs), strict=True))
        except (TypeError, RuntimeError, ValueError, KeyError) as error:
            self._check_each(split, indices)
            raise DataError(
                f"sample {indices[0]} of {split} doesn't go into a minibatch (torch's default_collate): it is "
                f"{in_words(pairs[0])}"
            ) from error

    def _collated_by(self, collate: Collate, split: str, samples: list[Any]) -> dict[str, Any]:
        """Return what a collate function of the user's own makes of samples."""
        what = f"what the collate_fn of {split} makes of {len(samples)} samples"
        try:
            made = collate(samples)
        except Exception as error:
            raise DataError(f"the collate_fn of {split} fails on {len(samples)} samples") from error
        collated = dict(zip((INPUT, TARGET), self._pair(what, made), strict=True))
        for name, part in flat(collated).items():
            if not isinstance(part, torch.Tensor) or part.shape[:1] != (len(samples),):
                raise DataError(f"{name} in {what} is {in_words(part)}, needed is a tensor with a row per sample")
        return {name: apart(value, samples) for name, value in collated.items()}

    def _pair(self, what: str, given: Any) -> tuple[Any, Any]:
        pair = given if self._fields is None else self._fields.pair(given)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(f"{what} is {in_words(pair)}, needed is a pair (input, target){how_to_name(pair)}")
        return tuple(pair)

    def _check_alike(self, split: str, indices: Sequence[int], given: Mapping[str, torch.Tensor]) -> None:
        for name in self._forms.of_costs:
            if differs := self._forms.differs(split, name, given.get(name)):
                self._check_each(split, indices)
                raise DataError(f"{name} of sample {indices[0]} of {split} is {differs}")

    def _check_labels(self, split: str, indices: Sequence[int], given: Mapping[str, torch.Tensor]) -> None:
        """Raise a DataError for labels that torch's mean ignores, since weights here count every sample."""
        for name in self._targets if self._loss is cross_entropy else ():
            ignored = (given[name] == IGNORED).reshape(len(indices), -1).any(1)
            if ignored.any():
                raise DataError(
                    f"sample {indices[int(ignored.nonzero()[0])]} of {split} has a label {IGNORED}, which torch "
                    "ignores; loss: cross_entropy counts every sample alike: say mean_over: labels"
                )

    def _check_each(self, split: str, indices: Sequence[int]) -> None:
        """Raise a DataError that names the first sample whose shapes or dtypes aren't those of the first of train."""
        for index in indices if len(indices) > 1 else ():
            self._check_alike(split, [index], flat(self._collated(split, [index], 0)))


def _num_samples(targets: Mapping[str, torch.Tensor]) -> int:
    return next(iter(targets.values())).shape[0]
