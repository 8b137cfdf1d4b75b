"""Tensor slices: which layers of a model are divided among k neighbouring devices, and how.

Paper: Megatron-LM (Shoeybi et al. 2019, section 3; Narayanan et al., SC'21, section 2.3). A matrix divided by columns
returns features, or heads, in pieces. Layers follow that treat each feature or head alone. A matrix divided by rows
reads pieces, and its partial results are summed. `find_slices` looks for such pairs in the traced graph, and only needs
to know types of layers. In addition, the last matrix, before the softmax, is divided by columns and its output
gathered, if it has more outputs than inputs. Embeddings are divided by rows, if they have more rows than features. All
other layers are computed by every device, with the same result.

Differs: every device computes the loss, from gathered logits, so that it may be any function of them.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from pipebench.errors import GraphError

FEATURES, HEADS = "features", "heads"  # kinds of pieces
DIMENSION = {FEATURES: -1, HEADS: 1}  # of the tensor that is divided
# Attribute of a module's class: the kinds of pieces that it reads and returns, None for no pieces (zoo/registry.py).
ROLE = "tensor_role"

# Modules and functions that treat each feature alone, besides modules that have the attribute.
_ALONE: tuple[type[nn.Module], ...] = (
    nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus,
)  # fmt: skip
_ALONE_FUNCTIONS = {
    *(operator.mul, operator.truediv, operator.add, operator.sub, operator.neg),
    *(torch.mul, torch.div, torch.add, torch.relu, torch.tanh, torch.sigmoid),
    *(functional.relu, functional.gelu, functional.silu, functional.tanh, functional.sigmoid, functional.dropout),
}
# Functions that treat each head alone.
_PRODUCTS = {torch.matmul, operator.matmul, torch.bmm, functional.scaled_dot_product_attention}


@dataclass
class Slicing:
    """The nodes of a graph that are divided; those of `columns`, `alone` and `rows` with the kind of their pieces."""

    columns: dict[fx.Node, str] = field(default_factory=dict)  # divided by columns: return pieces
    alone: dict[fx.Node, str] = field(default_factory=dict)  # read and return pieces
    rows: dict[fx.Node, str] = field(default_factory=dict)  # divided by rows: read pieces, return sums
    gathered: list[fx.Node] = field(default_factory=list)  # divided by columns: return gathered pieces
    embeddings: list[fx.Node] = field(default_factory=list)  # divided by rows: return sums

    @property
    def roles(self) -> dict[fx.Node, tuple[str, str]]:
        """The nodes whose matrices are divided, with the field that has them and the kind of their pieces."""
        by_kind = {node: (name, kind) for name in ("columns", "rows") for node, kind in getattr(self, name).items()}
        return by_kind | {node: (name, "") for name in ("gathered", "embeddings") for node in getattr(self, name)}

    @property
    def divided(self) -> dict[fx.Node, int]:
        """The nodes whose matrices are divided, with the divided dimension of the weights."""
        by_columns = dict.fromkeys([*self.columns, *self.gathered, *self.embeddings], 0)
        return by_columns | dict.fromkeys(self.rows, 1)


def find_slices(module: fx.GraphModule, num_slices: int) -> Slicing:
    """Return the nodes of a traced model to divide among so many devices.

    Raises:
        GraphError: no layer can be divided, or a number of features or heads can't.
    """
    pairs = [*_regions(module)]
    taken = {node for region in pairs for node in region.divided}
    ends = [region for region in _ends(module) if taken.isdisjoint(region.divided)]
    regions = _consistent(module, [*pairs, *ends])
    if not regions:
        raise GraphError(
            f"parallelism.tensor: got {num_slices}, and no layer of the model can be sliced: allowed is 1, or a model "
            "with two linear layers and what treats features alone between them, attention by heads, or a vocabulary"
        )
    found = Slicing()
    for region in regions:
        found.columns |= region.columns
        found.alone |= region.alone
        found.rows |= region.rows
        found.gathered += region.gathered
        found.embeddings += region.embeddings
    for node in (each for each in module.graph.nodes if each in found.columns):
        _check_divides(module.get_submodule(str(node.target)), node.name, found.columns[node], num_slices)
    return found


def _regions(module: fx.GraphModule) -> Iterator[Slicing]:
    """Yield regions of layers divided by columns, layers divided by rows and layers in between, in execution order."""
    taken: set[fx.Node] = set()
    for node in module.graph.nodes:
        kind = _role(module, node, 0)
        if kind is None or node in taken:
            continue
        region = _region(module, node, kind, taken)
        if region is not None:
            taken.update(region.columns, region.alone, region.rows)
            yield region


def _region(module: fx.GraphModule, row: fx.Node, kind: str, taken: set[fx.Node]) -> Slicing | None:
    """Return the region of a layer that may be divided by rows; None if not all that it needs can be in pieces.

    The search goes backwards from the layer to layers that can be divided by columns. Every other reader of a value in
    pieces belongs to the region, too, and has to read pieces.
    """
    found = Slicing(rows={row: kind})
    reading = _pieces_of(row)
    seen = {row}
    while reading:
        node = reading.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in taken:
            return None
        if _role(module, node, 1) == kind:
            found.columns[node] = kind
        elif _is_alone(module, node, kind):
            found.alone[node] = kind
            reading += _pieces_of(node) if node.op == "call_module" else node.all_input_nodes
        else:
            return None
        for user in node.users:
            if user in seen or user in reading:
                continue
            if _role(module, user, 0) == kind and user not in taken and _pieces_of(user) == [node]:
                found.rows[user] = kind
                seen.add(user)
            elif _is_alone(module, user, kind):
                reading.append(user)
            else:
                return None
    return found if _reads_what_it_needs(found) else None


def _reads_what_it_needs(region: Slicing) -> bool:
    """Return whether there are columns, which read whole values, and layers in between read pieces only.

    A whole value beside pieces, such as the one output of a gate, would get a part of its gradient on every device.
    """
    pieces = {*region.columns, *region.alone}
    whole = all(pieces.isdisjoint(node.all_input_nodes) for node in region.columns)
    return (
        bool(region.columns) and whole and all(region.rows.keys().isdisjoint(n.all_input_nodes) for n in region.alone)
    )


def _ends(module: fx.GraphModule) -> Iterator[Slicing]:
    """Yield the embeddings with more rows than features, and the last matrices with more outputs than inputs."""
    for node in module.graph.nodes:
        if node.op != "call_module":
            continue
        called = module.get_submodule(str(node.target))
        if type(called) is nn.Embedding and called.num_embeddings > called.embedding_dim and _is_plain_lookup(called):
            yield Slicing(embeddings=[node])
        is_last = [*node.users] == [*module.graph.find_nodes(op="output")]
        is_divided = is_last and isinstance(called, nn.Linear) and _role(module, node, 1) == FEATURES
        if is_divided and called.out_features > called.in_features:  # type: ignore[operator]
            yield Slicing(gathered=[node])


def _consistent(module: fx.GraphModule, regions: Sequence[Slicing]) -> list[Slicing]:
    """Return the regions whose modules and parameters are divided alike wherever the graph uses them.

    A process has only its piece of a divided matrix. So the matrix stays whole if the model also reads it as a tensor,
    as in `linear(x, self.words.weight)`, or calls its module once for the layer after it and once for its output.
    Leaving out a region may make others inconsistent, with which it shares parameters: hence the loop.
    """
    remaining = [*regions]
    while True:
        divided = {node: dimension for region in remaining for node, dimension in region.divided.items()}
        roles = {node: role for region in remaining for node, role in region.roles.items()}
        ways: dict[int, set[Any]] = {}  # by id of a module or parameter
        for node in module.graph.nodes:
            if node.op == "get_attr":
                ways.setdefault(id(operator.attrgetter(str(node.target))(module)), set()).add(None)
            elif node.op == "call_module":
                called = module.get_submodule(str(node.target))
                ways.setdefault(id(called), set()).add(roles.get(node))
                for parameter in called.parameters():
                    ways.setdefault(id(parameter), set()).add(divided.get(node))
        alike = [region for region in remaining if all(len(ways[id(each)]) == 1 for each in _held(module, region))]
        if len(alike) == len(remaining):
            return alike
        remaining = alike


def _is_plain_lookup(embedding: nn.Embedding) -> bool:
    """Return whether a row's vector and gradient depend on no other token: no renormalisation, no token counts."""
    return embedding.max_norm is None and not embedding.scale_grad_by_freq


