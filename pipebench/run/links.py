"""A cluster's links, measured by the processes of one job, and written as a cluster's file."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import torch

from pipebench import formats
from pipebench.distributed.links import NO_LINKS, MeasuredLinks, measure_links
from pipebench.distributed.world import join
from pipebench.errors import UserError
from pipebench.profile.devices import local_device_name

# A pair of workers or a sum that gets less than this fraction of what a port carries has a limit of its own.
_BINDS = 0.95
_JOIN_S = 600.0  # for all workers to join


def measure_here(device: str, on_progress: Callable[[str], None]) -> MeasuredLinks:
    """Join the other processes of a launcher's job on a device as for `join`, and measure their links.

    Raises:
        UserError: the processes can't join, or `measure_links` refuses them.
        PeerLostError: one is gone.
    """
    world = join(device, limit_s=_JOIN_S)
    found = measure_links(world, local_device_name(world.device), on_progress)
    world.close()
    return found


def check_device(device: str) -> None:
    """Check that processes of this host alone have links; raises a UserError if they are on its CPUs."""
    if device == "cpu" or not torch.cuda.is_available():
        raise UserError(NO_LINKS)


def cluster_text(found: MeasuredLinks, made_by: str) -> str:
    """Return the text of a cluster's file; `made_by` ends its first line."""
    return "\n".join([f"# workers on {found.device}, and their links, {made_by}", *_lines(found), ""])


def _lines(found: MeasuredLinks) -> Iterator[str]:
    yield "#"
    yield "# Times of layers are measured where this is used; a device of the catalogue for `local` has them computed."
    yield f'device: {{value: local, assumed: "{found.device}"}}'
    yield 'memory: {value: null, assumed: "of the GPUs that are there"}'
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    way = f"{found.backend}, {day}"
    if found.pcie_bytes_per_s is not None:
        pcie = _rate(found.pcie_bytes_per_s)
        yield f'pcie: {{value: {pcie}, measured: "copies to pinned memory and back, of all GPUs at once, {day}"}}'
    yield "levels:"
    for level in found.levels:
        size, latency = formats.num_bytes(level.message_bytes), f"{level.latency_s * 1e6:.3g} us"
        port, pair, ring = level.port_bytes_per_s, level.pair_bytes_per_s, level.sum_bytes_per_s
        yield f"  - name: {level.name}"
        yield f'    count: {{value: {level.count}, measured: "as it was started"}}'
        yield f'    bandwidth: {{value: {_rate(port)}, measured: "messages of {size} both ways, {way}"}}'
        yield f'    latency: {{value: {latency}, measured: "half of a round trip, {way}"}}'
        if pair < _BINDS * port:
            yield f'    flow: {{value: {_rate(pair)}, measured: "the same between one pair of workers, {way}"}}'
        if ring < _BINDS * min(port, pair):
            yield f'    ring: {{value: {_rate(ring)}, measured: "an all-reduce among {level.count}, {way}"}}'


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.4g} GB/s"
