"""Print how long activations take beside a block of layers: `python -m reports.studies.blocks_between_hosts` (root).

Two hosts of a lab, one wire. An activation of 1 MiB sets out every 40 ms, and a block of 12 MiB beside them: as any
other message ("shares"), by `distributed.yielding` ("gives way"), or not at all. Times are from hand-over to arrival.
"""

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import torch

from pipebench.distributed.channel import LANES, ChannelLink, ChannelSender, Receiver
from pipebench.distributed.ends import Received, ReceivingEnd, SendingEnd
from pipebench.distributed.launch_join import HostSlot
from pipebench.distributed.sockets import open_sockets, opened_since
from pipebench.distributed.world import FOR_EVER_S, join
from pipebench.distributed.yielding import YieldingReceiver, YieldingSender, until_gone
from tests.lab import wires
from tests.lab.hosts import Lab, environment

WAYS = ("shares", "gives way", "no block")
MBITS_PER_S = (400, 1000)
TRIALS, ACTIVATIONS, BEGINS_AT, EVERY_S = 6, 40, 5, 0.04
ACTIVATION_BYTES, BLOCK_BYTES = 1 << 20, 12 << 20
_PORT = 29501


def main() -> None:
    """Run both hosts at every bandwidth, and print a table."""
    print("| Mbit/s | block | activation, median ms | 95% | block, median ms |")
    print("| ---: | --- | ---: | ---: | ---: |")
    with Lab(2) as lab, tempfile.TemporaryDirectory() as folder:
        for mbits in MBITS_PER_S:
            lab.limit(mbits * 1e6 / 8)
            file = Path(folder) / f"{mbits}.json"
            words = [sys.executable, "-m", "reports.studies.blocks_between_hosts", wires.address(0), str(file)]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            hosts = [lab.start(i, [*words, str(i)], env=environment(i, env)) for i in range(2)]
            if any(host.wait() for host in hosts):
                sys.exit("a host failed")
            for way, (activations_s, blocks_s) in json.loads(file.read_text()).items():
                found = sorted(1000 * seconds for seconds in activations_s)
                block_ms = f"{1000 * statistics.median(blocks_s):.0f}" if blocks_s else ""
                middle, late = statistics.median(found), found[int(0.95 * len(found))]
                print(f"| {mbits} | {way} | {middle:.1f} | {late:.1f} | {block_ms} |")


def host(address: str, file: Path, rank: int) -> None:
    """Be one of the hosts: the first sends, the other one measures."""
    torch.set_num_threads(1)
    place = HostSlot(rank, 2, 0, 1, address, _PORT, agent_store=False, attempt=None)
    world = join("cpu", limit_s=100, place=place, shares_memory=False)
    before = open_sockets()
    activations = _link(1 - rank, [world.new_group("gloo") for _ in range(LANES)], 2)
    give_way = partial(until_gone, opened_since(before).queued_bytes)
    sharing = _link(1 - rank, [world.new_group("gloo") for _ in range(LANES)], 4)
    yielding = _link(1 - rank, [world.new_group("gloo", limit_s=FOR_EVER_S)], 6)
    found: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in WAYS}
    for way in WAYS * TRIALS:
        world.barrier()
        block: SendingEnd | ReceivingEnd | None = None
        if way == "shares":
            block = ChannelSender(sharing, 0) if rank == 0 else Receiver(sharing, 0)
        elif way == "gives way" and rank == 0:
            block = YieldingSender(yielding, give_way)
        elif way == "gives way":
            block = YieldingReceiver(yielding, world.operation_limit_s)
        if rank == 0:
            assert not isinstance(block, ReceivingEnd)
            _send(ChannelSender(activations, ACTIVATION_BYTES), block)
        else:
            assert not isinstance(block, SendingEnd)
            _measure(Receiver(activations, ACTIVATION_BYTES), block, *found[way])
    world.barrier()
    if rank == 1:
        file.write_text(json.dumps(found))
    world.close()


def _link(peer: int, lanes: list[object], tag: int) -> ChannelLink:
    return ChannelLink(peer, lanes, tag, None, torch.device("cpu"), time.perf_counter)


def _send(activations: SendingEnd, block: SendingEnd | None) -> None:
    start_s = time.perf_counter()
    for index in range(ACTIVATIONS):
        time.sleep(max(0.0, start_s + EVERY_S * index - time.perf_counter()))
        if index == BEGINS_AT and block is not None:
            block.send(0, {0: torch.zeros(BLOCK_BYTES // 4)}, 0.0)
        activations.send(index, {0: torch.zeros(ACTIVATION_BYTES // 4)}, 0.0)
    for end in (activations, block):
        if end is not None:
            end.flush()
            end.close()


def _measure(
    activations: ReceivingEnd, block: ReceivingEnd | None, activations_s: list[float], blocks_s: list[float]
) -> None:
    """Note what activations take that set out while a block is on its way; all of them where there is none."""
    blocks = list[Received]()

    def take() -> None:
        if block is not None:
            blocks.append(block.receive(0))

    activations.expect(ACTIVATIONS)
    waiting = threading.Thread(target=take)
    waiting.start()
    messages = [activations.receive(index) for index in range(ACTIVATIONS)]
    waiting.join()
    since_s, until_s = (blocks[0].sent_s, blocks[0].arrived_s) if blocks else (0.0, float("inf"))
    activations_s += [each.arrived_s - each.sent_s for each in messages if since_s <= each.sent_s < until_s]
    blocks_s += [until_s - since_s] if blocks else []
    if block is not None:
        block.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        host(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
