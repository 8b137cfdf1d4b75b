"""Stages: consecutive layers of the graph, cut out anywhere, as a module of their own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from pipebench.model.copies import copied
from pipebench.model.evaluation import plan_evaluation
from pipebench.model.folding import POLICY, Swapped, fold
from pipebench.model.graph import Layer, LayerGraph, Rounding, attribute, cloned, stateful_modules, tensors_read
from pipebench.model.in_place import is_inplace, may_share_memory
from pipebench.model.plan import Plan
from pipebench.model.recompute import Recomputed
from pipebench.model.sampling import mix, name_hash, seed_default_generator
from pipebench.model.traced_values import set_item, with_item
from pipebench.model.tracing import TracedModule
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP

LossFunction = Callable[[Any], torch.Tensor]

_SEEDER, _LOSS = "pipebench_seeder", "pipebench_loss"  # names of modules in a stage, which no model uses


class Seeder(nn.Module):
    """Seeds the generator right before a layer draws from it."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0  # the run's
        self.draw: tuple[int, ...] = ()  # (minibatch, microbatch)
        self.device = torch.device("cpu")
        self._keys: dict[str, int] = {}

    def forward(self, name: str) -> None:
        """Seed the generator for the layer that draws under a name."""
        if name not in self._keys:
            self._keys[name] = mix(self.seed, name_hash(name))
        seed_default_generator(self.device, mix(self._keys[name], *self.draw))


class LossHead(nn.Module):
    """Computes the loss inside the last stage's module, so that recomputed layers at the end can include it."""

    def __init__(self) -> None:
        super().__init__()
        self.function: LossFunction | None = None  # takes the model's output; None: the output itself is returned

    def forward(self, output: Any) -> Any:
        """Return the loss, or without a function the output."""
        return output if self.function is None else self.function(output)


@dataclass(frozen=True)
class Stage:
    """One stage, ready to run, in training or in evaluation mode."""

    index: int  # its number in the pipeline
    # Takes the model inputs in `inputs` and the values of `receives`; returns the values of `returns` and, in the last
    # stage, the loss head's output
    module: TracedModule
    inputs: tuple[str, ...]
    receives: dict[int, tuple[int, ...]]  # source stage to the layers whose values it receives, sources ascending
    sends: dict[int, tuple[int, ...]]  # target stage to the layers whose values it sends, targets ascending
    returns: tuple[int, ...]  # layers whose values leave the stage, ascending
    is_last: bool  # whether it computes the model's output, and so the loss
    random: tuple[str, ...]  # names under which its layers draw random numbers
    stateful: tuple[str, ...]  # qualified names of the modules that carry a state from one minibatch to the next
    seeder: Seeder
    loss: LossHead
    recomputed: tuple[Recomputed, ...]  # the runs of layers that its backward computes again
    swapped: tuple[Swapped, ...]  # the runs of layers whose saved tensors are swapped to the host
    modes: tuple[tuple[nn.Module, bool], ...]  # each of its modules, and whether it is in training mode
    rounding: Rounding | None = None  # what the caller has to round, see `precision.lower`
    evaluation: "Stage | None" = None  # in evaluation mode: the same modules, layers of the evaluation's graph
    idle: Mapping[str, torch.Tensor] = field(default_factory=dict)  # qualified name to tensor of idle layers

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """The layers whose values it receives, in the order of its module's arguments."""
        return tuple(layer for layers in self.receives.values() for layer in layers)

    @property
    def evaluated(self) -> "Stage":
        """The same stage in evaluation mode."""
        return self if self.evaluation is None else self.evaluation

    def evaluation_on(self, device: torch.device) -> "Stage":
        """Return the stage in evaluation mode, on a device, with the parameters and buffers that training has now."""
        evaluation = self.evaluated
        evaluation.module.to(device)
        held = {**dict(self.module.named_parameters(remove_duplicate=False)), **_buffers(self.module)}
        for name in (*dict(evaluation.module.named_parameters(remove_duplicate=False)), *_buffers(evaluation.module)):
            if name in held:
                path, _, key = name.rpartition(".")
                part = evaluation.module.get_submodule(path)
                table: dict[str, Any] = part._parameters if key in part._parameters else part._buffers
                table[key] = held[name]
        return evaluation

    def enter(self) -> None:
        """Put the modules into training or evaluation mode, as `modes` says."""
        for module, training in self.modes:
            module.training = training


