"""Small random planning problems, for the planner and for the oracle at once."""

import random
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

from pipebench.cluster import Level
from pipebench.planner.cost_models import COST_MODELS, CostModel, UnitWork
from pipebench.planner.memory import MemoryRule
from pipebench.planner.state_graph import antichains, prefixes
from pipebench.planner.states import States
from pipebench.profile.model import LayerProfile
from tests.oracles import planning

MODELS = sorted(COST_MODELS)
SECONDS = st.one_of(st.just(0.0), st.integers(1, 20).map(lambda n: n * 1e-3), st.floats(1e-6, 1.0))
BYTES = st.one_of(st.just(0), st.integers(1, 8).map(lambda n: n << 20), st.integers(1, 10**9))
BUSY_SECONDS, BUSY_BYTES = st.floats(0.01, 0.05), st.integers(10**8, 10**9)
BANDWIDTHS = st.one_of(st.sampled_from([1e3, 1e9, 1e10, 1e12, 1e15]), st.floats(4.0, 12.0).map(lambda power: 10**power))
LATENCIES = st.one_of(st.just(0.0), st.floats(1e-7, 1e-2))
EFFICIENCIES = st.sampled_from([1.0, 0.83, 0.5])


@st.composite
def graphs(draw: Any, max_layers: int = 7) -> tuple[LayerProfile, ...]:
    """Draw a model: skips, several sources, stand-ins for inputs, unread items, tied and missing parameters.

    In half of them every layer takes time and memory, so that plans have many stages and limits have an effect.
    """
    busy = draw(st.booleans())
    num_inputs = draw(st.integers(0, 2))
    rows = [LayerProfile(f"in{i}", "Input", 0.0, 0.0, draw(BYTES), 0, is_input=True) for i in range(num_inputs)]
    num_layers = draw(st.integers(1, max_layers))
    chain = draw(st.booleans())
    for index in range(num_inputs, num_inputs + num_layers):
        reads = set(draw(st.lists(st.integers(0, index - 1), max_size=3))) if index else set()
        if chain and index > num_inputs:
            reads.add(index - 1)
        rows.append(_layer(draw, index, tuple(sorted(reads)), busy=busy))
    for index in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        source = draw(st.integers(num_inputs, num_inputs + num_layers - 1))
        rows.append(LayerProfile(f"item{index}", "__getitem__", 0.0, 0.0, draw(BYTES), 0, (source,)))
    read = {index for row in rows for index in row.reads}
    items = {index for index, row in enumerate(rows) if row.kind.startswith("__getitem__")}
    returned = tuple(index for index in range(num_inputs, len(rows)) if index not in read and index not in items)
    extra = draw(st.sampled_from([(), (), (num_inputs,)]))
    loss_reads = tuple(sorted({*(returned or (num_inputs,)), *extra}))
    loss = LayerProfile("loss", "loss", draw(SECONDS), draw(SECONDS), 4, 4, loss_reads, saved_bytes=draw(BYTES))
    return (*rows, loss)


def _layer(draw: Any, index: int, reads: tuple[int, ...], *, busy: bool) -> LayerProfile:
    output_bytes = draw(BYTES)
    seconds, num_bytes = (BUSY_SECONDS, BUSY_BYTES) if busy else (SECONDS, BYTES)
    parameters = {f"own{index}": draw(num_bytes)} if busy or draw(st.booleans()) else {}
    if draw(st.integers(0, 7)) == 0:
        parameters["tied"] = 3 << 20
    untrained = {f"frozen{index}": draw(num_bytes)} if draw(st.integers(0, 3)) == 0 else {}
    if draw(st.integers(0, 7)) == 0:
        untrained["shared"] = 5 << 20
    return LayerProfile(
        name=f"layer{index}",
        kind="Linear",
        forward_s=draw(seconds),
        backward_s=draw(seconds),
        output_bytes=output_bytes,
        gradient_bytes=draw(st.sampled_from([0, output_bytes])),
        reads=reads,
        inputs=("x",) if draw(st.integers(0, 3)) == 0 else (),
        parameter_sizes=parameters,
        untrained_sizes=untrained,
        saved_bytes=draw(num_bytes),
        saved_with=tuple((read, draw(num_bytes)) for read in reads if draw(st.booleans())),
    )


