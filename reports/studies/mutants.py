"""Mutation testing of the package: `nox -s mutants` makes `mutants.md`.

A hundred mutations, changes of one operator or number, are drawn by seed from the packages in which a silent mistake
would give a wrong result.

1. All tests run once on a probed copy of the tree, which records which tests execute which of the places, in whatever
   process a test starts.
2. Every mutation is made on a copy of its own. The tests that execute its place run until one fails, the quickest
   first; then the others of their files, since what a fixture executes for several tests is recorded for the first of
   them only. After tests that take ten minutes, a mutation counts as not caught.

Existing tools run the whole suite for every mutation, which would take days; this takes seconds for most. The record of
a tree's tests and every verdict are stored below `.nox/mutants/`, so that an interrupted study resumes.

A mutation that no test notices has survived: its place gets a test or is deleted, or the page says why nothing differs.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue

from pipebench import __version__
from reports.studies.markdown import table
from reports.studies.mutations import Mutation, mutations, probed

ROOMS = ("schedule", "engine", "simulate", "planner", "checkpoint", "distributed")
NUMBER, SEED = 100, 0
_HITS, _RAN = "PIPEBENCH_MUTANT_HITS", "PIPEBENCH_MUTANT_RAN"
_PROBE = "mutant_probe"
# The module that probed places call, which is a plugin of pytest, too. A process that a test starts inherits the test's
# name from the environment. Every line is appended by one write, so that processes don't interleave theirs.
_PROBE_SOURCE = f"""import json
import os

_seen = set()


def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]
    if test and (number, test) not in _seen:
        _seen.add((number, test))
        with open(os.environ["{_HITS}"], "a") as file:
            file.write(f"{{number}} {{test}}\\n")


def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["{_RAN}"], "a") as file:
            print(json.dumps([report.nodeid, report.outcome, report.duration]), file=file)
"""
_CALL = f'__import__("{_PROBE}").hit'
# A mutation may make a loop endless. Tests that took t seconds in the first run may take `_PATIENCE` t + `_PATIENCE_S`.
_PATIENCE, _PATIENCE_S = 3, 180
_MOST_S = 600.0  # of tests per mutation, by their seconds in the first run: nearly all tests may execute a place
_STORED = Path(".nox") / "mutants"


@dataclass
class Mutant:
    """A drawn mutation and its verdict."""

    number: int  # position in the order of drawing
    path: str  # of its file, from the root of the tree
    line: int  # of the change
    words: str  # the line before and after, as Markdown
    verdict: str = ""  # "caught", "survived" or "in no test"; empty until it is known
    by: str = ""  # the first test that failed


@dataclass
class Ran:
    """The record of the run of all tests on the probed tree."""

    seconds: dict[str, float] = field(default_factory=dict)  # of every test that passed
    tests: dict[int, list[str]] = field(default_factory=dict)  # that execute a mutant's place, by its number


def draw(root: Path, number: int, seed: int) -> list[tuple[Mutant, Mutation]]:
    """Draw different mutations, each with the same probability."""
    paths = [path for room in ROOMS for path in sorted((root / "pipebench" / room).rglob("*.py"))]
    all_changes = [(path, change) for path in paths for change in mutations(path.read_bytes())]
    drawn = random.Random(seed).sample(all_changes, number)
    return [
        (Mutant(i, str(path.relative_to(root)), change.line, change.words(path.read_bytes())), change)
        for i, (path, change) in enumerate(drawn)
    ]


def tracked(root: Path) -> list[str]:
    """Return the files that git tracks."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, text=True).stdout
    return [*filter(None, names.split("\0"))]


def copy_tree(root: Path, to: Path) -> Path:
    """Copy the files that git tracks, with uncommitted changes, and return the copy."""
    for name in tracked(root):
        if (root / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, to / name, follow_symlinks=False)  # `pipebench/zoo` is a link to a folder
    return to