def cut_stage(graph: LayerGraph, plan: Plan, index: int) -> Stage:
    """Cut one stage out of the graph. Its modules, parameters and buffers are copies under the model's own names.

    Of idle layers the stage has only the tensors.
    """
    own, is_last = plan.stages[index], index == len(plan.stages) - 1
    seeder = Seeder()
    copies: dict[int, Any] = {}  # parts of the model that both forms of the stage share, by id
    evaluated = plan_evaluation(graph, plan)
    found = _active(graph.evaluated.layers[i] for i in evaluated.layers[index])
    evaluation = _StageLayers(index, graph.evaluated, found, None, evaluated.crossings, is_last).stage(seeder, copies)
    found = _active(graph.layers[own.start : own.stop])
    memory = dict(enumerate(own.memory, own.start))
    training = _StageLayers(index, graph, found, memory, plan.crossings, is_last).stage(seeder, copies)
    return replace(training, idle=idle_tensors(graph, own.start, own.stop), evaluation=evaluation)


def _active(layers: Iterable[Layer]) -> list[Layer]:
    return [layer for layer in layers if not layer.idle]


@dataclass(frozen=True)
class _StageLayers:
    """The layers of a stage in one mode, training or evaluation, and the values that cross its borders."""

    index: int
    graph: LayerGraph  # the model's, in that mode
    layers: Sequence[Layer]  # without idle ones
    memory: Mapping[int, str] | None  # layer to its policy; None in evaluation, which has no backward
    crossings: Mapping[tuple[int, int], tuple[int, ...]]  # see `Plan`
    is_last: bool  # whether the model ends here

    def stage(self, seeder: Seeder, copies: dict[int, Any]) -> Stage:
        """Return the stage; `copies` is deepcopy's memo, by which both modes share modules."""
        receives = {source: values for (source, target), values in self.crossings.items() if target == self.index}
        sends = {target: values for (source, target), values in self.crossings.items() if source == self.index}
        returns = tuple(sorted({value for values in sends.values() for value in values}))
        inputs, loss = self._inputs(), LossHead()
        new = self._program(inputs, [value for values in receives.values() for value in values], returns)
        parts: dict[str, Any] = {_SEEDER: seeder, _LOSS: loss}
        for name in (str(node.target) for node in new.nodes if node.op in ("get_attr", "call_module")):
            if name not in parts:
                parts[name] = copied(attribute(self.graph.root, name), copies)
        module = TracedModule(parts, new)
        recomputed = fold(module, RECOMPUTE, Recomputed, copied=_written(module))
        for part in (module, *(each.run for each in recomputed)):
            _switch_inplace_off_where_inputs_are_saved(part)
        swapped = fold(module, SWAP, Swapped)  # after the switch: in-place layers in swapped runs may stay in place
        for each in module.modules():
            if isinstance(each, fx.GraphModule):
                # Break the cycle of module and graph, so that weights are freed at once.
                each.graph.owning_module = None
        named = module.named_modules(remove_duplicate=False)
        return Stage(
            self.index,
            module,
            inputs,
            receives,
            sends,
            returns,
            self.is_last,
            random=tuple(layer.draws_as for layer in self.layers if layer.draws_as),
            stateful=stateful_modules(module, self.layers),
            seeder=seeder,
            loss=loss,
            recomputed=recomputed,
            swapped=swapped,
            modes=tuple((part, name in self.graph.training) for name, part in named),
            rounding=self.graph.rounding,
        )

    def _program(self, inputs: Sequence[str], receives: Sequence[int], returns: Sequence[int]) -> fx.Graph:
        """Return the stage's graph: its layers, a seeding before each that draws, and the loss at the end of training.

        Nodes have their layer's memory policy in `meta`. Layers that run once are kept instead of recomputed.
        """
        graph, new = self.graph, fx.Graph()
        placeholders = {node.name: node for node in graph.graph.find_nodes(op="placeholder")}
        env = {placeholders[name]: new.placeholder(f"input_{name}") for name in inputs}
        for layer in (graph.layers[value] for value in receives):
            env.setdefault(layer.node, new.placeholder(f"value_{layer.name}"))

        def take(node: fx.Node) -> fx.Node:
            if node.op == "get_attr" and node not in env:
                env[node] = new.get_attr(str(node.target))
            return env[node]

        mark = {POLICY: KEEP}
        for layer in self.layers:
            policy = KEEP if self.memory is None else self.memory[layer.index]
            mark = {POLICY: KEEP if policy == RECOMPUTE and layer.runs_once else policy}
            if layer.draws_as:
                new.call_module(_SEEDER, (layer.draws_as,)).meta.update(mark)
            env[layer.node] = new.node_copy(layer.node, take)
            env[layer.node].meta.update(mark)
        result: list[Any] = []
        for layer in (graph.layers[value] for value in returns):
            value = take(layer.node)
            # What a layer that runs once returns is a buffer, which may change again before it is sent.
            result.append(new.call_function(cloned, (value,)) if layer.runs_once else value)
        if self.is_last:
            result.append(fx.node.map_arg(self._output.args[0], take))
            if self.memory is not None:
                result[-1] = new.call_module(_LOSS, (result[-1],))
                result[-1].meta.update(mark)
        new.output(tuple(result))
        return new

    @property
    def _output(self) -> fx.Node:
        output: fx.Node
        (output,) = self.graph.graph.find_nodes(op="output")
        return output

    def _inputs(self) -> tuple[str, ...]:
        read = {name for layer in self.layers for name in layer.inputs}
        if self.is_last:
            read |= {node.name for node in self._output.all_input_nodes if node.op == "placeholder"}
        return tuple(name for name in self.graph.inputs if name in read)


