"""Runs processes in a lab: plain sockets that measure wires, profiling, and training with its traffic and log."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pipebench.errors import PipebenchError, WorkersFailedError, printable_lines
from pipebench.run.folder import RUNS, RunFolder
from pipebench.train.result import RunResult
from tests.lab import launcher, probe, wires
from tests.lab.cluster_file import LEVEL, cluster_text
from tests.lab.findings import Case, Options, Passed, Wire, label
from tests.lab.hosts import Lab

_PROBED_S = 0.5  # seconds for which a wire is measured
_FASTEST_BYTES_PER_S = 1.25e9  # assumed for sizing the transfer over wires without a limit
_TAIL_LINES = 20
_FAILED = 3


class Trials:
    """Runs processes in a lab.

    Args:
        lab: the hosts and wires.
        options: of the command.
        say: prints a line of progress.

    Attributes:
        free: the wires without a limit.
    """

    def __init__(self, lab: Lab, options: Options, say: Callable[[str], None]) -> None:
        self._lab, self._options, self._say = lab, options, say
        self.free = self._probed(None)

    def limit(self, bandwidth_bytes_per_s: float) -> Wire:
        """Limit the wires, and measure one with plain sockets."""
        self._lab.limit(bandwidth_bytes_per_s)
        return self._probed(bandwidth_bytes_per_s)

    def overrides(self, bandwidth_bytes_per_s: float) -> list[str]:
        """Write the lab's cluster file for a bandwidth; return the overrides that run a recipe on it."""
        return cluster_words(self._options, bandwidth_bytes_per_s, self.free.latency_s)

    def measure(self, module: str, folder: Path) -> None:
        """Measure, in as many processes on all hosts as runs have, what predictions need; see `measuring`.

        Raises:
            WorkersFailedError: it failed; the reason has been printed.
        """
        # With one host name, since processes of one host know that they share its cores.
        self._run([module, str(folder)], folder / "measuring.log", socket.gethostname())

    def train(self, case: Case, words: Sequence[str]) -> tuple[RunResult, Passed]:
        """Train a recipe on all hosts; return its result and its traffic.

        `words` are overrides in addition to the recipe's; among them is a `name` that no other run of the lab has.

        Raises:
            WorkersFailedError: it ended without a result; the reason has been printed.
        """
        name = next(word.partition("=")[2] for word in words if word.startswith("name="))
        before = {path.name for path in RUNS.glob(f"{name}-????????")}
        counted = self._counted()
        log = self._options.folder / "logs" / f"{name}.log"
        self._run(["pipebench", "run", str(case.path), *case.words, *words], log)
        wire_bytes, num_pieces = (now - then for now, then in zip(self._counted(), counted, strict=True))
        made = [path for path in RUNS.glob(f"{name}-????????") if path.name not in before]
        result = RunFolder(made[0].absolute()).result() if len(made) == 1 else None
        if result is None:
            raise self._failure(f"{name} ended without a result", log)
        return result, Passed(wire_bytes, num_pieces, self._payload_bytes(result))

    def _payload_bytes(self, result: RunResult) -> int:
        """Return the bytes that a run logged as sent between hosts.

        With several workers per host, those of buffers and evaluations are left out: levels aren't logged for them.
        """
        found = result.metrics
        apart = ("comm_bytes_buffers", "comm_bytes_evaluation") if self._options.workers_per_host == 1 else ()
        return int(sum(found.get(name, 0) for name in (f"comm_bytes_level_{LEVEL}", *apart)))

    def _counted(self) -> tuple[int, int]:
        """Return the bytes and packets that all hosts have sent."""
        counters = [self._lab.counters(index) for index in range(self._options.num_hosts)]
        return sum(each.sent_bytes for each in counters), sum(each.sent_packets for each in counters)

    def _probed(self, bandwidth_bytes_per_s: float | None) -> Wire:
        num_bytes = round((bandwidth_bytes_per_s or _FASTEST_BYTES_PER_S) * _PROBED_S)
        words = [sys.executable, "-I", "-S", probe.__file__]
        server = self._lab.start(0, [*words, "serve", wires.address(0)], stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            server.stdout.readline()
            asking = [*words, "ask", wires.address(0), str(num_bytes)]
            client = self._lab.start(1, asking, stdout=subprocess.PIPE)
            there_and_back_s, goodput_bytes_per_s = json.loads(client.communicate()[0])
        finally:
            server.kill()
            server.communicate()
        return Wire(bandwidth_bytes_per_s, goodput_bytes_per_s, there_and_back_s / 2)

    def _run(self, words: Sequence[str], log: Path, name: str | None = None) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        code = launcher.run(self._lab, self._options.workers_per_host, words, log, name)
        if code != 0:
            raise self._failure(f"`{' '.join(words[:3])}` ended with exit code {code}", log)

    def _failure(self, what: str, log: Path) -> PipebenchError:
        """Print what failed and the end of the log; return the error to raise."""
        self._say(f"{what}; the end of {log}:")
        for line in log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]:
            self._say(f"  {printable_lines(line)[0] if line else ''}")
        return WorkersFailedError(_FAILED)


def cluster_words(options: Options, bandwidth_bytes_per_s: float, latency_s: float) -> list[str]:
    """Write a lab's cluster file; return the overrides that run a recipe on it in processes."""
    path = options.folder / "clusters" / f"lab-{label(bandwidth_bytes_per_s)}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(cluster_text(bandwidth_bytes_per_s, latency_s, options.workers_per_host), encoding="utf-8")
    return ["engine.kind=distributed", f"cluster.name={path}", f"cluster.servers={options.num_hosts}"]
