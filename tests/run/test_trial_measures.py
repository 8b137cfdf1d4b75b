"""Whether a measure is the mean of what it is of parts, judged with larger outputs, too, where rounding is larger."""

import pytest
import torch

from pipebench.run.trial_measures import Summed, is_mean

TARGETS = {"target": torch.arange(12) % 3}
OUTPUT = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def added(output: torch.Tensor, _: object) -> torch.Tensor:
    return output.sum()


def weighted(output: torch.Tensor, _: object) -> torch.Tensor:
    """Return a mean over something else than samples, times their number."""
    weights = output[:, 0].abs()
    return len(output) * (weights @ output[:, 1]) / weights.sum()


def contrasts(output: torch.Tensor, _: object) -> torch.Tensor:
    return len(output) * (output - output.mean(0)).square().sum()


def rounded(output: torch.Tensor, _: object) -> torch.Tensor:
    """Return a sum with an error that depends on how many samples are computed together, as products have it."""
    return output.sum() + 0.01 * (len(output) % 12)


def broken(output: torch.Tensor, _: object) -> torch.Tensor:
    if len(output) < 12:
        raise ValueError("too few")
    return output.sum()


@pytest.mark.parametrize(
    ("measure", "judged"),
    [
        (added, {1: True, 64: True}),
        (weighted, {1: False, 64: False}),
        (contrasts, {1: False}),
        (rounded, {1: False, 64: True}),
        (broken, {1: True, 64: True}),
    ],
)
def test_means_are_told_from_other_measures(measure: Summed, judged: dict[int, bool]) -> None:
    assert {factor: is_mean(measure, OUTPUT, TARGETS, factor) for factor in judged} == judged
