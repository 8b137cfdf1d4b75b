"""A PyTorch data set whose samples a function makes."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset


class Made(Dataset[Any]):
    """Samples that a function makes from their index."""

    def __init__(self, make: Callable[[int], Any], length: int = 8) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)
