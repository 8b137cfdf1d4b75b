"""What MLflow holds already of a run: nothing is logged twice, nothing overwritten, whichever process logs it."""

from collections.abc import Iterable, Mapping

from pipebench.tracking.store import MAX_PARAM_CHARS, MAX_TAG_CHARS, Row, Store, StoredRun, clean_name

_RESUMES = "resumes"
SYSTEM = "system/"  # MLflow shows metrics of this prefix apart


class History:
    """What a run has in MLflow, asked for as far as it is needed. For the sender's thread only.

    Attributes:
        began_ms: when the run began, milliseconds since the epoch.
    """

    def __init__(self, store: Store, run_id: str, found: StoredRun) -> None:
        """Begin with what MLflow says of the run.

        Args:
            store: where the run is.
            run_id: MLflow's id.
            found: the run as it was found, or made.
        """
        self.began_ms = found.start_ms
        self._store, self._run_id = store, run_id
        self._params, self._tags = {**found.params}, {**found.tags}
        self._metrics = found.metrics
        self._last_steps: dict[str, int] = {}

    def has(self, row: Row) -> bool:
        """Return whether MLflow has a value of a curve's metric at this step, or after."""
        return row.step <= self.last_step(row.metric)

    def last_step(self, metric: str) -> int:
        """Return the largest step of a metric, -1 where it has none."""
        name = clean_name(metric)
        if name not in self._last_steps:
            self._last_steps[name] = self._store.last_step(self._run_id, name) if name in self._metrics else -1
        return self._last_steps[name]

    def next_system_step(self) -> int:
        """Return the step that comes after all system metrics."""
        return 1 + max((self.last_step(name) for name in self._metrics if name.startswith(SYSTEM)), default=-1)

    def params(self, params: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the params that are new, and as tags `resumed.<name>` those that changed: MLflow refuses them."""
        new = {name: value for name, value in params.items() if clean_name(name) not in self._params}
        return new, _changed(params, self._params, MAX_PARAM_CHARS)

    def start_tags(self, tags: Mapping[str, str]) -> dict[str, str]:
        """Return the tags that a process begins with as MLflow gets them.

        In a run that goes on these are the new ones, `resumed.<name>` of those that changed, and how often it resumed.
        """
        known = self._tags
        if not known:
            return dict(tags)
        new = {name: value for name, value in tags.items() if clean_name(name) not in known}
        times = int(known[_RESUMES]) + 1 if known.get(_RESUMES, "").isdigit() else 1
        return {**new, **_changed(tags, known, MAX_TAG_CHARS), _RESUMES: str(times)}

    def note(self, curves: Iterable[Row], params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Note what MLflow has taken."""
        for row in curves:
            name = clean_name(row.metric)
            self._last_steps[name] = max(row.step, self._last_steps.get(name, -1))
        self._params |= {clean_name(name): value for name, value in params.items()}
        self._tags |= {clean_name(name): value for name, value in tags.items()}


def _changed(values: Mapping[str, str], known: Mapping[str, str], limit: int) -> dict[str, str]:
    return {
        f"resumed.{name}": value
        for name, value in values.items()
        if known.get(clean_name(name), value[:limit]) != value[:limit]
    }
