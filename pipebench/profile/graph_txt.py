"""The PipeDream artifact's `graph.txt`, read and written: a profile as one line per layer and one line per edge.

    node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0, parameter_size=0.0
    node4 -- Embedding(32320, 1024) -- forward_compute_time=0.073, ..., activation_size=6291456.0, parameter_size=...
    <tab>node1 -- node4

Times are in milliseconds, sizes in bytes. An output of several tensors has a list of sizes, `[6291456.0; 131072.0]`.
The artifact's planner adds ` -- stage_id=N` to a line, which isn't a cost and is ignored.
"""

import heapq
import itertools
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePath

from pipebench.errors import ProfileError
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.saved_tensors import with_saved_bytes
from pipebench.profile.stored import check_profile
from pipebench.typed_json import MAX_BYTES, MAX_SECONDS

UNKNOWN_DEVICE = "not said by the file"
_SEPARATOR = " -- "
_INPUT, _LOSS, _GETITEM = "Input", "loss", "__getitem__"
_COSTS = re.compile(
    r"forward_compute_time=([^,]*), backward_compute_time=([^,]*), activation_size=([^,]*), parameter_size=([^,]*)"
    r"(?:, stage_id=[0-9]+)?"
)
_STAGE = re.compile(r"stage_id=[0-9]+(?:, stage_id=[0-9]+)?")
_NUMBER = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:[eE]([+-]?[0-9]{1,5}))?")
_NODE_FORM = (
    "`node -- description -- forward_compute_time=ms, backward_compute_time=ms, activation_size=bytes, "
    "parameter_size=bytes`"
)


def read_graph_txt(text: str, source: str, num_samples: int = 1) -> Profile:
    """Read a profile in the artifact's format.

    Layers are in topological order, and otherwise in the file's. A node that reads nothing and whose description starts
    with `Input` stands for a model input. The last row is the loss. It is the only sink that is described as `loss`; if
    there is none, or several, a row without cost is added, which reads every sink except inputs and `__getitem__`s (the
    artifact drops unread ones as well).

    Args:
        text: the file's content.
        source: its name, for errors and the profile's note.
        num_samples: the size of the minibatches that were timed, which the file doesn't state.

    Raises:
        ProfileError: the text isn't in this format; names file and line.
    """
    nodes = _Lines(source).read(text)
    _order(nodes, source)
    ordered = sorted(nodes.values(), key=lambda node: node.index)
    rows = with_saved_bytes([_row(node, nodes) for node in ordered])
    if all(row.is_input for row in rows):
        raise ProfileError(f"{source} has inputs only, a layer is needed")
    if not any(row.forward_s or row.backward_s for row in rows if not row.is_input):
        raise ProfileError(f"{source}: every time of a layer is 0, allowed is at least one above 0")
    loss = _missing_loss(rows)
    return Profile(
        model=PurePath(source).name,
        device=UNKNOWN_DEVICE,
        source="file",
        note=(
            f"read from {PurePath(source).name}, which says neither device nor samples (taken as {num_samples}); "
            "every output is taken to have a gradient of its size; what is saved for the backward is derived from the "
            "descriptions"
        ),
        layers={num_samples: rows if loss is None else (*rows, loss)},
        update_s_per_byte=0.0,
        update_floor_s=0.0,
        load_s={num_samples: sum((row.forward_s for row in rows if row.is_input), 0.0)},
        whole_step_s={},
    )


