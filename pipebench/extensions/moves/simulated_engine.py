"""Simulation of a run whose layers move: the virtual engine's clock, without training.

Segments are simulated with the virtual engine's instruction lists, costs and links, and with Algorithm 1 (vPipe), whose
reports are made from simulated events. The simulation of a segment stops once nothing has moved for long enough: the
rest of the segment has the steady costs of the last cuts (`simulate.steady`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from pipebench.checkpoint.handover import Key, StateClaim, requests_of
from pipebench.engine.engine import Engine
from pipebench.engine.protocols import EngineExtension
from pipebench.engine.segment import SizeOf
from pipebench.engine.setup import Setup, share_of
from pipebench.engine.virtual import InProcessTransport
from pipebench.extensions.moves.balancing import MIN_UNITS, Decisions
from pipebench.extensions.moves.engine import EngineMoves
from pipebench.extensions.moves.migration_memory import Inputs, held_at_once
from pipebench.extensions.moves.monitor import REPORT_INTERVAL, REPORTING, monitors
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.extensions.moves.settings import MOVES, settings_of
from pipebench.extensions.moves.simulated_segment import SimulatedSegment
from pipebench.extensions.moves.throughput import Mark, Marks
from pipebench.model.graph import tensors_of
from pipebench.model.plan import Plan
from pipebench.schedule.operations import MIGRATION
from pipebench.simulate.memory_meter import MemoryPeak
from pipebench.simulate.meter import Listener, Meter
from pipebench.simulate.network import Network
from pipebench.simulate.segments import Segments
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.steady import NOTHING, SegmentTotals
from pipebench.simulate.timeline import Timeline


class SimulatedEngine(Engine):
    """Simulates a run segment by segment, with the training engine's interface as far as it applies.

    Args:
        setup: the setup at the start.
        listeners: record simulated events and transfers.
        inputs: bytes of the model's inputs.
        known: a cache of Algorithm 1's decisions; see `RepartitionController`.
    """

    def __init__(
        self, setup: Setup, *listeners: Listener, inputs: Inputs | None = None, known: Decisions | None = None
    ) -> None:
        super().__init__(setup)
        pipeline = setup.pipeline
        self._listening = Marks(max(pipeline.depth, pipeline.period) * pipeline.microbatches)
        self._meter = Meter(pipeline, self._listening, *listeners)
        self.marks: list[Mark] = []  # progress within the last segment, counted from its start
        self.began_s: dict[int, float] = {}  # start times of the run's minibatches from which on new cuts hold
        self.peaks: list[MemoryPeak] = []  # by worker, over all segments and drains in which layers moved
        self.held = [0] * pipeline.num_workers  # the same as engines count them, without messages
        self.totals = NOTHING  # of all segments
        self._inputs = inputs or {}
        self._shown = False  # whether the meter has recorded a segment
        self._begin_under(setup, {} if known is None else known)

    @property
    def extensions(self) -> dict[str, EngineExtension]:
        """See `Engine`."""
        return {MOVES: self._moves}

    def _begin_under(self, setup: Setup, known: Decisions) -> None:
        """Continue with a setup; measurements start again."""
        self.setup, self.known = setup, known
        self._moves = EngineMoves(setup)
        balances = settings_of(setup.pipeline).balances
        self._monitors = monitors(setup, self._decided, known=known) if balances else []
        self._quiet = 0  # minibatches since the last decision
        self._segments = Segments(setup)

    def train(self, first: int, num_minibatches: int) -> int:
        """Simulate a segment; return its number of minibatches: fewer than requested if it drains for a move."""
        self.marks = []
        if not self._moves.announced and not self._monitors:
            return self._took(self._steady(first, num_minibatches), num_minibatches, first)
        before, phases = self.setup, self._moves.segment()
        self._mailbox = InProcessTransport(before, Counter())
        for monitor in self._monitors:
            monitor.begin()
        segment = SimulatedSegment(before, phases, first, num_minibatches, self.clock_s, self._inputs)
        self._moves.begin(segment.part)
        event, memory = (self._measure, self._hold) if self._monitors else (None, None)
        played = segment.played(self._meter, event, memory, self._enough())
        done, self._shown = segment.limit, True
        self._end_segment()
        self._quiet += max(0, done - segment.changed_at)
        if self.setup is not before:
            self._segments = Segments(self.setup)
        self._record(segment, before, first)
        if segment.is_quiet:
            self._monitors = []
        if not segment.changed_at:
            played, done = self._steady(first, num_minibatches), num_minibatches
        elif segment.is_quiet and done < num_minibatches:  # what the shortened simulation lacks is steady
            whole, part = self._steady(first, num_minibatches), self._steady(first, done)
            played, done = played.extended(whole, 1).extended(part, -1), num_minibatches
        return self._took(played, done, first)

    def _record(self, segment: SimulatedSegment, before: Setup, first: int) -> None:
        """Record a simulated segment's times, memory and marks; `before` is its setup, `first` its first minibatch."""
        self.began_s |= segment.began_s
        if segment.announced and segment.memory is not None:
            self._raise_peaks(segment.memory.timeline().peaks)
            self.held = [*map(max, self.held, segment.memory.held)]
        if segment.changed_at:
            # A shortened simulation drains at its end, where the segment doesn't: leave that part out.
            last = segment.limit - 2 * before.pipeline.depth if segment.is_quiet else segment.limit
            samples = before.sampler.samples_before(first + last) - before.sampler.samples_before(first)
            self.marks = [mark for mark in self._listening.made if mark.samples <= samples]

    def replan(self, plan: Plan) -> None:
        """See `Engine`; the cache of decisions stays."""
        self.switch_setup(self.setup.under(plan), self.known)

    def switch_setup(self, setup: Setup, known: Decisions | None = None) -> None:
        """See `Engine`; `known` is the cache of decisions for the new setup."""
        before = self.setup
        self._begin_under(setup, {} if known is None else known)
        network = Network(before.cluster, before.devices, self._meter.transfer)
        sent = [
            network.send(network.connection(MIGRATION, giver, taker), num_bytes, self.clock_s, "layers")
            for (giver, taker), num_bytes in _moved_bytes(before, self.setup, trained=self.clock_s > 0).items()
        ]
        network.deliver(sent)
        took_s = max([0.0, *(message.arrival_s - self.clock_s for message in sent)])
        held = held_at_once(before, self.setup, trained=self.clock_s > 0)
        self._raise_peaks(
            [MemoryPeak(worker, self.clock_s, "layers moving at a drain", each) for worker, each in enumerate(held)]
        )
        self._took(replace(NOTHING, end_s=took_s, num_bytes=network.num_bytes), 0, 0)

    def _raise_peaks(self, found: Sequence[MemoryPeak]) -> None:
        self.peaks = [*highest(self.peaks or found, found)]

    def timeline(self) -> Timeline:
        """Return the recorded events."""
        return self._meter.timeline()

    def _took(self, totals: SegmentTotals, num_minibatches: int, first: int) -> int:
        """Add the totals of a segment and of its drain; return its number of minibatches."""
        totals = totals.extended(self._segments.drain, 1) if num_minibatches else totals
        self.totals = self.totals.extended(totals, 1)
        self.clock_s += totals.end_s
        sampler = self.setup.sampler
        samples = sampler.samples_before(first + num_minibatches) - sampler.samples_before(first)
        if not self.marks or self.marks[-1].samples < samples:
            self.marks.append(Mark(self.clock_s, samples, totals.num_bytes, totals.busy_s))
        return num_minibatches

    def _measure(self, event: TimelineEvent, size_of: SizeOf) -> None:
        """Measure an event on its stage, and exchange reports as a worker in training does."""
        it, monitor = event.instruction, self._monitors[event.worker]
        monitor.note(it, event.end_s - event.start_s)
        if it.op in REPORTING and size_of(it.number):
            monitor.exchange(it, self._mailbox)

    def _hold(self, event: TimelineEvent, num_bytes: int) -> None:
        self._monitors[event.worker].note_memory(num_bytes)

    def _enough(self) -> int:
        """Return the number of minibatches without a decision after which there will be none.

        Decisions depend on mean times, which stay the same if all units take equally long. After so many minibatches
        every stage has measured enough units, and its reports have reached the last stage.
        """
        pipeline = self.setup.pipeline
        units = MIN_UNITS + 2 * REPORT_INTERVAL
        enough = 4 * pipeline.period + 4 * pipeline.depth + units
        if self.setup.sampler.varies:
            enough *= 8  # sizes of minibatches differ, so means still change a little
        return max(1, enough - self._quiet) if self._monitors else 8 * pipeline.depth

    def _decided(self, move: Repartition) -> None:
        """Handle a decision of Algorithm 1."""
        self._moves.decided(move)
        self._quiet = 0

    def _steady(self, first: int, num_minibatches: int) -> SegmentTotals:
        """Return a segment's totals under the current cuts, without moves."""
        meter, self._shown = None if self._shown else self._meter, True
        return self._segments.totals(first, num_minibatches, meter)


