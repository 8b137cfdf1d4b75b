"""The norm of a gradient, and gradients scaled down to a norm."""

from collections.abc import Sequence

import torch


def gradient_norm(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the Euclidean norm of all gradients together."""
    norms = [torch.linalg.vector_norm(g, dtype=_summed_in(g.dtype)) for g in gradients if g is not None]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which numbers of a type are squared and added: 16 bits hold neither many nor large ones."""
    return torch.promote_types(dtype, torch.float32)


def clipped(gradients: Sequence[torch.Tensor | None], norm: torch.Tensor, largest: float) -> list[torch.Tensor | None]:
    """Scale gradients down to a norm, by the factor torch.nn.utils.clip_grad_norm_ uses."""
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    return [None if gradient is None else gradient * factor.to(gradient.dtype) for gradient in gradients]