@dataclass(frozen=True)
class Case:
    """One problem, for the planner and for the oracle."""

    work: UnitWork
    model: CostModel
    memory: MemoryRule | None
    search: planning.Search

    @property
    def states(self) -> States:
        return self.work.states

    def members(self, state: int) -> planning.State:
        return as_set(self.states.members[state])


@st.composite
def cases(draw: Any, model: str, max_layers: int = 7, *, shards: bool = True) -> Case:
    """Draw a model, its places to cut, and a memory limit or none; `shards`: whether modes may be sharded."""
    rows = draw(graphs(max_layers))
    kind, ties = draw(st.booleans()), draw(st.booleans())
    states = (antichains if kind else prefixes)(rows, ties=ties)
    cuts = (planning.grown if kind else planning.in_order)(rows, ties=ties)
    constants = (
        draw(st.sampled_from([0.0, 1e-11])),
        draw(st.sampled_from([0.0, 1e-3])),
        draw(st.sampled_from([0.0, 0.5])),
    )
    given = planning.Given(rows, model, *constants)
    rule = draw(memories(given, shards=shards))
    memory = None
    if rule is not None:
        in_flight = {"in_flight": rule.in_flight, "depth_at_most": rule.depth_at_most}
        memory = MemoryRule(rule.limit_bytes, rule.versions, rule.state_bytes_per_byte, **in_flight, shard=rule.shard)
    return Case(UnitWork(states, *constants), COST_MODELS[model], memory, planning.Search(given, frozenset(cuts), rule))


@st.composite
def memories(draw: Any, given: planning.Given, *, shards: bool) -> planning.Memory | None:
    """Draw no limit, a loose one, or one near the bytes of the whole model on one worker."""
    share = draw(st.sampled_from([None, None, Fraction(100), *(Fraction(n, 8) for n in range(2, 14))]))
    if share is None:
        return None
    in_flight = draw(st.sampled_from([None, None, None, 1, 3]))
    at_most = draw(st.sampled_from([None, None, None, 1, 2])) if in_flight is None else None
    versions = draw(st.sampled_from([None, 1, 2]))
    # Weights of which versions are kept for minibatches in flight aren't gathered.
    kinds = ["none", "optimizer", "gradients", *(["parameters"] if versions else [])]
    shard = draw(st.sampled_from(kinds)) if shards else "none"
    rule = planning.Memory(0.0, versions, frozenset(), draw(st.integers(0, 2)), in_flight, at_most, shard)
    whole = given.num_bytes(planning.EMPTY, given.whole, 1, rule)
    return rule._replace(limit_bytes=float(int(share * whole)))


@st.composite
def levels(draw: Any, count: int) -> Level:
    return Level("level", count, draw(BANDWIDTHS), draw(LATENCIES), draw(EFFICIENCIES))


def link(level: Level) -> planning.Link:
    bandwidth = level.bandwidth_bytes_per_s
    return planning.Link(level.count, bandwidth * level.efficiency, bandwidth, level.latency_s)


def as_set(members: int) -> planning.State:
    return frozenset(index for index in range(members.bit_length()) if members >> index & 1)


def chain(num_layers: int, seed: int) -> tuple[LayerProfile, ...]:
    numbers = random.Random(seed)
    rows = []
    for index in range(num_layers):
        output_bytes = numbers.randrange(10**7)
        rows.append(
            LayerProfile(
                name=f"layer{index}",
                kind="Linear",
                forward_s=numbers.random() * 1e-3,
                backward_s=numbers.random() * 2e-3,
                output_bytes=output_bytes,
                gradient_bytes=output_bytes,
                reads=(index - 1,) if index else (),
                inputs=() if index else ("x",),
                parameter_sizes={f"own{index}": numbers.randrange(10**7)},
                saved_bytes=numbers.randrange(10**7),
            )
        )
    return (*rows, LayerProfile("loss", "loss", 1e-5, 1e-5, 4, 4, (num_layers - 1,)))
