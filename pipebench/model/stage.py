"""Stages: consecutive layers of the graph as a module of their own, cut anywhere."""

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx, nn

from pipebench.model.cells import idle_tensors
from pipebench.model.evaluation import plan_evaluation
from pipebench.model.folding import POLICY, fold
from pipebench.model.graph import Layer, LayerGraph, Rounding, carries_state, is_inplace, overwritten_buffer
from pipebench.model.plan import Plan
from pipebench.model.recompute import Recomputed
from pipebench.model.sampling import mix, name_hash, seed_default_generator
from pipebench.model.swap import Swapped
from pipebench.model.tracing import set_item, with_item
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP

LossFunction = Callable[[Any], torch.Tensor]

_SEEDER, _LOSS = "pipebench_seeder", "pipebench_loss"  # names that no model has

# Nodes that hand on (a view of) their input: an in-place layer after them overwrites the stage's own input.
_VIEWS = {
    *("flatten", "view", "view_as", "reshape", "transpose", "permute", "squeeze", "unsqueeze", "t", "expand", "chunk"),
    *("split", "unbind", "narrow", "select", "getitem", "contiguous", "Flatten", "Unflatten", "Identity"),
    *(module.__name__ for module in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)),
}


class Seeder(nn.Module):
    """Seeds the generator that a layer draws from, right before it draws.

    Attributes:
        seed: the run's.
        draw: what is drawn for: (minibatch, microbatch).
        device: where layers draw.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0
        self.draw: tuple[int, ...] = ()
        self.device = torch.device("cpu")
        self._keys: dict[str, int] = {}

    def forward(self, name: str) -> None:
        """Seed for the layer that draws under a name: no engine, plan or order of work changes what it draws."""
        if name not in self._keys:
            self._keys[name] = mix(self.seed, name_hash(name))
        seed_default_generator(self.device, mix(self._keys[name], *self.draw))


class LossHead(nn.Module):
    """Stands behind the model's last layer, so that what is recomputed can take the loss in.

    Attributes:
        function: maps the model's output to the loss; None hands the output on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.function: LossFunction | None = None

    def forward(self, output: Any) -> Any:
        """Return the loss."""
        return output if self.function is None else self.function(output)


@dataclass(frozen=True)
class Stage:
    """One stage, ready to run, as it trains or as it evaluates.

    Attributes:
        index: position in the pipeline.
        module: takes the model inputs named by `inputs`, then the values named by `receives`; returns the values
            named by `returns` and then, in the last stage, the model's output, or what the loss head makes of it.
        inputs: model inputs it reads.
        receives: source stage to the layers whose values it receives from there; sources ascending.
        sends: target stage to the layers whose values it sends there; targets ascending.
        returns: layers whose values leave the stage, ascending.
        is_last: whether the model's output (and so the loss) is computed here.
        random: names under which its layers draw random numbers.
        stateful: qualified names of the modules that carry something from one minibatch to the next.
        seeder: what they draw derives from.
        loss: the loss head, at the end of the last stage as it trains.
        recomputed: the runs of layers that its backward computes again.
        swapped: the runs of layers of which the host keeps what they save for the backward.
        modes: whether each module that it has is in training mode.
        rounding: what of it is rounded for the arithmetic; that is left to who runs it. None: nothing.
        evaluation: the same stage as it evaluates, made of the same modules; None if this is that. Its layers are
            those of the evaluation's graph.
        idle: copies of the parameters and buffers of its layers that are left out for now, by qualified name.
    """

    index: int
    module: fx.GraphModule
    inputs: tuple[str, ...]
    receives: dict[int, tuple[int, ...]]
    sends: dict[int, tuple[int, ...]]
    returns: tuple[int, ...]
    is_last: bool
    random: tuple[str, ...]
    stateful: tuple[str, ...]
    seeder: Seeder
    loss: LossHead
    recomputed: tuple[Recomputed, ...]
    swapped: tuple[Swapped, ...]
    modes: tuple[tuple[nn.Module, bool], ...]
    rounding: Rounding | None = None
    evaluation: "Stage | None" = None
    idle: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """Layers whose values it receives, in the order in which its module takes them."""
        return tuple(layer for layers in self.receives.values() for layer in layers)

    @property
    def evaluated(self) -> "Stage":
        """The same stage as it evaluates."""
        return self if self.evaluation is None else self.evaluation

    def enter(self) -> None:
        """Put the modules into the mode in which they train, or evaluate."""
        for module, training in self.modes:
            module.training = training


