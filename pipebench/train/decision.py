"""What all processes of a run must agree on, decided once: the plan, where it stands, and the profile it was made from.

It is kept as JSON in the run's folder, where processes that are started again, or go on later, find it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipebench.cluster import Cluster
from pipebench.errors import PlanError, UserError
from pipebench.model.plan import explicit_plan
from pipebench.profile.stored import write_profile
from pipebench.recipe.parallelism import resolve
from pipebench.recipe.schema import ParallelismRecipe
from pipebench.schedule.modes import AUTO, MODES
from pipebench.schedule.notation import format_plan, parse_plan, streams_problem
from pipebench.schedule.pipeline import noam
from pipebench.typed_json import Count, JsonError, Ordinal, read, shown, write

if TYPE_CHECKING:
    from pipebench.model.graph import LayerGraph
    from pipebench.train.prepare import Job

ANEW = "remove the file to have it decided anew"


@dataclass(frozen=True)
class Decided:
    """What was decided for a run.

    Attributes:
        mode: the mode, where the recipe left it to the planner.
        starts: first layer of every stage but the first.
        replicas: per stage.
        devices: of every worker.
        depth: minibatches in flight per input-stage replica.
        profile: layer costs, as its JSON.
        changes: overrides of a run that goes on, for which it was decided.
    """

    mode: str
    starts: tuple[Count, ...]
    replicas: tuple[Ordinal, ...]
    devices: tuple[Count, ...]
    depth: Ordinal
    profile: str
    changes: tuple[str, ...] = ()

    @staticmethod
    def of(job: "Job", changes: Sequence[str] = ()) -> "Decided":
        """Return what was decided for a job."""
        setup = job.setup
        return Decided(
            job.recipe.parallelism.mode,
            tuple(stage.start for stage in setup.plan.stages[1:]),
            setup.plan.replicas,
            tuple(setup.cluster.device_of(worker) for worker in range(setup.pipeline.num_workers)),
            setup.pipeline.depth,
            write_profile(job.profile),
            tuple(changes),
        )

    def to_json(self) -> str:
        """Return it as text."""
        return write(self)

    @staticmethod
    def from_json(given: bytes, source: str) -> "Decided":
        """Read what `to_json` wrote.

        Args:
            given: the text.
            source: where it is from.

        Raises:
            UserError: names the source, the field, what was found and what is allowed.
        """
        try:
            found = read(Decided, given)
            if found.mode not in MODES:
                raise JsonError(f"mode: got {shown(found.mode)}, allowed is {', '.join(MODES)}")
        except JsonError as error:
            raise UserError(f"{source}: {error}; {ANEW}") from None
        return found

    def check(self, parallelism: ParallelismRecipe, cluster: Cluster, graph: "LayerGraph", streams: int | None) -> None:
        """Check that a recipe could have been decided so.

        Args:
            parallelism: what the recipe asks for, its mode resolved.
            cluster: where it is to run.
            graph: the model.
            streams: of a text, which replicas take turns with.

        Raises:
            PlanError: names what doesn't fit, what was found and what is allowed.
        """
        for field, found, allowed in self._faults(parallelism, cluster, graph, streams):
            raise PlanError(f"the kept decision, {field}: got {found}, allowed is {allowed}; {ANEW}")

    def _faults(
        self, parallelism: ParallelismRecipe, cluster: Cluster, graph: "LayerGraph", streams: int | None
    ) -> list[tuple[str, str, str]]:
        faults: list[tuple[str, str, str]] = []

        def expect(fits: bool, field: str, found: object, allowed: str) -> None:
            if not fits:
                faults.append((field, shown(found) if isinstance(found, int | str) else str(found)[:60], allowed))

        mode, plan, depth = resolve(parallelism), parallelism.plan, parallelism.depth
        expect(self.mode == parallelism.mode, "mode", self.mode, parallelism.mode)
        written = "-".join(map(str, self.replicas))
        try:
            parse_plan(written, mode, cluster.num_workers)
        except PlanError as error:
            return [("replicas", written[:40], f"a plan of mode {self.mode} ({error})")]
        if plan != AUTO:
            asked = parse_plan(plan, mode, cluster.num_workers)
            expect(self.replicas == asked, "replicas", written, f"the recipe's plan, {format_plan(asked)}")
        expect(streams_problem(self.replicas, streams) is None, "replicas", written, f"one for {streams} streams")
        bounds = (0, *self.starts, len(graph.layers))
        expect(len(self.starts) == len(self.replicas) - 1, "starts", list(self.starts), "one for every later stage")
        ascending = all(a < b for a, b in itertools.pairwise(bounds))
        expect(ascending, "starts", list(self.starts), f"ascending layers from 1 to {len(graph.layers) - 1}")
        if parallelism.cuts is not None and not faults:
            cuts = [stage.start for stage in explicit_plan(graph, parallelism.cuts, self.replicas).stages[1:]]
            expect(list(self.starts) == cuts, "starts", list(self.starts), f"the recipe's cuts, {cuts}")
        devices = {device for device in self.devices if device < cluster.num_workers}
        enough = len(devices) == len(self.devices) == sum(self.replicas)
        allowed = f"{sum(self.replicas)} different ones from 0 to {cluster.num_workers - 1}"
        expect(enough, "devices", list(self.devices), allowed)
        fixed = mode.depth or (None if depth == AUTO else int(depth))
        lowest, highest = (fixed, fixed) if fixed is not None else (1, noam(self.replicas))
        expect(lowest <= self.depth <= highest, "depth", self.depth, f"a whole number from {lowest} to {highest}")
        return faults
