"""Copies beside a straight pipeline's work, by recurrences: no events, no agenda, no flows.

Links cost nothing. Of one worker, a copy begins when it is asked for, when the copy before it in its direction has
ended, and, back, when its own copy out has. A worker turns to its next instruction when the one before is done; a
backward begins when its unit is back.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

_TEXT = re.compile(r"(\d+)(F|BI|BW|B|SO|SI|RA|RG|SA|SG)(\d+)(?:[<>](\d+))?")
_PASSES = ("F", "B", "BI", "BW")


class Seconds(NamedTuple):
    """Of a stage: passes by their letters, and a copy."""

    passes: dict[str, float]
    copy_s: float


class Played(NamedTuple):
    """When passes and copies began and ended, by what is printed of them, and seconds that backwards waited."""

    times_s: dict[str, tuple[float, float]]
    waited_s: float


def play(lists: Sequence[str], seconds: Sequence[Seconds]) -> Played:
    """Return the times of printed lists of instructions, one for each worker."""
    todo = [[match.groups() for match in map(_TEXT.fullmatch, _bare(text)) if match] for text in lists]
    clock_s = [0.0] * len(lists)
    lanes_s: dict[tuple[int, str], float] = {}
    times_s: dict[str, tuple[float, float]] = {}
    waited_s, moved = 0.0, True
    while moved:
        moved = False
        for worker, own in enumerate(todo):
            while own:
                stage, what, unit, peer = own[0]
                assert what is not None
                now_s = clock_s[worker]
                if what in ("RA", "RG"):
                    made = [f"{peer}F{unit}"] if what == "RA" else [f"{peer}B{unit}", f"{peer}BI{unit}"]
                    sent = next((times_s[each][1] for each in made if each in times_s), None)
                    if sent is None:
                        break
                    clock_s[worker] = max(now_s, sent)
                elif what in ("SO", "SI"):
                    out_s = times_s[f"{stage}SO{unit}"][1] if what == "SI" else 0.0
                    begin_s = max(now_s, lanes_s.get((worker, what), 0.0), out_s)
                    lanes_s[worker, what] = begin_s + seconds[int(stage)].copy_s
                    times_s[f"{stage}{what}{unit}"] = begin_s, lanes_s[worker, what]
                elif what in _PASSES:
                    back_s = times_s.get(f"{stage}SI{unit}", (0.0, 0.0))[1] if what in ("B", "BI") else 0.0
                    waited_s += max(0.0, back_s - now_s)
                    begin_s = max(now_s, back_s)
                    clock_s[worker] = begin_s + seconds[int(stage)].passes[what]
                    times_s[f"{stage}{what}{unit}"] = begin_s, clock_s[worker]
                own.pop(0)
                moved = True
    assert not any(todo)
    return Played(times_s, waited_s)


def _bare(text: str) -> list[str]:
    return [re.sub(r"[@+~].*", "", each) for each in text.split()]
