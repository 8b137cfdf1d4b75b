"""Compares random recipes with the plain loop: `nox -s oracle`, or `python -m tests.random_recipes.main FILE...`."""

import argparse
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.random_recipes.compare import RefusedError, disagreements, text_of, written
from tests.random_recipes.drawing import draw_recipe
from tests.random_recipes.push_orders import num_workers
from tests.random_recipes.shrinking import shrunk
from tests.random_recipes.worlds import Worlds

MOST_REFUSED = 0.5  # share of the recipes drawn: beyond, what is drawn has drifted from what the product takes
SHRUNK = 5  # recipes that are made smaller, each by tens of runs: more of them tend to say the same


@dataclass
class Campaign:
    """What came of random recipes."""

    seed: int  # they are drawn from
    folder: Path  # where they are written
    agreed: Counter[str] = field(default_factory=Counter)  # by mode, recipes in which both ways agree
    refused: Counter[str] = field(default_factory=Counter)  # by reason, recipes that the product refuses
    failures: list[str] = field(default_factory=list)  # a report for each recipe in which they don't

    def run(self, count: int, *, in_processes: bool = False, first: int = 0) -> None:
        """Compare until so many recipes have been compared, the `first` of a number on, or far too many were refused.

        `in_processes`: take recipes of two workers, and run them with the distributed engine.
        """
        compared, number = 0, first
        while compared < count and number - first < (4 + 40 * in_processes) * count + 20:
            recipe = draw_recipe(self.seed, number)
            if not in_processes or num_workers(recipe) == 2:
                compared += self.compare(recipe, in_processes=in_processes)
            number += 1

    def compare(self, recipe: dict[str, Any], *, in_processes: bool = False) -> bool:
        """Compare one recipe; return whether there was something to compare."""
        try:
            found = self._found(recipe, in_processes)
        except RefusedError as error:
            self.refused[re.sub(r"\S*recipe\.yaml(:\d+)?: |[\d'\[\]]+", "", str(error))[:60]] += 1
            return False
        if not found:
            self.agreed[recipe["parallelism"]["mode"]] += 1
            return True
        small = recipe if in_processes or len(self.failures) >= SHRUNK else shrunk(recipe, self._fails)
        self.failures.append(_report(recipe, small, found if small is recipe else self._found(small, in_processes)))
        print(self.failures[-1], flush=True)
        return True

    def _found(self, recipe: dict[str, Any], in_processes: bool) -> list[str]:
        path = written(recipe, self.folder / "recipe")
        try:
            return disagreements(path, in_processes=in_processes)
        except RefusedError:
            raise
        except Exception as error:  # whatever breaks is a finding, and the others are still to be compared
            return [f"{type(error).__name__}: {error}"]
        finally:
            shutil.rmtree(path.parent)

    def _fails(self, recipe: dict[str, Any]) -> bool:
        try:
            return bool(self._found(recipe, in_processes=False))
        except RefusedError:
            return False

    @property
    def refused_share(self) -> float:
        return self.refused.total() / max(1, self.refused.total() + self.agreed.total() + len(self.failures))

    @property
    def summary(self) -> str:
        count = f"{self.agreed.total()} recipes agree with the plain loop, {len(self.failures)} don't"
        lines = [f"seed {self.seed}: {count}"]
        lines += [f"  {mode}: {count}" for mode, count in sorted(self.agreed.items())]
        lines += [f"refused: {self.refused.total()}, {self.refused_share:.0%} of those drawn; most often"]
        return "\n".join([*lines, *(f"  {count} x {reason}" for reason, count in self.refused.most_common(5))])


def _report(recipe: dict[str, Any], small: dict[str, Any], found: list[str]) -> str:
    told = "\n".join(f"  {each}" for each in found[:6])
    return f"{recipe['name']} disagrees with the plain loop:\n{told}\nA file with this shows it:\n{text_of(small)}"


def main(words: list[str] | None = None) -> int:
    """Compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="recipes to compare in place of random ones")
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")), help="of the random recipes")
    parser.add_argument("--recipes", type=int, default=500, help="with the virtual engine")
    parser.add_argument("--in-processes", type=int, default=20, help="with the distributed engine, two processes each")
    parser.add_argument("--in-worlds", type=int, default=60, help="in two to four processes beside the virtual engine")
    given = parser.parse_args(words)
    warnings.simplefilter("ignore")  # torch's, of schedules that step before their optimizer
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(given.seed, Path(folder))
        if given.files:
            for path in given.files:
                campaign.compare(yaml.safe_load(path.read_text()))
        else:
            print(f"seed {given.seed}", flush=True)
            campaign.run(given.recipes)
            campaign.run(given.in_processes, in_processes=True, first=10**6)
    print(campaign.summary)
    failed = bool(campaign.failures) or (not given.files and campaign.refused_share > MOST_REFUSED)
    if given.in_worlds and not given.files:
        with closing(Worlds(given.seed)) as worlds:
            worlds.run(given.in_worlds)
        print(worlds.summary)
        failed = failed or bool(worlds.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
