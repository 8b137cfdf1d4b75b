"""Compares a traced model, whole and in pieces, with the model itself on a few samples, before anything is trained.

torch.fx records operations. Other effects of a forward can get lost silently: the backward of a custom autograd
function, numbers from a generator of the model's own, a decision that depends on earlier calls.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from pipebench.errors import GraphError
from pipebench.model.graph import LayerGraph, attribute, forget_states
from pipebench.model.in_place import overwritten
from pipebench.zoo.measures import plain_output
from pipebench.zoo.registry import Dataset
from pipebench.zoo.seeding import seeded

_LOG = logging.getLogger("pipebench.model.trace_check")
_SAMPLES = 2  # one alone would be refused by BatchNorm behind a global pool
# Of the largest number in a tensor. The same operations in the same order: there mostly is no difference at all.
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3}
_LOW_PRECISION = 5e-2
# Of the largest gradient of the model: less may be a rounding of 0, as a bias before BatchNorm has it.
_NOISE = 1e-3
_GRADIENT = "gradient of "

_Found = dict[str, torch.Tensor]  # by a name that can stand in a sentence


def check_traced(graph: LayerGraph, dataset: Dataset, sizes: Sequence[int] = ()) -> None:
    """Compare a layer graph with its model: outputs, gradients and buffers, in training and in evaluation.

    The graph's weights are on the CPU and stay as they are. The data set's first samples must be there; `sizes` are
    numbers of samples to try where the model doesn't take two.

    Raises:
        GraphError: they differ.
        Exception: whatever the model, or the loss, raises for all these numbers of samples.
    """
    *first, last = dict.fromkeys((min(_SAMPLES, dataset.num_train), *sorted(sizes)))
    for count in first:
        try:
            return _compare(graph, dataset, count)
        except GraphError:
            raise
        except Exception as error:  # the user's code may raise anything
            _LOG.debug("%d samples are no minibatch for it: %s", count, error)
    return _compare(graph, dataset, last)


def _compare(graph: LayerGraph, dataset: Dataset, num_samples: int) -> None:
    model = graph.model
    fetched = dataset.fetch("train", range(num_samples), [*dataset.inputs, *dataset.targets])
    targets = {name: fetched[name] for name in dataset.targets}

    def whole(fields: Mapping[str, torch.Tensor]) -> Any:
        positional, named = dataset.arguments(fields)
        return model(*positional, **named)

    for training, traced in ((True, graph), (False, graph.evaluated)):

        def run(forward: Callable[[Mapping[str, torch.Tensor]], Any], training: bool = training) -> _Found:
            with _as_it_was(model, training=training):
                output = forward({name: fetched[name].clone() for name in dataset.inputs})
                loss = (lambda: dataset.loss(output, targets)) if training else None
                return _left_behind(model, output, loss)

        before = {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
        expected = run(whole)
        _check_buffers(traced, {name for name, value in before.items() if _differs(value, expected[name])})
        phase = "training" if training else "evaluation"
        found = run(lambda fields, root=traced.root: root(*fields.values()))  # type: ignore[misc]
        if (different := _first_difference(expected, found)) is not None:
            is_same = _first_difference(expected, run(whole)) is None
            raise GraphError(f"model {type(model).__name__} can't be run in layers: {_lost(different, phase, is_same)}")
        apart = _Apart(traced)
        found = run(lambda fields, apart=apart: apart.run(*fields.values()))  # type: ignore[misc]
        if (different := _first_difference(expected, found)) is not None:
            names = ", ".join(node.name for node in traced.graph.nodes if _overwrites(traced, node))
            raise GraphError(
                f"model {type(model).__name__} can't be cut: its {different} in {phase} is another where layers that "
                f"write in place ({names}) have copies of what they overwrite, so others read the same memory under "
                "another name; let them return new tensors, or name their module in model.leaves to make it one layer"
            )


def _check_buffers(graph: LayerGraph, changed: Collection[str]) -> None:
    """Refuse buffers that no layer is known to change, as of `F.batch_norm` with a model's own statistics."""
    known = {id(attribute(graph.root, name)) for layer in graph.layers for name in layer.buffers}
    for name, buffer in graph.model.named_buffers():
        if f"buffer {name}" in changed and id(buffer) not in known:
            raise GraphError(
                f"model {type(graph.model).__name__} can't be cut: a function changes its buffer {name}, which nobody "
                "sees; name the module that has it in model.leaves to make it one layer"
            )


