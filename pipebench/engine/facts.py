"""Extensions' counters in checkpoints and results: by extension, a list with one entry per process."""

from collections.abc import Mapping
from typing import Any, Final

from pipebench.engine.protocols import EngineExtension

# Checkpoints predate extensions, so one extension's list has a key of its own.
_KEYS: Final = {"asynchronous": "pushes"}
_OTHERS = "extensions"


def facts_of(extensions: Mapping[str, EngineExtension]) -> dict[str, Any]:
    """Return extensions' counters as part of an engine's."""
    found = {name: extension.facts() for name, extension in extensions.items()}
    others = {name: facts for name, facts in found.items() if facts and name not in _KEYS}
    return {key: found.get(name, []) for name, key in _KEYS.items()} | ({_OTHERS: others} if others else {})


def facts_by_extension(facts: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the counters by extension from an engine's; checkpoints of 0.1.0 have none."""
    return {name: facts.get(key, []) for name, key in _KEYS.items()} | dict(facts.get(_OTHERS, {}))


def restore_extensions(extensions: Mapping[str, EngineExtension], facts: Mapping[str, Any]) -> None:
    """Restore extensions from a checkpoint."""
    found = facts_by_extension(facts)
    for name, extension in extensions.items():
        extension.restore(found.get(name, []))
