"""What is kept of a run besides its curves: what it takes to run it again, its timeline, its log."""

import io
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from omegaconf import OmegaConf

from pipebench.model.device import commit_diff
from pipebench.planner.plans import Comparison
from pipebench.profile.stored import write_profile
from pipebench.recipe.load import LoadedRecipe
from pipebench.run.decision import plan_form
from pipebench.run.request import recipe_yaml
from pipebench.show import pictures
from pipebench.show.trace import write_trace
from pipebench.simulate.timeline import Timeline
from pipebench.tracking import RunLog
from pipebench.train.prepare import Job

_LOG = logging.getLogger("pipebench.run")


def run_tags(job: Job, facts: Mapping[str, str]) -> dict[str, str]:
    """Return what people filter runs by."""
    recipe = job.recipe
    return {
        "kind": "run",
        "mode": recipe.parallelism.mode,
        "plan": str(job.setup.plan),
        "engine": recipe.engine.kind,
        "seed": str(recipe.train.seed),
        "timing": job.profile.note,
        **{f"metric.{metric}": note for metric, note in job.setup.dataset.notes().items()},
        **facts,
    }


def record_inputs(log: RunLog, loaded: LoadedRecipe, job: Job, facts: Mapping[str, str]) -> None:
    """Keep everything it takes to run this again: recipe, profile, plan, environment, uncommitted changes."""
    log.text("recipe.yaml", recipe_yaml(loaded))
    log.text("profile.json", write_profile(job.profile))
    log.text("plan.json", plan_form(job).text())
    if job.comparison is not None:
        log.text("modes.json", _modes_json(job.comparison))
    log.text("environment.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(facts))))
    difference = commit_diff()
    if difference:
        log.text("changes.diff", difference)


def _modes_json(comparison: Comparison) -> str:
    """Return what the planner made of every mode, where the recipe left the choice to it."""
    compared = [
        {
            "mode": each.plan.mode,
            "plan": str(each.plan),
            "predicted_minibatch_s": each.minibatch_s,
            "memory_bytes": each.memory_bytes,
        }
        for each in (comparison.best, *comparison.others)
    ]
    return json.dumps({"compared": compared, "refused": comparison.refused}, indent=1)


def record_timeline(log: RunLog, timeline: Timeline) -> None:
    """Keep a timeline as a picture and as a trace for Perfetto."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            for artifact, write in (("timeline.png", pictures.draw_timeline), ("trace.json", write_trace)):
                path = Path(folder) / artifact
                write(timeline, path)
                log.file(artifact, path)
    except (OSError, ValueError) as error:  # a picture must never cost a result
        _LOG.warning("the timeline could not be drawn: %s", error)


@contextmanager
def collected_log(verbose: bool) -> Iterator[io.StringIO]:
    """Collect pipebench's log (and torch's warnings) for the artifact; show it too when verbose."""
    text = io.StringIO()
    root = logging.getLogger("pipebench")
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    handlers: list[logging.Handler] = [handler, *([logging.StreamHandler()] if verbose else [])]
    level, captured = root.level, logging.getLogger("py.warnings")
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.captureWarnings(True)
    for each in handlers:
        root.addHandler(each)
        captured.addHandler(each)
    try:
        with warnings.catch_warnings():
            yield text
    finally:
        logging.captureWarnings(False)
        for each in handlers:
            root.removeHandler(each)
            captured.removeHandler(each)
        root.setLevel(level)
