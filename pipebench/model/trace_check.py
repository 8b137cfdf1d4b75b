"""Compares a traced model, whole and cut apart, with the model itself on a few samples, before anything is trained.

torch.fx records operations. Other effects of a forward can be lost silently: the backward of a custom autograd
function, numbers from a generator of the model's own, a decision that depends on earlier calls. Weights can be missed
as well: every version has new tensors, in copies of the modules. A module that also holds its weights in a list would
go on reading the first ones.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from pipebench.errors import GraphError, print_notice
from pipebench.model.carried_state import attributes_of, changed_in, marks_of, shifted_weights
from pipebench.model.copies import copied
from pipebench.model.graph import LayerGraph, attribute, forget_states
from pipebench.model.in_place import overwritten
from pipebench.model.tracing import attributes_as_before
from pipebench.zoo.measures import plain_output
from pipebench.zoo.registry import Dataset
from pipebench.zoo.seeding import seeded

_LOG = logging.getLogger("pipebench.model.trace_check")
_SAMPLES = 2  # BatchNorm behind a global pool refuses a single one
# Allowed difference, relative to the largest number in a tensor. The operations and their order are the same, so there
# is mostly no difference at all.
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3}
_LOW_PRECISION = 5e-2  # the same for other types
# Gradients are compared relative to at least this share of the model's largest gradient: smaller ones may be rounding
# errors of 0, such as those of a bias before BatchNorm.
_NOISE = 1e-3
_GRADIENT = "gradient of "

_Found = dict[str, torch.Tensor]  # results by name, such as `gradient of fc.weight`
_Weights = Mapping[int, nn.Parameter]  # replacements of parameters, by the ids of those
_OWN: _Weights = MappingProxyType({})  # no replacement: the model's own parameters


def check_traced(graph: LayerGraph, dataset: Dataset, sizes: Sequence[int] = ()) -> None:
    """Compare a layer graph with its model: outputs, gradients and buffers, in training and in evaluation.

    Of a graph of one layer, which isn't traced, only this is checked: whether it computes with the weights that it is
    given.

    Args:
        graph: its weights are on the CPU; they don't change.
        dataset: its first samples are read.
        sizes: numbers of samples to try if the model doesn't take two.

    Raises:
        GraphError: they differ.
        Exception: whatever the model, or the loss, raises for all these numbers of samples.
    """
    *first, last = dict.fromkeys((min(_SAMPLES, dataset.num_train), *sorted(sizes)))
    changing: set[str] = set()
    # Attributes are restored at the end only, so that a layer which counts its calls gives differences.
    shifted = shifted_weights(graph.model) if len(graph.layers) > 1 else nullcontext()
    with attributes_as_before(graph.model), shifted:
        for training in (True, False):
            compare = partial(_compare, graph, dataset, changing, training=training)
            if not any(_taken(compare, count) for count in first):
                compare(last)
            elif 1 in sizes:  # tracing decided by shapes of several samples
                _taken(compare, 1)
    if changing:
        lost = "its layers don't" if len(graph.layers) > 1 else "each replica does on its own, and no checkpoint has"
        names = ", ".join(sorted(changing)[:3])
        print_notice(
            f"model {type(graph.model).__name__} changes {names} in every call, which {lost}: what training depends on "
            "belongs in a buffer"
        )


def _taken(compare: Callable[[int], None], count: int) -> bool:
    """Compare on so many samples; return False if the model doesn't take so few."""
    try:
        compare(count)
    except GraphError:
        raise
    except Exception as error:  # the user's code may raise anything
        _LOG.debug("%d samples are no minibatch for it: %s", count, error)
        return False
    return True


