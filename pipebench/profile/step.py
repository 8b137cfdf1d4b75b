"""A layer, or the loss, while it is profiled."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from pipebench.profile.clocks import Reading
from pipebench.profile.model import LayerProfile

LOSS = "loss"


@dataclass
class WalkStep:
    """A layer, or the loss, during the pass. Clocks are read when the pass is over."""

    name: str
    kind: str
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    reads: tuple[int, ...]
    inputs: tuple[str, ...]
    wanted: list[Any] = field(default_factory=list)  # gradient edges: inputs that have a gradient, then parameters
    # For each wanted input, the step that computed it and the tensor's index in its output
    origins: list[tuple["WalkStep", int]] = field(default_factory=list)
    outputs: dict[int, "StepOutput"] = field(default_factory=dict)  # index to each output tensor that has a gradient
    forward_s: Reading = float
    backward_s: Reading = float
    splits: bool = False  # whether its backward can be split
    weight_s: Reading = float  # seconds of its backward for gradients of parameters, if it can be split
    output_parts: tuple[int, ...] = ()  # bytes of each tensor of its output
    gradient_bytes: int = 0  # bytes of its output's tensors that have a gradient
    arrived: Counter[int] = field(default_factory=Counter)  # index of an output tensor to its gradients so far
    # The next five are as in `LayerProfile`, storages as number to bytes.
    saved_bytes: int = 0
    saved_with: Counter[int] = field(default_factory=Counter)
    saved_storages: dict[int, int] = field(default_factory=dict)
    output_storages: dict[int, int] = field(default_factory=dict)
    input_storages: dict[int, int] = field(default_factory=dict)
    masters: Mapping[str, torch.Tensor] = field(default_factory=dict)  # the optimizer's in fp32, by parameter's name
    untrained: Mapping[str, torch.Tensor] = field(default_factory=dict)  # untrained parameters, and buffers, by name
    runs_once: bool = False
    reads_samples: bool = False

    def forget(self) -> None:
        """Free what the forward saved for the backward."""
        self.wanted, self.origins, self.outputs = [], [], {}

    def row(self) -> LayerProfile:
        """Return the step's profile, once all work is done."""
        backward_s = self.backward_s()
        return LayerProfile(
            name=self.name,
            kind=self.kind,
            forward_s=self.forward_s(),
            backward_s=backward_s,
            weight_s=min(self.weight_s(), backward_s),
            output_bytes=sum(self.output_parts),
            gradient_bytes=self.gradient_bytes,
            reads=self.reads,
            inputs=self.inputs,
            parameter_sizes={name: parameter.nbytes for name, parameter in self.parameters.items()},
            buffer_sizes={name: buffer.nbytes for name, buffer in self.buffers.items()},
            saved_bytes=self.saved_bytes,
            master_sizes={name: master.nbytes for name, master in self.masters.items()},
            untrained_sizes={name: tensor.nbytes for name, tensor in self.untrained.items()},
            output_parts=self.output_parts if len(self.output_parts) > 1 else (),
            saved_with=tuple(sorted(self.saved_with.items())),
            saved_storages=tuple(self.saved_storages.items()),
            output_storages=tuple(self.output_storages.items()),
            input_storages=tuple(self.input_storages.items()),
            runs_once=self.runs_once,
            reads_samples=self.reads_samples,
        )


@dataclass
class StepOutput:
    """What a backward needs of an output tensor that has a gradient, without keeping the tensor alive."""

    edge: GradientEdge
    like: torch.Tensor  # a meta tensor of the same shape and type
    device: torch.device

    def gradient(self) -> torch.Tensor:
        """Return a gradient to start a backward from: all ones, since the values don't change the time."""
        return torch.ones_like(self.like, device=self.device)