def write_graph_txt(profile: Profile, num_samples: int) -> str:
    """Write the layers of one size in the artifact's format.

    A profile that was read from such a file is read back exactly. Of other profiles the file has names, kinds, order,
    edges, times to the last bit, output sizes, the bytes of each layer's parameters, and the loading time, as the
    forward of the first input. It can't hold the rest: model, device, note, other sizes, names of parameters (and so
    ties), buffers, what is saved for the backward, which outputs have no gradient, the optimizer's and the whole step's
    times. Inputs become nodes. In a kind, ` -- ` becomes a single dash; the kind `Input...` of a layer that reads
    nothing gets parentheses.

    Raises:
        ProfileError: the profile isn't valid, or a layer's name can't be a node's.
    """
    check_profile(profile)
    if num_samples not in profile.layers:
        raise ProfileError(f"no times for {num_samples} samples, only for {', '.join(map(str, profile.layers))}")
    rows = tuple(replace(row, kind=_writable_kind(row)) for row in profile.layers[num_samples])
    loss = _missing_loss(rows[:-1]) if any(not row.is_input for row in rows[:-1]) else None
    if loss is not None and replace(rows[-1], saved_bytes=loss.saved_bytes, saved_with=()) == loss:
        rows = rows[:-1]
    named = {row.name for row in rows}
    made = dict.fromkeys(name for row in rows for name in row.inputs if name not in named)
    for name in (*made, *named):
        if not _is_id(name):
            raise ProfileError(f"layer {name!r} can't stand in a graph.txt, where no name has a -- or blanks around it")
    load_s = profile.load_s[num_samples] if not any(row.is_input for row in rows) else 0.0
    inputs = (LayerProfile(each, f"{_INPUT}{i}", 0.0 if i else load_s, 0.0, 0, 0) for i, each in enumerate(made))
    losses = _losses(rows)
    ordered = sorted(rows, key=lambda row: losses == [row.name])  # a single loss comes last, as in `_order`
    lines = [_node_line(row) for row in (*inputs, *ordered)]
    position = {name: index for index, name in enumerate((*made, *(row.name for row in ordered)))}
    for row in ordered:
        sources = {*row.inputs, *(rows[read].name for read in row.reads)}
        lines += [f"\t{name}{_SEPARATOR}{row.name}" for name in sorted(sources, key=position.__getitem__)]
    return "\n".join(lines) + "\n"


@dataclass
class _Node:
    """A node line, its line number and its position in order of execution."""

    name: str
    kind: str
    forward_s: float
    backward_s: float
    sizes: tuple[int, ...]
    parameter_bytes: int
    line: int
    sources: dict[str, int] = field(default_factory=dict)  # name of each node that it reads to the line of the edge
    is_read: bool = False
    index: int = -1

    @property
    def is_input(self) -> bool:
        """Whether it stands for a model input."""
        return not self.sources and self.kind.startswith(_INPUT)


