"""Functions that the tests run in processes: training with the distributed engine, and its outcome.

Everything is called by name in a process of its own, so arguments are plain values.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from pipebench.distributed.control import Control
from pipebench.distributed.engine import DistributedEngine
from pipebench.distributed.world import World
from pipebench.engine.admission import EvaluationStoppedError
from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from pipebench.extensions.asynchronous.pushes import Pushes, unpacked
from pipebench.extensions.moves.engine import moves_of, moving
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.model.graph import trace
from pipebench.model.optimizer import make_optimizer
from pipebench.model.plan import recut
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.schedule.operations import Op
from pipebench.schedule.orders import ALL_FORWARDS, INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE
from pipebench.schedule.pipeline import SPLIT, STASH, WHOLE
from pipebench.schedule.weights import CORRECT, DOUBLE_BUFFER, ONE, PREDICT, VERTICAL_SYNC
from pipebench.simulate.network import Network
from tests.engine.test_cells import leaving_out
from tests.evaluations import RankedBlobs
from tests.lengths import Reader, Tagger, labelled_tokens, texts
from tests.model.test_cells import Stack
from tests.models import ConvNet, FrozenPart, Gated, MixedTypes, RandomNet, SkipNet, Structures, TiedEnds, WideTied
from tests.support import Blobs, Mlp, make_setup
from tests.unwatched import unwatched

POLICIES = [ONE, ONE, STASH, STASH, VERTICAL_SYNC, DOUBLE_BUFFER, PREDICT, CORRECT]


@dataclass(frozen=True)
class Case:
    """A recipe in small."""

    model: str  # the name of a kind in `model_of`, or `random-` and a seed
    starts: tuple[int, ...]  # first layers of all stages but the first
    replicas: tuple[int, ...]  # per stage
    columns: Mapping[str, Any] = field(default_factory=dict)  # of `make_setup`
    segments: tuple[int, ...] = (7, 5)  # minibatches between drains
    devices: tuple[int, ...] = ()  # of every worker; empty for its own number
    optimizer: OptimizerRecipe | None = None  # as in a recipe; None for `momentum`
    shares_memory: bool = True  # whether messages travel in memory that processes share; otherwise by sockets
    # First layers of all stages but the first, before every segment but the first; empty: as before.
    recuts: tuple[tuple[int, ...], ...] = ()
    moves: tuple[Repartition, ...] = ()  # announced before the first segment
    # Cells of `stack` that are left out, before every segment but the first: "bc"; empty: none.
    left_out: tuple[str, ...] = ()


def random_case(seed: int, num_workers: int) -> Case:
    """Return any case that so many processes can run."""
    draw = random.Random(f"{seed} of {num_workers}")
    model = draw.choice(["conv", "skip", "mlp", "reader", "tagger", f"random-{seed}"])
    num_layers = len(trace(model_of(model)).layers)
    replicas: list[int] = []
    columns: dict[str, Any] = {"weights": draw.choice(POLICIES)}
    equal = draw.choice([width for width in (1, 2) if num_workers % width == 0])
    while sum(replicas) < num_workers:
        replicas.append(draw.randint(1, min(2, num_workers - sum(replicas))))
    if columns["weights"] == DOUBLE_BUFFER:
        replicas = [equal] * (num_workers // equal)
    elif columns["weights"] == ONE and draw.random() < 0.4 and num_layers >= 2 * num_workers // equal:
        replicas = [equal] * (2 * num_workers // equal)
        columns |= {"chunks": 2}
    starts = sorted(draw.sample(range(1, num_layers), len(replicas) - 1))
    if columns["weights"] == ONE:
        columns |= {"microbatches": draw.randint(1, 4), "accumulate": draw.randint(1, 2)}
        columns["order"] = draw.choice([INTERLEAVED if "chunks" in columns else ONE_F_ONE_B, ALL_FORWARDS])
        columns["recompute"] = draw.random() < 0.3
        if columns["order"] == ONE_F_ONE_B and draw.random() < 0.4:
            columns["order"] = ZERO_BUBBLE
    columns["backward"] = SPLIT if columns.get("order") == ZERO_BUBBLE or draw.random() < 0.3 else WHOLE
    if columns["weights"] == PREDICT and len({*replicas}) == 1:
        columns["microbatches"] = draw.randint(1, 4)
    if columns["weights"] in (PREDICT, CORRECT):
        columns["recompute"] = draw.random() < 0.3
    columns["depth"] = draw.choice([None, 1, 2, 3, 5])
    if columns["weights"] == DOUBLE_BUFFER:
        columns["accumulate"] = (columns["depth"] or len(replicas)) + draw.randint(0, 1)
    columns["clip_norm"] = draw.choice([None, None, 0.3])
    if columns["backward"] == WHOLE and draw.random() < 0.3:
        columns["memory"] = [draw.choice((KEEP, RECOMPUTE, SWAP, SWAP)) for _ in range(num_layers)]
    segments = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3)))
    devices = tuple(draw.sample(range(num_workers), num_workers))
    return Case(model, tuple(starts), tuple(replicas), columns, segments, devices)


def model_of(name: str) -> nn.Module:
    if name.startswith("random-"):
        draw = random.Random(name)
        return RandomNet([[draw.randint(0, i) for _ in range(draw.randint(1, 3))] for i in range(draw.randint(3, 6))])
    kinds: dict[str, Callable[[], nn.Module]] = {
        "conv": ConvNet, "skip": SkipNet, "mlp": Mlp, "structures": Structures, "matrices": matrices,
        "mixed": MixedTypes, "frozen": FrozenPart, "gated": Gated, "stack": stack, "tied": TiedEnds,
        "wide tied": WideTied,
        "reader": Reader, "tagger": Tagger,
    }  # fmt: skip
    return kinds[name]()


def matrices() -> nn.Module:
    """Return a model all of whose parameters have two dimensions; double precision."""
    torch.default_generator.manual_seed(3)
    layers = [
        nn.Linear(6, 7, bias=False),
        nn.Tanh(),
        nn.Linear(7, 5, bias=False),
        nn.Tanh(),
        nn.Linear(5, 4, bias=False),
    ]
    return nn.Sequential(*layers).double()


def stack() -> nn.Module:
    """Return a model with cells that can be left out; double precision."""
    torch.default_generator.manual_seed(3)
    return Stack()


def images() -> Blobs:
    """Return image data in single precision, the last minibatch of an epoch a short one."""
    return RankedBlobs(num_train=46, shape=(2, 8, 8), dtype=torch.float32)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=0.01, fused=True)


def own_optimizer(target: str) -> OptimizerRecipe:
    """Return a recipe's optimizer with a target, everything else its own."""
    return OptimizerRecipe(None, 0.05, target=target)


