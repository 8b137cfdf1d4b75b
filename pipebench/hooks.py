"""Extensions: optional features, imported only by a run that enables them.

The core looks up what an extension provides by the name of a hook, each at one place, and refers to extensions nowhere
else. A recipe enables an extension by the section of its name, by one of its `keys`, or by a `sync` that needs it.

| hook | used by | what it is |
| --- | --- | --- |
| `section` | `recipe/leaves.py` | a dataclass: the keys of a recipe's section of the extension's name |
| `keys` | `recipe/draft.py` | not a module: keys of recipes, any of which enables it, instead of a section |
| `choices`, `ranges` | `recipe/draft.py` | allowed values of its keys, as in `recipe/ranges.py` |
| `paths` | `recipe/load.py` | its keys that may name a file beside the recipe |
| `rules` | `recipe/draft.py` | pairs of keys and a function of their values, as `draft.rule` takes them |
| `settings` | `train/prepare.py` | returns a recipe's entry in `Pipeline.extensions`; by default the section |
| `prepare` | `train/prepare.py` | a subclass of `JobExtension`: the first model of a run, and later ones |
| `program` | `schedule/programs.py` | `ProgramHook`: changes a worker's list of instructions |
| `play` | `simulate/simulation.py` | a subclass of `SimulationExtension`: begin and time of instructions |
| `memory` | `simulate/memory_meter.py` | a subclass of `MemoryExtension`: memory of workers |
| `replica` | `engine/worker_replicas.py` | a subclass of `Replica`, which runs stages in its place |
| `worker` | `engine/worker.py` | a subclass of `WorkerExtension`: how instructions are executed |
| `in_process`, `processes` | the engines' collectives | a subclass of `EngineExtension`: segments, drains, counts |
| `channels` | `distributed/transport.py` | returns kinds of messages and the stages they are between, of a setup |
| `loop` | `train/loop.py` | a subclass of `LoopExtension`: where a segment ends, and what follows from scores |
| `simulate` | `train/engines.py` | simulates a whole run instead of an epoch; of several extensions, the first one's |
| `forecast` | `run/recorder.py` | predicts memory of a run from the moves it made; of several, the first one's |
| `rows` | `metrics.py` | rows of the table of metrics |
| `metrics`, `result` | `train/metrics.py`, `train/loop.py` | returns metrics, or fields of the result, from counts |
| `record` | `run/drawings.py` | records artifacts |
"""

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Any

_ASYNCHRONOUS = "pipebench.extensions.asynchronous"
_MOVES = "pipebench.extensions.moves"
_SEARCH = "pipebench.extensions.search"

# Extension to hook to `module:name`.
EXTENSIONS: dict[str, dict[str, str]] = {
    "asynchronous": {
        "rules": f"{_ASYNCHRONOUS}.recipe:RULES",
        "settings": f"{_ASYNCHRONOUS}.recipe:settings",
        "program": f"{_ASYNCHRONOUS}.program:pushing_program",
        "play": f"{_ASYNCHRONOUS}.program:Pushing",
        "memory": f"{_ASYNCHRONOUS}.memory:ServerMemory",
        "worker": f"{_ASYNCHRONOUS}.server:PushAndPull",
        "in_process": f"{_ASYNCHRONOUS}.server:InProcessServer",
        "processes": f"{_ASYNCHRONOUS}.processes:ProcessServer",
        "metrics": f"{_ASYNCHRONOUS}.pushes:metrics",
        "result": f"{_ASYNCHRONOUS}.pushes:fields",
        "record": f"{_ASYNCHRONOUS}.record:record",
    },
    "search": {
        "section": f"{_SEARCH}.recipe:SearchRecipe",
        "choices": f"{_SEARCH}.recipe:CHOICES",
        "ranges": f"{_SEARCH}.recipe:RANGES",
        "paths": f"{_SEARCH}.recipe:PATHS",
        "rules": f"{_SEARCH}.recipe:RULES",
        "prepare": f"{_SEARCH}.setup:SearchSetup",
        "loop": f"{_SEARCH}.setup:SearchLoop",
        "simulate": f"{_SEARCH}.simulated:simulate_search",
        "record": f"{_SEARCH}.record:record",
    },
    "moves": {
        "keys": "parallelism.vpipe.repartition parallelism.vpipe.moves search",
        "rules": f"{_MOVES}.recipe:RULES",
        "settings": f"{_MOVES}.recipe:settings",
        "prepare": f"{_MOVES}.planned:MovesPlanned",
        "program": f"{_MOVES}.program:moving_program",
        "play": f"{_MOVES}.program:MovingPlay",
        "worker": f"{_MOVES}.worker:MovingWorker",
        "in_process": f"{_MOVES}.in_process:in_process",
        "processes": f"{_MOVES}.processes:processes",
        "channels": f"{_MOVES}.processes:channels",
        "loop": f"{_MOVES}.repartitioning:Repartitioning",
        "simulate": f"{_MOVES}.simulated:simulate_moving",
        "forecast": f"{_MOVES}.simulated:forecast_of",
        "record": f"{_MOVES}.record:record",
    },
}


def hooks(name: str, extensions: Iterable[str]) -> dict[str, Any]:
    """Return a hook's objects by extension; imports only the extensions that have the hook."""
    return {each: _imported(EXTENSIONS[each][name]) for each in extensions if name in EXTENSIONS[each]}


def with_section() -> list[str]:
    """Return the extensions that have a section in recipes."""
    return [each for each, found in EXTENSIONS.items() if "section" in found]


def keys_of(name: str) -> list[str]:
    """Return the keys of recipes that enable an extension."""
    return EXTENSIONS[name].get("keys", name).split()


@cache
def _imported(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
