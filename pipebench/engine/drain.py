"""Exchanges at a drain among workers of one process, with an empty pipeline: averages, and layers that move."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipebench.checkpoint.handover import keys_of, pieces, requests_of, retained, state_bytes
from pipebench.checkpoint.state import ModelState
from pipebench.engine.collectives import InProcessCollectives
from pipebench.engine.setup import Setup
from pipebench.engine.worker import Worker
from pipebench.schedule.operations import MIGRATION
from pipebench.simulate.network import Message, Network
from pipebench.simulate.timeline import BUFFERS


@dataclass(frozen=True)
class DrainExchange:
    """A drain's exchange: starts when the pipeline is empty; the run resumes when all messages have arrived."""

    setup: Setup
    workers: Sequence[Worker]  # all
    rings: InProcessCollectives  # the collectives, which count sent bytes
    network: Network
    clock_s: float  # when the pipeline is empty

    def average(self) -> float:
        """Average running statistics over the replicas of every stage; return the end time.

        Extensions' exchanges start at the same time.
        """
        pipeline, network = self.setup.pipeline, self.network
        ends = [self.clock_s]
        for stage, r in enumerate(pipeline.replicas):
            num_bytes = self.setup.costs.stages[stage].buffer_bytes
            if r == 1 or num_bytes == 0:
                continue
            ring = self.rings.of_stage(stage)
            for column in zip(*(self.workers[worker].buffers(stage) for worker in ring), strict=True):
                flats = [buffer.reshape(-1) for buffer in column]
                mean = self.rings.sum_buffers(ring, flats) / r
                for buffer in column:
                    buffer.copy_(mean.view(buffer.shape))
            workers = pipeline.places[stage]
            network.sum_up(pipeline.buffer_way, BUFFERS, "buffers", workers, num_bytes, self.clock_s, ends.append)
        sent = [self._send(*each) for extension in self.rings.extensions.values() for each in extension.drained()]
        ends.append(self._arrive(sent))  # by then the sums have ended, too
        return max(ends)

    def hand_over(self, before: Sequence[Worker]) -> float:
        """Transfer state from the workers `before` to those cut anew; return the end time."""
        given = [ModelState.merge(part for _, part in worker.parts()) for worker in before]
        offers = [keys_of(state) for state in given]
        messages = []
        for worker, old in zip(self.workers, before, strict=True):
            claim = worker.claim()
            state = retained(old.held(), claim)
            for giver, keys in requests_of(worker.index, offers, keys_of(state), claim).items():
                moved = pieces(given[giver], keys)
                messages.append(self._send(MIGRATION, giver, worker.index, state_bytes(moved), "layers"))
                state = ModelState.merge([state, moved])
            worker.restore(state)
            worker.follow(old)
        return self._arrive(messages)

    def _send(self, kind: str, sender: int, receiver: int, num_bytes: int, what: str) -> Message:
        self.rings.count(kind, sender, receiver, num_bytes)
        connection = self.network.connection(kind, sender, receiver)
        return self.network.send(connection, num_bytes, self.clock_s, what)

    def _arrive(self, messages: Sequence[Message]) -> float:
        """Complete the transfers before anything else runs; return the end time."""
        self.network.deliver(messages)
        return max([self.clock_s, *(message.arrival_s for message in messages)])
