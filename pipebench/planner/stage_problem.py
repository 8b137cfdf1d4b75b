"""What becomes of a stage when each of its layers keeps, recomputes or swaps its activations: bytes and seconds.

Paper: vPipe (TPDS'21) section 4.1. A stage with d units in flight keeps, of every layer, what its backward needs d
times (equation 1). A layer that is computed again keeps nothing but takes its forward once more; what is swapped is on
the host in between, which takes no time as long as the copies fit in the stage's window (equation 2).

Differs: equation 1 takes what is swapped to be nowhere, what is computed again to take no room, and a layer that is
computed again to keep nothing. Here a unit that swaps is on the device while its copies are on their way, a backward
has room for what it computes again, and a run of recomputed layers keeps what it reads: what the simulator counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipebench.planner.activations import MOST_ON_DEVICE, Amounts, copies_s, on_device
from pipebench.profile.model import LayerProfile
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP


def input_bytes_of(rows: Sequence[LayerProfile]) -> dict[str, int]:
    """Return the bytes of the model's inputs, as far as a profile says them: of those that a layer reads alone."""
    return {row.inputs[0]: sum(size for _, size in row.takes) for row in rows if len(row.inputs) == 1 and row.takes}


class Sums(NamedTuple):
    """What some layers of a stage, from its first on, come to with their policies.

    Attributes:
        again_s: seconds that forwards take that are computed again.
        again_bytes: bytes that a backward makes room for while it computes them.
        unit_bytes: kept of a unit right after its forward.
        swapped_bytes: the part of it that is on the host in between.
        free: layers and model inputs that the run of recomputed layers that ends here has already, and others read.
        again, swapped: layers that do so, as far as others save the same tensors.
    """

    again_s: float = 0.0
    again_bytes: int = 0
    unit_bytes: int = 0
    swapped_bytes: int = 0
    free: frozenset[int | str] = frozenset()
    again: frozenset[int] = frozenset()
    swapped: frozenset[int] = frozenset()

    @property
    def consequences(self) -> tuple[frozenset[int | str], frozenset[int], frozenset[int]]:
        """All that what later layers come to depends on."""
        return self.free, self.again, self.swapped