def _lost(different: str, phase: str, is_same: bool) -> str:
    """Return what differs from the model, and why, by whether the model itself gives the same again."""
    what = f"its {different} in {phase}"
    if not is_same:
        return (
            f"{what} differs from call to call, for the same samples and the same seed, as if it drew from a generator "
            "of its own or counted its calls"
        )
    return (
        f"{what} is another than the model's own, so torch.fx has lost something that its forward does; name the "
        "module that does it in model.leaves to make it one layer"
    )


class _Apart(fx.Interpreter):
    """Runs a graph as if it were cut everywhere: what a layer overwrites, nobody sees but those that read that layer.

    Buffers stay shared: layers that read what another changes are in its stage.
    """

    def __init__(self, graph: LayerGraph) -> None:
        super().__init__(graph.root, graph=graph.graph)
        self._graph = graph

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, an in-place one on a copy."""
        if _overwrites(self._graph, n):
            first = n.args[0]
            assert isinstance(first, fx.Node)
            before = self.env[first]
            self.env[first] = before.clone()
            try:
                return super().run_node(n)
            finally:
                self.env[first] = before
        return super().run_node(n)


def _overwrites(graph: LayerGraph, node: fx.Node) -> bool:
    """Return whether a layer overwrites a value, and no buffer."""
    changed, is_given = overwritten(graph.root, node), bool(node.args) and isinstance(node.args[0], fx.Node)
    return is_given and changed is not None and changed.op != "get_attr"


@contextmanager
def _as_it_was(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Seed all generators, and undo what a forward does to the model and to them."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    forget_states(model)
    model.train(training)
    try:
        with seeded(0), torch.set_grad_enabled(training):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        forget_states(model)


def _left_behind(model: nn.Module, output: Any, loss: Callable[[], torch.Tensor] | None) -> _Found:
    """Return a forward's outputs and buffers, and the gradients of a loss."""
    found: _Found = {}
    for index, leaf in enumerate(pytree.tree_leaves(plain_output(output))):
        if isinstance(leaf, torch.Tensor):
            found[f"output {index}"] = leaf.detach()
    found |= {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}
    value = loss() if loss is not None else None
    if value is not None and value.requires_grad:
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        pairs = zip(named, gradients, strict=True)
        found |= {f"{_GRADIENT}{name}": gradient for name, gradient in pairs if gradient is not None}
    return found


def _first_difference(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> str | None:
    gradients = [_largest(tensor) for name, tensor in expected.items() if name.startswith(_GRADIENT)]
    least = _NOISE * max(gradients, default=0.0)
    for name in {**expected, **found}:
        at_least = least if name.startswith(_GRADIENT) else 0.0
        if name not in expected or name not in found or not _close(expected[name], found[name], at_least):
            return name
    return None


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors differ at all; not a number equals itself."""
    return bool(((one != other) & ((one == one) | (other == other))).any())


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest finite number of a tensor, without its sign; 0 without any."""
    finite = tensor[tensor.isfinite()]
    return float(finite.double().abs().max()) if finite.numel() else 0.0


def _close(expected: torch.Tensor, found: torch.Tensor, at_least: float) -> bool:
    """Compare tensors up to a share of the largest number in one, or of `at_least`."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, found)
    share = _TOLERANCES.get(expected.dtype, _LOW_PRECISION)
    scale = max(at_least, _largest(expected))
    return torch.allclose(found.double(), expected.double(), rtol=share, atol=share * scale, equal_nan=True)