def cut_stage(graph: LayerGraph, plan: Plan, index: int) -> Stage:
    """Cut one stage out of the graph. Its modules, parameters and buffers are copies under the model's own names.

    Layers that are idle have no part in it but what they hold.
    """
    cut = partial(_cut, index, is_last=index == len(plan.stages) - 1, seeder=Seeder(), copies={})
    evaluated = plan_evaluation(graph, plan)
    there = [i for i in evaluated.layers[index] if not graph.evaluated.layers[i].idle]
    evaluation = cut(graph.evaluated, there, evaluated.crossings, memory=None)
    own = plan.stages[index]
    policies = {
        i: policy for i, policy in zip(range(own.start, own.stop), own.memory, strict=True) if not graph.layers[i].idle
    }
    trains = cut(graph, [*policies], plan.crossings, memory=[*policies.values()])
    return replace(trains, idle=idle_tensors(graph, own.start, own.stop), evaluation=evaluation)


def _cut(
    index: int,
    graph: LayerGraph,
    indices: Sequence[int],
    crossings: Mapping[tuple[int, int], tuple[int, ...]],
    *,
    memory: Sequence[str] | None,
    is_last: bool,
    seeder: Seeder,
    copies: dict[int, Any],
) -> Stage:
    """Cut layers out of a graph.

    Args:
        index: which stage they are.
        graph: the model's, as it trains or as it evaluates.
        indices: the layers.
        crossings: see `Plan`.
        memory: policy of each of the layers; None in evaluation, which has no backward.
        is_last: whether the model ends here.
        seeder: of both forms of the stage.
        copies: notes what has been copied: both forms have the same modules.
    """
    layers = [graph.layers[i] for i in indices]
    receives = {source: values for (source, target), values in crossings.items() if target == index}
    sends = {target: values for (source, target), values in crossings.items() if source == index}
    returns = tuple(sorted({value for values in sends.values() for value in values}))
    inputs = _inputs_read(graph, layers, is_last)
    loss = LossHead()
    new = _program(graph, layers, inputs, receives, returns, is_last, memory)
    graph.root.add_module(_SEEDER, seeder)
    graph.root.add_module(_LOSS, loss)
    module = copy.deepcopy(fx.GraphModule(graph.root, new), copies)
    delattr(graph.root, _SEEDER)
    delattr(graph.root, _LOSS)
    recomputed = fold(module, RECOMPUTE, Recomputed, copied=_written(module))
    for part in (module, *(each.run for each in recomputed)):
        _switch_inplace_off_where_inputs_are_kept(part)
    swapped = fold(module, SWAP, Swapped)  # last: what is in place stays so
    return Stage(
        index,
        module,
        inputs,
        receives,
        sends,
        returns,
        is_last,
        random=tuple(layer.draws_as for layer in layers if layer.draws_as),
        stateful=_stateful(module, layers),
        seeder=copies.get(id(seeder), seeder),
        loss=copies.get(id(loss), loss),
        recomputed=recomputed,
        swapped=swapped,
        modes=tuple((part, name in graph.training) for name, part in module.named_modules(remove_duplicate=False)),
        rounding=graph.rounding,
    )