def run_tests(tree: Path, arguments: Sequence[str], environment: dict[str, str], limit_s: float | None) -> str:
    """Run pytest on a tree and return its output; "" if it takes longer than `limit_s`."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    # The tree's own package comes before the installed one.
    environment = {**os.environ, **environment, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    ) as process:
        try:
            return process.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # with the processes that tests started
            return ""


def run_probed(root: Path, drawn: Sequence[tuple[Mutant, Mutation]], arguments: Sequence[str], folder: Path) -> Ran:
    """Run all tests once on a tree in which every drawn place records which test executes it."""
    tree = copy_tree(root, folder / "probed")
    (tree / f"{_PROBE}.py").write_text(_PROBE_SOURCE)
    by_path = defaultdict(list)
    for mutant, change in drawn:
        by_path[mutant.path].append((mutant.number, change))
    for path, numbered in by_path.items():
        (tree / path).write_bytes(probed((tree / path).read_bytes(), numbered, _CALL))
    hits, log = folder / "hits", folder / "ran"
    hits.touch()
    said = run_tests(tree, ["-p", _PROBE, *arguments], {_HITS: str(hits), _RAN: str(log)}, None)[-2000:]
    print(said, file=sys.stderr, flush=True)
    return read_ran(log, hits)


def stored_in(root: Path, asked: Sequence[object]) -> Path:
    """Return the folder for results about this tree, under these arguments; it is made if it doesn't exist."""
    digest = hashlib.sha256(repr(asked).encode())
    for path in (root / name for name in sorted(tracked(root))):
        digest.update(path.read_bytes() if path.is_file() else b"")
    folder = root / _STORED / digest.hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_ran(log: Path, hits: Path) -> Ran:
    """Read the files that the probe wrote; tests that failed without a mutation are left out."""
    ran, failed = Ran(), set()
    for line in log.read_text().splitlines():
        name, outcome, seconds = json.loads(line)
        ran.seconds[name] = ran.seconds.get(name, 0) + seconds
        if outcome == "failed":
            failed.add(name)
    ran.seconds = {name: seconds for name, seconds in ran.seconds.items() if name not in failed}
    tests: dict[int, set[str]] = defaultdict(set)
    for line in hits.read_text().splitlines():
        number, _, name = line.partition(" ")
        if name in ran.seconds:
            tests[int(number)].add(name)
    ran.tests = {number: sorted(names, key=ran.seconds.__getitem__) for number, names in tests.items()}
    return ran


def in_order(tests: Sequence[str], seconds: dict[str, float]) -> list[str]:
    """Return tests file by file, since those of one file share fixtures: the quickest file first."""
    file_s: dict[str, float] = defaultdict(float)
    for name in tests:
        file_s[_file_of(name)] += seconds[name]
    return sorted(tests, key=lambda name: (file_s[_file_of(name)], _file_of(name)))


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def with_their_files(tests: Sequence[str], seconds: dict[str, float]) -> list[str]:
    """Return tests in order, then the others of their files, as many as take `_MOST_S` seconds together."""
    files = set(map(_file_of, tests))
    others = [name for name in seconds.keys() - {*tests} if _file_of(name) in files]
    every = [*in_order(tests, seconds), *in_order(sorted(others), seconds)]
    ends_s = itertools.accumulate(seconds[name] for name in every)
    return [name for name, end_s in zip(every, ends_s, strict=True) if end_s <= _MOST_S] or every[:1]


def judge(tree: Path, mutant: Mutant, change: Mutation, ran: Ran) -> None:
    """Make a mutation on a tree, run the tests that execute its place, undo it, and set the verdict."""
    tests = with_their_files(ran.tests.get(mutant.number, []), ran.seconds)
    if not tests:
        mutant.verdict = "in no test"
        return
    path = tree / mutant.path
    source = path.read_bytes()
    path.write_bytes(change.applied(source))
    try:
        names = tree / "mutant-tests.txt"
        names.write_text("\n".join(tests))
        limit_s = _PATIENCE_S + _PATIENCE * sum(ran.seconds[name] for name in tests)
        printed = run_tests(tree, ["-x", "--tb=no", "-rfE", f"@{names}"], {}, limit_s)
    finally:
        path.write_bytes(source)
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR", "INTERNALERROR"))]
    if failed or not printed or " passed" not in printed.splitlines()[-1]:
        mutant.verdict, mutant.by = "caught", failed[0].split(" - ")[0].split(" ", 1)[-1] if failed else "no end"
    else:
        mutant.verdict = "survived"


