"""Random images and texts, for measuring throughput: nothing to read and nothing to learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from pipebench.zoo import metrics
from pipebench.zoo.images import LabelledImages
from pipebench.zoo.late import torch
from pipebench.zoo.options import at_least, check_split
from pipebench.zoo.registry import Dataset

# PipeDream's artifact repeats one image. With a few more, BatchNorm's statistics of a minibatch don't degenerate.
_NUM_DISTINCT = 64
_SEED = 0


class Synthetic(LabelledImages):
    """Random images; fields `image` and `label`.

    `image`: [samples, *shape] float32, standard normal; `label`: [samples] int64. Both depend on a sample's index only,
    and repeat every 64 samples. There is no metric, so a run can have no target.
    """

    metrics: Mapping[str, str] = {}
    concurrent = True

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return fields of the samples at `indices`, in that order; both splits have the same samples."""
        check_split("synthetic", split)
        rows = torch.as_tensor(indices, dtype=torch.int64) % _NUM_DISTINCT
        return {
            field: (_images(self.shape) if field == "image" else _labels(self.num_classes))[rows] for field in fields
        }


def synthetic(
    shape: tuple[int, ...] = (3, 224, 224), num_classes: int = 1000, num_train: int = 1_281_167, num_eval: int = 50_000
) -> Synthetic:
    """Build the data set; PipeDream (SOSP'19), section 5.1, measures AlexNet's throughput on synthetic data.

    Args:
        shape: of one sample: channels, height and width of an image, or any other; every size at least 1.
        num_classes: labels are 0 to num_classes - 1, at least 1.
        num_train: samples of an epoch, at least 1; ImageNet's, as in PipeDream's artifact.
        num_eval: held-out samples, at least 1; ImageNet's.
    """
    if not shape or any(size < 1 for size in shape):
        raise ValueError(f"synthetic: shape is {list(shape)}, allowed are one or more sizes of at least 1")
    at_least(1, "synthetic", num_classes=num_classes, num_train=num_train, num_eval=num_eval)
    return Synthetic(shape, num_classes, num_train, num_eval)


class SyntheticText(Dataset):
    """Random tokens; fields `tokens` and `next_tokens`, both [samples, columns] int64, the same for every sample.

    Samples don't continue each other, so any number of replicas can share them. There is no metric.
    """

    inputs: Sequence[str] = ("tokens",)
    targets: Sequence[str] = ("next_tokens",)
    metrics: Mapping[str, str] = {}
    concurrent = True

    def __init__(self, columns: int, vocabulary: int, num_train: int, num_eval: int) -> None:
        self.columns, self.vocabulary = columns, vocabulary
        self.num_ids = {"tokens": vocabulary, "next_tokens": vocabulary}
        self.num_train, self.num_eval = num_train, num_eval

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return both fields for `num_samples` samples on the meta device."""
        shape = (num_samples, self.columns)
        return {field: torch.empty(shape, dtype=torch.int64, device="meta") for field in ("tokens", "next_tokens")}

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return fields of the samples at `indices`; both splits have the same samples."""
        check_split("synthetic_text", split)
        generator = torch.Generator().manual_seed(_SEED)
        row = torch.randint(self.vocabulary, (self.columns + 1,), generator=generator)
        found = {"tokens": row[:-1], "next_tokens": row[1:]}
        return {field: found[field].repeat(len(indices), 1) for field in fields}

    def loss(self, output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the cross-entropy in nats, summed over tokens; output: [samples, columns, vocabulary]."""
        self.check_logits(output, "next_tokens")
        return metrics.token_cross_entropy(output, targets["next_tokens"])


def synthetic_text(
    columns: int = 1024, vocabulary: int = 50_257, num_train: int = 1_000_000, num_eval: int = 1000
) -> SyntheticText:
    """Build the data set, for the throughput of models that predict the next token.

    Args:
        columns: tokens of a sample, at least 1.
        vocabulary: token ids, at least 2; GPT-2's.
        num_train: samples of an epoch, at least 1.
        num_eval: held-out samples, at least 1.
    """
    at_least(1, "synthetic_text", columns=columns, num_train=num_train, num_eval=num_eval)
    at_least(2, "synthetic_text", vocabulary=vocabulary)
    return SyntheticText(columns, vocabulary, num_train, num_eval)


@lru_cache(maxsize=2)
def _images(shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(_NUM_DISTINCT, *shape, generator=generator)


@lru_cache(maxsize=2)
def _labels(num_classes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(num_classes, (_NUM_DISTINCT,), generator=generator)
