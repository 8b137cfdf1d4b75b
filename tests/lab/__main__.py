"""`python -m tests.lab`: trains recipes across emulated hosts and links, and compares with predictions."""

import sys
from pathlib import Path

import click

from pipebench.cli.group import tracebacks
from pipebench.cli.main import cli
from pipebench.cli.parameters import Parameter, count
from pipebench.cli.references import load_all, split
from pipebench.errors import UserError, WorkersFailedError
from pipebench.units import UnitError, parse_bandwidth
from tests.lab.ladder import HIGHEST_BYTES_PER_S, LOWEST_BYTES_PER_S

_MOST_HOSTS, _MOST_WORKERS = 64, 64


def _hosts(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= _MOST_HOSTS:
        raise ValueError(f"got {text[:60]!r}, allowed is a whole number from 2 to {_MOST_HOSTS}: one host has no wire")
    return int(text)


def _bandwidths(text: str) -> tuple[float, ...]:
    """Return the bandwidths [bytes/s] of a text such as `100Mbit,1Gbit`, in the notation of `tc` or of recipes."""
    found = []
    for part in text.split(","):
        try:
            found.append(parse_bandwidth(f"{part.strip()}/s" if part.strip().endswith("bit") else part))
        except UnitError:
            raise ValueError(
                f"got {part[:40]!r}, allowed are bandwidths joined by commas, such as 100Mbit,1.5Gbit,10Gbit"
            ) from None
        if not LOWEST_BYTES_PER_S <= found[-1] <= HIGHEST_BYTES_PER_S:
            raise ValueError(f"got {part[:40]!r}, allowed are 1Mbit to 100Gbit")
    if len(set(found)) != len(found):
        raise ValueError(f"got {text[:60]!r}, allowed are different bandwidths")
    return tuple(found)


@click.command(short_help="Train across wires of limited bandwidth, and compare with the prediction.")
@click.argument("words", metavar="RECIPE... [KEY=VALUE...]", nargs=-1)
@click.option("--hosts", type=Parameter(_hosts), default=2, metavar="N", help="Hosts to make.  [default: 2]")
@click.option(
    "--workers-per-host", type=count(_MOST_WORKERS), default=1, metavar="N", help="Processes on each.  [default: 1]"
)
@click.option(
    "--bandwidth",
    "bandwidths",
    type=Parameter(_bandwidths),
    default="100Mbit,1Gbit,10Gbit",
    metavar="RATE[,...]",
    help="Of the wires, each way, headers included.  [default: 100Mbit,1Gbit,10Gbit]",
)
@click.option(
    "--ladder",
    "climbs",
    is_flag=True,
    help="Predict where the fastest pipeline overtakes data parallelism, then measure both at bandwidths around it, "
    "each 1.5 times the one before.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("pipebench-lab"), metavar="FOLDER",
    help="Where the report, its picture, predictions and logs go.  [default: pipebench-lab]",
)  # fmt: skip
@click.option(
    "--clean", is_flag=True, help="Remove what labs have left whose processes were killed, and do nothing else."
)
@tracebacks
def lab(
    words: tuple[str, ...],
    hosts: int,
    workers_per_host: int,
    bandwidths: tuple[float, ...],
    climbs: bool,
    out: Path,
    clean: bool,
) -> int:
    """Train recipes across real sockets of limited bandwidth, and put predicted beside measured.

    The lab is made on this machine: a network namespace per host, joined by pairs of virtual interfaces whose bandwidth
    `tc tbf` limits, and torchrun in each, as on hosts of their own. It needs Linux, root and iproute2, and removes what
    it makes, however it ends. What the simulator says of a bandwidth is written down before anything trains at it.

    RECIPE is as for `pipebench run`; every plan has as many workers as the lab: hosts times workers per host. FOLDER
    gets lab.md, lab.png, lab.json; every run is recorded in MLflow.

    \b
    Examples:
      python -m tests.lab lab --ladder                            the shipped recipes: four modes, one worker per host
      python -m tests.lab lab/dp lab/pipedream --bandwidth 200Mbit,2Gbit
      python -m tests.lab my-recipe.yaml --hosts 3 parallelism.plan=2-1
      python -m tests.lab --clean
    """
    from tests.lab import hosts as machine

    refused = machine.why_not()
    if refused:
        raise UserError(refused)
    if clean:
        removed = machine.clean()
        click.echo(f"removed {len(removed)} namespaces{': ' if removed else ''}{', '.join(removed)}")
        return 0
    references, overrides = split(words)
    if not references:
        raise click.UsageError("name at least one recipe, for example: python -m tests.lab lab --ladder")
    from tests.lab.command import run_lab
    from tests.lab.findings import Options

    options = Options(hosts, workers_per_host, bandwidths, climbs, out.absolute())
    try:
        code: int = run_lab(lambda more: load_all(references, [*overrides, *more]), overrides, options)
    except WorkersFailedError as error:  # the reason has been printed
        return error.exit_code
    return code


cli.add_command(lab)  # so that mistakes end as in any of pipebench's commands

if __name__ == "__main__":
    cli(["lab", *sys.argv[1:]])