def highest(*peaks: Iterable[MemoryPeak]) -> Iterator[MemoryPeak]:
    """Yield, for every worker, the highest of several peaks; of equals, the first."""
    for of_worker in zip(*peaks, strict=True):
        yield max(of_worker, key=lambda peak: peak.num_bytes)


def _moved_bytes(before: Setup, after: Setup, *, trained: bool) -> dict[tuple[int, int], int]:
    """Return the bytes sent between workers at a drain, by (sender, receiver); see `checkpoint.handover`.

    Carried states of stateful modules, loss scales and an optimizer's counts of steps are not counted. `trained`:
    whether there has been an update, which makes the optimizer's state.
    """
    pipeline = before.pipeline
    given = [_pieces(before, worker, trained=trained, answers=True) for worker in range(pipeline.num_workers)]
    found: dict[tuple[int, int], int] = {}
    for worker in range(pipeline.num_workers):
        (stage,) = pipeline.stages_of(worker)
        names = frozenset(_tensors(after, stage))
        claim = StateClaim(names, frozenset(), share_of(after, stage, pipeline.replica_of(worker)))
        has = [key for key in _pieces(before, worker, trained=trained, answers=False) if claim.wants(key)]
        for giver, keys in requests_of(worker, given, has, claim).items():
            found[giver, worker] = sum(given[giver][key] for key in keys)
    return found


def _pieces(setup: Setup, worker: int, *, trained: bool, answers: bool) -> dict[Key, int]:
    """Return the bytes of the pieces of the model's state that a worker holds or, with `answers`, sends to others."""
    (stage,), replica = setup.pipeline.stages_of(worker), setup.pipeline.replica_of(worker)
    tensors = _tensors(setup, stage)
    if answers and replica > 0:
        counters = (name for name, tensor in tensors.items() if not tensor.is_floating_point())
        return {("counters", f"{replica}/{name}"): tensors[name].nbytes for name in counters}
    pieces: dict[Key, int] = {}
    for name, tensor in tensors.items():
        pieces["parameters" if isinstance(tensor, nn.Parameter) else "buffers", name] = tensor.nbytes
        if trained and tensor.requires_grad and setup.profile.state_bytes_per_byte:
            pieces["optimizer", name] = tensor.nbytes * setup.profile.state_bytes_per_byte
    return pieces


def _tensors(setup: Setup, stage: int) -> dict[str, torch.Tensor]:
    start, stop = setup.plan.stages[stage].start, setup.plan.stages[stage].stop
    return tensors_of(setup.graph, setup.graph.layers[start:stop])
