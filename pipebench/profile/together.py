"""A profile measured by all processes of a run at once: each is as slow as the others make it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from pipebench.profile.model import LayerProfile, Profile


def mean_profile(profiles: Sequence[Profile]) -> Profile:
    """Return the mean of what several processes measured at the same time.

    Args:
        profiles: of one model, at the same sizes, on devices of one kind; at least one.
    """
    first = profiles[0]
    layers = {
        size: tuple(map(_mean_row, zip(*(profile.layers[size] for profile in profiles), strict=True)))
        for size in first.layers
    }

    def mean(of: Callable[[Profile], float]) -> float:
        return fmean(of(profile) for profile in profiles)

    return replace(
        first,
        note=f"{first.note}; mean of {len(profiles)} processes that measured at the same time",
        layers=layers,
        update_s_per_byte=mean(lambda profile: profile.update_s_per_byte),
        update_floor_s=mean(lambda profile: profile.update_floor_s),
        load_s={size: mean(lambda profile, size=size: profile.load_s[size]) for size in first.load_s},  # type: ignore[misc]
        whole_step_s={
            size: mean(lambda profile, size=size: profile.whole_step_s[size])  # type: ignore[misc]
            for size in first.whole_step_s
        },
    )


def _mean_row(rows: Sequence[LayerProfile]) -> LayerProfile:
    """Return a layer's row: durations differ from process to process, nothing else."""
    forward_s, backward_s = fmean(row.forward_s for row in rows), fmean(row.backward_s for row in rows)
    return replace(rows[0], forward_s=forward_s, backward_s=backward_s)
