"""What a plan sends, counted from what crosses its cuts: a cost model may charge for more, the bytes stay these."""

from collections.abc import Sequence

from pipebench.model.plan import Plan
from pipebench.profile.model import LayerProfile
from pipebench.simulate.timeline import ACTIVATION, ALL_REDUCE, GRADIENT


def payload(rows: Sequence[LayerProfile], plan: Plan, units: int, accumulate: int) -> dict[str, float]:
    """Return the payload per minibatch by kind, in the steady state.

    Args:
        rows: the layers in the order of the plan, the loss last, at the size that travels.
        plan: the plan.
        units: microbatches per minibatch.
        accumulate: minibatches of each replica per update.
    """
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