def small_setup(case: Case) -> Setup:
    columns, model = {"devices": case.devices or None, **case.columns}, model_of(case.model)
    if "memory" in columns:  # cases of several models have the policies of the largest
        columns["memory"] = columns["memory"][: len(trace(model).layers)]
    setup = make_setup(
        model,
        (list(case.starts), list(case.replicas)),
        dataset={"conv": images, "reader": texts, "tagger": labelled_tokens}.get(
            case.model, partial(RankedBlobs, num_train=46)
        )(),
        make_optimizer=partial(make_optimizer, case.optimizer) if case.optimizer else momentum,
        **columns,
    )
    return moving(setup) if case.moves else replace(setup, repartitions=bool(case.recuts or case.left_out))


@dataclass
class Outcome:
    """The outcome of a run: of one process, of a worker, or of all."""

    worker: int
    tensors: list[dict[str, torch.Tensor]]  # per worker
    losses: list[tuple[float, float]]
    scores: list[dict[str, float]]
    num_bytes: dict[tuple[str, str], int]
    versions: list[int]
    done: list[int]  # minibatches of every segment
    pushes: list[Pushes] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)  # most bytes held, per worker


def distributed(world: World, case: Case) -> Outcome:
    """Run a case on the processes; return this one's share."""
    world = replace(world, shares_memory=case.shares_memory)
    return in_processes(
        world, small_setup(case), case.segments, recuts=case.recuts, moves=case.moves, left_out=case.left_out
    )


def all_distributed(world: World, cases: Sequence[Case]) -> list[Outcome]:
    return [distributed(world, case) for case in cases]


def in_processes(
    world: World,
    setup: Setup,
    segments: Sequence[int],
    *,
    control: Control | None = None,
    on_unit: Any = None,
    recuts: Sequence[Sequence[int]] = (),
    moves: Sequence[Repartition] = (),
    left_out: Sequence[str] = (),
) -> Outcome:
    """Run a setup on the processes; return this one's share."""
    losses: list[tuple[float, float]] = []
    engine = DistributedEngine(
        replace(setup, device=world.device),
        world,
        control or unwatched(setup),
        on_loss=lambda loss, n, weight, s: losses.append((float(loss), weight)),
        on_unit=on_unit or (lambda samples, loss, s: None),
    )
    engine.start_clock()
    for move in moves:
        moves_of(engine).announce(move)
    scores, done = [], list[int]()
    for index, count in enumerate(segments):
        leave_out(engine, setup, left_out, index)
        repartition_before(engine, recuts, index)
        done.append(engine.train(sum(done), count))
        with suppress(EvaluationStoppedError):
            scores.append(engine.evaluate())
    whole(engine)
    replicas = engine.worker.replicas.values()
    tensors = [{name: tensor.detach().cpu().clone() for name, tensor in r.tensors().items()} for r in replicas]
    bytes_sent, versions = dict(engine.num_bytes), [engine.worker.versions_max]
    peaks = [engine.worker.peaks.device_bytes]
    pushes = unpacked(engine.facts()["extensions"].get("asynchronous", ()))
    engine.close()
    return Outcome(engine.worker.index, tensors, losses, scores, bytes_sent, versions, done, pushes, peaks)


