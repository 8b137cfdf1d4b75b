"""PipeDream-2BW against its formula, at every update of every stage: one update late, two versions."""

import pytest
import torch
from torch.nn import functional

from pipebench.schedule.operations import Op
from pipebench.simulate.simulation import TimelineEvent
from tests.engine.test_staleness import OPTIMIZERS
from tests.oracles import double_buffer
from tests.support import Blobs, Mlp, make_engine, make_setup

PLANS = [([2], [1, 1]), ([2, 4], [1, 1, 1]), ([2, 4, 6], [1, 1, 1, 1]), ([4], [2, 2])]
COUNT = 23  # minibatches of 2, the last update a short one


@pytest.mark.sampled(8)
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan[1])))
def test_every_version_is_the_formula_s(plan: tuple[list[int], list[int]], optimizer: str, more: int) -> None:
    replicas = plan[1]
    accumulate = len(replicas) + more
    model, dataset = Mlp(), Blobs(num_train=46)
    make_optimizer, step = OPTIMIZERS[optimizer]
    setup = make_setup(
        model, plan, weights="double-buffer", accumulate=accumulate, dataset=dataset, make_optimizer=make_optimizer,
        minibatch_size=2,
    )  # fmt: skip
    seen: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(sum(replicas))]

    def observe(event: TimelineEvent) -> None:
        if event.instruction.op is Op.UPDATE:
            store = engine.replicas[event.worker].weights
            now = {n: p.detach().clone() for n, p in zip(store.names, store.newest.parameters, strict=True)}
            seen[event.worker].append(now)

    def field(name: str, k: int) -> torch.Tensor:
        return dataset.fetch("train", setup.sampler.indices(k), [name])[name]

    engine = make_engine(setup, observe)
    engine.train(0, COUNT)
    expected = double_buffer.train(
        model,
        lambda output, k: functional.cross_entropy(output, field("label", k), reduction="sum"),
        lambda k: field("x", k),
        lambda k: float(setup.sampler.size(k)),
        COUNT,
        accumulate * replicas[0],
        step,
        0.1,
    )[1:]
    for versions in seen:
        assert len(versions) == len(expected) > 2
        for mine, theirs in zip(versions, expected, strict=True):
            assert all((mine[name] - theirs[name]).abs().max() < 1e-13 for name in mine)
    assert max(replica.weights.most_alive for replica in engine.replicas) == 2


def test_two_versions_are_too_few_if_an_update_has_fewer_minibatches_than_are_in_flight() -> None:
    """Why `accumulate` must be at least the depth: otherwise a minibatch needs a version that the engine has freed."""
    setup = make_setup(Mlp(), ([2, 4, 6], [1, 1, 1, 1]), weights="double-buffer", accumulate=2)
    with pytest.raises(StopIteration):
        make_engine(setup).train(0, 12)
