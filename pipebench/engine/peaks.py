"""The most bytes that a worker's replicas hold at once: measured between instructions, bounded within them."""

from collections.abc import Iterable, Mapping

from pipebench.engine.protocols import StageRunner


class WorkerPeaks:
    """Peaks of one worker's memory, on its device and on the host.

    Replicas are measured between instructions. Within one, bytes of one kind grow while those of another shrink: a
    backward frees activations and adds gradients. So the bytes within are taken to be the larger of those before and
    those after, kind by kind, and what a backward recomputes in between (docs/memory.md).

    `running` has the worker's stage runners by stage; its entries change while layers move.
    """

    def __init__(self, running: Mapping[int, StageRunner]) -> None:
        self.device_bytes = 0  # peak
        self.host_bytes = 0  # peak, of swapped activations
        self._running = running
        self._stage = -1  # of the instruction under way
        self._changed = {*running}  # stages whose bytes may have changed since the last measurement
        self._live_bytes: dict[int, Iterable[int]] = {}  # by stage, then by kind: the last measurement
        self._on_host_bytes: dict[int, int] = {}  # by stage
        self._now_bytes: list[int] = []  # `_live_bytes` in one list
        self._within_bytes: list[int] = []  # the most of each of them within the last instruction; empty: unknown
        self._recomputed_bytes = 0  # within the last instruction

    def begin(self, stage: int) -> None:
        """Begin an instruction of a stage."""
        self._stage = stage
        self._changed.add(stage)

    def change(self) -> None:
        """Measure all stages next time, not only those of the instructions in between."""
        self._changed.update(self._running)

    def measure(self, recomputed_bytes: int = 0) -> int:
        """Measure after an instruction, or after a part of it.

        Args:
            recomputed_bytes: held since the last measurement, and freed again.

        Returns:
            The most bytes that the device has held since then.
        """
        self._within_bytes, self._recomputed_bytes = self._now_bytes, recomputed_bytes
        return self._measure()

    def measure_beside(self, *, is_idle: bool) -> int:
        """Measure after another worker's instruction has changed this worker's memory.

        Args:
            is_idle: whether no instruction of this worker runs at that moment.

        Returns:
            The most bytes that the device holds now or, unless it is idle, within its instruction.
        """
        if is_idle:
            self._within_bytes, self._recomputed_bytes = [], 0
        self.change()
        return self._measure()

    def _measure(self) -> int:
        running = self._running
        for stage in self._changed & running.keys():
            self._live_bytes[stage] = running[stage].live_by_kind()
            self._on_host_bytes[stage] = running[stage].host_bytes()
        self._changed = {self._stage}  # the instruction may go on
        self._now_bytes = [num_bytes for kinds in self._live_bytes.values() for num_bytes in kinds]
        self._within_bytes = [*map(max, self._now_bytes, self._within_bytes or self._now_bytes)]
        most_bytes = self._recomputed_bytes + sum(self._within_bytes)
        self.device_bytes = max(self.device_bytes, most_bytes)
        self.host_bytes = max(self.host_bytes, sum(self._on_host_bytes.values()))
        return most_bytes