def whole(engine: VirtualEngine | DistributedEngine) -> None:
    """Let sharded replicas gather their weights, for a look at all of them."""
    engine.gather_or_free(Op.GATHER, Op.WAIT_GATHER)


def virtually(case: Case, device: str = "cpu") -> Outcome:
    """Run a case on the virtual engine, on a device; the outcome's tensors are in the host's memory."""
    setup = replace(small_setup(case), device=torch.device(device))
    return on_virtual_engine(setup, case.segments, case.recuts, case.left_out, case.moves)


def repartition_before(engine: VirtualEngine | DistributedEngine, recuts: Sequence[Sequence[int]], index: int) -> None:
    """Repartition an engine before a segment if `recuts` has cuts for it."""
    if 0 < index <= len(recuts) and recuts[index - 1]:
        engine.replan(recut(engine.setup.graph, engine.setup.plan, recuts[index - 1]))


def leave_out(engine: VirtualEngine | DistributedEngine, whole: Setup, left_out: Sequence[str], index: int) -> None:
    """Deactivate the cells that `left_out` has for a segment, with unchanged cuts."""
    if 0 < index <= len(left_out):
        found = leaving_out(replace(whole, device=engine.setup.device), left_out[index - 1])
        engine.switch_setup(found.under(engine.setup.plan))


def on_virtual_engine(
    setup: Setup,
    segments: Sequence[int],
    recuts: Sequence[Sequence[int]] = (),
    left_out: Sequence[str] = (),
    moves: Sequence[Repartition] = (),
) -> Outcome:
    losses: list[tuple[float, float]] = []
    network = Network(setup.cluster, setup.devices)
    engine = VirtualEngine(setup, network, on_loss=lambda loss, n, weight, s: losses.append((float(loss), weight)))
    scores, done = [], 0
    for move in moves:
        moves_of(engine).announce(move)
    for index, count in enumerate(segments):
        leave_out(engine, setup, left_out, index)
        repartition_before(engine, recuts, index)
        engine.train(done, count)
        done += count
        scores.append(engine.evaluate())
    whole(engine)
    tensors = [
        {name: tensor.detach().cpu() for name, tensor in replica.tensors().items()} for replica in engine.replicas
    ]
    versions = [worker.versions_max for worker in engine.workers]
    peaks = engine.peak_bytes
    pushes = unpacked(engine.facts()["extensions"].get("asynchronous", ()))
    return Outcome(0, tensors, losses, scores, dict(engine.num_bytes), versions, list(segments), pushes, peaks)


def compare(found: Sequence[Outcome], expected: Outcome, tolerance: float) -> None:
    """Compare the processes with the virtual engine; a tolerance of 0 asks for the same bits."""
    by_worker = sorted(found, key=lambda outcome: outcome.worker)
    tensors = [tensors for outcome in by_worker for tensors in outcome.tensors]
    for worker, (mine, theirs) in enumerate(zip(tensors, expected.tensors, strict=True)):
        assert set(mine) == set(theirs)
        for name, tensor in mine.items():
            same = torch.equal(tensor, theirs[name]) if tolerance == 0.0 else _close(tensor, theirs[name], tolerance)
            assert same, f"worker {worker}: {name} differs by {(tensor.double() - theirs[name].double()).abs().max()}"
    assert Counter(expected.num_bytes) == sum((Counter(outcome.num_bytes) for outcome in found), Counter())
    assert expected.versions == [version for outcome in by_worker for version in outcome.versions]
    assert all(outcome.done == expected.done for outcome in found)
    losses = sorted(loss for outcome in found for loss, _ in outcome.losses)
    assert _near(losses, sorted(loss for loss, _ in expected.losses), tolerance)
    for outcome in found:  # every process knows the scores
        for known, scores in zip(outcome.scores, expected.scores, strict=True):
            assert list(known) == list(scores)
            assert _near(list(known.values()), list(scores.values()), tolerance)


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def _near(found: Sequence[float], expected: Sequence[float], tolerance: float) -> bool:
    """Compare sums: the last bits depend on the order in which workers' sums are added."""
    limit = max(tolerance, 1e-12)
    pairs = zip(found, expected, strict=True)
    return all(math.isclose(a, b, rel_tol=limit, abs_tol=tolerance) for a, b in pairs)
