"""Special token ids of the zoo's data sets and models of text, and padding.

Padding, unknown, begin and end have the ids 0 to 3, as in MLPerf's GNMT. A vocabulary's own tokens start at 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipebench.zoo.late import torch

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SPECIAL_TOKENS: tuple[str, ...] = ("<pad>", "<unk>", "<s>", "</s>")
NUM_SPECIAL = len(SPECIAL_TOKENS)


def pad_rows(rows: Sequence[Sequence[int]], length: int | None = None) -> torch.Tensor:
    """Return sentences as one tensor of ids, padded on the right with PAD: [len(rows), length] int64.

    By default, `length` is that of the longest sentence, and at least 1.

    Raises:
        ValueError: a sentence is longer than `length`.
    """
    longest = max(map(len, rows), default=0)
    if length is None:
        length = max(longest, 1)
    if longest > length:
        raise ValueError(f"pad_rows: a sentence has {longest} tokens, allowed are {length} or fewer")
    return torch.tensor([[*row, *[PAD] * (length - len(row))] for row in rows], dtype=torch.int64).reshape(-1, length)


def content(ids: Iterable[int]) -> list[int]:
    """Return the ids of a sentence up to the first EOS, without BOS and PAD."""
    found: list[int] = []
    for token in ids:
        if token == EOS:
            break
        if token not in (BOS, PAD):
            found.append(int(token))
    return found


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple
