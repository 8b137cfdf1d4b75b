"""The profile: what every layer costs at the size that travels, and on which device that is so."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

VERSION = 1


@dataclass(frozen=True)
class LayerProfile:
    """Cost of one layer for one minibatch (or microbatch) of a given number of samples.

    Attributes:
        name: the layer's name in the graph, e.g. `features_0`.
        kind: what it is, e.g. `Conv2d`.
        forward_s: seconds of its forward.
        backward_s: seconds of its backward, both input and weight gradient.
        output_bytes: bytes of its output, integers included: what crosses forward if a cut separates it from a reader.
        gradient_bytes: bytes of the part of its output that has a gradient: what crosses back.
        parameter_bytes: bytes of its trainable parameters.
    """

    name: str
    kind: str
    forward_s: float
    backward_s: float
    output_bytes: int
    gradient_bytes: int
    parameter_bytes: int


@dataclass(frozen=True)
class Profile:
    """Layer costs of one model on one device.

    Attributes:
        model: readable description of the model and its options.
        device: the device the times are true for.
        source: `measured`, `analytic` or `file`.
        note: one readable sentence on how the times came about, constants included.
        layers: number of samples to the layers' costs at exactly that size, in graph order; the last entry is the
            loss. A size that isn't here was not profiled: nothing is scaled.
        update_s_per_byte: optimizer time per byte of trainable parameters (one whole step measured or computed, shared
            out by bytes).
        update_floor_s: optimizer time of one step that doesn't depend on the bytes (kernel launches).
        load_s: number of samples to the seconds it takes to load them.
        whole_step_s: number of samples to a whole measured forward and backward, where one was measured.
    """

    model: str
    device: str
    source: str
    note: str
    layers: Mapping[int, tuple[LayerProfile, ...]]
    update_s_per_byte: float
    update_floor_s: float
    load_s: Mapping[int, float]
    whole_step_s: Mapping[int, float]

    def to_json(self) -> str:
        """Return versioned JSON; `from_json` reads it back exactly."""
        return json.dumps({"pipebench_profile": VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> "Profile":
        """Read what `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: the text isn't a profile of this version.
        """
        data = json.loads(text)
        if data.pop("pipebench_profile") != VERSION:
            raise ValueError(f"a profile of version {VERSION} is expected")
        data["layers"] = {int(n): tuple(LayerProfile(**row) for row in rows) for n, rows in data["layers"].items()}
        for key in ("load_s", "whole_step_s"):
            data[key] = {int(n): float(seconds) for n, seconds in data[key].items()}
        return Profile(**data)
