"""Relayed values: each crosses all cuts between its own stage and its last reader's; no code of the package."""

from collections.abc import Mapping, Sequence


def crossed(stage_of: Sequence[int], reads: Mapping[int, Sequence[int]], loss_reads: Sequence[int]) -> list[int]:
    """Return the number of cuts that each layer's output crosses.

    Args:
        stage_of: the stage of every layer.
        reads: the layers whose outputs a layer reads.
        loss_reads: the layers whose outputs the loss reads, in the last stage.
    """
    furthest = [*stage_of]
    for reader, sources in reads.items():
        for source in sources:
            furthest[source] = max(furthest[source], stage_of[reader])
    for source in loss_reads:
        furthest[source] = max(stage_of)
    return [last - own for last, own in zip(furthest, stage_of, strict=True)]
