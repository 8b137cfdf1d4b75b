"""The references of comparisons: torch's pipelines and data parallelism, a plain loop, and a stage that never waits.

torch's pipelines get the modules that the engine trains (`cut_stage`), so that differences are those of the engines.
Each is used in the fastest way it offers: outputs aren't kept, and gradients are scaled by the loss alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pipebench.distributed.world import current
from pipebench.model.graph import trace
from pipebench.model.plan import make_plan
from pipebench.model.stage import cut_stage
from tests.bench.processes.subject import Minibatches, Subject, sgd, straight

GPIPE, ONE_F_ONE_B, DDP, FSDP = "ScheduleGPipe", "Schedule1F1B", "DistributedDataParallel", "fully_shard"
_PREPARED = 4  # minibatches that `Alone` repeats


class _OneValue(nn.Module):
    """Unpacks the only value of a stage, as torch's classes expect it."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        return self.stage(received)[0]


def _group(subject: Subject) -> Any:
    """Return the process group for torch's classes: the default one, or an NCCL group on GPUs."""
    world = current()
    return None if subject.device == "cpu" or world is None else world.new_group("nccl")


class _OnModule:
    """A side that trains a module in place."""

    module: nn.Module

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.module.named_parameters())


class Plain(_OnModule):
    """A plain training loop on one device."""

    def __init__(self, subject: Subject) -> None:
        self._subject, self.module = subject, subject.model().to(subject.place)
        if subject.channels_last:
            self.module.to(memory_format=torch.channels_last)
        self._call: Any = torch.compile(self.module) if subject.compile else self.module
        self._optimizer = subject.make_optimizer(list(self.module.parameters()))
        self._minibatches = Minibatches(subject)

    def train(self, num_minibatches: int) -> None:
        """Train on the next minibatches."""
        rounds = self._subject.precision != "fp32"
        for _ in range(num_minibatches):
            image, label = self._minibatches.take("image", "label")
            if self._subject.channels_last:
                image = image.contiguous(memory_format=torch.channels_last)
            self._optimizer.zero_grad()
            with torch.autocast(self._subject.device, torch.bfloat16, enabled=rounds):
                loss = functional.cross_entropy(self._call(image), label)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()


class Pipelined(_OnModule):
    """One of torch's schedules, by its class's name, on two stages, the second from layer `cut` on."""

    def __init__(self, subject: Subject, cut: int, schedule: str) -> None:
        from torch.distributed import pipelining  # late: pytest imports this file even if no test of it runs

        rank = distributed.get_rank()
        graph, plan = straight(subject, cut)
        self.module = cut_stage(graph, plan, rank).module.train().to(subject.place)
        stage = pipelining.PipelineStage(_OneValue(self.module), rank, 2, subject.place, group=_group(subject))
        size = subject.minibatch_size

        def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(output, label, reduction="sum") / size

        self._schedule: Any = getattr(pipelining, schedule)(stage, subject.microbatches, loss, scale_grads=False)
        self._optimizer = sgd(list(self.module.parameters()))
        self._minibatches = Minibatches(subject)
        self._is_first = rank == 0

    def train(self, num_minibatches: int) -> None:
        """Train on the next minibatches."""
        for _ in range(num_minibatches):
            self._optimizer.zero_grad()
            if self._is_first:
                self._schedule.step(*self._minibatches.take("image"), return_outputs=False)
            else:
                (label,) = self._minibatches.take("label")
                self._schedule.step(target=label, return_outputs=False)
            self._optimizer.step()


