"""Memory and time of one stage as a function of its layers' policies: keep, recompute or swap.

Paper: vPipe (TPDS'21) section 4.1: activations times units in flight (equation 1); swapping costs no time while copies
fit in the stage's window (equation 2).
Differs: equation 1 counts nothing for swapped or recomputed layers. Here, as in the simulator, units being copied are
on the device, a backward has room for what it recomputes, and a run of recomputed layers keeps its inputs.
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
    """Return the bytes of model inputs that are the only input of some layer; a profile doesn't say those of others."""
    alone = [row for row in rows if len(row.inputs) == 1 and row.input_storages]
    return {row.inputs[0]: sum(size for _, size in row.input_storages) for row in alone}


class Sums(NamedTuple):
    """Totals over the first layers of a stage, given their policies."""

    again_s: float = 0.0  # seconds of recomputed forwards
    again_bytes: int = 0  # memory for what a backward recomputes
    unit_bytes: int = 0  # kept per unit after its forward
    swapped_bytes: int = 0  # the part of `unit_bytes` that is swapped
    # Layers and model inputs that the current run of recomputed layers already holds, and that later layers read
    free: frozenset[int | str] = frozenset()
    again: frozenset[int] = frozenset()  # recomputed layers whose saved tensors later layers also save
    swapped: frozenset[int] = frozenset()  # swapped layers whose saved tensors later layers also save

    @property
    def consequences(self) -> tuple[frozenset[int | str], frozenset[int], frozenset[int]]:
        """The part of the state that the costs of later layers depend on."""
        return self.free, self.again, self.swapped


@dataclass(frozen=True)
class StageProblem:
    """One stage whose policies are to be chosen."""

    # The model's layers at the size of a unit; the last is the loss, which goes with the last layer
    rows: Sequence[LayerProfile]
    start: int  # first layer
    stop: int  # layer after the last
    in_flight: int  # units in flight, the paper's p - k
    limit_bytes: float  # memory of the device, the paper's M
    constant_bytes: float = 0.0  # kept at any depth
    each_bytes: float = 0.0  # kept per unit in flight besides activations: a stashed weight version
    pcie_bytes_per_s: float | None = None  # copy rate per direction, both at once, the paper's P; None if unknown
    chooses: tuple[str, ...] = (SWAP, RECOMPUTE)  # policies allowed besides keep
    input_bytes: Mapping[str, int] = field(default_factory=dict)  # per model input

    @property
    def num_layers(self) -> int:
        """Layers that have a policy."""
        return self.stop - self.start

    @cached_property
    def own(self) -> range:
        """Its layers, including the loss if the stage ends the model."""
        return range(self.start, self.stop + (self.stop == len(self.rows) - 1))

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed policies that can save memory: swapping needs more units in flight than stay on the device."""
        swaps = self.pcie_bytes_per_s is not None and self.in_flight > MOST_ON_DEVICE
        return (KEEP, *(policy for policy in self.chooses if policy != SWAP or swaps))

    def swapped_on_device(self, swapped_bytes: Amounts) -> Amounts:
        """Return the peak device bytes of swapped tensors, of all units."""
        lines = on_device(swapped_bytes, self.forward_s, self.pcie_bytes_per_s)
        all_of_it, late = (constant + self.in_flight * each for constant, each in lines)
        least: Amounts = np.minimum(all_of_it, late)
        return least

    def swaps_gain(self, swapped_bytes: Amounts) -> NDArray[np.bool_]:
        """Return whether swapping saves memory, or nothing is swapped; late copies may leave all on the device."""
        gained_bytes = np.asarray(self.in_flight * swapped_bytes - self.swapped_on_device(swapped_bytes))
        gains: NDArray[np.bool_] = (gained_bytes > 0) | (np.asarray(swapped_bytes) == 0)
        return gains

    @cached_property
    def forward_s(self) -> float:
        """Seconds of one forward."""
        return sum(self.rows[index].forward_s for index in self.own)

    @cached_property
    def window_s(self) -> float:
        """Seconds that copies overlap with: t_fwd + t_bwd of equation 2, without recomputation."""
        return self.forward_s + sum(self.rows[index].backward_s for index in self.own)

    def outcome(self, memory: Sequence[str]) -> "StageOutcome":
        """Evaluate policies, one per layer; the loss has that of the last one."""
        sums = Sums()
        for index in self.own:
            sums = self.then(sums, index, memory[min(index - self.start, self.num_layers - 1)])
        num_bytes = self.most_bytes(*map(np.float64, (sums.unit_bytes, sums.swapped_bytes, sums.again_bytes)))
        extra_s = self.added_s(np.float64(sums.again_s), np.float64(sums.swapped_bytes))
        return StageOutcome(self, tuple(memory), float(num_bytes), float(extra_s), sums)

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

    def most_bytes(self, unit_bytes: Amounts, swapped_bytes: Amounts, again_bytes: Amounts) -> Amounts:
        """Return the stage's peak bytes, for one choice of policies or an array of them; arguments as in `Sums`."""
        stays = unit_bytes - swapped_bytes
        activations = self.in_flight * stays + self.swapped_on_device(swapped_bytes)
        return self.constant_bytes + self.in_flight * self.each_bytes + activations + again_bytes

    def added_s(self, again_s: Amounts, swapped_bytes: Amounts) -> Amounts:
        """Return the seconds that recomputation and late copies add: equation 2. Arguments as in `Sums`."""
        late_s: Amounts = np.maximum(0.0, copies_s(swapped_bytes, self.pcie_bytes_per_s) - self.window_s)
        return again_s + late_s

    def _size(self, read: int | str) -> int:
        return self.input_bytes.get(read, 0) if isinstance(read, str) else self.rows[read].output_bytes

    def _not_held(self, index: int, gone: frozenset[int]) -> int:
        """Return the bytes of shared tensors that a layer saves, if all earlier layers that save them are `gone`."""
        return sum(num_bytes for holders, num_bytes in self._shared[index] if holders <= gone)

    @cached_property
    def _shared(self) -> dict[int, list[tuple[frozenset[int], int]]]:
        """By layer, its shared tensors: (earlier layers of the stage that also save the tensor, bytes)."""
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
        """By layer, the layers whose policies have no effect on the costs of layers after it."""
        last = {index: index for index in self.own}
        last |= {holder: index for index in self.own for holders, _ in self._shared[index] for holder in holders}
        found: dict[int, set[int]] = {}
        for layer, index in last.items():
            found.setdefault(index, set()).add(layer)
        return {index: frozenset(layers) for index, layers in found.items()}


@dataclass(frozen=True)
class StageOutcome:
    """Policies and their cost."""

    problem: StageProblem
    memory: tuple[str, ...]  # one policy per layer
    num_bytes: float  # peak
    extra_s: float  # seconds beyond those of the layers
    sums: Sums
    is_exact: bool = False  # whether these are known to be the fastest policies that fit

    @property
    def fits(self) -> bool:
        """Whether the device has the memory."""
        return self.num_bytes <= self.problem.limit_bytes
