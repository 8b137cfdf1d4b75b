"""Maps the layers of a model's evaluation to those of its training.

A forward may do other things in evaluation: leave noise out, scale, return less. So a model is traced in both modes and
the two lists of layers are aligned.
"""

import difflib
from collections.abc import Sequence
from typing import Any

from torch import fx

MADE = "_tensor_constant"  # how torch.fx names tensors that are made in forward, with a number: each time another one


def evaluation_map(training: Sequence[fx.Node], evaluation: Sequence[fx.Node]) -> tuple[int | None, ...]:
    """Return for every layer of the evaluation its index in training, or None; indices ascend."""
    ours, theirs = list(map(_what, training)), list(map(_what, evaluation))
    if ours == theirs:  # nearly always
        return tuple(range(len(ours)))
    found: list[int | None] = [None] * len(theirs)
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            found[block.b + offset] = block.a + offset
    return tuple(found)


def _what(node: fx.Node) -> tuple[Any, ...]:
    """Return what identifies a layer: what it calls, and on which of the model's tensors."""
    names = (str(read.target) for read in node.all_input_nodes if read.op == "get_attr")
    tensors = tuple("" if name.startswith(MADE) else name for name in names)
    return node.op, node.target, tensors
