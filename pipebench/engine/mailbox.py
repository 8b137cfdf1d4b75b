"""The transport of workers that share a process: values are stored until requested."""

from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipebench.engine.setup import Setup
from pipebench.simulate.timeline import PCIE


class InProcessTransport:
    """Transfers values between stages and counts bytes; `num_bytes` counts them by kind and level."""

    def __init__(self, setup: Setup, num_bytes: Counter[tuple[str, str]]) -> None:
        self._setup = setup
        self._num_bytes = num_bytes
        self._mail: dict[tuple[str, int, int, int], Any] = {}

    def send(self, kind: str, unit: int, source: int, target: int, values: Any) -> None:
        """Store a unit's values until requested."""
        pipeline = self._setup.pipeline
        level = self._setup.level_between(pipeline.worker(source, unit), pipeline.worker(target, unit)).name
        self._num_bytes[kind, level] += sum(map(_bytes_of, values.values()))
        self._mail[kind, unit, source, target] = values

    def receive(self, kind: str, unit: int, source: int, target: int) -> Any:
        """Return the sent values; the virtual clock guarantees that they have arrived."""
        return self._mail.pop((kind, unit, source, target))

    def copied(self, kind: str, num_bytes: int) -> None:
        """Count bytes copied between a device and its host."""
        self._num_bytes[kind, PCIE] += num_bytes


def _bytes_of(value: Any) -> int:
    """Return the bytes of a value's tensors; a fast path serves single tensors and lists of them."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, list):
        return sum(map(_bytes_of, value))
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
