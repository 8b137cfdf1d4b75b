"""MLflow's limits (its `utils/validation.py`): it refuses a whole request if one text in it is longer."""

import re

MAX_PARAM_CHARS, MAX_TAG_CHARS, _MAX_NAME_CHARS = 6000, 8000, 250


def clean_name(name: str) -> str:
    """Return a name of a metric, param or tag that every MLflow store accepts: other characters become `_`."""
    return re.sub(r"[^\w./ :-]+", "_", name, flags=re.ASCII)[:_MAX_NAME_CHARS]
