"""Gradient norms and clipping.

Squares are float64, which holds the square of any fp32 number, and are added in ascending order: how parameters are
distributed over stages and processes changes no bit of the sum.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from pipebench.model.slice_modules import Divided

# On a CPU, up to `_FEW` numbers are widened to float64 at once, which stays in the cache. More are added in rows of
# `ROW`, in their own type: widened one by one, as torch's norms do it, they take ten times as long.
_FEW, ROW = 1 << 14, 512
_ALIGNMENT = 64  # bytes; vectorised kernels of CUDA need 32 for float64


def squared_norms(
    gradients: Sequence[torch.Tensor | None], device: torch.device, sizes: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """Return the squared norm of every gradient on `device`, one float64 per parameter; 0 for None.

    `sizes` are the elements of the whole gradients, if these are pieces: the whole's size decides how they are added.
    """
    if any(gradient is not None and gradient.is_complex() for gradient in gradients):
        is_complex = [gradient is not None and gradient.is_complex() for gradient in gradients]
        sizes = None if sizes is None else [size * (1 + two) for size, two in zip(sizes, is_complex, strict=True)]
        gradients = [torch.view_as_real(g.resolve_conj()) if g is not None and g.is_complex() else g for g in gradients]
    if device.type == "cpu":
        wholes = [0 if g is None else g.numel() for g in gradients] if sizes is None else sizes
        given_sizes = zip(gradients, wholes, strict=True)
        squares = iter([_squared_norm(gradient, size) for gradient, size in given_sizes if gradient is not None])
    else:
        # Copied into aligned memory: the order in which kernels add depends on the alignment.
        given = [g if g.data_ptr() % _ALIGNMENT == 0 else g.clone() for g in gradients if g is not None]
        squares = iter([norm.square() for norm in torch._foreach_norm(given, 2.0, torch.float64)] if given else [])
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    return [nothing if gradient is None else next(squares) for gradient in gradients]


def norm_of(squares: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm of all gradients together: squares [parameters] float64, in any order."""
    return squares.sort().values.sum().sqrt()


def gradient_norm(
    gradients: Sequence[torch.Tensor | None], device: torch.device, scale: float = 1.0, divided: Divided | None = None
) -> torch.Tensor:
    """Return the norm of all gradients together, a float64; the gradients are `scale` times too large."""
    squares = squared_norms(gradients, device)
    if not squares:
        return torch.zeros((), dtype=torch.float64, device=device)
    own = torch.stack(squares)
    return norm_of((own if divided is None else divided.whole(own)) / scale**2)


def clip(gradients: list[torch.Tensor | None], indices: Iterable[int], norm: torch.Tensor, largest: float) -> None:
    """Scale some gradients down to a norm, by the factor torch.nn.utils.clip_grad_norm_ uses; see `replace_each`."""
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    replace_each(gradients, indices, lambda gradient: gradient * factor.to(gradient.dtype))


def replace_each(
    gradients: list[torch.Tensor | None], indices: Iterable[int], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Replace some gradients in their list, one after the other.

    None is changed in place, since other replicas of this process may have the same tensor. All of them at once would
    take as much memory again.
    """
    for index in indices:
        gradient = gradients[index]
        if gradient is not None:
            gradients[index] = change(gradient)


def _squared_norm(gradient: torch.Tensor, size: int) -> torch.Tensor:
    """Return a gradient's squared norm on a CPU: [] float64. Large ones are summed in rows, and the rows in float64.

    An fp32 sum of a million squares is wrong in its fifth digit; with rows it is as exact as a float64 sum.
    """
    flat = gradient.reshape(-1)
    if size > _FEW:
        whole = len(flat) // ROW * ROW
        own = torch.promote_types(flat.dtype, torch.float32)  # 16 bits hold neither many nor large squares
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=own)
        rest = torch.linalg.vector_norm(flat[whole:], dtype=own)
        total: torch.Tensor = rows.double().square().sum() + rest.double().square()
        if not total.isfinite():
            total = torch.linalg.vector_norm(flat, dtype=torch.float64).square()
        return total
    wide = flat.to(torch.float64, copy=True)  # copied, so aligned: the order in which BLAS adds may depend on it
    return torch.dot(wide, wide)
