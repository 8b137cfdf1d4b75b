"""Folding: replaces each run of consecutive layers with one memory policy by a module.

The module runs the layers, and applies the policy to what they save between forward and backward. The arithmetic and
its order don't change.
"""

import operator
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from pipebench.model.graph import cloned
from pipebench.model.tracing import TracedModule

POLICY = "pipebench_policy"  # key of a node's `meta`: the memory policy of its layer

M = TypeVar("M", bound=nn.Module)


class FoldedRun(nn.Module):
    """Runs layers whose modules and parameters remain the stage's, under the stage's names; it has none of its own.

    A run includes the nodes that seed its layers' draws, so that it draws the same numbers whenever it runs.
    """

    def __init__(self, run: fx.GraphModule) -> None:
        super().__init__()
        self._run = (run,)  # in a tuple, so that nn.Module doesn't register it as a submodule

    @property
    def run(self) -> fx.GraphModule:
        """The layers."""
        return self._run[0]


def fold(
    module: fx.GraphModule, policy: str, make: Callable[[fx.GraphModule], M], copied: Container[fx.Node] = ()
) -> tuple[M, ...]:
    """Replace every run of nodes that have a policy by a module; return these modules in order.

    Args:
        module: the stage's module, which is changed.
        policy: of the nodes to fold.
        make: makes a run's module, given the run as a module.
        copied: nodes of whose values the runs read clones.
    """
    runs = _runs(module.graph, policy)
    found = tuple(_folded(module, nodes, f"pipebench_{policy}_{i}", make, copied) for i, nodes in enumerate(runs))
    if found:
        module.recompile()
    return found


def _runs(graph: fx.Graph, policy: str) -> list[list[fx.Node]]:
    """Return the runs of consecutive nodes with a policy; placeholders and attributes in between don't end a run."""
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
    """Move a run of nodes out of a module's graph into a submodule `name`, which is called in their place."""
    inside, run = set(nodes), fx.Graph()
    read = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
    returned = [node for node in nodes if any(user not in inside for user in node.users)]
    env = {node: run.placeholder(node.name) for node in read}
    for node in nodes:
        env[node] = run.node_copy(node, env.__getitem__)
    run.output(tuple(env[node] for node in returned))
    folded = make(TracedModule(module, run))
    module.add_module(name, folded)
    with module.graph.inserting_after(nodes[-1]):
        call = module.graph.call_module(name, tuple(read))
    with module.graph.inserting_before(call):
        call.args = tuple(module.graph.call_function(cloned, (node,)) if node in copied else node for node in read)
    last = call
    for index, node in enumerate(returned):
        with module.graph.inserting_after(last):
            last = module.graph.call_function(operator.getitem, (call, index))
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        module.graph.erase_node(node)
    return folded


class Swapped(FoldedRun):
    """Runs layers whose saved tensors its hooks store, on the host between forward and backward.

    Paper: vDNN (Rhu et al., MICRO'16); vPipe's virtualised tensors (TPDS'21).
    """

    def __init__(self, run: fx.GraphModule) -> None:
        super().__init__(run)
        self.hooks: saved_tensors_hooks | None = None  # the running unit's; None: autograd stores tensors as usual

    def forward(self, *values: Any) -> Any:
        """Return the values that later layers read, as a tuple."""
        if self.hooks is None or not torch.is_grad_enabled():
            return self.run(*values)
        with self.hooks:
            return self.run(*values)
