"""The virtual engine: N logical workers, real arithmetic, one process, one device, a virtual clock.

It plays the simulator's events in order and executes each. Weight versions, stale gradients and replicas are exactly
those of N processes; only time is the simulator's.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipebench.checkpoint.handover import asked, kept, keys_of, pieces, state_bytes
from pipebench.checkpoint.state import ModelState
from pipebench.engine.feed import Feed
from pipebench.engine.gate import StoppableAdmission, StopRequest, admitted_program
from pipebench.engine.monitor import monitors
from pipebench.engine.phase_costs import PhaseCosts
from pipebench.engine.phases import Phases, phases_of
from pipebench.engine.replica import Replica
from pipebench.engine.ring import all_reduce, of_one_type, server_sum
from pipebench.engine.scores import Scores
from pipebench.engine.server import ParameterServer, Pulled
from pipebench.engine.setup import Setup
from pipebench.engine.whole import WholeModel
from pipebench.engine.worker import Worker, host_peaks, scale_metrics, training_feed
from pipebench.model.plan import Plan
from pipebench.model.sampling import Size
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.moves import Move
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import forward_programs
from pipebench.schedule.pushes import Turns
from pipebench.schedule.syncs import ALL_REDUCE, SYNCS
from pipebench.simulate.costs import Costs
from pipebench.simulate.meter import Measured, Meter, fractions, pcie_fractions
from pipebench.simulate.network import Message, Network
from pipebench.simulate.simulation import Event, Simulation
from pipebench.simulate.timeline import BUFFERS, CONTROL, EVALUATION, MIGRATION, PCIE

_LOG = logging.getLogger("pipebench.engine")

OnLoss = Callable[[torch.Tensor, int, float, float], None]
OnUnit = Callable[[int, float, float], None]


class VirtualEngine:
    """Trains on a virtual clock. `train` and `evaluate` leave the pipeline drained.

    Args:
        setup: what to run.
        network: the links, which also count the bytes the shapes predict.
        observe: told of every event, after it was executed.
        on_loss: told of every unit's summed loss (a scalar on the engine's device, not divided by its weight), number
            of samples, weight and the time; it may raise to end the run.
        on_unit: told of every unit whose loss is known: its samples, its mean loss (NaN where reading it would keep a
            GPU waiting), the time.
        meter: takes note of every event, too.
        stop: asks for an early end.
    """

    def __init__(
        self,
        setup: Setup,
        network: Network,
        observe: Callable[[Event], None] = lambda event: None,
        on_loss: OnLoss = lambda loss, samples, weight, clock_s: None,
        on_unit: OnUnit = lambda samples, loss, clock_s: None,
        meter: Meter | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self.network = network
        self.clock_s = 0.0  # at the last drain
        self.now_s = 0.0
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        self._evaluation_s = 0.0
        self._observe = observe
        self._on_loss = on_loss
        self._on_unit = on_unit
        self._meter = meter or Meter(setup.pipeline, costs=setup.costs)
        self._stop = stop or StopRequest()
        self._decisions: list[Move] = []
        self._cut_stages(setup)

    def _cut_stages(self, setup: Setup) -> None:
        """Cut the stages of a setup, with their initial weights and nothing in flight."""
        self.setup = setup
        self._phases: Phases | None = None
        self.workers = [Worker(setup, index) for index in range(setup.pipeline.num_workers)]
        if setup.balances:
            for worker, monitor in zip(self.workers, monitors(setup, self._decided), strict=True):
                worker.monitor = monitor
        self._mailbox = _Mailbox(setup, self.num_bytes)
        self._rings = _Rings(setup, self.workers, self.num_bytes)

    @property
    def replicas(self) -> list[Replica]:
        """Every worker's replica of every stage it has."""
        return [replica for worker in self.workers for replica in worker.replicas.values()]

    @property
    def peak_bytes(self) -> list[int]:
        """The most bytes that every worker has held."""
        return [worker.peak_bytes for worker in self.workers]

    @property
    def busy_fraction(self) -> float:
        """Share of the workers' time in training that they spent computing."""
        elapsed_s = (self.now_s - self._evaluation_s) * len(self.workers)
        return min(1.0, self._meter.busy_s / elapsed_s) if elapsed_s > 0 else 0.0

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends early, if it does."""
        return self._stop.reason

    @property
    def position(self) -> int:
        """The one process there is."""
        return 0

    @property
    def is_first(self) -> bool:
        """The one process there is keeps the run's records."""
        return True

    def exchange(self, value: Any) -> list[Any]:
        """Return what every process gives: this one's."""
        return [value]

    def start_clock(self, clock_s: float = 0.0) -> None:
        """Let the run's clock go on from `clock_s`."""
        self.clock_s = self.now_s = self._meter.origin_s = clock_s

    def turn_to(self, work: str) -> None:
        """Nobody else waits."""

    def settle(self) -> None:
        """On this clock nothing happens between two segments."""

    def parts(self) -> list[tuple[str, ModelState]]:
        """Return every worker's part of a checkpoint, by name."""
        return [part for worker in self.workers for part in worker.parts()]

    def replan(self, plan: Plan) -> None:
        """Go on under a plan with other cuts or memory policies, at a drain; what moves takes the links' time.

        Raises:
            PlanError: stages, replicas, devices or depth are others.
        """
        self.take_up(self.setup.under(plan))

    def take_up(self, setup: Setup) -> None:
        """Go on with another setup of the same model, at a drain: other cuts, or other cells left out; see `replan`."""
        before = self.workers
        self._cut_stages(setup)
        given = [ModelState.merge(part for _, part in worker.parts()) for worker in before]
        offers = [keys_of(state) for state in given]
        messages = []
        for worker, old in zip(self.workers, before, strict=True):
            claim = worker.claim()
            state = kept(old.held(), claim)
            for giver, keys in asked(offers, worker.index, keys_of(state), claim).items():
                moved = pieces(given[giver], keys)
                messages.append(self._migrate(giver, worker.index, state_bytes(moved)))
                state = ModelState.merge([state, moved])
            worker.restore(state)
            worker.recall(old.peak_bytes, old.versions_max, old.host_peak_bytes)
        self._arrive(messages)

    def restore(
        self, state: ModelState, facts: Mapping[str, Any] | None, clock_s: float, plan: Plan | None = None
    ) -> None:
        """Go on from a checkpoint.

        Args:
            state: of the whole model.
            facts: what `facts` returned when it was taken; None if engine or plan was another.
            clock_s: the run's clock then.
            plan: to go on under; None for the one there is.
        """
        if plan is not None:
            self._cut_stages(self.setup.under(plan))
        for worker in self.workers:
            worker.restore(state)
        if facts is not None:
            self.num_bytes.clear()
            self.num_bytes.update({(kind, level): count for kind, level, count in facts["num_bytes"]})
            columns = (facts["peak_bytes"], facts["weight_versions_max"], host_peaks(facts))
            for worker, *counted in zip(self.workers, *columns, strict=True):
                worker.recall(*counted)
            self._meter.busy_s, self._meter.stall_s = facts["busy_s"], facts["stall_s"]
            self._meter.again_s, self._meter.swap_stall_s = facts.get("again_s", 0.0), facts.get("swap_stall_s", 0.0)
            self._evaluation_s = facts["evaluation_s"]
            for server in self._rings.servers:
                server.segments = [*facts["pushes"]]

    def facts(self) -> dict[str, Any]:
        """Return what was counted so far, in a form that JSON holds; lists are by worker."""
        return {
            "num_bytes": [[kind, level, count] for (kind, level), count in self.num_bytes.items()],
            "peak_bytes": self.peak_bytes,
            "weight_versions_max": [worker.versions_max for worker in self.workers],
            "host_peak_bytes": [worker.host_peak_bytes for worker in self.workers],
            "busy_s": self._meter.busy_s,
            "stall_s": self._meter.stall_s,
            "again_s": self._meter.again_s,
            "swap_stall_s": self._meter.swap_stall_s,
            "evaluation_s": self._evaluation_s,
            "pushes": [asdict(pushes) for server in self._rings.servers for pushes in server.segments],
        }

    def measured(self, training_s: float) -> Measured:
        """Return what the workers did, on the virtual clock."""
        meter = self._meter
        num_workers, swaps = len(self.workers), bool(self.setup.pipeline.swaps)
        metrics = fractions(
            meter.busy_s, meter.stall_s, num_workers, training_s,
            again_s=meter.again_s, swap_stall_s=meter.swap_stall_s if swaps else None,
        ) | pcie_fractions(self.setup.cluster, self.num_bytes, num_workers, training_s)  # fmt: skip
        return Measured(metrics, (), meter.timeline(), meter.busy_s, meter.stall_s, Counter(self.num_bytes))

    def train(self, first_minibatch: int, num_minibatches: int) -> int:
        """Train on minibatches `first_minibatch` and after, then drain.

        Returns:
            How many were trained on: fewer than asked for if a stop was asked for.
        """
        pipeline = self.setup.pipeline
        self._feed, divisors = training_feed(self.setup, first_minibatch, num_minibatches)
        phases = self._phases or phases_of(self.setup)
        self._phases = phases
        for worker in self.workers:
            worker.begin_training(self._feed, first_minibatch, num_minibatches, divisors, phases)
        self._admission = admission = StoppableAdmission(
            self._stop, pipeline, num_minibatches, self.setup.sampler.streams or 1, self._cut
        )
        routes = None if phases is None else phases.routes
        lists = [admitted_program(pipeline, w.index, num_minibatches, admission, routes) for w in self.workers]
        self._rings.begin(first_minibatch)
        self._meter.begin(self._feed.size)
        turns = Turns(self.setup.push_order.get(first_minibatch), lambda: admission.limit)
        self._play(pipeline, self.setup.costs, lists, turns, phases)
        for worker in self.workers:
            worker.end_training()
        if phases is not None:
            self.setup = phases.last
        self._phases = None
        if admission.limit > 0:
            self._average_buffers()
        return admission.limit

    def announce(self, move: Move) -> None:
        """Let layers move while training goes on: in the segment that runs now, which who hears of its events may call.

        Between two segments the move is for the next one.

        Raises:
            PlanError: layers can't move so, or not from that minibatch on.
        """
        self._phases = self._phases or Phases(self.setup)
        self._phases.announce(move)

    def take_decisions(self) -> list[Move]:
        """Return what was decided to balance the stages since this was last asked, numbered since the drain before."""
        taken, self._decisions = self._decisions, []
        return taken

    def _decided(self, move: Move) -> None:
        """One worker after the other hears of a decision: the first of them tells all."""
        if move not in self._decisions:
            self._decisions.append(move)
            if self.setup.live:
                self.announce(move)
            else:
                self._admission.end_at(move.at)

    def _cut(self, num_minibatches: int) -> None:
        """Let the segment end early."""
        for worker in self.workers:
            worker.end_early(num_minibatches)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the newest weights on every held-out sample; return `eval_loss` and every metric of the dataset."""
        dataset, count = self.setup.dataset, self.setup.held_out.minibatches_per_epoch
        before_s, self._meter.evaluating = self.clock_s, True
        self._feed = Feed(self.setup, "eval", 0, count)
        scores = Scores(dataset)
        for worker in self.workers:
            worker.begin_evaluation(self._feed, scores)
        before = Counter(self.network.num_bytes)
        evaluation = self.setup.evaluation
        costs = evaluation.costs(self.setup.costs)
        self._play(evaluation.pipeline, costs, forward_programs(evaluation.pipeline, count))
        self.network.num_bytes = _as_evaluation(before, self.network.num_bytes)
        self._meter.evaluating = False
        self._evaluation_s += self.clock_s - before_s
        for worker in self.workers:
            worker.end_evaluation()
        metrics = scores.metrics() | scale_metrics(each for worker in self.workers for each in worker.loss_scales)
        if dataset.generates_with is not None:
            metrics |= dataset.whole_model_metrics(self._whole.filled(worker.tensors() for worker in self.workers))
        return metrics

    @cached_property
    def _whole(self) -> WholeModel:
        return WholeModel(self.setup)

    def _play(
        self,
        pipeline: Pipeline,
        costs: Costs,
        lists: Sequence[Iterator[Instruction]],
        turns: Turns | None = None,
        phases: Phases | None = None,
    ) -> None:
        size_of: Callable[[int], Size] = self._feed.size
        moving = None
        if phases is not None:
            moving = PhaseCosts(phases, size_of, lambda unit: pipeline.minibatch(unit)[0])
            costs, size_of = moving.costs, moving.size_of
        simulation = Simulation(pipeline, lists, costs, self.network, size_of, self.clock_s, turns, moving)
        verbose = _LOG.isEnabledFor(logging.DEBUG)
        try:
            for event in simulation:
                self.now_s = event.end_s
                if verbose:
                    duration_s = event.end_s - event.start_s
                    _LOG.debug(
                        "t=%.9f s worker %d %s (%.3g s)", event.start_s, event.worker, event.instruction, duration_s
                    )
                self._execute(event)
                self._observe(event)
                self._meter.event(event)
        finally:
            self._feed.close()
        self.clock_s = simulation.end_s

    def _execute(self, event: Event) -> None:
        worker = self.workers[event.worker]
        if worker.monitor is not None:
            worker.monitor.note(event.instruction, event.end_s - event.start_s)
        loss = worker.execute(event.instruction, self._mailbox, self._rings)
        if loss is not None:
            self._on_loss(*loss, self.now_s)
            mean = math.nan if loss.total.is_cuda else float(loss.total) / loss.weight
            self._on_unit(loss.samples, mean, self.now_s)

    def _average_buffers(self) -> None:
        """Average running statistics over the replicas of every stage, as part of the drain (DESIGN: BatchNorm)."""
        pipeline, network = self.setup.pipeline, self.network
        ends = [self.clock_s]
        for stage, r in enumerate(pipeline.replicas):
            num_bytes = self.setup.costs.stages[stage].buffer_bytes
            if r == 1 or num_bytes == 0:
                continue
            ring = self._rings.of_stage(stage)
            for column in zip(*(self.workers[worker].buffers(stage) for worker in ring), strict=True):
                flats = [buffer.reshape(-1) for buffer in column]
                mean = self._rings.all_reduce(BUFFERS, ring, flats) / r
                for buffer in column:
                    buffer.copy_(mean.view(buffer.shape))
            workers = pipeline.workers_of(stage)
            network.sum_up(ALL_REDUCE, BUFFERS, "buffers", workers, num_bytes, self.clock_s, ends.append)
        messages = [*self._hand_out_averages()]
        self._arrive(messages)
        self.clock_s = max([*ends, self.clock_s])

    def _arrive(self, messages: Sequence[Message]) -> None:
        """Let what was sent at a drain arrive, before anything else goes on."""
        self.network.agenda.play()
        for message in messages:
            self.network.arrived(message)
        self.clock_s = max([self.clock_s, *(message.arrival_s for message in messages)])

    def _migrate(self, sender: int, receiver: int, num_bytes: int) -> Message:
        """Let bytes of the model's state set out from a worker to another, at a drain."""
        self.num_bytes[MIGRATION, self.setup.level_between(sender, receiver).name] += num_bytes
        return self.network.send(
            self.network.connection(MIGRATION, sender, receiver), num_bytes, self.clock_s, "layers"
        )

    def _hand_out_averages(self) -> Iterator[Message]:
        """Let replicas evaluate with the averages that a server's optimizer keeps; yield what sets out."""
        pipeline = self.setup.pipeline
        for stage, server in enumerate(self._rings.servers):
            host, *others = pipeline.workers_of(stage)
            averages = server.averages
            for worker in others if averages is not None else ():
                assert averages is not None
                self.workers[worker].replicas[stage].weights.take_averages(averages)
                num_bytes = sum(average.nbytes for average in averages)
                self.num_bytes[BUFFERS, self.setup.level_between(host, worker).name] += num_bytes
                connection = self.network.connection(BUFFERS, host, worker)
                yield self.network.send(connection, num_bytes, self.clock_s, "averages")


