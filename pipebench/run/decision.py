"""What all processes of a run must agree on, in the run's folder: processes that start again, or go on later, read it.

plan.json and profile.json are what they are anywhere else; overrides.json says for which changes of a run that goes on
they were made. It is written last and removed first, so that it is never there for another plan.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipebench.errors import ProfileError, RecipeError, UserError
from pipebench.files import replace as replace_file
from pipebench.model.plan_layers import form_of
from pipebench.profile.model import Profile
from pipebench.profile.stored import read_profile, write_profile
from pipebench.recipe.plan_file import PlanForm, parse_plan_file
from pipebench.run.folder import RunFolder
from pipebench.train.kept_plan import ANEW
from pipebench.train.prepare import Decision, Job
from pipebench.typed_json import JsonError, read

_PLAN, _PROFILE, _OVERRIDES = "plan.json", "profile.json", "overrides.json"


def decision_of(job: Job) -> Decision:
    """Return what was decided for a prepared recipe."""
    return Decision(plan_form(job), job.profile, "the plan")


def plan_form(job: Job) -> PlanForm:
    """Return a prepared recipe's plan as a file has it."""
    setup = job.setup
    return form_of(setup.plan, [layer.name for layer in setup.graph.layers])


def keep_decision(folder: RunFolder, decision: Decision, overrides: Sequence[str]) -> None:
    """Write a decision into a run's folder.

    Raises:
        OSError: it can't be written.
    """
    (folder.path / _OVERRIDES).unlink(missing_ok=True)
    texts = {
        _PLAN: decision.plan.text(),
        _PROFILE: write_profile(decision.profile),
        _OVERRIDES: json.dumps(list(overrides)) + "\n",
    }
    for name, text in texts.items():
        replace_file(folder.path / name, text.encode())


def kept_decision(folder: RunFolder | None, overrides: Sequence[str]) -> Decision | None:
    """Return what was decided for a run under these overrides; None if nothing was, or for others.

    Raises:
        UserError: a file of it can't be read, or isn't what it should be.
    """
    if folder is None or not all((folder.path / name).exists() for name in (_PLAN, _PROFILE, _OVERRIDES)):
        return None
    try:
        kept_for = read(list[str], folder.read_bytes(_OVERRIDES))
    except JsonError as error:
        raise UserError(f"{folder.path / _OVERRIDES}: {error}; {ANEW}") from None
    return read_decision(folder) if kept_for == list(overrides) else None


def read_decision(folder: RunFolder) -> Decision:
    """Return what was decided for a run.

    Raises:
        UserError: a file of it can't be read, or isn't what it should be.
    """
    plan = parse_decided_plan(folder.read_bytes(_PLAN), str(folder.path / _PLAN))
    profile = _profile(folder.read_bytes(_PROFILE), folder.path / _PROFILE)
    return Decision(plan, profile, str(folder.path / _PLAN))


def parse_decided_plan(text: bytes | str, source: str) -> PlanForm:
    """Read a kept plan.

    Raises:
        RecipeError: it isn't one; says where it isn't, and what to do.
    """
    try:
        return parse_plan_file(text, source)
    except RecipeError as error:
        raise RecipeError(replace(fault, problem=f"{fault.problem}; {ANEW}") for fault in error.faults) from None


def _profile(text: bytes, path: Path) -> Profile:
    try:
        return read_profile(text.decode("utf-8", "replace"))
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}; {ANEW}") from None
