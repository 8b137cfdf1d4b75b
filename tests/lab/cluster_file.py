"""Writes the cluster's file of a lab: hosts on this machine's cores, joined by wires of a stated bandwidth."""

from pipebench.cluster import Level
from pipebench.recipe.clusters import load_cluster
from tests.lab.wires import EFFICIENCY, FRAME_BYTES, PAYLOAD_BYTES

LEVEL = "wire"


def cluster_text(bandwidth_bytes_per_s: float, latency_s: float, workers_per_host: int) -> str:
    """Return the file's text; the recipe's `cluster.servers` is the number of hosts.

    Args:
        bandwidth_bytes_per_s: of every host's wire, in each direction, headers included.
        latency_s: half of the measured round trip of a small message.
        workers_per_host: number of processes on each host.
    """
    local = load_cluster("local", 1)  # its loopback interface joins the processes of one host
    inside = _level("host", workers_per_host, local.levels[0]) if workers_per_host > 1 else ""
    return f"""# a lab: network namespaces of this machine, joined by wires of limited bandwidth
device: {{value: local, assumed: "the machine pipebench runs on"}}
memory: {{value: null, assumed: "all hosts share the machine's memory"}}
pcie: {{value: {local.pcie_bytes_per_s!r} B/s, assumed: "as on cluster local"}}
levels:
{inside}  - name: {LEVEL}
    count: {{value: 1, assumed: "times the recipe's `servers`"}}
    bandwidth: {{value: {bandwidth_bytes_per_s!r} B/s, assumed: "what tc tbf was told"}}
    latency: {{value: {latency_s!r} s, assumed: "half of a small message's round trip, measured without limit"}}
    efficiency: {{value: {EFFICIENCY!r}, assumed: "TCP in frames: {PAYLOAD_BYTES} bytes of payload in {FRAME_BYTES}"}}
"""


def _level(name: str, count: int, level: Level) -> str:
    return f"""  - name: {name}
    count: {{value: {count}, assumed: "--workers-per-host"}}
    bandwidth: {{value: {level.bandwidth_bytes_per_s!r} B/s, assumed: "as on cluster local"}}
    latency: {{value: {level.latency_s!r} s, assumed: "as on cluster local"}}
"""
