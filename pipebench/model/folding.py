"""Folding: runs of consecutive layers of one memory policy become modules inside a stage's, called in their place.

Between a forward and its backward such a module does with what its layers save what the policy says; arithmetic, and
the order of it, stay as they were.
"""

import operator
from collections.abc import Callable, Container, Sequence
from typing import TypeVar

from torch import fx, nn

POLICY = "pipebench_policy"  # key of a node's meta data: the memory policy of its layer

M = TypeVar("M", bound=nn.Module)


def fold(
    module: fx.GraphModule, policy: str, make: Callable[[fx.GraphModule], M], copied: Container[fx.Node] = ()
) -> tuple[M, ...]:
    """Make every run of nodes of a policy a module of its own; return those modules in order.

    Args:
        module: of a stage; it is changed.
        policy: the policy.
        make: makes the module of a run.
        copied: nodes of whose values runs are given copies.
    """
    runs = _runs(module.graph, policy)
    found = tuple(_folded(module, nodes, f"pipebench_{policy}_{i}", make, copied) for i, nodes in enumerate(runs))
    module.recompile()
    return found


def _runs(graph: fx.Graph, policy: str) -> list[list[fx.Node]]:
    """Return runs of nodes of a policy that follow each other; attributes read in between don't part them."""
    runs: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node.meta.get(POLICY) == policy:
            runs[-1].append(node)
        elif node.op not in ("get_attr", "placeholder") and runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _folded(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    name: str,
    make: Callable[[fx.GraphModule], M],
    copied: Container[fx.Node],
) -> M:
    """Take a run out of a module's graph and call it there by name instead."""
    inside, run = set(nodes), fx.Graph()
    read = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
    left = [node for node in nodes if any(user not in inside for user in node.users)]
    env = {node: run.placeholder(node.name) for node in read}
    for node in nodes:
        env[node] = run.node_copy(node, env.__getitem__)
    run.output(tuple(env[node] for node in left))
    folded = make(fx.GraphModule(module, run))
    module.add_module(name, folded)
    with module.graph.inserting_after(nodes[-1]):
        call = module.graph.call_module(name, tuple(read))
    with module.graph.inserting_before(call):
        call.args = tuple(module.graph.call_method("clone", (node,)) if node in copied else node for node in read)
    last = call
    for index, node in enumerate(left):
        with module.graph.inserting_after(last):
            last = module.graph.call_function(operator.getitem, (call, index))
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        module.graph.erase_node(node)
    return folded
