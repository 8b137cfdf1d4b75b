"""A profile as a table: the origin of its times and the costs of every layer."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipebench.errors import printable
from pipebench.formats import UNKNOWN, num_bytes, number, percent, seconds, shortened
from pipebench.profile.model import LayerProfile, ParameterBytes, Profile
from pipebench.show.tables import new_table, print_facts, print_table
from pipebench.show.terminal import print_plain

# Two screens of lines; of a model with more layers the heaviest are shown.
_MOST_ROWS, _HEAVIEST = 60, 40
_NAME_WIDTH, _KIND_WIDTH = 26, 22


def print_profile(name: str, profile: Profile, num_samples: int, *, show_all: bool, console: Console) -> None:
    """Print the origin of a profile's times, and the layers' costs.

    Args:
        name: of the recipe or the file.
        profile: of the model.
        num_samples: the profiled size that is shown.
        show_all: show every layer; otherwise only the heaviest of a long model, in order of execution.
        console: where to print.
    """
    print_plain(console, "")
    print_plain(console, Text(printable(title(name, profile)), style="bold"))
    print_facts(console, _facts(profile, num_samples))
    rows = profile.layers[num_samples]
    shown = heaviest(rows, len(rows) if show_all or len(rows) <= _MOST_ROWS else _HEAVIEST)
    print_table(console, profile_table(rows, shown), indent=2, left=2)
    left_out = [row for index, row in enumerate(rows) if index not in shown]
    if left_out:
        share = _share(sum(map(_work_s, left_out)), sum(map(_work_s, rows)))
        text = f"  {len(left_out)} lighter layers ({share} of the time) are left out; --all shows them"
        print_plain(console, Text(text, style="dim"))


def heaviest(rows: Sequence[LayerProfile], most: int) -> list[int]:
    """Return the indices of the layers that take longest, in order of execution."""
    return sorted(sorted(range(len(rows)), key=lambda index: -_work_s(rows[index]))[:most])


def profile_table(rows: Sequence[LayerProfile], shown: Sequence[int]) -> Table:
    """Return the costs of the layers whose indices are `shown`, and the totals of all `rows`."""
    table = new_table("#", "layer", "kind", "forward", "backward", "share", "output", "parameter bytes", "kept", left=3)
    total_s = sum(map(_work_s, rows))
    for index in shown:
        row = rows[index]
        times = (_ms(row.forward_s), _ms(row.backward_s), _share(_work_s(row), total_s))
        table.add_row(
            str(index),
            Text(shortened(row.name, _NAME_WIDTH)),
            Text(shortened(row.kind, _KIND_WIDTH), style="dim" if row.is_input else ""),
            *(times if not row.is_input else ("", "", "")),
            num_bytes(row.output_bytes),
            num_bytes(row.parameter_bytes) if row.parameter_sizes else "",
            num_bytes(row.saved_bytes),
        )
    table.add_section()
    work = [row for row in rows if not row.is_input]
    table.add_row(
        "",
        Text("together", style="bold"),
        f"{len(work)} layers",
        _ms(sum(row.forward_s for row in work)),
        _ms(sum(row.backward_s for row in work)),
        "",
        "",
        num_bytes(ParameterBytes.of(rows).trained),
        num_bytes(sum(row.saved_bytes for row in work)),
    )
    return table


def title(name: str, profile: Profile) -> str:
    """Return the profile's name, with its model's if that adds anything."""
    return profile.model if profile.model.startswith(name) else f"{name}: {profile.model}"


def _facts(profile: Profile, num_samples: int) -> list[tuple[str, str]]:
    ratio, whole_s = profile.sum_over_whole.get(num_samples), profile.whole_step_s.get(num_samples)
    rows = profile.layers[num_samples]
    adds_up = "" if ratio is None else f"{ratio:.3f} of a whole step, which takes {seconds(whole_s)}"
    trained, _, untrained = ParameterBytes.of(rows)
    update_s = profile.update_floor_s + profile.update_s_per_byte * trained
    others = ", ".join(str(size) for size in sorted(profile.layers) if size != num_samples)
    return [
        ("times", f"{profile.source}: {profile.note}"),
        ("device", profile.device),
        ("samples", f"{num_samples}" + (f" (also profiled: {others}; --samples shows them)" if others else "")),
        ("layers together", f"{seconds(sum(map(_work_s, rows)))}{', ' if adds_up else ''}{adds_up}"),
        ("loading, update", f"{_known(profile.load_s[num_samples])}, {_known(update_s)}"),
        *([("not trained", f"{num_bytes(untrained)} of parameters and buffers besides")] if untrained else []),
    ]


def _known(value_s: float) -> str:
    return seconds(value_s) if value_s else UNKNOWN


def _work_s(row: LayerProfile) -> float:
    return 0.0 if row.is_input else row.forward_s + row.backward_s


def _share(part_s: float, total_s: float) -> str:
    return percent(part_s / total_s) if total_s else UNKNOWN


def _ms(value_s: float) -> str:
    return f"{number(value_s * 1e3)} ms"