def _compare(graph: LayerGraph, dataset: Dataset, changing: set[str], num_samples: int, *, training: bool) -> None:
    """Compare on so many samples, in training or in evaluation; add to `changing` the attributes of `_carried_over`."""
    fetched = dataset.fetch("train", range(num_samples), [*dataset.inputs, *dataset.targets])
    form = graph if training else graph.evaluated
    trial = _Trial(form, dataset, fetched, training=training)
    before = {f"buffer {name}": buffer.clone() for name, buffer in graph.model.named_buffers()}
    marks = marks_of(graph.model)
    expected = trial.whole()
    _check_weights(trial, marks)
    changing.update(_carried_over(trial, expected))
    if len(graph.layers) > 1:
        _check_buffers(form, {name for name, value in before.items() if _differs(value, expected[name])})
        _check_recorded(trial, expected)
    _check_apart(trial, expected)


@dataclass(frozen=True)
class _Trial:
    """A model in training or in evaluation mode, and samples to run it on."""

    graph: LayerGraph  # in that mode
    dataset: Dataset
    fetched: Mapping[str, torch.Tensor]
    training: bool

    def whole(self) -> _Found:
        """Run the model itself."""

        def forward(fields: Mapping[str, torch.Tensor]) -> Any:
            positional, named = self.dataset.arguments(fields)
            return self.graph.model(*positional, **named)

        return self._run(forward)

    def recorded(self) -> _Found:
        """Run the graph."""
        return self._run(lambda fields: self.graph.root(*fields.values()))

    def apart(self, weights: _Weights) -> _Found:
        """Run the graph as if it were cut everywhere, with `weights` in place of the parameters."""
        return self._run(lambda fields: _Apart(self.graph, weights).run(*fields.values()), weights)

    def replacements(self) -> _Weights:
        """Return copies of the parameters; none in evaluation, where no gradient could show that they aren't used."""
        return {id(parameter): _like(parameter) for parameter in self.graph.model.parameters() if self.training}

    def _run(self, forward: Callable[[Mapping[str, torch.Tensor]], Any], weights: _Weights = _OWN) -> _Found:
        """Run a forward, and in training the loss and its backward; return all results."""
        model, dataset = self.graph.model, self.dataset
        with _as_it_was(model, training=self.training):
            output = forward({name: self.fetched[name].clone() for name in dataset.inputs})
            targets = {name: self.fetched[name] for name in dataset.targets}
            loss = (lambda: dataset.loss(output, targets)) if self.training else None
            return _left_behind(model, output, loss, weights)


def _check_weights(trial: _Trial, before: Mapping[str, object]) -> None:
    """Refuse a traced model that changes weights, or has others in a mode, given their marks before it ran.

    A single layer may change those that aren't trained.
    """
    model, after = trial.graph.model, marks_of(trial.graph.model)
    name, is_traced = type(model).__name__, len(trial.graph.layers) > 1
    with _as_it_was(model, training=trial.training):
        within = marks_of(model) if is_traced else after
    changed = [name for name, mark in before.items() if not mark == after.get(name) == within.get(name)]
    trained = [each for each in changed if model.get_parameter(each).requires_grad]
    if changed and is_traced:
        raise GraphError(
            f"model {name} can't be run in layers: its forward, train() or eval() changes parameter {changed[0]}, "
            "which updates alone may do; have what a forward changes in a buffer (register_buffer), compute from the "
            f"parameter instead, or {_as_one_layer(model)}"
        )
    if trained:
        raise GraphError(
            f"model {name} can't be trained here: its forward changes parameter {trained[0]}, which updates alone may "
            "do; compute from it instead (say F.normalize(self.weight) in forward)"
        )


def _carried_over(trial: _Trial, expected: _Found) -> list[str]:
    """Run the model a second time; return attributes that differ then and that its layers, or no checkpoint, have.

    Refuse a traced model that gives other results. A single layer may, and its attributes count only if it does.
    """
    graph, model, name = trial.graph, trial.graph.model, type(trial.graph.model).__name__
    before, again = attributes_of(model), trial.whole()
    changed, different = changed_in(before, attributes_of(model)), _first_difference(expected, again)
    if len(graph.layers) == 1:
        return changed if different else []
    layers = tuple(f"{layer.node.target}." for layer in graph.layers if layer.node.op == "call_module")
    changed = [each for each in changed if not each.startswith(layers)]
    if different is None:
        return changed
    also = f" (with its attribute {changed[0]})" if changed else ""
    when = "training" if trial.training else "evaluation"
    raise GraphError(
        f"model {name} can't be run in layers: its {different}{also} in {when} differs from call to call, for the same "
        "samples and the same seed, as if it drew from a generator of its own, counted its calls or kept a state; keep "
        "a number in a buffer and change it in place (self.steps.add_(1)), a state in carried_state (docs/zoo.md), or "
        f"{_as_one_layer(model)}"
    )


