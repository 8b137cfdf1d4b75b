"""The usual split of a backward into input and weight part, for profiles without measured ones."""

from dataclasses import replace

from pipebench.model.split_kinds import SPLITTABLE, is_kind_of
from pipebench.profile.model import LayerProfile


def with_usual_part(row: LayerProfile) -> LayerProfile:
    """Return the row with an estimated `weight_s`.

    It is half of the backward of a layer that can be split, as its two products are equally large; all of it where the
    layer reads no other layer, and so computes no input gradient.
    """
    if not row.parameters or not is_kind_of(row.kind, SPLITTABLE):
        return replace(row, weight_s=0.0)
    return replace(row, weight_s=row.backward_s / 2 if row.reads else row.backward_s)
