"""Folding: each run of consecutive layers with one memory policy becomes a module called in their place.

Between forward and backward that module applies the policy to what its layers save; the arithmetic and its order don't
change.
"""

import operator
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from pipebench.model.graph import cloned
from pipebench.model.tracing import TracedModule

POLICY = "pipebench_policy"  # key of a node's meta data: the memory policy of its layer

M = TypeVar("M", bound=nn.Module)


class FoldedRun(nn.Module):
    """Holds a run of layers, which stay the stage's own: it has no parameters, and no names of them.

    Each layer that draws is seeded by the node before it.
    """

    def __init__(self, run: fx.GraphModule) -> None:
        super().__init__()
        self._run = (run,)  # a tuple hides it from nn.Module

    @property
    def run(self) -> fx.GraphModule:
        """The layers."""
        return self._run[0]


def fold(
    module: fx.GraphModule, policy: str, make: Callable[[fx.GraphModule], M], copied: Container[fx.Node] = ()
) -> tuple[M, ...]:
    """Make every run of a policy's nodes in a stage's module a module of its own; return those modules in order.

    `make` makes a run's module. It gets clones of the values of nodes in `copied`.
    """
    runs = _runs(module.graph, policy)
    found = tuple(_folded(module, nodes, f"pipebench_{policy}_{i}", make, copied) for i, nodes in enumerate(runs))
    if found:
        module.recompile()
    return found


def _runs(graph: fx.Graph, policy: str) -> list[list[fx.Node]]:
    """Return runs of consecutive nodes of a policy; placeholders and attributes in between don't end a run."""
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
    """Move a run out of a module's graph into a module `name`, and call that in its place."""
    inside, run = set(nodes), fx.Graph()
    read = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
    left = [node for node in nodes if any(user not in inside for user in node.users)]
    env = {node: run.placeholder(node.name) for node in read}
    for node in nodes:
        env[node] = run.node_copy(node, env.__getitem__)
    run.output(tuple(env[node] for node in left))
    folded = make(TracedModule(module, run))
    module.add_module(name, folded)
    with module.graph.inserting_after(nodes[-1]):
        call = module.graph.call_module(name, tuple(read))
    with module.graph.inserting_before(call):
        call.args = tuple(module.graph.call_function(cloned, (node,)) if node in copied else node for node in read)
    last = call
    for index, node in enumerate(left):
        with module.graph.inserting_after(last):
            last = module.graph.call_function(operator.getitem, (call, index))
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        module.graph.erase_node(node)
    return folded


class Keeper(Protocol):
    """Stores what the layers of one unit save for their backward."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take a tensor that autograd saves; return what replaces it in the graph."""

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return that tensor for its backward."""


class Swapped(FoldedRun):
    """Runs layers whose saved tensors its keeper stores: they move to the host between forward and backward.

    The idea is that of vDNN (Rhu et al., MICRO'16), and vPipe's virtualised tensors (TPDS'21).
    """

    def __init__(self, run: fx.GraphModule) -> None:
        super().__init__(run)
        self.keeper: Keeper | None = None  # of the running unit; None leaves saved tensors to autograd

    def forward(self, *values: Any) -> Any:
        """Return the values that later layers read, as a tuple."""
        if self.keeper is None or not torch.is_grad_enabled():
            return self.run(*values)
        with saved_tensors_hooks(self.keeper.pack, self.keeper.unpack):
            return self.run(*values)
