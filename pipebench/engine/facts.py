"""What extensions have counted, as checkpoints and results have it: a list from every process, by extension."""

from collections.abc import Mapping
from typing import Any, Final

from pipebench.engine.protocols import EngineExtension

# Checkpoints are older than extensions: of these one keeps the list under a key of its own.
_KEYS: Final = {"asynchronous": "pushes"}
_OTHERS = "extensions"


def facts_of(extensions: Mapping[str, EngineExtension]) -> dict[str, Any]:
    """Return what extensions have counted as a part of what an engine has."""
    found = {name: extension.facts() for name, extension in extensions.items()}
    others = {name: facts for name, facts in found.items() if name not in _KEYS}
    return {key: found.get(name, []) for name, key in _KEYS.items()} | ({_OTHERS: others} if others else {})


def facts_by_extension(facts: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what every extension has counted, of what an engine has; checkpoints of 0.1.0 say nothing of any."""
    return {name: facts.get(key, []) for name, key in _KEYS.items()} | dict(facts.get(_OTHERS, {}))


def restore_extensions(extensions: Mapping[str, EngineExtension], facts: Mapping[str, Any]) -> None:
    """Let extensions go on from a checkpoint."""
    found = facts_by_extension(facts)
    for name, extension in extensions.items():
        extension.restore(found.get(name, []))