class _Lines:
    """Parses the lines of a file; every error names the file and the line that is read."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._line = 0

    def read(self, text: str) -> dict[str, _Node]:
        """Return the nodes of a file by name, with its edges in their `sources`.

        Raises:
            ProfileError: a line has the wrong form, or a node is defined twice or not at all.
        """
        nodes: dict[str, _Node] = {}
        edges = []
        for self._line, raw in enumerate(text.split("\n"), start=1):
            line = raw.rstrip(" \t\r")
            if not line:
                continue
            if not line.lstrip("\t").isprintable():
                raise self._fault("it holds characters that aren't text, so this is no graph.txt")
            if line[0] in " \t":
                edges.append((self._line, self._edge(line)))
                continue
            node = self._node(line)
            if node.name in nodes:
                raise self._fault(f"node {_shown(node.name)} is there already, on line {nodes[node.name].line}")
            nodes[node.name] = node
        if not nodes:
            raise ProfileError(f"{self._source} has no nodes: a line of the form {_NODE_FORM} is expected")
        for self._line, (first, second) in edges:
            self._join(nodes, first, second)
        return nodes

    def _fault(self, problem: str) -> ProfileError:
        return ProfileError(f"{self._source}, line {self._line}: {problem}")

    def _edge(self, line: str) -> tuple[str, str]:
        ends = line.strip().split(_SEPARATOR)
        if len(ends) != 2 or not all(map(_is_id, ends)):
            raise self._fault(f"got {_shown(line.strip())}, allowed is an edge, `node -- node`, after a tab")
        return ends[0], ends[1]

    def _join(self, nodes: dict[str, _Node], first: str, second: str) -> None:
        """Add an edge to the nodes."""
        for name in (first, second):
            if name not in nodes:
                raise self._fault(f"there is no node {_shown(name)}")
        if first == second:
            raise self._fault(f"node {_shown(first)} reads itself")
        earlier = nodes[second].sources.setdefault(first, self._line)
        if earlier != self._line:
            raise self._fault(f"this edge is there already, on line {earlier}")
        nodes[first].is_read = True

    def _node(self, line: str) -> _Node:
        name, *rest = line.split(_SEPARATOR)
        costs = _COSTS.fullmatch(rest[1]) if len(rest) in (2, 3) else None
        if costs is None or not _is_id(name) or (len(rest) == 3 and not _STAGE.fullmatch(rest[2])):
            raise self._fault(f"got {_shown(line)}, allowed is {_NODE_FORM}, or an edge after a tab")
        forward, backward, activation, parameters = costs.groups()
        return _Node(
            name=name,
            kind=_description(rest[0]),
            forward_s=self._seconds("forward_compute_time", forward),
            backward_s=self._seconds("backward_compute_time", backward),
            sizes=self._sizes(activation),
            parameter_bytes=self._bytes("parameter_size", parameters),
            line=self._line,
        )

    def _seconds(self, what: str, text: str) -> float:
        """Return a text of milliseconds as seconds, rounded once: 18.335 becomes 0.018335, not 18.335 / 1000."""
        match = _NUMBER.fullmatch(text.strip())
        value_s = float(f"{match[1]}e{int(match[2] or 0) - 3}") if match else -1.0
        if not 0 <= value_s <= MAX_SECONDS:
            raise self._fault(f"{what} is {_shown(text)}, allowed are milliseconds from 0 to {MAX_SECONDS * 1e3:g}")
        return value_s + 0.0  # not -0.0

    def _sizes(self, text: str) -> tuple[int, ...]:
        """Return the bytes of every tensor of an output."""
        inner = text.strip()
        if inner.startswith("[") and inner.endswith("]"):
            sizes = tuple(self._bytes("activation_size", part) for part in inner[1:-1].split(";"))
            if sum(sizes) > MAX_BYTES:
                raise self._fault(f"activation_size is {_shown(text)}, more than {MAX_BYTES} bytes together")
            return sizes
        return (self._bytes("activation_size", text),)

    def _bytes(self, what: str, text: str) -> int:
        value = Decimal(text.strip()) if _NUMBER.fullmatch(text.strip()) else Decimal(-1)
        if not 0 <= value <= MAX_BYTES or value != value.to_integral_value():
            raise self._fault(f"{what} is {_shown(text)}, allowed are whole bytes from 0 on")
        return int(value)


def _order(nodes: dict[str, _Node], source: str) -> None:
    """Set every node's index, in topological order and otherwise in the file's, with a single loss last."""
    losses = [
        name
        for name, node in nodes.items()
        if not node.is_read and node.kind == _LOSS and any(not nodes[each].is_input for each in node.sources)
    ]
    rank = {name: (losses == [name], position) for position, name in enumerate(nodes)}
    sorter = TopologicalSorter({name: node.sources for name, node in nodes.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        raise _cycle(nodes, error.args[1][:-1], source) from None
    ready: list[tuple[tuple[bool, int], str]] = []
    for index in range(len(nodes)):
        for name in sorter.get_ready():
            heapq.heappush(ready, (rank[name], name))
        _, name = heapq.heappop(ready)
        nodes[name].index = index
        sorter.done(name)


def _cycle(nodes: dict[str, _Node], around: list[str], source: str) -> ProfileError:
    """Return the error that names the nodes of a cycle, each of which the next one reads."""
    line = nodes[around[1 % len(around)]].sources[around[0]]
    shown = around if len(around) <= 8 else [*around[:6], "...", around[-1]]
    names = " -> ".join(_shown(each) if each != "..." else each for each in (*shown, around[0]))
    return ProfileError(f"{source}, line {line}: this edge closes a cycle: {names}")


def _row(node: _Node, nodes: dict[str, _Node]) -> LayerProfile:
    """Return a node's row, in which parameters have the node's name."""
    sources = sorted((nodes[name] for name in node.sources), key=lambda each: each.index)
    output_bytes = sum(node.sizes)
    row = LayerProfile(
        name=node.name,
        kind=node.kind,
        forward_s=node.forward_s,
        backward_s=node.backward_s,
        output_bytes=output_bytes,
        gradient_bytes=output_bytes,
        reads=tuple(each.index for each in sources if not each.is_input),
        inputs=tuple(each.name for each in sources if each.is_input),
        parameter_sizes={node.name: node.parameter_bytes} if node.parameter_bytes else {},
        output_parts=node.sizes if len(node.sizes) > 1 else (),
        is_input=node.is_input,
    )
    return row.with_estimated_split()


def _sinks(rows: Sequence[LayerProfile]) -> list[int]:
    read = {index for row in rows for index in row.reads}
    return [index for index, row in enumerate(rows) if index not in read and not row.is_input]


def _losses(rows: Sequence[LayerProfile]) -> list[str]:
    """Return the names of the sinks that may be the loss; if there are several, none of them is."""
    return [rows[index].name for index in _sinks(rows) if rows[index].kind == _LOSS and rows[index].reads]


def _missing_loss(rows: Sequence[LayerProfile]) -> LayerProfile | None:
    """Return a row for the loss, which has no cost; None if one of the layers is the loss."""
    if len(_losses(rows)) == 1:
        return None
    reads = tuple(index for index in _sinks(rows) if not rows[index].kind.startswith(_GETITEM))
    saved_bytes = sum(rows[read].output_bytes for read in reads)  # the logarithms of probabilities, as many as it reads
    return LayerProfile(_free_name({row.name for row in rows}), _LOSS, 0.0, 0.0, 0, 0, reads, saved_bytes=saved_bytes)


def _free_name(taken: Container[str]) -> str:
    names = itertools.chain([_LOSS], (f"{_LOSS}_{count}" for count in itertools.count(2)))
    return next(name for name in names if name not in taken)


def _writable_kind(row: LayerProfile) -> str:
    """Return a row's kind, changed where the reader would take an input for a layer or a layer for an input."""
    kind = _description(row.kind)
    if row.is_input and not kind.startswith(_INPUT):
        return f"{_INPUT} {kind}".strip()
    reads_nothing = not row.is_input and not row.reads and not row.inputs
    return f"({kind})" if reads_nothing and kind.startswith(_INPUT) else kind


def _node_line(row: LayerProfile) -> str:
    sizes = f"[{'; '.join(f'{part}.0' for part in row.output_parts)}]" if len(row.output_parts) > 1 else None
    costs = (
        f"forward_compute_time={_ms(row.forward_s)}, backward_compute_time={_ms(row.backward_s)}, "
        f"activation_size={sizes or f'{row.output_bytes}.000'}, parameter_size={row.parameter_bytes}.000"
    )
    return _SEPARATOR.join((row.name, row.kind, costs))


def _ms(value_s: float) -> str:
    """Return seconds as milliseconds with every digit, at least three after the point."""
    whole, _, fraction = f"{Decimal(repr(abs(float(value_s)))).scaleb(3):f}".partition(".")
    return f"{whole}.{fraction:0<3}"


def _description(text: str) -> str:
    """Return a description without surrounding blanks and without ` -- `, which the format can't hold."""
    return re.sub(r"(?<![^ ])--(?![^ ])", "-", text).strip(" ")


def _is_id(name: str) -> bool:
    return bool(name) and name == name.strip() and "--" not in name.split(" ") and name.isprintable()


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 60 else f"{text[:57]}...")
