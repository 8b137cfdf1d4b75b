"""Ctrl-C before training, in every phase of a start: stand-ins block in it for ever, so that only Ctrl-C ends the run.

A file in the path of all processes, `sitecustomize.py`, puts the stand-in in its place when its module is imported.
"""

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from reports.studies.watched_run import WatchedRun, lives
from tests.patience import PATIENCE_S
from tests.recipes import uniform_recipe

STAND_IN = """
import importlib.abc, importlib.util, os, sys, threading

def block(*args, **kwargs):
    open(os.path.join({folder!r}, f"blocked-{{os.environ.get('RANK', 'command')}}"), "w").close()
    threading.Event().wait()

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            if {name!r}:
                execute(module)
                vars(module).update({{"needs_warm_up": lambda device: True}} if {name!r} == "warm_up" else {{}})
                setattr(module, {name!r}, block)
            else:
                block()

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


class Phase(NamedTuple):
    """A function that does a phase's work, "" for a module's import, and the processes that do it."""

    module: str
    name: str
    blocked: tuple[str, ...]  # ranks, or the command


BOTH = ("0", "1")
PHASES = {
    "importing": Phase("pipebench.run.runner", "", ("command",)),
    "measuring, in the command": Phase("pipebench.profile.choose", "measured_profile", ("command",)),
    "joining": Phase("pipebench.run.processes", "join", BOTH),
    "measuring": Phase("pipebench.run.measuring", "measured_profile", BOTH),
    "measuring lists": Phase("pipebench.run.measuring", "in_situ", BOTH),
    "measuring messages": Phase("pipebench.run.measuring", "host_costs", BOTH),
    "connecting": Phase("pipebench.distributed.engine", "ProcessCollectives", BOTH),
    "warming up": Phase("pipebench.distributed.engine", "warm_up", BOTH),
}


OFTEN = {"importing", "measuring"}  # the others do more of the same


@pytest.mark.parametrize("phase", [pytest.param(p, marks=() if p in OFTEN else pytest.mark.slow) for p in PHASES])
def test_ctrl_c_is_answered_in_every_phase(phase: str, tmp_path: Path) -> None:
    it = PHASES[phase]
    (tmp_path / "path").mkdir()
    text = STAND_IN.format(folder=str(tmp_path), module=it.module, name=it.name)
    (tmp_path / "path" / "sitecustomize.py").write_text(text)
    given = yaml.safe_load(uniform_recipe(2, 16, 8, 8, "mode: gpipe, plan: 1-1"))
    timing = "anew" if "measuring" in phase else "auto"
    given |= {"cluster": {"name": "local", "count": 2}, "engine": {"kind": "distributed", "timing": timing}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(given))
    path = os.pathsep.join([str(tmp_path / "path"), str(Path(__file__).parents[2])])
    with WatchedRun(tmp_path, ["small.yaml"], {"PYTHONPATH": path}) as run:

        def all_blocked() -> bool:
            return all((tmp_path / f"blocked-{who}").exists() for who in it.blocked)

        assert run.wait_until(all_blocked, PATIENCE_S, "the phase")
        workers = [*run.workers().values()]
        assert len(workers) == (0 if it.blocked == ("command",) else 2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE_S) == 130, run.output
        assert "Traceback" not in run.output
        assert not [pid for pid in workers if is_running(pid)]
        assert ("ended before training began" in run.output) == (it.blocked == BOTH)


def is_running(pid: int) -> bool:
    """Return whether a process computes or waits; one that has ended may wait for its parent to notice."""
    until_s = time.monotonic() + PATIENCE_S
    while lives(pid):
        if time.monotonic() > until_s:
            return True
        time.sleep(0.02)
    return False