def _held(module: fx.GraphModule, region: Slicing) -> Iterator[nn.Module | nn.Parameter]:
    """Yield the divided modules of a region, and their parameters."""
    for node in region.divided:
        called = module.get_submodule(str(node.target))
        yield called
        yield from called.parameters()


def _role(module: fx.GraphModule, node: fx.Node, side: int) -> str | None:
    """Return the kind of pieces that a divided matrix reads (side 0) or returns (side 1); None for other layers."""
    if node.op != "call_module" or len(node.all_input_nodes) != 1:
        return None
    called = module.get_submodule(str(node.target))
    if type(called) is nn.Linear:
        return FEATURES
    role = getattr(called, ROLE, None)
    if not isinstance(called, nn.Linear) or role is None:
        return None
    kind: str | None = role[side]
    return kind


def _is_alone(module: fx.GraphModule, node: fx.Node, kind: str) -> bool:
    """Return whether a layer computes each piece of its output from one piece of its input."""
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        if isinstance(called, nn.Softmax):
            return kind == HEADS and called.dim not in (None, 0, DIMENSION[HEADS])
        return type(called) in _ALONE or (
            not isinstance(called, nn.Linear) and getattr(called, ROLE, None) == (kind,) * 2
        )
    if node.op != "call_function":
        return False
    return node.target in _ALONE_FUNCTIONS or (kind == HEADS and node.target in _PRODUCTS)


def _pieces_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a module reads in pieces: its first argument."""
    return [each for each in node.args[:1] if isinstance(each, fx.Node)]


def _check_divides(called: nn.Module, name: str, kind: str, num_slices: int) -> None:
    """Raise a GraphError unless a matrix's features, or heads, divide among the slices."""
    count: Any = called.out_features if kind == FEATURES else getattr(called, "num_heads", None)
    if count is None:
        raise GraphError(
            f"parallelism.tensor: got {num_slices}, and layer {name} puts out heads, whose class has no attribute "
            "num_heads: set it to their number"
        )
    if count % num_slices:
        allowed = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise GraphError(
            f"parallelism.tensor: got {num_slices}, and layer {name} has {count} {kind}, which so many slices don't "
            f"divide: allowed are {allowed[:80]}"
        )
