"""What MLflow holds already of a run that goes on in another process: nothing is logged twice, nothing overwritten."""

from collections.abc import Mapping, Sequence

from pipebench.tracking.store import MAX_PARAM_CHARS, MAX_TAG_CHARS, Found, Row, Store, clean_name

_RESUMES = "resumes"
SYSTEM = "system/"  # MLflow shows metrics of this prefix apart


class History:
    """The earlier part of a run's record, asked for as far as it is needed. For the sender's thread only."""

    def __init__(self, store: Store, run_id: str, found: Found) -> None:
        """Begin with what MLflow says of the run.

        Args:
            store: where the run is.
            run_id: MLflow's id.
            found: the run as it was found.
        """
        self._store = store
        self._run_id = run_id
        self._found = found
        self._last_steps: dict[str, int] = {}

    def unseen(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of curves that MLflow doesn't have yet, by metric and step."""
        return [row for row in rows if row.step > self.last_step(row.metric)]

    def last_step(self, metric: str) -> int:
        """Return the largest step of a metric when the run was taken up again, -1 where it had none."""
        name = clean_name(metric)
        if name not in self._found.metrics:
            return -1
        if name not in self._last_steps:
            self._last_steps[name] = self._store.last_step(self._run_id, name)
        return self._last_steps[name]

    def next_system_step(self) -> int:
        """Return the step that comes after all system metrics."""
        return 1 + max((self.last_step(name) for name in self._found.metrics if name.startswith(SYSTEM)), default=-1)

    def params(self, params: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the params that are new, and as tags `resumed.<name>` those that changed: MLflow refuses them."""
        known = self._found.params
        new = {name: value for name, value in params.items() if clean_name(name) not in known}
        return new, _changed(params, known, MAX_PARAM_CHARS)

    def tags(self, tags: Mapping[str, str]) -> dict[str, str]:
        """Return the tags to set: the new ones, `resumed.<name>` of those that changed, how often the run resumed."""
        known = self._found.tags
        new = {name: value for name, value in tags.items() if clean_name(name) not in known}
        times = int(known[_RESUMES]) + 1 if known.get(_RESUMES, "").isdigit() else 1
        return {**new, **_changed(tags, known, MAX_TAG_CHARS), _RESUMES: str(times)}


def _changed(values: Mapping[str, str], known: Mapping[str, str], limit: int) -> dict[str, str]:
    return {
        f"resumed.{name}": value
        for name, value in values.items()
        if known.get(clean_name(name), value[:limit]) != value[:limit]
    }
