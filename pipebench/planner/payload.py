"""What a plan sends, counted from what crosses its cuts: a cost model may charge for more, the bytes stay these."""

from collections.abc import Sequence

from pipebench.model.plan import make_plan
from pipebench.profile.model import LayerProfile, Rows
from pipebench.simulate.timeline import ACTIVATION, ALL_REDUCE, GRADIENT


def payload(
    rows: Sequence[LayerProfile], starts: Sequence[int], replicas: Sequence[int], units: int, accumulate: int
) -> dict[str, float]:
    """Return the payload per minibatch by kind, in the steady state.

    Args:
        rows: the layers in the order of the plan, the loss last, at the size that travels.
        starts: first layers of the stages after the first.
        replicas: replicas per stage.
        units: microbatches per minibatch.
        accumulate: minibatches of each replica per update.
    """
    plan = make_plan(Rows.of(rows), starts, replicas)
    sent = [value for values in plan.crossings.values() for value in values]
    summed = 0.0
    for stage in plan.stages:
        weights = {name: size for row in rows[stage.start : stage.stop] for name, size in row.parameter_sizes.items()}
        # A ring sends 2 (m-1) |w| per update, which takes in `accumulate` minibatches of each of the m replicas.
        summed += 2 * (stage.replicas - 1) / stage.replicas * sum(weights.values()) / accumulate
    return {
        ACTIVATION: units * float(sum(rows[value].output_bytes for value in sent)),
        GRADIENT: units * float(sum(rows[value].gradient_bytes for value in sent)),
        ALL_REDUCE: summed,
    }
