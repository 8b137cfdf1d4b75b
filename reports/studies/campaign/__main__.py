"""Fault injection: kills and stops runs in every mode and both engines, damages checkpoints, and checks the results.

`nox -s campaign` writes a page of `reports/` and its picture: `PAGES` in `page.py`. Results are stored in a file as
they come in, so that an interrupted campaign resumes.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped] # it has no types of its own

import pipebench
from reports.studies.campaign import disks
from reports.studies.campaign.cases import write_recipe
from reports.studies.campaign.drawing import Trial, draw
from reports.studies.campaign.hosts import RunOnHosts
from reports.studies.campaign.page import WHOLE, Findings, draw_picture, page, page_name
from reports.studies.campaign.reference import References
from reports.studies.campaign.spoilt import Spoilt, spoil_drawn, spoilt_cases, table_of_tests
from reports.studies.campaign.trial import DisturbedRun, Outcome, Place
from tests.lab.hosts import why_not as why_no_hosts

ROOT = Path(pipebench.__file__).parents[1]
KEPT, REPORTS = ROOT / ".nox" / "campaign", ROOT / "reports"
TABLE, DRAWN = "spoilt as the tests do", "spoilt by chance"  # names of the parts that damage checkpoints

Spoiling = Mapping[str, Callable[[Place], list[Spoilt]]]


class Campaign:
    """The parts of a campaign, and the results of those that are done.

    Args:
        trials: runs with the faults that are injected into them.
        spoilt: functions that damage checkpoints, by name of the part.
        asked: the seed and the other arguments that decide what is drawn.
        anew: discard stored results.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        spoilt: Mapping[str, Callable[[Place], Any]],
        asked: dict[str, Any],
        *,
        anew: bool,
    ) -> None:
        self.trials, self.spoilt, self.asked = trials, spoilt, asked
        head = {**asked, "code": code_hash()}
        name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
        self._path = KEPT / f"{name}.jsonl"
        self._lock = threading.Lock()
        self.done: dict[str, Any] = {}
        lines = self._path.read_text().splitlines() if self._path.exists() and not anew else []
        if lines and json.loads(lines[0]) == head:
            self.done = {row["name"]: row for row in map(json.loads, lines[1:])}
        else:
            KEPT.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(head) + "\n")

    @property
    def left(self) -> list[str]:
        """The names of the parts that aren't done."""
        return [name for name in (*(trial.name for trial in self.trials), *self.spoilt) if name not in self.done]

    def note(self, row: dict[str, Any]) -> None:
        """Store the result of a part."""
        with self._lock:
            self.done[row["name"]] = row
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def findings(self, not_tried: Sequence[str]) -> Findings:
        """Return the results so far; `not_tried` says why some parts can't be done on this machine."""
        outcomes = [Outcome.of(self.done[trial.name]) for trial in self.trials if trial.name in self.done]
        spoilt = {name: self.done[name] for name in self.spoilt if name in self.done}
        seconds = sum(row["took_s"] for row in self.done.values())
        return Findings(self.asked, outcomes, spoilt, seconds, len(self.left), tuple(not_tried))


