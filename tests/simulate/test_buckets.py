"""When a gradient bucket of a simulated stage can be summed: as soon as the backward has passed all of its layers."""

import pytest

from pipebench.model.plan import Plan, StagePlan
from pipebench.profile.model import LayerProfile, Profile
from pipebench.simulate.costs import BUCKET_BYTES, stage_costs


def layer(name: str, reads: tuple[int, ...], backward_s: float, num_bytes: int) -> LayerProfile:
    sizes = {f"{name}.weight": num_bytes} if num_bytes else {}
    return LayerProfile(name, "Linear", 1.0, backward_s, 8, 8, reads, () if reads else ("x",), sizes, {}, 8)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_the_first_bucket_waits_for_the_loss_s_own_backward(policy: str) -> None:
    """Backwards of 3, 2 and 4 seconds, the last the loss's; recomputed, all three run forward again before them."""
    rows = (layer("a", (), 3.0, 2 * BUCKET_BYTES), layer("b", (0,), 2.0, 2 * BUCKET_BYTES), layer("loss", (1,), 4.0, 0))
    profile = Profile("m", "d", "file", "n", {4: rows}, 0.0, 0.0, {4: 0.0}, {})
    stage = StagePlan(0, 2, 2, (0, 1), (policy, policy))
    (costs,) = stage_costs(profile, Plan("dp", (stage,), 1)).stages
    again_s = 3.0 if policy == "recompute" else 0.0
    assert costs.backward_s[4] == 9.0 + again_s
    assert [bucket.ready for bucket in costs.buckets] == pytest.approx([(again_s + 4 + 2) / (9 + again_s), 1.0])


@pytest.mark.parametrize("sizes", [(4,), (1, 4), (4, 1)])
def test_a_short_minibatch_does_not_change_when_buckets_are_ready(sizes: tuple[int, ...]) -> None:
    """The planner knows whole minibatches only, a run also the short one of an epoch: both give one plan one speed."""
    rows = {
        size: (
            layer("a", (), 3.0 if size == 4 else 1.0, 2 * BUCKET_BYTES),
            layer("b", (0,), 5.0, 2 * BUCKET_BYTES),
            layer("loss", (1,), 0.0, 0),
        )
        for size in sizes
    }
    profile = Profile("m", "d", "file", "n", rows, 0.0, 0.0, dict.fromkeys(sizes, 0.0), {})
    stage = StagePlan(0, 2, 2, (0, 1), ("keep", "keep"))
    (costs,) = stage_costs(profile, Plan("dp", (stage,), 1)).stages
    assert [bucket.ready for bucket in costs.buckets] == pytest.approx([5 / 8, 1.0])
