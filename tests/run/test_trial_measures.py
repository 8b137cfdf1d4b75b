"""Whether a loss is the mean of what it is of parts, judged with larger outputs, too, where rounding is larger."""

from collections.abc import Callable

import pytest
import torch

from pipebench.errors import UserCodeError
from pipebench.run.trial_measures import refuse_no_mean

TARGETS = {"target": torch.arange(12) % 3}


def noisy(output: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a sum with an error that depends on how many samples are computed together, as products have it."""
    return output.sum() + scale * (len(output) % 12)


def weighted(output: torch.Tensor) -> torch.Tensor:
    """Return a mean over something else than samples, times their number."""
    weights = output[:, 0].abs()
    return len(output) * (weights @ output[:, 1]) / weights.sum()


def contrasts(output: torch.Tensor) -> torch.Tensor:
    return len(output) * (output - output.mean(0)).square().sum()


def refused(measure: Callable[[torch.Tensor], torch.Tensor], factor: int) -> bool:
    output = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    try:
        refuse_no_mean("the loss", lambda o, _: measure(o), output, TARGETS, "dataset.loss", "", factor)
    except UserCodeError:
        return True
    return False


@pytest.mark.parametrize("factor", [1, 64])
def test_means_pass_and_others_do_not(factor: int) -> None:
    assert not refused(torch.sum, factor)
    assert refused(weighted, factor)


def test_in_larger_outputs_as_much_rounding_is_tolerated_as_there_is() -> None:
    assert [refused(lambda output: noisy(output, 0.01), factor) for factor in (1, 64)] == [True, False]


def test_contrasts_between_samples_are_refused_as_they_are() -> None:
    assert refused(contrasts, 1)
