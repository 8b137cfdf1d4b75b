"""The times of swaps in a straight pipeline by recurrences, without events; shares no code with the simulator.

Messages take no time. A worker executes its instructions one after another, and swaps run beside them. A swap begins
once the worker requests it, the swap before it in the same direction has ended and, if it is a swap in, its own swap
out has ended. A backward begins once its unit is swapped in.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

_TEXT = re.compile(r"(\d+)(F|BI|BW|B|SO|SI|RA|RG|SA|SG)(\d+)(?:[<>](\d+))?")
_PASSES = ("F", "B", "BI", "BW")


class Seconds(NamedTuple):
    """Durations of a stage."""

    passes: dict[str, float]  # seconds of passes by their letters
    copy_s: float  # of a swap in one direction


class Played(NamedTuple):
    """The times of a run."""

    times_s: dict[str, tuple[float, float]]  # begin and end of passes and swaps, by their text, such as `0F3`
    waited_s: float  # sum of the seconds that backwards waited for swaps


def play(lists: Sequence[str], seconds: Sequence[Seconds]) -> Played:
    """Return the times of printed instructions, one list per worker; `seconds` are by stage."""
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
