"""Disturbed runs on two emulated hosts: a host's processes are killed, it is removed, or its network fails."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from reports.studies.campaign.drawing import HOSTS, Fault
from reports.studies.campaign.points import asked
from reports.studies.campaign.trial import DisturbedRun, last_line
from tests.lab import launcher
from tests.lab.hosts import Lab

_NUM_HOSTS = 2
_SILENCE_S = 10  # the runs' `engine.silence_limit_s`
_UNPLUGGED_S = 3.0  # how long a network fails that comes back
_LIMIT_S, _POLL_S = 240.0, 0.02
_BANDWIDTH_BYTES_PER_S = 1.25e8


class Agents:
    """torchrun on every host, as a context manager; leaving it kills those that still run."""

    def __init__(self, lab: Lab, folder: Path, words: Sequence[str], settings: dict[str, str]) -> None:
        self._logs = [folder / f"host{index}.txt" for index in range(_NUM_HOSTS)]
        self._before = [path.stat().st_size if path.exists() else 0 for path in self._logs]
        with contextlib.ExitStack() as files:
            logs = [files.enter_context(path.open("ab")) for path in self._logs]
            own = {**settings, "OMP_NUM_THREADS": "1"}
            self.processes = launcher.start(lab, 1, ["pipebench", "run", *words], logs, cwd=folder, env=own)

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def said(self, host: int) -> str:
        """Return the output of this command on a host."""
        return self._logs[host].read_text(errors="replace")[self._before[host] :]

    def over(self, host: int) -> bool:
        """Return whether torchrun has ended on a host, or its worker has printed an error.

        A torchrun that has lost its store ends only when TCP gives up, long after its worker.
        """
        return self.processes[host].poll() is not None or "pipebench: error: " in self.said(host)


class RunOnHosts(DisturbedRun):
    """Runs a trial on two hosts; the result is `outcome`."""

    def _command(self, words: Sequence[str]) -> list[str]:
        if "--resume" not in words:
            words = [*words, f"engine.silence_limit_s={_SILENCE_S}"]
        with Lab(_NUM_HOSTS) as lab:
            lab.limit(_BANDWIDTH_BYTES_PER_S)
            with Agents(lab, self.folder, words, self.settings) as agents:
                return self._disturb(lab, agents)

    def _disturb(self, lab: Lab, agents: Agents) -> list[str]:
        """Inject the next fault, wait for the command's end, and return the next command's words."""
        fault = self.trial.faults[self._next] if self._next < len(self.trial.faults) else None
        if fault is not None:
            path = asked(self.questions, self._next)
            self._wait(lambda: path.exists() or all(map(agents.over, range(_NUM_HOSTS))), agents, str(fault.moment))
            if path.exists():
                self.note_done(fault)
                self._do_to_hosts(fault, lab)
                self.answer()
        self._wait(lambda: all(map(agents.over, range(_NUM_HOSTS))), agents, "the end")
        return self._next_words(agents, fault)

    def _do_to_hosts(self, fault: Fault, lab: Lab) -> None:
        host = fault.victims[0]
        if fault.kind == HOSTS[0]:
            lab.kill(host)
        elif fault.kind == HOSTS[1]:
            lab.destroy(host)
        else:
            lab.unplug(host)
            if fault.kind == HOSTS[3]:
                time.sleep(_UNPLUGGED_S)
                lab.plug(host)

    def _next_words(self, agents: Agents, fault: Fault | None) -> list[str]:
        codes = [process.poll() for process in agents.processes]
        if codes == [0] * _NUM_HOSTS:
            return []
        lost = fault is not None and fault.kind != HOSTS[3]
        (run,) = self.folder.glob("pipebench-runs/*/run.json")
        lines = [line for host in range(_NUM_HOSTS) for line in agents.said(host).splitlines()]
        if not lost or not any(line.startswith("pipebench: error: ") for line in lines):
            said = [last_line(agents.said(host)) for host in range(_NUM_HOSTS)]
            self.outcome.problems.append(f"exit codes {codes}: {said}")
            return []
        return ["--resume", run.parent.name]

    def _wait(self, happened: Callable[[], bool], agents: Agents, what: str) -> None:
        until_s = time.monotonic() + _LIMIT_S
        while not happened():
            if time.monotonic() > until_s:
                raise TimeoutError(f"{what}: not within {_LIMIT_S:g} s; {agents.said(0)[-600:]}")
            time.sleep(_POLL_S)
