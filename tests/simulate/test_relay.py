"""`parallelism.relay`: values that skip stages pass through the stages between, forward and back."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.model.plan import Plan, make_plan
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.flat import SearchStage
from pipebench.planner.floor import Floors
from pipebench.planner.placement_costs import Sketch
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.profile.model import LayerProfile, Profile
from pipebench.recipe.load import load
from pipebench.simulate.memory import stage_memories
from pipebench.simulate.steady import simulate_all
from pipebench.train.prepare import prepare
from reports.studies.planner_regret import MODE, Candidate, every_plan, instance
from tests.models import SkipNet
from tests.oracles.relay import crossed
from tests.support import Blobs, Mlp, make_setup, unit_profile

PLANS: list[tuple[list[int], list[int]]] = [
    ([3, 6], [1, 1, 1]), ([2, 5, 8], [1, 1, 1, 1]), ([3, 5, 8], [2, 1, 1, 1]), ([4, 7], [3, 1, 2]), ([4], [2, 2]),
]  # fmt: skip
COLUMNS: dict[str, dict[str, Any]] = {
    "pipedream": {"weights": "stash"},
    "vertical sync": {"weights": "stash-vertical-sync"},
    "1f1b, flush": {"weights": "one", "microbatches": 2},
    "gpipe": {"weights": "one", "order": "all-forwards", "microbatches": 2, "recompute": True},
    "hybrid": {"weights": "one", "depth": 1},
    "zero bubble": {"weights": "one", "order": "zero-bubble", "backward": "split", "microbatches": 2},
    "parameter servers": {"weights": "stash", "sync": "parameter-server-after"},
}


def stages_of(plan: Plan) -> list[int]:
    return [index for index, stage in enumerate(plan.stages) for _ in range(stage.start, stage.stop)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_values_and_gradients_cross_every_cut_on_their_way(plan: Any, columns: dict[str, Any]) -> None:
    direct, setup = (
        make_setup(SkipNet(), plan, dataset=Blobs(num_train=48), relay=relay, **columns) for relay in (False, True)
    )
    rows = unit_profile(setup.graph, setup.dataset, [4]).layers[4]
    reads = {layer.index: layer.reads for layer in setup.graph.layers}
    cuts = crossed(stages_of(setup.plan), reads, setup.graph.outputs)
    expected = {
        "activation": 12 * sum(cuts[i] * rows[i].output_bytes for i in range(len(cuts))),
        "gradient": 12 * sum(cuts[i] * rows[i].gradient_bytes for i in range(len(cuts))),
    }
    assert all(target == source + 1 for source, target in setup.plan.crossings)
    sent, before = Counter[str](), Counter[str]()
    for found, workload in ((sent, setup), (before, direct)):
        for (kind, _), num_bytes in simulate_all(workload, 12).num_bytes.items():
            found[kind] += num_bytes
    assert {kind: sent[kind] for kind in expected} == expected
    assert sent["activation"] >= before["activation"]
    assert {**sent, **expected} == {**before, **expected}, "nothing else travels otherwise"


def test_chunks_of_one_worker_pass_values_locally_and_relay_the_others() -> None:
    plan = ([2, 4, 6], [1, 1, 1, 1])
    columns: dict[str, Any] = {"weights": "one", "order": "interleaved", "chunks": 2, "microbatches": 2}
    setup = make_setup(SkipNet(), plan, dataset=Blobs(num_train=48), relay=True, **columns)
    rows = unit_profile(setup.graph, setup.dataset, [4]).layers[4]
    cuts = crossed(stages_of(setup.plan), {each.index: each.reads for each in setup.graph.layers}, setup.graph.outputs)
    sent = simulate_all(setup, 12).num_bytes
    assert sent["activation", "server"] == 12 * sum(n * rows[i].output_bytes for i, n in enumerate(cuts))


def chain_with_a_skip(sizes: tuple[int, int, int], returned: int) -> Profile:
    """Return four layers of 1 s and 2 s, the last of which reads the first, too; `returned` bytes of gradients each."""
    reads = [(), (0,), (1,), (0, 2)]
    rows = [
        LayerProfile(f"layer{i}", "Linear", 1.0, 2.0, size, returned if i < 3 else 0, reads=read)
        for i, (size, read) in enumerate(zip((*sizes, 0), reads, strict=True))
    ]
    loss = LayerProfile("loss", "loss", 0.0, 0.0, 0, 0, reads=(3,))
    return Profile("chain", "unit", "file", "", {1: (*rows, loss)}, 0.0, 0.0, {}, {})


def straight(relay: bool, level: Level) -> Planner:
    cluster = Cluster("flat", "unit", None, (replace(level, count=4),))
    asked = Request(chain_with_a_skip((30, 10, 10), 20), cluster, COST_MODELS["overlap"], 1, relay=relay)
    return Planner(asked, "model")


def test_a_skip_waits_for_the_stages_between() -> None:
    """One minibatch in a straight pipeline at 10 bytes/s: 4 s of forwards and 8 s of backwards, and its messages.

    Forward 30, 10 + 30 and 10 + 30 bytes relayed, and 30, 10, 10 where the skip goes its own way meanwhile; it leaves
    with the other value, and 30 bytes each through one port take 6 s. Back 20, 2 x 20 and 2 x 20 are relayed; else the
    skip's gradient is there long before.
    """
    stages = [SearchStage(i, i + 1, 1) for i in range(4)]
    relayed, direct = (straight(relay, Level("server", 4, 10.0, 0.0)) for relay in (True, False))
    found = relayed.with_prediction(relayed.estimate("", stages))
    assert found.minibatch_s == pytest.approx(12 + (3 + 4 + 4) + (4 + 4 + 2))
    assert found.num_bytes["activation"] == 30 + 40 + 40
    assert found.num_bytes["gradient"] == 20 + 40 + 40
    other = direct.with_prediction(direct.estimate("", stages))
    assert other.num_bytes["activation"] == 30 + 10 + 10 + 30
    assert other.minibatch_s < found.minibatch_s


def test_copies_to_hosts_are_made_at_every_hop() -> None:
    stages = [SearchStage(i, i + 1, 1) for i in range(4)]
    planner = straight(True, Level("server", 4, 10.0, 0.0, host_copy_bytes_per_s=5.0))
    found = planner.with_prediction(planner.estimate("", stages))
    assert found.minibatch_s == pytest.approx(12 + (110 + 100) / 10 + 2 * (110 + 100) / 5)


def test_relayed_values_are_held_until_they_are_sent_on() -> None:
    plan = make_plan(SkipReader(), [1, 2, 3], [1, 1, 1, 1], relay=True)
    assert plan.crossings == {(0, 1): (0,), (1, 2): (0, 1), (2, 3): (0, 2)}
    direct = make_plan(SkipReader(), [1, 2, 3], [1, 1, 1, 1])
    assert direct.crossings == {(0, 1): (0,), (0, 3): (0,), (1, 2): (1,), (2, 3): (2,)}
    setup = make_setup(Mlp(), ([4], [1, 1]))
    pipeline = replace(setup.pipeline, replicas=(1, 1, 1, 1))
    profile = chain_with_a_skip((30, 10, 10), 20)
    found = stage_memories(profile, plan, pipeline)
    assert [each.received[1] for each in found] == [0, 30, 40, 40]
    assert [each.relayed[1] for each in found] == [0, 30, 30, 0]
    assert [each.returned[1] for each in found] == [20, 40, 40, 0]
    assert not any(each.relayed[1] for each in stage_memories(profile, direct, pipeline))
    # A stage that keeps it for its own backward has it among its activations, once.
    rows = [*profile.layers[1]]
    rows[1] = replace(rows[1], saved_with=((0, 30),))
    kept = stage_memories(replace(profile, layers={1: tuple(rows)}), plan, pipeline)
    assert [each.relayed[1] for each in kept] == [0, 0, 30, 0]
    assert kept[1].unit[1] == found[1].unit[1] + 30


class SkipReader:
    """The layers of `chain_with_a_skip`, as what can be cut."""

    def __init__(self) -> None:
        rows = chain_with_a_skip((1, 1, 1), 1).layers[1]
        self.layers, self.outputs = rows[:-1], (3,)


def with_skips(asked: Request) -> Request:
    """Return a request whose every third layer is also read four layers on, relayed."""
    rows = [*asked.profile.layers[1]]
    for index in range(4, len(rows) - 1, 3):
        rows[index] = replace(rows[index], reads=(index - 4, *rows[index].reads))
    profile = replace(asked.profile, layers={1: tuple(rows)})
    return replace(asked, profile=profile, relay=True, cluster=replace(asked.cluster, memory_bytes=None))


@pytest.mark.parametrize(("kind", "seed"), [("random", 3), ("CNN-like", 7), ("RNN-like", 7)])
def test_floors_and_bottlenecks_count_relayed_values(kind: str, seed: int) -> None:
    made = Planner(with_skips(instance(kind, seed).request), MODE)
    floors = Floors(made)
    every = list(every_plan(made))
    equal = 0
    for each in every[:: max(1, len(every) // 30)]:
        floor_s = floors.floor_s(Sketch(each.stages, each.devices, each.depth))
        found = made.with_prediction(estimated(made, each))
        # What is simulated may end within a cycle of a few minibatches.
        assert floor_s <= found.minibatch_s * (1 + 5e-3)
        equal += found.minibatch_s == pytest.approx(floor_s, rel=1e-2)
    assert equal >= 5


def estimated(made: Planner, each: Candidate) -> Any:
    return made.estimate("", each.stages, each.devices, depth=each.depth)


def test_a_recipe_relays_in_training_and_in_evaluations() -> None:
    recipes = (load("modes/pipedream-relay", words) for words in ([], ["parallelism.relay=false"]))
    job, direct = (prepare(loaded.recipe, loaded.cluster) for loaded in recipes)
    assert {target - source for source, target in job.setup.plan.crossings} == {1}
    assert {edge.target - edge.source for edge in job.setup.evaluation.pipeline.edges} == {1}
    assert max(target - source for source, target in direct.setup.plan.crossings) > 1
    assert stages_of(direct.setup.plan) == stages_of(job.setup.plan)
    relayed, before = (simulate_all(each.setup, 24) for each in (job, direct))
    for kind in ("activation", "gradient"):
        assert relayed.num_bytes[kind, "server"] > before.num_bytes[kind, "server"]
    assert relayed.end_s > before.end_s
