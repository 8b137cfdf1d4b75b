"""Rules on the cluster, the first of which makes `@cluster` for others, and on what engines can do with it."""

from dataclasses import fields
from typing import Any

from pipebench.cluster import RING, coarser
from pipebench.errors import PlanError, RecipeError, choice
from pipebench.recipe.clusters import CHANGED, SERVERS, load_cluster
from pipebench.recipe.draft import Draft, Problems, rule
from pipebench.recipe.engines import ENGINES
from pipebench.recipe.ranges import MEASURED, TIMINGS
from pipebench.recipe.schema import ClusterRecipe


@rule("@draft", "parallelism.tensor", *(f"cluster.{each.name}" for each in fields(ClusterRecipe)))
def _cluster(draft: Draft, tensor: Any, name: str, servers: int, *given: Any) -> Problems:
    try:
        cluster = load_cluster(name, servers, draft.folder, ClusterRecipe(name, servers, *given).changes)
        draft.made["@cluster"] = coarser(cluster, tensor) if isinstance(tensor, int) and tensor > 1 else cluster
    except PlanError as error:
        yield "parallelism.tensor", str(error)
    except RecipeError as error:
        for fault in error.faults:
            own = "cluster.servers" if fault.key == SERVERS else fault.key
            yield (own, fault.problem) if own.startswith(CHANGED) else ("cluster.name", str(fault))


@rule("engine.kind", "@cluster")
def _all_reduce(kind: str, cluster: Any) -> Problems:
    if ENGINES[kind].in_processes and cluster.all_reduce != RING:
        why = f"whose all_reduce is {cluster.all_reduce}: in processes torch's process groups choose their own way"
        others = " or ".join(name for name, each in ENGINES.items() if not each.in_processes)
        yield "engine.kind", f"got {kind} with cluster {cluster.name}, {why}: allowed is {others}"


@rule("engine.kind", "parallelism.relay")
def _relay(kind: str, relay: bool) -> Problems:
    if relay and ENGINES[kind].trains:
        others = " or ".join(name for name, each in ENGINES.items() if not each.trains)
        why = f"got true with engine {kind}, which hands values to the stages that read them"
        yield "parallelism.relay", f"{why}: allowed is false, or engine.kind: {others}"


@rule("engine.timing", "@cluster")
def _timing(timing: str, cluster: Any) -> Problems:
    is_local = cluster.device == "local"
    if timing in MEASURED and not is_local:
        why = "this machine's compute times are never combined with another cluster's links"
        yield "engine.timing", f"got {timing} with cluster {cluster.name}, {why}: allowed is analytic or a profile file"
    elif timing == "analytic" and is_local:
        yield (
            "engine.timing",
            f"got analytic with cluster {cluster.name}, whose device is no named one: allowed is measured",
        )
    elif timing not in TIMINGS and "/" not in timing and "." not in timing:
        yield "engine.timing", f"{choice(timing[:60], TIMINGS)}, or the path of a profile file"
