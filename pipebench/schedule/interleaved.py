"""Interleaved 1F1B: every worker has several stages, which shortens filling and draining.

Paper: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (SC'21) section 2.2. With P
positions and v stages per worker, a worker at position p runs 2 (P - p - 1) + (v - 1) P forwards, then one forward and
one backward in turn; units pass a stage in groups of P. The bubble is 1/v of that of 1F1B.

Differs: the paper requires P to divide the number of units. Here the last group is padded and the padding left out;
leaving units out of a list can't deadlock.
"""

from collections.abc import Iterator, Sequence

from pipebench.schedule.operations import Op
from pipebench.schedule.passes import Pass
from pipebench.schedule.pipeline import Pipeline


def passes(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """Yield a worker's passes between two flushes."""
    stages, positions, chunks = p.stages_of(worker), p.num_positions, p.chunks
    own = p.own_units(stages[0], worker, units)
    total = -(-len(own) // positions) * positions * chunks

    def step(op: Op, index: int) -> Iterator[Pass]:
        group, within = divmod(index, positions * chunks)
        chunk, place = divmod(within, positions)
        number = group * positions + place
        if index < total and number < len(own):
            yield Pass(stages[chunk if op is Op.FORWARD else chunks - 1 - chunk], op, own[number])

    warmup = min(2 * (positions - stages[0] - 1) + (chunks - 1) * positions, total)
    for index in range(warmup):
        yield from step(Op.FORWARD, index)
    for index in range(total):
        yield from step(Op.FORWARD, index + warmup)
        yield from step(Op.BACKWARD, index)
