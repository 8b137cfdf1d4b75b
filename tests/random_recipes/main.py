"""Compares random recipes with the plain loop: `nox -s oracle`, or `python -m tests.random_recipes.main [FILE]...`."""

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from tests.random_recipes.compare import RefusedError, disagreements, text_of, written
from tests.random_recipes.drawing import draw_recipe
from tests.random_recipes.push_orders import num_workers
from tests.random_recipes.shrinking import shrunk
from tests.random_recipes.tally import Tally
from tests.random_recipes.worlds import Worlds

MOST_REFUSED = 0.5  # share of the recipes drawn: if more are refused, `drawing` is out of date
SHRUNK = 5  # recipes that are shrunk, by tens of runs each: more tend to show the same defect


class Campaign(Tally):
    """Compares random recipes with the plain loop; they are written to a folder."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed)
        self.folder = folder

    def run(self, count: int, *, in_processes: bool = False, first: int = 0) -> None:
        """Compare recipes until there are `count`, or far too many were refused.

        Args:
            count: number of recipes to compare.
            in_processes: take recipes of two workers, and run them with the distributed engine.
            first: number of the first recipe that is drawn.
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
            self.refuse(error)
            return False
        if not found:
            self.agreed[recipe["parallelism"]["mode"]] += 1
            return True
        small = recipe if in_processes or len(self.failures) >= SHRUNK else shrunk(recipe, self._fails)
        self.fail(_report(recipe, small, found if small is recipe else self._found(small, in_processes)))
        return True

    def _found(self, recipe: dict[str, Any], in_processes: bool) -> list[str]:
        path = written(recipe, self.folder / "recipe")
        try:
            return disagreements(path, in_processes=in_processes)
        except RefusedError:
            raise
        except Exception as error:  # a finding like others, after which other recipes can still be compared
            return [f"{type(error).__name__}: {error}"]
        finally:
            shutil.rmtree(path.parent)

    def _fails(self, recipe: dict[str, Any]) -> bool:
        try:
            return bool(self._found(recipe, in_processes=False))
        except RefusedError:
            return False


def _report(recipe: dict[str, Any], small: dict[str, Any], found: list[str]) -> str:
    lines = "\n".join(f"  {each}" for each in found[:6])
    return f"{recipe['name']} disagrees with the plain loop:\n{lines}\nA file with this shows it:\n{text_of(small)}"


def main(words: list[str] | None = None) -> int:
    """Compare as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="recipes to compare in place of random ones")
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")), help="of the random recipes")
    parser.add_argument("--recipes", type=int, default=500, help="with the virtual engine")
    parser.add_argument("--in-processes", type=int, default=20, help="with the distributed engine, two processes each")
    parser.add_argument("--in-worlds", type=int, default=60, help="in two to four processes beside the virtual engine")
    given = parser.parse_args(words)
    warnings.simplefilter("ignore")  # torch warns of schedules that step before their optimizer
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(given.seed, Path(folder))
        if given.files:
            for path in given.files:
                campaign.compare(yaml.safe_load(path.read_text()))
        else:
            print(f"seed {given.seed}", flush=True)
            campaign.run(given.recipes)
            campaign.run(given.in_processes, in_processes=True, first=10**6)
    print(campaign.summary("with the plain loop"))
    failed = bool(campaign.failures) or (not given.files and campaign.refused_share > MOST_REFUSED)
    if given.in_worlds and not given.files:
        with closing(Worlds(given.seed)) as worlds:
            worlds.run(given.in_worlds)
        print(worlds.summary("in processes"))
        failed = failed or bool(worlds.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