@dataclass(frozen=True)
class StageProblem:
    """One stage, whose layers' policies are to be chosen.

    Attributes:
        rows: the model's layers at the size of a unit; the last is the loss, which goes with the last layer.
        start: the stage's first layer.
        stop: the layer after its last.
        in_flight: units in flight, the paper's p - k.
        limit_bytes: memory of the device, the paper's M.
        constant_bytes: kept whatever is in flight.
        each_bytes: kept for each unit in flight beside activations: a weight version, where the mode stashes them.
        pcie_bytes_per_s: rate of copies to the host and, at the same time, back, the paper's P; None: not known.
        chooses: policies to choose from, beside keeping.
        input_bytes: of every model input.
    """

    rows: Sequence[LayerProfile]
    start: int
    stop: int
    in_flight: int
    limit_bytes: float
    constant_bytes: float = 0.0
    each_bytes: float = 0.0
    pcie_bytes_per_s: float | None = None
    chooses: tuple[str, ...] = (SWAP, RECOMPUTE)
    input_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Layers that have a policy."""
        return self.stop - self.start

    @cached_property
    def own(self) -> range:
        """Its layers; the loss is the last of them where the stage ends with the model."""
        return range(self.start, self.stop + (self.stop == len(self.rows) - 1))

    @property
    def choices(self) -> tuple[str, ...]:
        """The policies that may save something."""
        swaps = self.pcie_bytes_per_s is not None and self.in_flight > MOST_ON_DEVICE
        return (KEEP, *(policy for policy in self.chooses if policy != SWAP or swaps))

    def swapped_on_device(self, swapped_bytes: Amounts) -> Amounts:
        """Return the bytes of swapped tensors that are on the device at most, of all units."""
        lines = on_device(swapped_bytes, self.forward_s, self.pcie_bytes_per_s)
        all_of_it, late = (constant + self.in_flight * each for constant, each in lines)
        least: Amounts = np.minimum(all_of_it, late)
        return least

    def swaps_gain(self, swapped_bytes: Amounts) -> NDArray[np.bool_]:
        """Return whether memory is gained by what is swapped; beyond, copies are so late that all might be kept."""
        gained_bytes = np.asarray(self.in_flight * swapped_bytes - self.swapped_on_device(swapped_bytes))
        gains: NDArray[np.bool_] = (gained_bytes > 0) | (np.asarray(swapped_bytes) == 0)
        return gains

    @cached_property
    def forward_s(self) -> float:
        """The seconds of a forward."""
        return sum(self.rows[index].forward_s for index in self.own)

    @cached_property
    def window_s(self) -> float:
        """The seconds in which copies are hidden: t_fwd + t_bwd of equation 2, nothing computed again."""
        return self.forward_s + sum(self.rows[index].backward_s for index in self.own)

    def policy_of(self, memory: Sequence[str], index: int) -> str:
        """Return the policy of a layer or the loss, which has that of the last layer."""
        return memory[min(index - self.start, self.num_layers - 1)]

    def outcome(self, memory: Sequence[str]) -> "StageOutcome":
        """Return what policies, one per layer, come to."""
        sums = Sums()
        for index in self.own:
            sums = self.then(sums, index, self.policy_of(memory, index))
        return StageOutcome(self, tuple(memory), self.num_bytes(sums), self.extra_s(sums), sums)

    def then(self, sums: Sums, index: int, policy: str) -> Sums:
        """Return the sums with one more layer."""
        row, again_s, again_bytes, unit, swapped = self.rows[index], *sums[:4]
        free: frozenset[int | str] = frozenset()
        if policy == RECOMPUTE:
            read: set[int | str] = {*row.reads, *row.inputs}
            unit += sum(self._size(each) for each in read - sums.free)
            again_s, again_bytes = again_s + row.forward_s, again_bytes + row.saved_bytes
            free = frozenset(each for each in {*sums.free, *read, index} if self._last_read.get(each, -1) > index)
        else:
            gone = sums.again | sums.swapped
            own = row.saved_bytes + self._not_held(index, sums.again)
            stays = 0 if policy == SWAP else row.saved_bytes + self._not_held(index, gone)
            unit, swapped = unit + own, swapped + own - stays
        again, away = sums.again, sums.swapped
        if policy != KEEP:
            again, away = (again | {index}, away) if policy == RECOMPUTE else (again, away | {index})
        if index in self._forgotten:
            again, away = again - self._forgotten[index], away - self._forgotten[index]
        return Sums(again_s, again_bytes, unit, swapped, free, again, away)

    def num_bytes(self, sums: Sums) -> float:
        """Return the bytes that a stage keeps at most."""
        return float(self.most_bytes(*map(np.float64, (sums.unit_bytes, sums.swapped_bytes, sums.again_bytes))))

    def most_bytes(self, unit_bytes: Amounts, swapped_bytes: Amounts, again_bytes: Amounts) -> Amounts:
        """Return the bytes that a stage keeps at most, for one choice of policies or many; arguments as in `Sums`."""
        stays = unit_bytes - swapped_bytes
        activations = self.in_flight * stays + self.swapped_on_device(swapped_bytes)
        return self.constant_bytes + self.in_flight * self.each_bytes + activations + again_bytes

    def extra_s(self, sums: Sums) -> float:
        """Return the seconds that a stage takes beyond those of its layers: what equation 2 adds."""
        return float(self.added_s(np.float64(sums.again_s), np.float64(sums.swapped_bytes)))

    def added_s(self, again_s: Amounts, swapped_bytes: Amounts) -> Amounts:
        """Return the seconds that equation 2 adds, for one choice of policies or many; arguments as in `Sums`."""
        late_s: Amounts = np.maximum(0.0, copies_s(swapped_bytes, self.pcie_bytes_per_s) - self.window_s)
        return again_s + late_s

    def _size(self, read: int | str) -> int:
        return self.input_bytes.get(read, 0) if isinstance(read, str) else self.rows[read].output_bytes

    def _not_held(self, index: int, gone: frozenset[int]) -> int:
        """Return the bytes of tensors that a layer saves and that no layer before it in the stage keeps."""
        return sum(num_bytes for holders, num_bytes in self._shared[index] if holders <= gone)

    @cached_property
    def _shared(self) -> dict[int, list[tuple[frozenset[int], int]]]:
        """Of every layer, tensors that it saves and layers before it do, too: which of the stage, and bytes."""
        return {
            index: [(frozenset(self._holders(holder, n)), n) for holder, n in self.rows[index].saved_with]
            for index in self.own
        }

    def _holders(self, holder: int, num_bytes: int) -> Iterable[int]:
        while holder >= self.start:
            yield holder
            if num_bytes <= self.rows[holder].saved_bytes:  # the first to save it
                return
            holder = next((before for before, n in self.rows[holder].saved_with if n >= num_bytes), -1)

    @cached_property
    def _last_read(self) -> dict[int | str, int]:
        last: dict[int | str, int] = {}
        for index in self.own:
            last |= dict.fromkeys(self.rows[index].reads, index) | dict.fromkeys(self.rows[index].inputs, index)
        return last

    @cached_property
    def _forgotten(self) -> dict[int, frozenset[int]]:
        """By layer, those whose policies nobody asks for after it."""
        last = {index: index for index in self.own}
        last |= {holder: index for index in self.own for holders, _ in self._shared[index] for holder in holders}
        found: dict[int, set[int]] = {}
        for layer, index in last.items():
            found.setdefault(index, set()).add(layer)
        return {index: frozenset(layers) for index, layers in found.items()}


@dataclass(frozen=True)
class StageOutcome:
    """Policies of a stage's layers, and what they come to.

    Attributes:
        problem: the stage.
        memory: the policy of every layer.
        num_bytes: kept at most.
        extra_s: seconds beyond those of its layers.
        sums: of all layers.
        is_exact: whether no other policies that fit take less time.
    """

    problem: StageProblem
    memory: tuple[str, ...]
    num_bytes: float
    extra_s: float
    sums: Sums
    is_exact: bool = False

    @property
    def fits(self) -> bool:
        """Whether the device has so much memory."""
        return self.num_bytes <= self.problem.limit_bytes
