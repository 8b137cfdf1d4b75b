"""Stages: consecutive layers of the graph as a module of their own, cut anywhere."""

import copy
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from pipebench.graph import LayerGraph, carries_state, is_inplace, is_random
from pipebench.plan import Plan

# Nodes that hand on (a view of) their input: an in-place layer after them overwrites the stage's own input.
_VIEWS = {
    *("flatten", "view", "view_as", "reshape", "transpose", "permute", "squeeze", "unsqueeze", "t", "expand", "chunk"),
    *("split", "unbind", "narrow", "select", "getitem", "contiguous", "Flatten", "Unflatten", "Identity"),
    *(module.__name__ for module in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)),
}


@dataclass(frozen=True)
class Stage:
    """One stage, ready to run.

    Attributes:
        index: position in the pipeline.
        module: takes the model inputs named by `inputs`, then the values named by `receives`; returns the values
            named by `returns` and then, in the last stage, the model's output.
        inputs: model inputs it reads.
        receives: source stage to the layers whose values it receives from there; sources ascending.
        sends: target stage to the layers whose values it sends there; targets ascending.
        returns: layers whose values leave the stage, ascending.
        is_last: whether the model's output (and so the loss) is computed here.
        random: qualified names of the modules that draw random numbers.
        stateful: qualified names of the modules that carry something from one minibatch to the next.
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


def cut_stage(graph: LayerGraph, plan: Plan, index: int) -> Stage:
    """Cut one stage out of the graph. Its modules, parameters and buffers are copies under the model's own names."""
    stage = plan.stages[index]
    layers = graph.layers[stage.start : stage.stop]
    receives = {source: values for (source, target), values in plan.crossings.items() if target == index}
    sends = {target: values for (source, target), values in plan.crossings.items() if source == index}
    is_last = stage.stop == len(graph.layers)
    returns = tuple(sorted({value for values in sends.values() for value in values}))
    inputs = _inputs_read(graph, stage.start, stage.stop, is_last)

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

    for layer in layers:
        for argument in layer.node.all_input_nodes:
            take(argument)  # attributes are copied before the node that reads them
        env[layer.node] = new.node_copy(layer.node, take)
    result: list[Any] = [take(graph.layers[value].node) for value in returns]
    if is_last:
        (output,) = graph.graph.find_nodes(op="output")
        result.append(fx.node.map_arg(output.args[0], take))
    new.output(tuple(result))
    module = copy.deepcopy(fx.GraphModule(graph.root, new))
    _switch_inplace_off_at_heads(module)
    called = [str(layer.node.target) for layer in layers if layer.node.op == "call_module"]
    random = tuple(path for path in called if is_random(module.get_submodule(path)))
    stateful = tuple(
        f"{path}.{inner}" if inner else path
        for path in dict.fromkeys(called)
        for inner, part in module.get_submodule(path).named_modules()
        if carries_state(part)
    )
    return Stage(index, module, inputs, receives, sends, returns, is_last, random, stateful)


def _inputs_read(graph: LayerGraph, start: int, stop: int, is_last: bool) -> tuple[str, ...]:
    read = {name for layer in graph.layers[start:stop] for name in layer.inputs}
    if is_last:
        (output,) = graph.graph.find_nodes(op="output")
        read |= {node.name for node in output.all_input_nodes if node.op == "placeholder"}
    return tuple(name for name in graph.inputs if name in read)


def _switch_inplace_off_at_heads(module: fx.GraphModule) -> None:
    """Let layers that would overwrite a stage's input compute out of place.

    Autograd refuses to overwrite a leaf (P28), and the sender, a recomputation or the dataset may still need it.
    """
    for node in module.graph.nodes:
        if is_inplace(module, node) and node.args and _is_stage_input(node.args[0]):
            _out_of_place(module, node)
    module.recompile()


def _is_stage_input(node: Any) -> bool:
    while isinstance(node, fx.Node) and node.op != "placeholder":
        name = getattr(node.target, "__name__", str(node.target))
        if node.op == "call_module":
            name = type(node.graph.owning_module.get_submodule(str(node.target))).__name__  # type: ignore[union-attr]
        if name not in _VIEWS or not node.args:
            return False
        node = node.args[0]
    return isinstance(node, fx.Node)


def _out_of_place(module: fx.GraphModule, node: fx.Node) -> None:
    if node.op == "call_module":
        module.get_submodule(str(node.target)).inplace = False  # type: ignore[assignment]
    elif node.op == "call_method":
        node.target = str(node.target).rstrip("_")
    elif "inplace" in node.kwargs:
        node.kwargs = {**node.kwargs, "inplace": False}
    else:
        name = str(getattr(node.target, "__name__", ""))
        node.target = getattr(operator, name[1:]) if hasattr(operator, name) else getattr(torch, name.rstrip("_"))
