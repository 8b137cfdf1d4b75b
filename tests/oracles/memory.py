"""A worker's memory after every instruction, from its printed instructions; shares no code with the simulator.

The activations of a unit are kept from its F to its B, or to its BI and a rest of them to its BW. A version of the
weights is kept while a unit between its F and its B uses it, and while an F after the last U reads it or an older one.
Gradients are kept from the first B after a U to the next U, the optimizer's state from the first U on.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

Kept = Mapping[str, int]
_WORD = re.compile(r"(\d+)([A-Z]+)(\d+)(?:[<>]\d+)?(?:\+\d+)?(?:@(\d+))?((?:~-?\d+)?)")


class Sizes(NamedTuple):
    """Bytes of one stage."""

    weights: int  # of one version
    unit: Callable[[int], int]  # activations of a unit
    rest: Callable[[int], int]  # activations of a unit after its BI
    state: int  # of the optimizer
    early: int  # gradients that a BI makes
    stashes: bool = True  # whether there are several versions; else one is overwritten
    copies: int = 0  # number of copies of the weights beside the versions
    untrained: int = 0  # parameters that aren't trained
    shares: bool = False  # whether weights that the F before a U read are kept until the last F that reads the same


class _Step(NamedTuple):
    stage: int
    letters: str
    number: int
    version: int
    ahead: str


def replay(text: str, sizes: Mapping[int, Sizes]) -> list[dict[int, dict[str, int]]]:
    """Return the bytes that are kept after every instruction of a worker, by stage and kind."""
    steps = [_step(word) for word in text.split()]
    moments: list[dict[int, dict[str, int]]] = []
    for end in range(1, len(steps) + 1):
        moments.append({})
        for stage, own in sizes.items():
            past, future = ([step for step in part if step.stage == stage] for part in (steps[:end], steps[end:]))
            moments[-1][stage] = _kept(past, future, own)
    return moments


def _step(word: str) -> _Step:
    match = _WORD.fullmatch(word)
    assert match is not None, word
    return _Step(int(match[1]), match[2], int(match[3]), int(match[4] or -1), match[5])


def _kept(past: list[_Step], future: list[_Step], own: Sizes) -> dict[str, int]:
    done = {(step.letters, step.number) for step in past}
    newest = sum(step.letters == "U" for step in past)
    in_flight = [f for f in past if f.letters == "F" and not {("B", f.number), ("BW", f.number)} & done]
    since = max((i for i, step in enumerate(past) if step.letters == "U"), default=-1)
    wanted = min((step.version for step in [*past, *future][since + 1 :] if step.letters == "F"), default=newest)
    needed = {f.version for f in in_flight}
    older = [v for v in range(newest) if own.stashes and (v in needed or v >= wanted)]
    letters = {step.letters for step in past[since + 1 :]}
    gradients = own.weights if {"B", "BW", "W"} & letters else own.early * ("BI" in letters)
    return {
        "weights": own.weights + own.untrained,
        "older versions": len(older) * own.weights,
        "moved weights": (own.copies + _is_shared(past, future, own)) * own.weights,
        "optimizer state": own.state * (newest > 0),
        "gradients": gradients,
        "activations": sum((own.rest if ("BI", f.number) in done else own.unit)(f.number) for f in in_flight),
    }


def _is_shared(past: list[_Step], future: list[_Step], own: Sizes) -> bool:
    """Return whether weights outlive an update between two Fs that read the same weights as the last F."""
    steps = [*past, *future]
    forwards = [i for i, step in enumerate(steps) if step.letters == "F"]
    last = max((i for i in forwards if i < len(past)), default=None)
    if not own.shares or last is None:
        return False
    first = final = last
    for i in reversed([i for i in forwards if i < last]):
        if steps[i][3:] != steps[last][3:]:
            break
        first = i
    for i in [i for i in forwards if i > last]:
        if steps[i][3:] != steps[last][3:]:
            break
        final = i
    return any(step.letters == "U" and first < i < final for i, step in enumerate(past))
