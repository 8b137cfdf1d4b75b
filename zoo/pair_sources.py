"""What a user's pair of PyTorch data sets may be: data sets with a length and samples by index, or loaders of them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from pipebench.zoo.options import SPLITS
from pipebench.zoo.registry import DataError

Collate = Callable[[list[Any]], Any]  # makes a minibatch of samples, as for torch's DataLoader


def by_split(train: Any, held_out: Any) -> dict[str, tuple[Any, Collate]]:
    """Return, by split, copies of two data sets, or of the data sets of two loaders, and what collates their samples.

    Raises:
        DataError: a loader has a sampler of its own, or drops the last minibatch.
    """
    return {split: _with_collate(split, given) for split, given in zip(SPLITS, (train, held_out), strict=True)}


def _with_collate(split: str, given: Any) -> tuple[Any, Collate]:
    """Return a data set, and what makes minibatches of its samples: its loader's `collate_fn`, or its own."""
    data = _copied(_unloaded(split, given))
    collates = given if isinstance(given, DataLoader) else data
    while isinstance(collates, Subset):  # such as random_split makes
        collates = collates.dataset
    return data, getattr(collates, "collate_fn", None) or default_collate


def epoch_setters(data: Any) -> list[Callable[[int], object]]:
    """Return the `set_epoch` of a data set, or those of the data sets inside of it."""
    own = getattr(data, "set_epoch", None)
    if callable(own):
        return [own]
    parts = [*vars(data).values()] if isinstance(data, torch.utils.data.Dataset) else []
    lists = (part if isinstance(part, list) else [part] for part in parts)
    inside = {id(part): part for each in lists for part in each if isinstance(part, torch.utils.data.Dataset)}
    return [setter for part in inside.values() for setter in epoch_setters(part)]


def _copied(data: Any) -> Any:
    """Return a copy of a data set, and of data sets inside of it.

    What reading opens, such as files, is then in the copy. A user's function may return the same data set every time,
    and each `DatasetPair` then has files of its own.
    """
    if not isinstance(data, torch.utils.data.Dataset):
        return data
    try:
        made = copy.copy(data)
    except Exception:  # a class that can't be copied, as many with a __getattr__
        return data
    for name, part in [*vars(made).items()]:
        if isinstance(part, torch.utils.data.Dataset):
            vars(made)[name] = _copied(part)
        elif isinstance(part, list) and part and isinstance(part[0], torch.utils.data.Dataset):
            vars(made)[name] = [_copied(each) for each in part]
    return made


def _unloaded(split: str, data: Any) -> Any:
    """Return the data set of a loader, or `data` if it is none; minibatches are drawn from the run's seed instead.

    Raises:
        DataError: the loader has a sampler of its own, or drops the last minibatch.
    """
    if not isinstance(data, DataLoader):
        return data
    known = (RandomSampler, SequentialSampler)
    if type(data.sampler) not in known or type(data.batch_sampler) is not BatchSampler:
        raise DataError(
            f"the loader of {split} has a sampler of its own, and minibatches are drawn from the run's seed: give its "
            "data set, `loader.dataset`, or, to draw by weight, a data set whose __getitem__ does that"
        )
    if data.drop_last:
        raise DataError(
            f"the loader of {split} has drop_last=True, and every sample is read once an epoch, in a smaller last "
            "minibatch too: leave it out, or choose train.minibatch_size so that it divides their number"
        )
    return data.dataset


def length_of(split: str, data: Any) -> int:
    """Return the number of samples of a split's data set.

    Raises:
        DataError: it has no length, no samples by index or no sample.
    """
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        what = f"the data set of {split} is a {type(data).__name__}"
        raise DataError(f"{what}, needed is one with a length and samples by index (torch.utils.data.Dataset)")
    if len(data) < 1:
        raise DataError(f"the data set of {split} has no sample")
    try:
        torch.empty(len(data), dtype=torch.int64)  # takes no memory before it is written to
    except RuntimeError:
        most = f"the data set of {split} has {len(data):,} samples, and memory can't even hold their order"
        raise DataError(f"{most}: let __len__ return those of an epoch") from None
    return len(data)
