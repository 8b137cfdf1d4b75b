"""Measures layers and host costs for a lab's predictions, in as many processes at once as the runs have.

torchrun starts `python -m tests.lab.measuring FOLDER` on every host. The wires have no limit then, so that the CPU time
of messages is measured without waiting for the wire. FOLDER/recipes.json lists the recipes; their profiles are written
there, with an index, `measured.json`.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from pipebench.distributed.launch_worker import worker_main
from pipebench.distributed.world import World, join
from pipebench.model.device import torch_settings
from pipebench.profile.stored import read_profile, write_profile
from pipebench.recipe.load import LoadedRecipe, load
from pipebench.run.deciding import decision_of, parse_decided_plan, prepare_job
from pipebench.run.processes import prepared_together
from pipebench.train.job import Decision, Job

RECIPES, MEASURED = "recipes.json", "measured.json"


def work(folder: Path) -> None:
    """Measure the recipes that the folder lists, and write the results there on rank 0; all processes call it."""
    listed = json.loads((folder / RECIPES).read_text())
    recipes = {name: load(path, [*words, "engine.timing=anew"]) for name, (path, words) in listed.items()}
    engine = next(iter(recipes.values())).recipe.engine
    world = join(engine.device, limit_s=engine.join_limit_s)
    found = {}
    with torch_settings(engine):
        for index, (name, loaded) in enumerate(recipes.items()):
            job = _measured(loaded, world)
            found[name] = {"profile": f"profile-{index}.json", "host": asdict(job.setup.costs.host)}
            if world.rank == 0:
                (folder / f"profile-{index}.json").write_text(write_profile(job.profile))
    if world.rank == 0:
        (folder / MEASURED).write_text(json.dumps(found, indent=1) + "\n")
    world.close()


def _measured(loaded: LoadedRecipe, world: World) -> Job:
    """Prepare a recipe in all processes as a run does, with the plan that rank 0 decides."""
    texts = ["", ""]
    if world.rank == 0:
        decision = decision_of(prepare_job(loaded, trains=False))
        texts = [decision.plan.text(), write_profile(decision.profile)]
    plan, profile = world.exchange(texts)[0]
    return prepared_together(loaded, Decision(parse_decided_plan(plan, "the plan"), read_profile(profile), "it"), world)


if __name__ == "__main__":
    worker_main(lambda: work(Path(sys.argv[1])))
