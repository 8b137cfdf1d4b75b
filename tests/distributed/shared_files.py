"""Replicas that share files in memory: threads of one process."""

import itertools
import os
import threading
from collections.abc import Callable, Sequence

from pipebench.distributed.pipes import PipePair
from pipebench.distributed.shared_sum import SharedFile
from tests.patience import PATIENCE_S


def replicas(count: int, num_bytes: int, limit_s: float = PATIENCE_S) -> list[SharedFile]:
    """Return replicas that share files, a line between any two of them."""
    lines: list[dict[int, PipePair]] = [{} for _ in range(count)]
    for a, b in itertools.combinations(range(count), 2):
        forth, back = os.pipe(), os.pipe()
        lines[a][b] = PipePair(os.getpid(), back[0], forth[1], limit_s)
        lines[b][a] = PipePair(os.getpid(), forth[0], back[1], limit_s)
    found = [SharedFile(position, own, num_bytes) for position, own in enumerate(lines)]
    for each in found:
        each.files = {position: line.open(found[position].file) for position, line in each.lines.items()}
    return found


def together(works: Sequence[Callable[[], object]]) -> None:
    """Let every replica do its work, at the same time."""
    faults: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as fault:
            faults.append(fault)
            raise

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
