"""Weights that layers of several stages share: a copy per stage, whose gradients are summed before every update."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from pipebench.cluster import Cluster, Level
from pipebench.engine.in_situ import profile_in_situ
from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from pipebench.model.optimizer import MakeOptimizer
from pipebench.model.sampling import Sampler
from pipebench.planner.predict import payload
from pipebench.profile.enough import StopRule
from pipebench.schedule.instructions import BACKWARDS
from pipebench.schedule.modes import MODES
from pipebench.schedule.operations import Op
from pipebench.schedule.programs import programs
from pipebench.schedule.syncs import ALL_REDUCE
from pipebench.simulate.costs import HostCosts, SharedProcessors
from pipebench.simulate.crowded import simulation_of
from pipebench.simulate.kinds import WHATEVER_SIZE
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import TimelineEvent
from tests.checkpoint.support import captured, restored
from tests.models import TiedEnds
from tests.oracles import sequential
from tests.simulate.test_memory import Levels, live
from tests.support import Blobs, make_engine, make_setup, momentum

SIZE = 4


# Layers: words, tanh, one, tanh, norm, two, tanh, three, tanh, classifier.
ENDS, BOTH, INNER, THREE = [5], [3, 5, 8], [2, 5, 8], [2, 6]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.1, fused=True)


def plainly(
    data: Any, groups: Sequence[range], make: MakeOptimizer, clip_norm: float | None, kind: type[nn.Module] = TiedEnds
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train a tied model in a plain loop on groups of minibatches, one update each."""
    model, sampler = kind(), Sampler(data.num_train, SIZE, 0)

    def minibatch(k: int) -> Any:
        fields = data.fetch("train", sampler.indices(k), ["x", "label"])
        return (fields["x"],), fields["label"]

    losses = sequential.train(
        model,
        make(list(model.parameters())),
        [[minibatch(k) for k in group] for group in groups],
        lambda output, target: functional.cross_entropy(output, target, reduction="sum"),
        lambda target: float(len(target)),
        clip_norm,
    )
    return {name: p.detach() for name, p in model.named_parameters()}, losses


def copies_of(engine: VirtualEngine) -> dict[str, list[torch.Tensor]]:
    """Return every replica's copy of each parameter, by the model's own name."""
    found: dict[str, list[torch.Tensor]] = {}
    for worker in engine.workers:
        for stage, replica in worker.replicas.items():
            for name, parameter in zip(replica.weights.names, replica.weights.newest.parameters, strict=True):
                found.setdefault(worker.shares[stage].names[name], []).append(parameter.detach())
    return found


