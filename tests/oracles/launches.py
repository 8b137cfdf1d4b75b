"""Kernels of one forward and backward, counted by torch's tracer of ATen operators; shares no code with profiles."""

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from pipebench.zoo.registry import Dataset

# ATen operators that launch no kernel: they allocate memory or return a view.
_NO_KERNEL = frozenset(
    (
        *("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "detach", "alias", "lift_fresh"),
        *("lift_fresh_copy", "view", "_unsafe_view", "expand", "transpose", "permute", "t", "unsqueeze", "squeeze"),
        *("slice", "select", "split", "split_with_sizes", "unbind", "as_strided", "unfold"),
    )
)


def launches(model: nn.Module, dataset: Dataset, num_samples: int) -> tuple[int, int]:
    """Return the numbers of kernels of the forward, loss included, and of the backward, of a model without dropout.

    The gradients of a convolution's input and weight count as a kernel each.
    """
    example = {name: torch.ones(like.shape, dtype=like.dtype) for name, like in dataset.example(num_samples).items()}
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        output = torch.func.functional_call(model, parameters, tuple(example[name] for name in dataset.inputs))
        return dataset.loss(output, {name: example[name] for name in dataset.targets})

    def gradients(parameters: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        return torch.autograd.grad(loss(parameters), [*parameters.values()], allow_unused=True)

    def counted(work: object) -> int:
        traced = make_fx(work, tracing_mode="fake", _allow_non_fake_inputs=True)(parameters)  # type: ignore[arg-type]
        found = 0
        for node in traced.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                name = node.target._schema.name.split("::")[1]
                found += name not in _NO_KERNEL
                found += sum(node.args[-1][:2]) - 1 if name == "convolution_backward" else 0
        return found

    forward = counted(loss)
    return forward, counted(gradients) - forward
