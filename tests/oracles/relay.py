"""What relayed values come to, from who reads what: each crosses all cuts from its own stage to its last reader's."""

from collections.abc import Mapping, Sequence


def crossed(stage_of: Sequence[int], reads: Mapping[int, Sequence[int]], loss_reads: Sequence[int]) -> list[int]:
    """Return how many cuts each layer's output crosses.

    `reads` are the layers whose output a layer reads, `loss_reads` those that the loss, in the last stage, reads.
    """
    furthest = [*stage_of]
    for reader, sources in reads.items():
        for source in sources:
            furthest[source] = max(furthest[source], stage_of[reader])
    for source in loss_reads:
        furthest[source] = max(stage_of)
    return [last - own for last, own in zip(furthest, stage_of, strict=True)]