def check(setup: Setup, group: int, *, clip_norm: float | None = None, bits: bool = False) -> VirtualEngine:
    """Train two epochs, and compare with the plain loop; all copies of a weight must be equal to the bit."""
    data, total = setup.dataset, 2 * setup.sampler.minibatches_per_epoch
    engine = make_engine(setup)
    for first in range(0, total, total // 2):
        engine.train(first, total // 2)
    starts = [*range(0, total // 2, group), *range(total // 2, total, group)]
    ends = [min(start + group, total // 2 if start < total // 2 else total) for start in starts]
    expected, _ = plainly(data, [*map(range, starts, ends)], setup.make_optimizer, clip_norm)
    found = copies_of(engine)
    assert found.keys() == expected.keys()
    for name, copies in found.items():
        assert all(torch.equal(copies[0], each) for each in copies), name
        if bits:
            assert torch.equal(copies[0], expected[name]), name
        else:
            torch.testing.assert_close(copies[0], expected[name], rtol=1e-12, atol=1e-12)
    return engine


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [momentum, adamw])
@pytest.mark.parametrize("starts", [ENDS, THREE, BOTH], ids=str)
def test_model_parallelism_is_bit_identical_to_a_plain_loop(starts: list[int], make: MakeOptimizer) -> None:
    """One minibatch per update: a copy's gradient is one term, and two terms have the same sum in any order."""
    setup = make_setup(
        TiedEnds(), (starts, [1] * (len(starts) + 1)), weights="one", depth=1, ties=True, make_optimizer=make
    )
    assert setup.pipeline.ties
    engine = check(setup, 1, bits=True)
    assert engine.num_bytes == engine.network.num_bytes


SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"order": "all-forwards", "microbatches": 3, "recompute": True},
    "flush": {"microbatches": 2},
    "accumulated": {"accumulate": 2},
    "zero-bubble": {"order": "zero-bubble", "backward": "split", "microbatches": 4},
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_flushing_modes_equal_a_plain_loop(name: str, replicas: tuple[int, int], clip_norm: float | None) -> None:
    shape = SCHEDULES[name]
    setup = make_setup(
        TiedEnds(), (ENDS, list(replicas)), weights="one", ties=True, clip_norm=clip_norm, make_optimizer=adamw,
        dataset=Blobs(num_train=46), **shape,
    )  # fmt: skip
    assert setup.pipeline.ties == ((0, 1),)
    engine = check(setup, setup.pipeline.period, clip_norm=clip_norm)
    assert engine.num_bytes == engine.network.num_bytes


@pytest.mark.parametrize("replicas", [1, 2])
def test_interleaved_stages_equal_a_plain_loop(replicas: int) -> None:
    """Stages 0 and 2, which share the inner weight with stage 2 too, are of one worker; the ends are of two."""
    setup = make_setup(
        TiedEnds(), ([2, 3, 6], [replicas] * 4), weights="one", order="interleaved", chunks=2, microbatches=4,
        ties=True, clip_norm=0.1, make_optimizer=adamw,
    )  # fmt: skip
    assert setup.pipeline.ties == ((0, 3), (1, 2))
    check(setup, setup.pipeline.period, clip_norm=0.1)


def test_copies_of_one_worker_are_summed_without_a_message() -> None:
    setup = make_setup(
        TiedEnds(), ([2, 3, 5], [1] * 4), weights="one", order="interleaved", chunks=2, microbatches=4, ties=True
    )
    assert setup.pipeline.ties == ((0, 3), (1, 3))
    alone = setup.pipeline.num_stages + 1
    assert len(setup.pipeline.members(alone)) == 1
    check(setup, setup.pipeline.period)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("plan", [(ENDS, [1, 1]), (BOTH, [1, 1, 1, 1]), (ENDS, [2, 2])], ids=str)
def test_two_buffered_weights_are_the_formula_s(plan: tuple[list[int], list[int]], clip_norm: float | None) -> None:
    """w(t+1) = w(t) - lr grad f(w(t-1)); a tied weight is clipped by its own norm, a stage's other ones by theirs."""
    count, data, limit = 23, Blobs(num_train=46), clip_norm or math.inf
    setup = make_setup(
        TiedEnds(), plan, weights="double-buffer", accumulate=len(plan[1]), dataset=data, minibatch_size=2, ties=True,
        clip_norm=clip_norm,
    )  # fmt: skip
    engine = make_engine(setup)
    engine.train(0, count)
    assert engine.num_bytes == engine.network.num_bytes
    tied = {"words.weight", "one.weight"}
    together = [{name} for name in tied]
    for worker in engine.workers:
        ((stage, replica),) = worker.replicas.items()
        if worker.replica_index[stage] == 0:
            together.append({worker.shares[stage].names[name] for name in replica.weights.names} - tied)
    model = TiedEnds()
    versions = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    size = setup.pipeline.round_size(0)
    for first in range(0, count, size):
        samples = [i for k in range(first, min(first + size, count)) for i in setup.sampler.indices(k)]
        fields = data.fetch("train", samples, ["x", "label"])
        stale = {name: p.clone().requires_grad_() for name, p in versions[max(0, len(versions) - 2)].items()}
        loss = functional.cross_entropy(functional_call(model, stale, (fields["x"],)), fields["label"])
        gradients = dict(zip(stale, torch.autograd.grad(loss, list(stale.values())), strict=True))
        for names in filter(None, together):
            norm = torch.stack([gradients[name].square().sum() for name in names]).sum().sqrt()
            gradients |= {name: gradients[name] * min(1.0, limit / (norm.item() + 1e-6)) for name in names}
        versions.append({name: p - 0.1 * gradients[name] for name, p in versions[-1].items()})
    for name, copies in copies_of(engine).items():
        assert all(torch.equal(copies[0], each) for each in copies), name
        torch.testing.assert_close(copies[0], versions[-1][name], rtol=1e-12, atol=1e-12)
    assert max(replica.weights.most_alive for replica in engine.replicas) == 2


@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (2, 1, 2, 1), (3, 1, 1, 2)], ids=str)
def test_bytes_of_an_update_equal_a_ring_s_around_all_copies(replicas: tuple[int, ...]) -> None:
    """R copies of a tied weight send 2 (R - 1) |w| per update; its stages' own sums leave it out."""
    setup = make_setup(TiedEnds(), (INNER, list(replicas)), weights="one", ties=True, dataset=Blobs(num_train=96))
    assert setup.pipeline.ties == ((0, 3), (1, 2))
    engine = make_engine(setup)
    engine.train(0, 2 * setup.pipeline.period)
    words, one = 8 * 24, 8 * 16
    own = [0, 8 * (4 + 4 + 4), 8 * (4 + 24 + 6), 0]  # biases, the norm, and a layer that isn't tied
    sums = sum(2 * (r - 1) * num_bytes for r, num_bytes in zip(replicas, own, strict=True))
    ends, middle = replicas[0] + replicas[3], replicas[1] + replicas[2]
    per_update = sums + 2 * (ends - 1) * words + 2 * (middle - 1) * one
    assert engine.num_bytes[ALL_REDUCE, "server"] == 2 * per_update
    assert engine.network.num_bytes == engine.num_bytes
    rows = setup.profile.rows
    mode = replace(MODES["hybrid"], accumulate=1)
    predicted = payload(rows, setup.plan, mode, 1, 1)[ALL_REDUCE] * setup.pipeline.period
    assert predicted == pytest.approx(per_update)


def test_an_update_waits_for_the_sum_on_the_links_that_join_the_copies() -> None:
    """Two copies: both send half of the weight twice, one after the other, and two latencies."""
    cluster = Cluster("levels", "unit", None, (Level("server", 2, 1e6, 1e-3), Level("cluster", 2, 1e5, 5e-3)))
    setup = make_setup(TiedEnds(), (INNER, [1] * 4), weights="one", ties=True, depth=1, cluster=cluster)
    events: list[TimelineEvent] = []
    make_engine(setup, events.append).train(0, 1)
    backward_s = max(e.end_s for e in events if e.worker == 0 and e.instruction.op is Op.BACKWARD)
    waits = {e.worker: e.end_s for e in events if e.instruction.op is Op.WAIT_TIED}
    assert waits[0] == waits[3] == pytest.approx(backward_s + 2 * (8 * 24 / 2 / 1e5 + 5e-3))
    assert waits[1] == waits[2] < backward_s  # the inner tie's copies are ready before


@pytest.mark.parametrize("columns", [{"microbatches": 2}, {"order": "zero-bubble", "backward": "split"}], ids=str)
def test_predicted_memory_equals_that_of_live_tensors_with_both_copies(columns: dict[str, Any]) -> None:
    """Weights, gradients, optimizer state: both copies of every tied weight count on their stages, to the byte."""
    setup = make_setup(TiedEnds(), (BOTH, [1] * 4), weights="one", ties=True, make_optimizer=momentum, **columns)
    levels, compared = Levels(setup), 0

    def observe(event: TimelineEvent) -> None:
        nonlocal compared
        it, worker = event.instruction, event.worker
        size = engine.workers[worker].feed.size(it.number) if it.op in (Op.FORWARD, *BACKWARDS) else 0
        levels.execute(worker, it, size)
        held, found = levels.held(worker, it.stage), live(engine.workers[worker].replicas[it.stage])
        assert [held[kind] for kind in WHATEVER_SIZE] == [found[kind] for kind in WHATEVER_SIZE], it
        compared += 1

    engine = make_engine(setup, observe)
    levels.drain()
    engine.train(0, 12)
    assert compared > 90
    whole = sum(p.nbytes for p in TiedEnds().parameters())
    assert sum(r.weights.version_bytes for r in engine.replicas) == whole + 8 * (24 + 16)
    assert sum(r.weights.state_bytes for r in engine.replicas) == whole + 8 * (24 + 16)


PLANS: dict[str, tuple[tuple[list[int], list[int]], dict[str, Any]]] = {
    "one": (([], [1]), {"weights": "one"}),
    "apart": ((BOTH, [1, 1, 1, 1]), {"weights": "one", "microbatches": 2}),
    "replicated": ((ENDS, [2, 1]), {"weights": "one"}),
    "two versions": ((ENDS, [1, 1]), {"weights": "double-buffer", "accumulate": 2}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("after", PLANS)
@pytest.mark.parametrize("before", ["apart", "replicated", "two versions"])
def test_a_checkpoint_has_a_tied_weight_once_and_every_mode_resumes_from_it(before: str, after: str) -> None:
    def setup(name: str) -> Setup:
        plan, columns = PLANS[name]
        return make_setup(TiedEnds(), plan, ties=True, make_optimizer=adamw, **columns)

    engine = make_engine(setup(before))
    engine.train(0, 4)
    stored = [name for _, state in engine.parts() for name in state.parameters]
    assert sorted(stored) == sorted(dict(TiedEnds().named_parameters()))
    steps = [name for _, state in engine.parts() for name in state.optimizer]
    assert sorted(steps) == sorted(stored)
    other = restored(setup(after), captured(engine))
    mine, theirs = copies_of(engine), copies_of(other)
    assert all(torch.equal(each, mine[name][0]) for name, copies in theirs.items() for each in copies)
    own, others = captured(engine), captured(other)
    assert own.optimizer.keys() == others.optimizer.keys()
    for name, state in own.optimizer.items():
        assert all(torch.equal(value, others.optimizer[name][key]) for key, value in state.items())
    other.train(4, 4)
    for name, copies in copies_of(other).items():
        assert all(torch.equal(copies[0], each) for each in copies), name


def test_evaluations_are_those_of_the_tied_model() -> None:
    setup = make_setup(TiedEnds(), (BOTH, [1] * 4), weights="one", ties=True, depth=1, make_optimizer=momentum)
    engine = make_engine(setup)
    engine.train(0, 6)
    weights, losses = plainly(setup.dataset, [range(k, k + 1) for k in range(6)], momentum, None)
    model = TiedEnds()
    model.load_state_dict(weights, strict=False)  # which lacks the other names of tied ones
    fields = setup.dataset.fetch("eval", range(setup.dataset.num_eval), ["x", "label"])
    loss = functional.cross_entropy(model(fields["x"]), fields["label"]).detach()
    assert engine.evaluate()["eval_loss"] == pytest.approx(float(loss), rel=1e-12)
    assert len(losses) == 6


def test_stages_profiled_in_situ_do_not_wait_for_other_copies() -> None:
    setup = make_setup(TiedEnds(), (BOTH, [1] * 4), weights="one", microbatches=2, ties=True)
    found = profile_in_situ(setup, lambda enough: enough, rule=StopRule(most=2))
    assert {key.stage for key in found if key.op is Op.UPDATE} == {0, 1, 2, 3}


@pytest.mark.parametrize("shared", [None, SharedProcessors(8.0)])
def test_a_sum_takes_processor_time_of_every_copy_s_worker(shared: SharedProcessors | None) -> None:
    """Of 2 copies each sends the weight's bytes once in all; with cores for all, it takes them no longer."""
    setup = make_setup(TiedEnds(), (ENDS, [1, 1]), weights="one", ties=True, depth=1)
    ends = []
    for byte_s in (0.0, 1e-3):
        costs = replace(setup.costs, host=HostCosts(ring_byte_s=byte_s, shared=shared))
        lists = programs(setup.pipeline, 1)
        simulation = simulation_of(setup.pipeline, lists, costs, Network(setup.cluster), lambda unit: 4)
        ends.append({e.worker: e.end_s for e in simulation if e.instruction.op is Op.WAIT_TIED})
    for worker in range(2):
        assert ends[1][worker] - ends[0][worker] == pytest.approx(8 * (24 + 16) * 1e-3)
