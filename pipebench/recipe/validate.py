"""The explicit validation step: what a recipe's types can't say.

Rules run once, over a recipe that is merged and resolved, and need neither data nor device. The modules of rules are
imported for what they register.
"""

from pipebench.errors import choice
from pipebench.recipe import rules_training, rules_zoo  # noqa: F401
from pipebench.recipe.draft import RULES, UNUSABLE, Draft
from pipebench.recipe.ranges import CHOICES, RANGES
from pipebench.recipe.typecheck import shown


def check(draft: Draft) -> None:
    """Run every rule; faults go to `draft.leaves`."""
    for key, names in CHOICES.items():
        _check_choice(draft, key, names)
    for key, (is_allowed, words) in RANGES.items():
        value = draft.get(key)
        if value is not UNUSABLE and value is not None and not is_allowed(value):
            draft.fault(key, f"got {shown(value)}, allowed is {words}")
    for keys, rule_function in RULES:
        values = [draft if key == "@draft" else draft.get(key) for key in keys]
        if not any(value is UNUSABLE for value in values):
            for key, problem in rule_function(*values):
                draft.fault(key, problem)


def _check_choice(draft: Draft, key: str, names: tuple[str, ...]) -> None:
    value = draft.get(key)
    if value is UNUSABLE or value is None or value in names:
        return
    draft.fault(key, choice(str(value)[:60], names))