def _switch_inplace_off_where_inputs_are_saved(module: fx.GraphModule) -> None:
    """Let layers that would overwrite an input of the stage, or of a recomputed run, compute out of place.

    Autograd refuses to overwrite a leaf, and the sender, a recomputation or the data set may still need the value.
    """
    saved = {node for node in module.graph.nodes if node.op == "placeholder"}
    for node in module.graph.nodes:
        if _is_recomputed(module, node):
            saved.update(*(_sharing_memory(module, argument) for argument in node.all_input_nodes))
    has_changed = False
    for node in list(module.graph.nodes):  # in order: the output of a layer that has been changed is a new tensor
        if is_inplace(module, node) and node.args and saved & _sharing_memory(module, node.args[0]):
            _out_of_place(module, node)
            has_changed = True
    if has_changed:
        module.recompile()


def _written(module: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes whose values are, or are views of, buffers that a layer of the stage changes in place."""
    sharing = {node: _sharing_memory(module, node) for node in module.graph.nodes}
    names = {n.target for node in sharing if is_inplace(module, node) for n in sharing[node] if n.op == "get_attr"}
    return {node for node, own in sharing.items() if any(n.op == "get_attr" and n.target in names for n in own)}


def _sharing_memory(module: fx.GraphModule, node: Any) -> set[fx.Node]:
    """Return the nodes whose memory a node's value may share: itself, and those that it is a view of."""
    found: set[fx.Node] = set()
    while isinstance(node, fx.Node):
        found.add(node)
        if _is_recomputed(module, node):
            return found.union(*(_sharing_memory(module, argument) for argument in node.all_input_nodes))
        if not may_share_memory(module, node) or not node.args:
            return found
        node = node.args[0]
    return found


def _is_recomputed(module: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), Recomputed)


def _out_of_place(module: fx.GraphModule, node: fx.Node) -> None:
    """Let an in-place layer compute out of place or, if it has no such form, on a copy."""
    if node.op == "call_module":
        module.get_submodule(str(node.target)).inplace = False  # type: ignore[assignment]
    elif node.target is set_item:
        node.target = with_item
    elif "inplace" in node.kwargs:
        node.kwargs = {**node.kwargs, "inplace": False}
    else:  # an out-of-place form, such as `add` of `add_`, may not exist or may return another type
        with node.graph.inserting_before(node):
            copied = node.graph.call_method("clone", (node.args[0],))
        node.args = (copied, *node.args[1:])


def idle_tensors(graph: LayerGraph, start: int, stop: int) -> dict[str, torch.Tensor]:
    """Return copies of the parameters and buffers that only idle layers of `start` to `stop`, excluded, use."""
    layers = graph.layers[start:stop]
    active = {id(tensor) for layer in layers if not layer.idle for _, tensor in tensors_read(graph.root, layer.node)}
    idle = {name: tensor for layer in layers if layer.idle for name, tensor in tensors_read(graph.root, layer.node)}
    return {name: copied(tensor) for name, tensor in idle.items() if id(tensor) not in active}


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_buffers(remove_duplicate=False))
