"""Extensions: features that stand beside the core, and are imported only by a run that turns them on.

The core asks for what an extension brings by the name of a hook, at one place each; this table is all that it knows of
extensions. A recipe turns one on by having the section of its name, or by the `sync` that needs it.

| hook | asked by | what it is |
| --- | --- | --- |
| `section` | `recipe/leaves.py` | a dataclass: what a recipe's section of the extension's name takes |
| `rules` | `recipe/draft.py` | pairs of keys and a function of their values, as `draft.rule` takes them |
| `settings` | `train/prepare.py` | returns of a recipe what `Pipeline.extensions` has; without it that is the section |
| `program` | `schedule/programs.py` | `ProgramHook`: returns a worker's list, given the one that it would have |
| `play` | `simulate/simulation.py` | a subclass of `SimulationExtension`: how instructions begin, and what they take |
| `memory` | `simulate/memory_meter.py` | a subclass of `MemoryExtension`: what workers hold |
| `worker` | `engine/worker.py` | a subclass of `WorkerExtension`: how instructions are executed |
| `in_process`, `processes` | the engines' collectives | a subclass of `EngineExtension`: segments, drains, counts |
| `rows` | `metrics.py` | rows of the list of metrics |
| `metrics`, `result` | `train/metrics.py`, `train/loop.py` | returns metrics, or fields of the result, of the counts |
| `record` | `run/drawings.py` | keeps artifacts |
"""

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Any

_ASYNCHRONOUS = "pipebench.extensions.asynchronous"

# Of every extension, where its hooks are: module and name.
EXTENSIONS: dict[str, dict[str, str]] = {
    "asynchronous": {
        "rules": f"{_ASYNCHRONOUS}.recipe:RULES",
        "settings": f"{_ASYNCHRONOUS}.recipe:settings",
        "program": f"{_ASYNCHRONOUS}.program:pushing_program",
        "play": f"{_ASYNCHRONOUS}.play:Pushing",
        "memory": f"{_ASYNCHRONOUS}.memory:ServerMemories",
        "worker": f"{_ASYNCHRONOUS}.server:PushAndPull",
        "in_process": f"{_ASYNCHRONOUS}.in_process:InProcessServers",
        "processes": f"{_ASYNCHRONOUS}.processes:ProcessServers",
        "metrics": f"{_ASYNCHRONOUS}.record:metrics",
        "result": f"{_ASYNCHRONOUS}.record:fields",
        "record": f"{_ASYNCHRONOUS}.record:record",
    },
}


def hooks(name: str, extensions: Iterable[str]) -> dict[str, Any]:
    """Return what extensions bring for a hook, by extension; those that bring nothing aren't imported."""
    return {each: _found(EXTENSIONS[each][name]) for each in extensions if name in EXTENSIONS[each]}


def with_section() -> list[str]:
    """Return the extensions that have a section in recipes."""
    return [each for each, found in EXTENSIONS.items() if "section" in found]


@cache
def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