def _check_recorded(trial: _Trial, expected: _Found) -> None:
    """Refuse a graph that computes something else than its model."""
    name, when = type(trial.graph.model).__name__, "training" if trial.training else "evaluation"
    way_out = "so torch.fx has lost something that its forward does; name the module that does it in model.leaves to "
    way_out += f"make it one layer, or {_as_one_layer(trial.graph.model)}"
    try:
        found = trial.recorded()
    except Exception as error:  # raised by the user's code or torch, which the model itself doesn't
        reason = str(error).strip().split("\n")[0]
        raise GraphError(
            f"model {name} can't be run in layers: they fail in {when}, and the model itself doesn't, {way_out} "
            f"({type(error).__name__}: {reason})"
        ) from error
    if (different := _first_difference(expected, found)) is None:
        return
    what = f"its {different} in {when}"
    raise GraphError(f"model {name} can't be run in layers: {what} is another than the model's own, {way_out}")


def _check_apart(trial: _Trial, expected: _Found) -> None:
    """Refuse a model that computes something else if it is cut apart, or with copies of its parameters."""
    if (different := _first_difference(expected, trial.apart(trial.replacements()))) is None:
        return
    graph, name = trial.graph, type(trial.graph.model).__name__
    if _first_difference(expected, trial.apart(_OWN)) is None:
        raise GraphError(
            f"model {name} can't be trained here: its {different} is another where modules have other tensors for "
            "parameters, as every version of the weights is; a forward has to read them from its own module, not from "
            "a list or a function that keeps the first ones"
        )
    if len(graph.layers) > 1:  # a single layer isn't cut; a difference is the model's own from call to call
        names = ", ".join(node.name for node in graph.graph.nodes if _overwrites(graph, node))
        raise GraphError(
            f"model {name} can't be cut: its {different} in {'training' if trial.training else 'evaluation'} is "
            f"another where layers that write in place ({names}) have copies of what they overwrite, so others read "
            "the same memory under another name; let them return new tensors, or name their module in model.leaves to "
            "make it one layer"
        )


def _as_one_layer(model: nn.Module) -> str:
    """Return how a model runs that can't be cut into layers, in words."""
    name = type(model).__name__
    is_alone = sum(type(part).__name__ == name for part in model.modules()) == 1
    how = f"model.leaves: [{name}]" if is_alone else "name the class of a module around it in model.leaves"
    return f"run it as one layer in mode single or dp ({how})"


def _like(parameter: nn.Parameter) -> nn.Parameter:
    """Return a copy of a parameter, with its attributes."""
    other = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    vars(other).update(vars(parameter))
    return other


def _check_buffers(graph: LayerGraph, changed: Collection[str]) -> None:
    """Refuse buffers that change though no layer is known to change them, as by `F.batch_norm` with own statistics."""
    known = {id(attribute(graph.root, name)) for layer in graph.layers for name in layer.buffers}
    for name, buffer in graph.model.named_buffers():
        if f"buffer {name}" in changed and id(buffer) not in known:
            raise GraphError(
                f"model {type(graph.model).__name__} can't be cut: a function changes its buffer {name}, which "
                "torch.fx doesn't record; name the module that has it in model.leaves to make it one layer"
            )


