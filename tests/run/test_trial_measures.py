"""Whether a measure is the mean of what it is of parts, judged with larger outputs, too, where rounding is larger."""

from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from pipebench.errors import UserCodeError
from pipebench.run.trial_measures import Summed, is_mean, refuse_changed_targets

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


def no_single(output: torch.Tensor, _: object) -> torch.Tensor:
    if len(output) == 1:
        raise ValueError("too few")
    return output.sum()


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
        (no_single, {1: True, 64: True}),
        (broken, {1: True, 64: True}),
    ],
)
def test_means_are_told_from_other_measures(measure: Summed, judged: dict[int, bool]) -> None:
    assert {factor: is_mean(measure, OUTPUT, TARGETS, factor) for factor in judged} == judged


@pytest.mark.parametrize(("weights", "judged"), [([1, 2, 3] * 4, False), ([2, 1, 2, 1, 3, 3] * 2, False), ([2], True)])
def test_halves_of_the_same_weight_are_no_proof_of_a_mean(weights: list[int], judged: bool) -> None:
    """0.2.0: a mean over labels was taken for one over samples if both halves of the first 16 had as many."""
    given = {"weights": torch.tensor(weights).expand(12) if judged else torch.tensor(weights)}

    def mean(output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        own = targets["weights"].float()
        return len(output) * (own @ output[:, 0]) / own.sum()

    assert is_mean(mean, OUTPUT, given) is judged
    assert is_mean(mean, OUTPUT, given, 64) is judged


def test_rows_of_an_output_that_are_not_of_samples_are_not_cut_like_samples() -> None:
    def to_centres(output: tuple[torch.Tensor, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        points, centres = output
        return (points - centres[targets["target"]]).square().sum()

    assert is_mean(to_centres, (OUTPUT, OUTPUT[:3]), {"target": torch.arange(12) % 2})


def test_a_mean_in_bf16_is_told_within_its_rounding() -> None:
    """0.2.0: losses of models in bf16, as transformers loads them, were refused by chance."""

    def mean(output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return len(output) * nn.functional.cross_entropy(output, targets["target"])

    draws = [torch.randn(12, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert all(is_mean(mean, draw.bfloat16(), TARGETS) for draw in draws)
    assert not is_mean(weighted, draws[0].bfloat16(), TARGETS)


@pytest.mark.parametrize("labels", [[1, 2, 3], [1, 255, 3]])
@pytest.mark.parametrize("is_refused", [True, False])
def test_targets_may_be_marked_in_place_but_not_shifted(labels: list[int], is_refused: bool) -> None:
    """0.2.0: a model was refused, as one that gives another gradient in every call."""

    def measure(output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        target = targets["target"]
        if is_refused:
            target -= 1
        target[target > 100] = -100
        return nn.functional.cross_entropy(output, target, reduction="sum")

    targets = {"target": torch.tensor(labels), "weight": torch.tensor([1.0, float("nan"), 1.0])}
    refused = pytest.raises(UserCodeError, match=r"the loss changes its target in place, .*target\.clone\(\)")
    with refused if is_refused else nullcontext():
        refuse_changed_targets("the loss", measure, OUTPUT[:3], targets, "dataset.loss")
    assert targets["target"].tolist() == labels