def _program(
    graph: LayerGraph,
    layers: Sequence[Layer],
    inputs: Sequence[str],
    receives: Mapping[int, tuple[int, ...]],
    returns: Sequence[int],
    is_last: bool,
    memory: Sequence[str] | None,
) -> fx.Graph:
    """Return the graph of a stage: its layers, the seeding before those that draw, the loss after the last in training.

    Nodes know their layer's policy; layers that change a buffer aren't recomputed: they run once.
    """
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    placeholders = {node.name: node for node in graph.graph.find_nodes(op="placeholder")}
    for name in inputs:
        env[placeholders[name]] = new.placeholder(f"input_{name}")
    for values in receives.values():
        for value in values:
            env.setdefault(graph.layers[value].node, new.placeholder(f"value_{graph.layers[value].name}"))

    def take(node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in env:
            env[node] = new.get_attr(str(node.target))
        return env[node]

    mark = {POLICY: KEEP}
    for layer, policy in zip(layers, memory or [KEEP] * len(layers), strict=True):
        for argument in layer.node.all_input_nodes:
            take(argument)  # attributes are copied before the node that reads them
        runs_once = policy == RECOMPUTE and overwritten_buffer(graph.root, layer.node)
        mark = {POLICY: KEEP if runs_once else policy}
        if layer.draws_as:
            new.call_module(_SEEDER, (layer.draws_as,)).meta.update(mark)
        env[layer.node] = new.node_copy(layer.node, take)
        env[layer.node].meta.update(mark)
    result: list[Any] = []
    for layer in (graph.layers[value] for value in returns):
        leaves = take(layer.node)
        if overwritten_buffer(graph.root, layer.node):  # it will be changed again while this is on its way
            leaves = new.call_method("clone", (leaves,))
        result.append(leaves)
    if is_last:
        (output,) = graph.graph.find_nodes(op="output")
        result.append(fx.node.map_arg(output.args[0], take))
        if memory is not None:
            result[-1] = new.call_module(_LOSS, (result[-1],))
            result[-1].meta.update(mark)
    new.output(tuple(result))
    return new


def _stateful(module: nn.Module, layers: Sequence[Layer]) -> tuple[str, ...]:
    called = [str(layer.node.target) for layer in layers if layer.node.op == "call_module"]
    return tuple(
        f"{path}.{inner}" if inner else path
        for path in dict.fromkeys(called)
        for inner, part in module.get_submodule(path).named_modules()
        if carries_state(part)
    )


def _inputs_read(graph: LayerGraph, layers: Sequence[Layer], is_last: bool) -> tuple[str, ...]:
    read = {name for layer in layers for name in layer.inputs}
    if is_last:
        (output,) = graph.graph.find_nodes(op="output")
        read |= {node.name for node in output.all_input_nodes if node.op == "placeholder"}
    return tuple(name for name in graph.inputs if name in read)


def _switch_inplace_off_where_inputs_are_kept(module: fx.GraphModule) -> None:
    """Let layers that would overwrite an input of the stage, or of layers that are recomputed, compute out of place.

    Autograd refuses to overwrite a leaf, and the sender, a recomputation or the dataset may still need it.
    """
    kept = {node for node in module.graph.nodes if node.op == "placeholder"}
    for node in module.graph.nodes:
        if _is_recomputed(module, node):
            kept.update(*(_handed_on(module, argument) for argument in node.all_input_nodes))
    for node in list(module.graph.nodes):
        if is_inplace(module, node) and node.args and kept & _handed_on(module, node.args[0]):
            _out_of_place(module, node)
    module.recompile()


def _written(module: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that hand out buffers which a layer changes, now or for the next minibatch."""
    handed_on = {node: _handed_on(module, node) for node in module.graph.nodes}
    names = {n.target for node in handed_on if is_inplace(module, node) for n in handed_on[node] if n.op == "get_attr"}
    return {node for node, own in handed_on.items() if any(n.op == "get_attr" and n.target in names for n in own)}


def _handed_on(module: fx.GraphModule, node: Any) -> set[fx.Node]:
    """Return the nodes whose memory a node's value may share: itself, and what it hands on (a view of)."""
    found: set[fx.Node] = set()
    while isinstance(node, fx.Node):
        found.add(node)
        name = getattr(node.target, "__name__", str(node.target))
        if node.op == "call_module":
            name = type(module.get_submodule(str(node.target))).__name__
        if _is_recomputed(module, node):
            return found.union(*(_handed_on(module, argument) for argument in node.all_input_nodes))
        if node.op in ("placeholder", "get_attr") or not (name in _VIEWS or is_inplace(module, node)) or not node.args:
            return found
        node = node.args[0]
    return found


def _is_recomputed(module: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), Recomputed)


def _out_of_place(module: fx.GraphModule, node: fx.Node) -> None:
    """Let a layer leave its input as it is: by its own form for that, or by working on a copy where it has none."""
    name = str(getattr(node.target, "__name__", node.target))
    if node.op == "call_module":
        module.get_submodule(str(node.target)).inplace = False  # type: ignore[assignment]
    elif node.op == "call_method" and hasattr(torch.Tensor, name.rstrip("_")):
        node.target = name.rstrip("_")
    elif node.target is set_item:
        node.target = with_item
    elif "inplace" in node.kwargs:
        node.kwargs = {**node.kwargs, "inplace": False}
    elif hasattr(operator, name):
        node.target = getattr(operator, name[1:])
    elif node.op == "call_function" and hasattr(torch, name.rstrip("_")):
        node.target = getattr(torch, name.rstrip("_"))
    else:  # random numbers into a tensor that is there, say
        with node.graph.inserting_before(node):
            copied = node.graph.call_method("clone", (node.args[0],))
        node.args = (copied, *node.args[1:])