class DataParallel(_OnModule):
    """DistributedDataParallel on the whole model, with its default buckets.

    Running statistics of BatchNorm aren't synchronised, as the engine's aren't between drains.
    """

    _fuses = True

    def __init__(self, subject: Subject) -> None:
        rank, self._size = distributed.get_rank(), distributed.get_world_size()
        self.module, self._group = subject.model().to(subject.place), _group(subject)
        self._parallel = self._wrapped()
        self._optimizer = sgd(list(self.module.parameters()), fused=self._fuses)
        self._minibatches = Minibatches(subject, self._size, rank)

    def _wrapped(self) -> nn.Module:
        """Return the module that is called."""
        return DistributedDataParallel(
            self.module, process_group=self._group, broadcast_buffers=False, gradient_as_bucket_view=True
        )

    def train(self, num_minibatches: int) -> None:
        """Train on the next minibatches, distributed over the processes."""
        for _ in range(num_minibatches // self._size):
            image, label = self._minibatches.take("image", "label")
            self._optimizer.zero_grad()
            functional.cross_entropy(self._parallel(image), label).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()


class FullyShard(DataParallel):
    """`fully_shard` on the engine's groups of layers, resharded after the forward, as in the engine's mode `fsdp`.

    Its parameters don't support a fused optimizer (torch 2.14), so it uses the next fastest implementation. `starts`
    are the first layers of the groups after the first.
    """

    _fuses = False

    def __init__(self, subject: Subject, starts: Sequence[int]) -> None:
        self._starts = starts
        super().__init__(subject)

    def _wrapped(self) -> nn.Module:
        from torch.distributed.fsdp import fully_shard  # late, as above

        graph = trace(self.module)
        plan = make_plan(graph, self._starts, [1] * (len(self._starts) + 1))
        groups = [_OneValue(cut_stage(graph, plan, index).module.train()) for index in range(len(plan.stages))]
        for group in groups:
            fully_shard(group, reshard_after_forward=True)
        self.module = nn.Sequential(*groups)
        return self.module

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the whole parameters by the model's names; all processes call it."""
        from torch.distributed.tensor import DTensor  # late, as above

        found: dict[str, torch.Tensor] = {}
        for group in self.module.children():
            for name, parameter in group.get_submodule("stage").named_parameters():
                assert isinstance(parameter, DTensor)
                found[name] = parameter.full_tensor()
        return found


class Alone(_OnModule):
    """Each of two processes trains its stage without waiting: inputs and gradients are computed in advance.

    The slower stage is an upper bound for the speed of the pipeline. Both work at the same time, as in the pipeline.
    """

    def __init__(self, subject: Subject, cut: int) -> None:
        graph, plan = straight(subject, cut)
        first, second = (cut_stage(graph, plan, index).module.train().to(subject.place) for index in range(2))
        self._size = subject.minibatch_size
        self._is_first = distributed.get_rank() == 0
        minibatches = Minibatches(subject)
        self._given = [self._prepare(first, second, *minibatches.take("image", "label")) for _ in range(_PREPARED)]
        self.module = first if self._is_first else second
        self.module.zero_grad()
        self._optimizer = sgd(list(self.module.parameters()))
        # Inputs never change, so larger steps would make the weights diverge; a step's cost doesn't depend on the rate.
        self._optimizer.param_groups[0]["lr"] = 1e-9

    def train(self, num_minibatches: int) -> None:
        """Train on the prepared minibatches, again and again."""
        for k in range(num_minibatches):
            received, other = self._given[k % _PREPARED]
            self._optimizer.zero_grad()
            if self._is_first:
                self.module(received)[0].backward(other)
            else:
                torch.autograd.backward(self._loss(self.module(received.detach().requires_grad_())[0], other))
            self._optimizer.step()

    def _prepare(
        self, first: nn.Module, second: nn.Module, image: torch.Tensor, label: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what this process's stage receives: an image and a gradient, or an activation and labels."""
        activation = first(image)[0].detach().requires_grad_()
        self._loss(second(activation)[0], label).backward()
        assert activation.grad is not None
        return (image, activation.grad) if self._is_first else (activation.detach(), label)

    def _loss(self, output: torch.Tensor, label: torch.Tensor) -> Any:
        return functional.cross_entropy(output, label, reduction="sum") / self._size


def distance_from_plain_loop(
    weights: Mapping[str, torch.Tensor], subject: Subject, steps: int, parts: int, of: int = 1
) -> float:
    """Return the distance of trained weights from a plain loop's, relative to the distance that the loop's moved.

    Args:
        weights: of the model or of a stage, by the model's names, after `steps` updates.
        subject: the model and the data.
        steps: number of updates.
        parts: microbatches per minibatch, with a forward and a backward each.
        of: minibatches per update.
    """
    whole = subject.model().to(subject.place)
    before = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    optimizer, minibatches = sgd(list(whole.parameters())), Minibatches(subject)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(of):
            image, label = minibatches.take("image", "label")
            for x, y in zip(image.chunk(parts), label.chunk(parts), strict=True):
                loss = functional.cross_entropy(whole(x), y, reduction="sum") / (of * subject.minibatch_size)
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    apart = way = 0.0
    for name, weight in weights.items():
        trained = whole.get_parameter(name).detach()
        apart += float((weight.detach() - trained).square().sum())
        way += float((trained - before[name]).square().sum())
    return math.sqrt(apart / way)