class _Mailbox:
    """Hands values from stage to stage, and counts their bytes."""

    def __init__(self, setup: Setup, num_bytes: Counter[tuple[str, str]]) -> None:
        self._setup = setup
        self._num_bytes = num_bytes
        self._mail: dict[tuple[str, int, int, int], Any] = {}

    def send(self, kind: str, unit: int, source: int, target: int, values: Any) -> None:
        """Keep a unit's values until they are asked for."""
        pipeline = self._setup.pipeline
        level = self._setup.level_between(pipeline.worker(source, unit), pipeline.worker(target, unit)).name
        self._num_bytes[kind, level] += sum(map(_bytes_of, values.values()))
        self._mail[kind, unit, source, target] = values

    def receive(self, kind: str, unit: int, source: int, target: int) -> Any:
        """Return what was sent; the clock has seen to it that it has arrived."""
        return self._mail.pop((kind, unit, source, target))

    def copied(self, kind: str, num_bytes: int) -> None:
        """Count bytes between a device and its host."""
        self._num_bytes[kind, PCIE] += num_bytes


class _Rings:
    """Sums among the workers of one process, added in the order in which processes do."""

    def __init__(self, setup: Setup, workers: Sequence[Worker], num_bytes: Counter[tuple[str, str]]) -> None:
        self._setup = setup
        self._workers = workers
        self._num_bytes = num_bytes
        self._given: dict[tuple[int, int], dict[int, Sequence[torch.Tensor | None]]] = {}  # by replica
        self._sums: dict[tuple[int, int], tuple[list[torch.Tensor | None], int]] = {}  # and how many still ask for it
        self._norms: dict[int, torch.Tensor] = {}
        self._hosts = [] if SYNCS[setup.pipeline.sync].waits else [workers[w] for w in setup.pipeline.first_workers]
        self.servers = [
            ParameterServer(setup, stage, host.replicas[stage]) for stage, host in enumerate(self._hosts)
        ]  # of every stage
        self._pulled: dict[tuple[int, int], Pulled] = {}  # by stage and replica

    def begin(self, first: int) -> None:
        """Start a segment of training that begins with this minibatch of the run."""
        for server in self.servers:
            server.begin(first)

    def on_gradient(self, stage: int) -> None:
        """Gradients are given all at once: in this process nothing travels while a backward runs."""

    def contribute(self, stage: int, replica: int, round_index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep a replica's gradients of a round; one that had no unit in it may come when the sum is made."""
        if (stage, round_index) not in self._sums:
            self._given.setdefault((stage, round_index), {})[replica] = gradients

    def wait(self, stage: int, round_index: int) -> list[torch.Tensor | None]:
        """Return the sum of the gradients that all replicas gave; the clock has seen to it that they have."""
        key = (stage, round_index)
        if key not in self._sums:
            self._sums[key] = self._reduced(stage, self._given.pop(key)), self._setup.pipeline.replicas[stage]
        total, asking = self._sums.pop(key)
        if asking > 1:
            self._sums[key] = total, asking - 1
        return list(total)

    def norm(self, round_index: int) -> torch.Tensor:
        """Return the norm of all stages' gradients; every stage's replicas hold the same gradients by now."""
        if round_index not in self._norms:
            ring = self._setup.ring(range(self._setup.pipeline.num_workers))
            squares = [self._workers[worker].squared_norm() for worker in ring]
            self._norms = {round_index: self.all_reduce(CONTROL, ring, squares).sqrt()}
        return self._norms[round_index]

    def push(
        self, stage: int, replica: int, minibatch: int, version: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Let a stage's server apply a gradient: the clock has seen to it that it is there, and its turn."""
        self._pulled[stage, replica] = self.servers[stage].apply(replica, minibatch, version, gradients)
        self._count_weights(stage, replica, to_server=True)

    def pull(self, stage: int, replica: int, at_least: int) -> Pulled:
        """Return what the replica's last push has made, or what all have."""
        self._count_weights(stage, replica, to_server=False)
        own = self._pulled.pop((stage, replica), None)
        return own if at_least < 0 and own is not None else self.servers[stage].newest(replica)

    def _count_weights(self, stage: int, replica: int, *, to_server: bool) -> None:
        """Count a gradient, or weights, of a whole stage on their way between a replica and the server."""
        if replica > 0:
            ends = [self._setup.pipeline.workers_of(stage)[each] for each in (replica, 0)]
            sender, receiver = ends if to_server else reversed(ends)
            num_bytes = sum(p.nbytes for p in self._workers[sender].replicas[stage].weights.newest.parameters)
            kind = SYNCS[self._setup.pipeline.sync].kind
            self._num_bytes[kind, self._setup.level_between(sender, receiver).name] += num_bytes

    def of_stage(self, stage: int) -> list[int]:
        """Return a stage's workers in the order of their ring."""
        return self._setup.ring(self._setup.pipeline.workers_of(stage))

    def all_reduce(self, kind: str, ring: Sequence[int], buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of what the workers of a ring have, and count its bytes."""
        return all_reduce(buffers, self._setup.servers(ring), self._counter(kind, ring))

    def _counter(self, kind: str, ring: Sequence[int]) -> Callable[[int, int, int], None]:
        """Return what counts the bytes that one member of a ring sends to another."""

        def count(sender: int, receiver: int, num_bytes: int) -> None:
            level = self._setup.level_between(ring[sender], ring[receiver]).name
            self._num_bytes[kind, level] += num_bytes

        return count

    def _reduced(self, stage: int, given: Mapping[int, Sequence[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """Sum a round's gradients bucket by bucket; a member without a gradient brings zeros."""
        ring, sync = self.of_stage(stage), SYNCS[self._setup.pipeline.sync]
        weights = self._workers[ring[0]].replicas[stage].weights
        names, like = weights.names, weights.newest.parameters
        nothing: list[torch.Tensor | None] = [None] * len(names)
        members = [given.get(self._workers[worker].replica_index, nothing) for worker in ring]
        result: list[torch.Tensor | None] = [None] * len(names)
        buckets = self._setup.costs.stages[stage].buckets
        named = ([names.index(name) for name in bucket.parameters] for bucket in buckets)
        for indices in (part for bucket in named for part in of_one_type(bucket, like)):
            flats = [
                torch.cat([(like[i].detach() * 0 if m[i] is None else m[i]).reshape(-1) for i in indices])  # type: ignore[union-attr]
                for m in members
            ]
            if sync.way == ALL_REDUCE:
                total = self.all_reduce(sync.kind, ring, flats)
            else:
                total = server_sum(flats, self._counter(sync.kind, ring))
            pieces = torch.split(total, [like[i].numel() for i in indices])
            for i, piece in zip(indices, pieces, strict=True):
                result[i] = None if all(m[i] is None for m in members) else piece.view(like[i].shape)
        return result


def _bytes_of(value: Any) -> int:
    """Return the bytes of a value's tensors; most values are one, or a list of them, and pytrees take their time."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, list):
        return sum(map(_bytes_of, value))
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _as_evaluation(before: Counter[tuple[str, str]], after: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Book what an evaluation sent under the kind `evaluation`."""
    booked = Counter(before)
    for (_, level), num_bytes in (after - before).items():
        booked[EVALUATION, level] += num_bytes
    return booked