class _Apart(fx.Interpreter):
    """Runs a graph as if it were cut everywhere: only readers of an in-place layer's output see what it overwrites.

    Buffers stay shared, since layers that read a buffer are in the stage of the layer that changes it. With `weights`,
    modules are copies that have them in place of the parameters.
    """

    def __init__(self, graph: LayerGraph, weights: _Weights) -> None:
        super().__init__(graph.root, graph=graph.graph)
        self._graph, self._weights = graph, weights
        self._copies: dict[int, Any] = {id(buffer): buffer for buffer in graph.model.buffers()}  # deepcopy's memo

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module or, with weights, a copy that has them."""
        module = self.module.get_submodule(target)
        if not self._weights:
            return module(*args, **kwargs)
        made = copied(module, self._copies)
        for own, new in zip(module.modules(), made.modules(), strict=True):
            for name, parameter in own._parameters.items():
                if parameter is not None:
                    new._parameters[name] = self._weights[id(parameter)]
        output = made(*args, **kwargs)
        for own, new in zip(module.modules(), made.modules(), strict=True):
            own._buffers.update(new._buffers)  # a forward may assign another tensor to a buffer
            self._copies |= {id(buffer): buffer for buffer in new._buffers.values()}
        return output

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a tensor of the model or its replacement."""
        found = super().get_attr(target, args, kwargs)
        return self._weights.get(id(found), found)

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
    """Return whether a layer overwrites a value that isn't a buffer."""
    changed, is_given = overwritten(graph.root, node), bool(node.args) and isinstance(node.args[0], fx.Node)
    return is_given and changed is not None and changed.op != "get_attr"


@contextmanager
def _as_it_was(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Seed all generators within the context; undo afterwards what a forward does to them and to the model."""
    modes = [(module, module.training) for module in model.modules()]
    tables = [(module, dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    forget_states(model)
    model.train(training)
    try:
        with seeded(0), torch.set_grad_enabled(training):
            yield
    finally:
        model.train(modes[0][1])  # a method of its own may undo what it did
        for module, mode in modes:
            module.training = mode
        for module, table in tables:  # a forward may have assigned another tensor
            module._buffers.update(table)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        forget_states(model)


def _left_behind(model: nn.Module, output: Any, loss: Callable[[], torch.Tensor] | None, weights: _Weights) -> _Found:
    """Return a forward's outputs and buffers, and the gradients of a loss, of `weights` where these are used."""
    found: _Found = {}
    for index, leaf in enumerate(pytree.tree_leaves(plain_output(output))):
        if isinstance(leaf, torch.Tensor):
            found[f"output {index}"] = leaf.detach()
    found |= {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}
    value = loss() if loss is not None else None
    if value is not None and value.requires_grad:
        named = {name: weights.get(id(p), p) for name, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        pairs = zip(named, gradients, strict=True)
        found |= {f"{_GRADIENT}{name}": gradient for name, gradient in pairs if gradient is not None}
    return found


def _first_difference(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first result that differs or that only one of the two has; None if all agree."""
    common = expected.keys() & found.keys()
    # Nearly all are equal bit by bit, which is found far sooner than how large the differences may be.
    unequal = [name for name in {**expected, **found} if name not in common or not _same(expected[name], found[name])]
    if not unequal:
        return None
    gradients = [_largest(tensor) for name, tensor in expected.items() if name.startswith(_GRADIENT)]
    least = _NOISE * max(gradients, default=0.0)
    for name in unequal:
        at_least = least if name.startswith(_GRADIENT) else 0.0
        if name not in common or not _close(expected[name], found[name], at_least):
            return name
    return None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors have the same type, shape and values, none of them NaN."""
    return one.dtype == other.dtype and torch.equal(one, other)


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors differ at all; NaN is taken to equal NaN."""
    return bool(((one != other) & ((one == one) | (other == other))).any())


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude in a tensor; 0 if it has none."""
    finite = tensor[tensor.isfinite()]
    return float(finite.double().abs().max()) if finite.numel() else 0.0


def _close(expected: torch.Tensor, found: torch.Tensor, at_least: float) -> bool:
    """Return whether tensors agree up to a share of the largest magnitude in `expected`, or of `at_least` if larger."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, found)
    share = _TOLERANCES.get(expected.dtype, _LOW_PRECISION)
    scale = max(at_least, _largest(expected))
    return torch.allclose(found.double(), expected.double(), rtol=share, atol=share * scale, equal_nan=True)
