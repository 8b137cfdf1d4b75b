"""`pipebench links`: measures what a cluster's links carry, and writes a cluster's file."""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from pipebench.cli.group import tracebacks
from pipebench.cli.outputs import Output, refuse_to_overwrite
from pipebench.cli.parameters import Choice
from pipebench.errors import UserError
from pipebench.files import start_of
from pipebench.formats import num_bytes, seconds
from pipebench.garbage import without_collector
from pipebench.show.progress import lasting
from pipebench.show.tables import new_table, print_facts, print_table
from pipebench.show.terminal import standard_output

_MADE_BY = "measured by pipebench links"
_ALONE = (
    "links join processes, and there is one: start as many as there are GPUs, here by --workers 4, on several hosts by "
    "torchrun --nnodes 2 --nproc-per-node 4 ... -m pipebench links"
)


@click.command
@click.option("--out", type=click.Path(path_type=Path), default="cluster.yaml", show_default=True, help="The new file.")
@click.option("--workers", type=click.IntRange(2, 1024), help="Start so many processes on this host, as torchrun does.")
@click.option(
    "--device", type=Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
    help="Where messages start and end.",
)  # fmt: skip
@tracebacks
def links(out: Path, workers: int | None, device: str) -> None:
    """Measure what a cluster's links carry, and write a cluster's file that recipes name as `cluster.name`.

    Start it as training is started: one process per GPU on every host. It times messages between two GPUs of a server,
    messages between all GPUs of two servers at the same time, and sums among the GPUs of a server and among servers.
    This takes about a minute, in which nothing else should use the links.

    \b
    Examples:
      pipebench links --workers 4
      torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
          -m pipebench links --out ours.yaml
      pipebench plan quickstart cluster.name=ours.yaml
    """
    output = Output("--out", out, "a file that pipebench links wrote", _is_ours, (".yaml", ".yml"))
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        refuse_to_overwrite([output])
    if "RANK" not in os.environ:
        _start(out, workers, device)
    if workers is not None:
        raise UserError("--workers: a launcher has started the processes already, leave it out")
    if os.environ.get("WORLD_SIZE") == "1":
        raise UserError(_ALONE)
    measuring = _measuring()
    with lasting("links", "waiting for all workers to join", shown=is_first) as on_progress:
        found = measuring.measure_here(device, on_progress)
    if is_first:
        _print(found)
        output.write(lambda path: path.write_text(measuring.cluster_text(found, _MADE_BY), encoding="utf-8"))


def _start(out: Path, workers: int | None, device: str) -> None:
    """Replace this process by torchrun, whose processes run the command on this host."""
    if workers is None:
        raise UserError(_ALONE)
    _measuring().check_device(device)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    sys.stdout.flush()
    os.execv(sys.executable, [*torchrun, "-m", "pipebench", "links", "--out", str(out), "--device", device])


def _measuring() -> ModuleType:
    with without_collector():
        from pipebench.run import links as measuring  # late: imports torch
    return measuring


def _print(found: Any) -> None:
    table = new_table("level", "count", "bandwidth", "of one pair", "of a sum", "latency")
    for each in found.levels:
        rates = (each.port_bytes_per_s, each.pair_bytes_per_s, each.sum_bytes_per_s)
        table.add_row(each.name, str(each.count), *(f"{num_bytes(rate)}/s" for rate in rates), seconds(each.latency_s))
    print_table(standard_output(), table, indent=2)
    if found.pcie_bytes_per_s is not None:
        print_facts(standard_output(), [("pcie", f"{num_bytes(found.pcie_bytes_per_s)}/s, of every GPU each way")])


def _is_ours(path: Path) -> bool:
    return _MADE_BY.encode() in start_of(path, 1000).partition(b"\n")[0]
