"""Bytes that layers save for their backwards, derived from the descriptions in a `graph.txt`, which doesn't state them.

As torch's kernels do, a layer saves its input, its output or a buffer of its own. A tensor that several layers save
counts once. In-place layers and views have no output of their own. Numbers are assumed to have 4 bytes. A layer with an
unknown description is assumed to save its output.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipebench.profile.model import LayerProfile

_NUMBER_BYTES, _MASK_BYTES, _INDEX_BYTES = 4, 1, 8
_LOSS = "loss"  # saves the logarithms of probabilities, as many as the numbers that it reads


class _Rule(NamedTuple):
    """What a kind of layer saves for its backward."""

    reads: bool = False  # whether it saves its inputs
    output: bool = False  # whether it saves its output, the first tensor of several
    own: float = 0.0  # bytes of other saved tensors per byte of its first output tensor
    own_in_place: float = 0.0  # the same if it overwrites its input
    is_view: bool = False  # whether its output is a view of its input


_READS, _OUTPUT, _NOTHING, _VIEW = _Rule(reads=True), _Rule(output=True), _Rule(), _Rule(is_view=True)
_INDICES = _Rule(reads=True, own=_INDEX_BYTES / _NUMBER_BYTES)
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("conv", "convtranspose", "linear", "bilinear", "embedding"), _READS),
    **dict.fromkeys(("mul", "div", "matmul", "bmm", "leakyrelu", "gelu", "silu", "hardtanh"), _READS),
    **dict.fromkeys(("batchnorm", "layernorm", "groupnorm", "instancenorm", "localresponsenorm"), _READS),
    **dict.fromkeys(("avgpool", "adaptiveavgpool"), _READS),
    **dict.fromkeys(("relu", "relu6", "sigmoid", "tanh", "softmax", "logsoftmax", "elu"), _OUTPUT),
    **dict.fromkeys(("maxpool", "adaptivemaxpool"), _INDICES),
    **dict.fromkeys(("add", "sub", "concat", "cat", "stack", "pad", "hidden", "size"), _NOTHING),
    **dict.fromkeys(("view", "flatten", "reshape", "transpose", "permute", "squeeze", "unsqueeze", "identity"), _VIEW),
    **dict.fromkeys(("expand", "contiguous", "chunk", "split", "unbind", "getitem"), _VIEW),
    # It saves a mask of bytes; in place, factors of the tensor's type.
    "dropout": _Rule(own=_MASK_BYTES / _NUMBER_BYTES, own_in_place=1.0),
    # cuDNN reserves memory for every gate, and for an LSTM's cell.
    "lstm": _Rule(reads=True, output=True, own=5.0),
    "gru": _Rule(reads=True, output=True, own=3.0),
    "rnn": _Rule(reads=True, output=True, own=1.0),
    _LOSS: _NOTHING,
}
_INNER = re.compile(r"\(\w+\): *(\w+)\(")
_IN_PLACE = re.compile(r"\binplace(?!=False)\b")
_PART = re.compile(r"__getitem__\((\d+)\)")

_Tensor = tuple[int, int]  # the row that made it, and which of its tensors it is


def with_saved_bytes(rows: Sequence[LayerProfile]) -> tuple[LayerProfile, ...]:
    """Return the rows with the bytes that each saves for its backward, beyond those that earlier rows save."""
    index_of = {row.name: index for index, row in enumerate(rows)}
    tensors: list[list[_Tensor]] = []  # the output of every row
    sizes: dict[_Tensor, int] = {}  # bytes
    holders: dict[_Tensor, int] = {}  # the last row that saves a tensor
    found = []
    for index, row in enumerate(rows):
        read = [tensor for each in sorted({*row.reads, *(index_of[n] for n in row.inputs)}) for tensor in tensors[each]]
        rule, in_place = rule_of(row.kind), bool(_IN_PLACE.search(row.kind))
        made = [((index, part), size) for part, size in enumerate(row.output_parts or (row.output_bytes,))]
        sizes |= made
        tensors.append(_viewed(row, read) if (rule.is_view or in_place) and read else [tensor for tensor, _ in made])
        held = [*(read if rule.reads else ()), *(tensors[index][:1] if rule.output and not row.is_input else ())]
        own = round((rule.own_in_place if in_place else rule.own) * made[0][1])
        if _plain(row.kind) == _LOSS:
            own = sum(sizes[tensor] for tensor in read)
        saved = 0 if row.is_input else own
        saved_with: Counter[int] = Counter()
        for tensor in dict.fromkeys(held):
            if tensor in holders:
                saved_with[holders[tensor]] += sizes[tensor]
            else:
                saved += sizes[tensor]
            holders[tensor] = index
        found.append(replace(row, saved_bytes=saved, saved_with=tuple(sorted(saved_with.items()))))
    return tuple(found)


def rule_of(kind: str) -> _Rule:
    """Return the rule for a description; of a module whose description lists other modules, their rules combined."""
    inner = _INNER.findall(kind)
    rules = [_RULES.get(_plain(name)) for name in inner or [kind]]
    known = [rule for rule in rules if rule is not None]
    if len(known) < len(rules):
        known.append(_OUTPUT)
    return _Rule(
        reads=any(rule.reads for rule in known),
        output=any(rule.output for rule in known),
        own=max(rule.own for rule in known),
        own_in_place=max(rule.own_in_place for rule in known),
        is_view=not inner and known[0].is_view,
    )


def _plain(kind: str) -> str:
    """Return a kind's name as the table has it: `Conv2d(3, 64)` is `conv`, `__getitem__(0)` is `getitem`."""
    return re.sub(r"[123]d$", "", kind.split("(")[0].replace("_", "").lower())


def _viewed(row: LayerProfile, read: Sequence[_Tensor]) -> list[_Tensor]:
    """Return the output of a view or an in-place layer: one of the tensors that it reads."""
    part = _PART.match(row.kind)
    return [read[int(part[1])] if part and int(part[1]) < len(read) else read[0]]