def code_hash() -> str:
    """Return a hash of the code that the results depend on: results of other code are discarded."""
    found = hashlib.sha256()
    for folder in ("pipebench", "zoo", "reports/studies/campaign", "tests/checkpoint"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name not in ("page.py", "__main__.py"):
                found.update(path.read_bytes())
    return found.hexdigest()[:16]


def perform(campaign: Campaign, place: Place, at_once: int, say: Callable[[str], None]) -> None:
    """Do the parts that are left, `at_once` at a time, and store the result of each; `say` prints progress."""
    by_name = {trial.name: trial for trial in campaign.trials}
    began_s, count = time.monotonic(), len(campaign.left)
    pool = ThreadPoolExecutor(at_once)
    try:
        futures: dict[Future[dict[str, Any]], str] = {
            pool.submit(_part, campaign, by_name.get(name), name, place): name for name in _mixed(campaign.left)
        }
        for number, future in enumerate(as_completed(futures), 1):
            row = future.result()
            campaign.note(row)
            passed_s = time.monotonic() - began_s
            rest_s = passed_s / number * (count - number)
            problems = row["problems"]
            said = "fine" if not problems else f"NOT FINE: {problems[0]}"
            title = by_name[row["name"]].title if row["name"] in by_name else row["name"]
            clock = f"{passed_s / 60:.1f} min, about {rest_s / 60:.0f} to go"
            say(f"[{number}/{count}, {clock}] {row['name']} {title}: {said} ({row['took_s']:.0f} s)")
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        raise
    pool.shutdown()


def _mixed(names: Sequence[str]) -> list[str]:
    """Return parts in random order, so that an interrupted campaign has done some of each kind."""
    return random.Random(0).sample(names, len(names))


def _part(campaign: Campaign, trial: Trial | None, name: str, place: Place) -> dict[str, Any]:
    """Do one part and return its result; the folder of a run with problems is copied below `.nox/campaign/lost/`."""
    began_s = time.monotonic()
    if trial is None:
        try:
            found = campaign.spoilt[name](place)
        except RuntimeError as error:
            return {"name": name, "rows": [], "problems": [str(error)], "took_s": time.monotonic() - began_s}
        problems = [f"{each.case}, {each.way}: {each.answer}" for each in found if not each.fine]
        rows = [asdict(each) for each in found]
        return {"name": name, "rows": rows, "problems": problems, "took_s": time.monotonic() - began_s}
    kind = RunOnHosts if trial.on_hosts else DisturbedRun
    run = kind(trial, place, campaign.asked["seed"])
    outcome = run.run()
    if outcome.problems:
        kept = KEPT / "lost" / trial.name
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(run.folder, kept, symlinks=True, ignore_dangling_symlinks=True)
    shutil.rmtree(run.folder, ignore_errors=True)
    return asdict(outcome)


def prepared(room: Path) -> Place:
    """Make what all parts share, in the folder `room`."""
    from mlflow.tracking import MlflowClient

    database = room / "empty.db"
    MlflowClient(f"sqlite:///{database}").search_experiments()
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    settings = {
        "PIPEBENCH_CACHE": str(room / "cache"), "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    references = References(room / "references", write_recipe(room), {**os.environ, **settings})
    return Place(room, database, settings, references)


def possible(trials: Sequence[Trial]) -> tuple[list[Trial], list[str]]:
    """Return the trials that can be done on this machine, and why others can't."""
    refusals = {"on_small_disk": disks.why_not(), "on_hosts": why_no_hosts()}
    lacking = [name for name, why in refusals.items() if why]
    found = [trial for trial in trials if not any(getattr(trial, name) for name in lacking)]
    return found, [refusals[name] for name in lacking if any(getattr(trial, name) for trial in trials)]


def spoiling(seed: int, kills: int, only: str) -> Spoiling:
    """Return the parts that damage checkpoints: at random and, in a large campaign, as the tests' tables do."""
    found: dict[str, Callable[[Place], list[Spoilt]]] = {}
    these = "spoilt" in only  # the parts themselves
    if these or spoilt_cases(only):
        cases, count = "" if these else only, max(5, kills // 2)
        found[DRAWN] = lambda place: spoil_drawn(seed, count, cases, place.folder / "drawn", place.settings)
    if these or (kills >= 100 and not only):
        found[TABLE] = lambda place: table_of_tests(place.folder / "table", place.settings)
    return found


def main() -> int:
    """Do the campaign and write its page; return 1 if something was lost or is left to do, else 0."""
    parser = argparse.ArgumentParser(prog="nox -s campaign --", description=__doc__)
    parser.add_argument("--kills", type=int, default=WHOLE["kills"], help="number of kills; other faults in proportion")
    parser.add_argument("--seed", type=int, default=WHOLE["seed"])
    parser.add_argument("--only", default=WHOLE["only"], help="a part of modes, plans, engines or faults; several: A,B")
    parser.add_argument("--at-once", type=int, default=max(1, min(4, os.cpu_count() or 1)), help="runs at once")
    parser.add_argument("--anew", action="store_true", help="discard the results of an earlier campaign")
    parser.add_argument("--list", action="store_true", help="print what is drawn, and do nothing")
    given = parser.parse_args()
    drawn = draw(given.seed, given.kills, given.only)
    spoilt = spoiling(given.seed, given.kills, given.only)
    if not drawn and not spoilt:
        parser.error(f"--only: got {given.only!r}, which no run's mode, plan, engine or disturbance contains")
    if given.list:
        print(*(f"{trial.name}  {trial.title}" for trial in drawn), *spoilt, sep="\n")
        return 0
    trials, not_tried = possible(drawn)
    asked = {"seed": given.seed, "kills": given.kills, "only": given.only}
    campaign = Campaign(trials, spoilt, asked, anew=given.anew)
    if any(trial.on_small_disk for trial in trials):
        disks.own_mounts()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as room:
            place = prepared(Path(room))
            with place.references:
                perform(campaign, place, given.at_once, _say)
    except KeyboardInterrupt:
        _say(f"interrupted: {len(campaign.left)} left; the same command goes on")
    found = campaign.findings(not_tried)
    text = page(found)
    if (name := page_name(asked)) and not campaign.left:
        (REPORTS / f"{name}.md").write_text(text)
        draw_picture(found, REPORTS / f"{name}.png")
    else:
        print(text)
    _say(found.verdict)
    return 0 if found.fine else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
