"""Tensor slices in a profile: the bytes that a worker's devices sum and gather, and the seconds.

A worker stands for k neighbouring devices; its profile has the costs of one of them. All k wait for their exchanges,
whose seconds are therefore part of the layers'.
"""

from collections.abc import Sequence
from dataclasses import replace

from pipebench.cluster import Level
from pipebench.profile.model import LayerProfile, Profile

# Kinds of layers by what they exchange; they are classes of `model/slice_modules.py`.
_SUMMED, _GATHERED, _COPIED = ("SummedSlices", "EmbeddingSlices"), ("GatheredSlices",), ("CopiedToSlices",)


def exchanged_bytes(row: LayerProfile, num_slices: int) -> tuple[int, int]:
    """Return the bytes that a worker's devices send each other in a layer's forward, and in its backward.

    In rings over k devices, a sum of n bytes on each takes 2 (k - 1) n, and a gather of n bytes in total (k - 1) n.
    """
    others = num_slices - 1
    if row.kind in _SUMMED:
        return 2 * others * row.output_bytes, 0
    if row.kind in _GATHERED:
        return others * row.output_bytes, 0
    return 0, 2 * others * row.gradient_bytes if row.kind in _COPIED else 0


def unit_bytes(rows: Sequence[LayerProfile], num_slices: int, again: Sequence[int] = ()) -> int:
    """Return the bytes that a unit's forward and backward exchange; forwards of the layers `again` run twice."""
    found = [exchanged_bytes(row, num_slices) for row in rows]
    return sum(map(sum, found)) + sum(found[index][0] for index in again)


def with_exchanges(profile: Profile, level: Level, num_slices: int) -> Profile:
    """Return the profile of a slice with the seconds of the devices' exchanges over a level's links, in rings."""

    def seconds(num_bytes: int, kind: str) -> float:
        if not num_bytes:
            return 0.0
        steps = (1 if kind in _GATHERED else 2) * (num_slices - 1)
        return num_bytes / num_slices / level.sum_bytes_per_s + steps * level.latency_s

    def with_seconds(row: LayerProfile) -> LayerProfile:
        forward_s, backward_s = (seconds(num_bytes, row.kind) for num_bytes in exchanged_bytes(row, num_slices))
        return replace(row, forward_s=row.forward_s + forward_s, backward_s=row.backward_s + backward_s)

    changed = profile.with_rows(lambda rows: tuple(map(with_seconds, rows)))
    note = f"{profile.note}; of one of {num_slices} slices, with what they sum and gather on {level.name} links"
    return replace(changed, note=note, slices=num_slices)