def judged(root: Path, drawn: Sequence[tuple[Mutant, Mutation]], ran: Ran, folder: Path) -> Iterator[Mutant]:
    """Judge all mutants at once, each on one of several copies of the tree, as many as there are cores."""
    trees: SimpleQueue[Path] = SimpleQueue()
    num_trees = os.cpu_count() or 1
    for i in range(num_trees):
        trees.put(copy_tree(root, folder / f"tree-{i}"))

    def one(mutant: Mutant, change: Mutation) -> Mutant:
        tree = trees.get()
        try:
            judge(tree, mutant, change, ran)
        finally:
            trees.put(tree)
        return mutant

    with ThreadPoolExecutor(num_trees) as pool:
        yield from pool.map(lambda pair: one(*pair), drawn)


def judge_all(root: Path, drawn: Sequence[tuple[Mutant, Mutation]], ran: Ran, folder: Path, verdicts: Path) -> None:
    """Judge the mutants without a stored verdict, and store each verdict as soon as it is known."""
    stored = {
        row["number"]: row for row in map(json.loads, verdicts.read_text().splitlines() if verdicts.exists() else ())
    }
    for mutant, _ in drawn:
        vars(mutant).update(stored.get(mutant.number, {}))
    for mutant in judged(root, [pair for pair in drawn if not pair[0].verdict], ran, folder):
        with verdicts.open("a") as file:
            file.write(json.dumps(asdict(mutant)) + "\n")
        where = f"{mutant.number} {mutant.path}:{mutant.line}"
        print(where, mutant.verdict, mutant.by, file=sys.stderr, flush=True)


def page(mutants: Sequence[Mutant], seed: int, minutes: float) -> str:
    """Return the page in Markdown."""
    count = Counter(mutant.verdict for mutant in mutants)
    survivors = [mutant for mutant in mutants if mutant.verdict != "caught"]
    rooms = [
        [room, str(len(of_room)), str(sum(it.verdict == "caught" for it in of_room))]
        for room in ROOMS
        if (of_room := [it for it in mutants if it.path.startswith(f"pipebench/{room}/")])
    ]
    rows = [[f"{it.path.removeprefix('pipebench/')}:{it.line}", it.words, it.verdict] for it in survivors]
    return "\n".join([
        "# Mutants: single operators and numbers changed, and whether a test notices",
        "",
        f"`nox -s mutants` makes this page: {len(mutants)} changes drawn by seed {seed} of all in {', '.join(ROOMS)};",
        "the tests that execute the changed place run until one fails (see `reports/studies/mutants.py`).",
        "",
        f"**{count['caught']} of {len(mutants)} caught**, {count['survived']} survived, {count['in no test']} executed",
        f"by no test. pipebench {__version__}, {minutes:.0f} minutes.",
        "",
        table(["package", "mutants", "caught"], rooms),
        "",
        "## Not caught",
        "",
        table(["place", "change", "verdict"], rows) if rows else "None.",
    ])  # fmt: skip


def main() -> None:
    """Draw, probe, judge and print the page; exit with code 1 if fewer than 95 of 100 are caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=NUMBER, help=f"of mutations ({NUMBER})")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the drawing ({SEED})")
    parser.add_argument("--out", type=Path, help="a file that all verdicts are written to, as JSON")
    parser.add_argument("tests", nargs="*", help="arguments for pytest in the first run; all tests by default")
    options = parser.parse_args()
    root, began = Path.cwd(), time.monotonic()
    drawn = draw(root, options.number, options.seed)
    at_once = ["--dist=loadfile", "--no-loadscope-reorder", f"--numprocesses={(os.cpu_count() or 1) + 1}"]
    stored = stored_in(root, (options.number, options.seed, options.tests))
    known, verdicts = stored / "ran.json", stored / "verdicts.jsonl"
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        if not known.exists():
            ran = run_probed(root, drawn, [*at_once, *options.tests], Path(name))
            known.write_text(json.dumps([ran.seconds, [*ran.tests.items()]]))
        seconds, tests = json.loads(known.read_text())
        judge_all(root, drawn, Ran(seconds, dict(tests)), Path(name), verdicts)
    mutants = [mutant for mutant, _ in drawn]
    if options.out:
        options.out.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1))
    print(page(mutants, options.seed, (time.monotonic() - began) / 60))
    sys.exit(sum(mutant.verdict == "caught" for mutant in mutants) < 0.95 * len(mutants))


if __name__ == "__main__":
    main()
