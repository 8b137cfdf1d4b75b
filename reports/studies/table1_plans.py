"""Print what PipeDream's Table 1 chose beside what this planner chooses: `python -m reports.studies.table1_plans`.

The output is `table1_plans.md`. Nothing is tuned: where the choices differ, one thing at a time is varied until the
planner chooses the paper's plan, or nothing is left to vary.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipebench.cluster import Cluster
from pipebench.errors import PlanError
from pipebench.planner.cost_models import COST_MODELS, CostModel
from pipebench.planner.fixed import plan_fixed
from pipebench.planner.planner import Planner
from pipebench.planner.plans import PlanEstimate, Request
from reports.studies.markdown import table
from reports.studies.planned_models import Subject, TableRow, analytic, cluster, measured, missing, published_rows

# Levels are varied alone and together, in this order: nearest to what is assumed first.
FACTORS = (0.75, 1.33, 0.5, 2.0, 0.25, 4.0, 0.125, 8.0, 0.03, 32.0)

HEAD = """# Table 1 of PipeDream (SOSP'19): its plans and ours

`python -m reports.studies.table1_plans` makes this page.
Clusters are those of `recipes/clusters`; rates inside a server are
assumed there, those between servers are published, and payload gets 94 % of them under `overlap`. The published
speed-up is over epoch times, measured; ours is predicted: data parallelism's seconds per minibatch over the plan's,
both simulated under the same cost model. Ours is without a limit on memory; where the devices' own changes the choice,
what is chosen with it follows after "16 GB:". The last column is the paper's config, cut where this cost model wants it
and placed along the devices: its speed-up.

Analytic profiles are those of the full-size recipes (`recipes/*/single.yaml`): the paper's samples per GPU, the
recipe's optimizer, computed for a V100 (S2VT: a Titan X). Text is priced at the lengths that its data set declares:
30 source and 30 target tokens (`wmt16`), 70 tokens (`ptb`), 60 frames and 20 words (`msvd`). Computed times of LSTMs
have been compared with measured ones for GNMT-8 only, at 32 sentences of 32 source words (`analytic_profile.md`).

The measured profiles are the artifact's, at 128 images (VGG-16; the paper has 64) and at 32 sentences (GNMT-8; 64), and
nothing is scaled.

AWD LM is planned as if any replica could take any minibatch, as the paper's planner does. A run of it carries state
from minibatch to minibatch, so `pipebench plan` keeps to replicas that divide the recipe's `train.streams`.
"""
DIFFERENCES = """
## Differences, and what alone would make the paper's choice ours

Varied one at a time: the cost model; the profile, or the samples per GPU (a quarter to four times as many); the rate of
one level's links or of all, x 0.03 to 32, of which the first that does it is named. Failing that, what makes a straight
plan ours is named with its number of stages, fewer than the paper's: it leaves workers idle.
"""
NOTES = """
## What the differences come down to

- **Cost model.** The paper prints a formula (`sosp19`) and publishes an optimizer with another (`artifact`); neither is
  known to have made Table 1. `sosp19` charges 2 (m-1)/m |w| / B per minibatch for summed gradients, m times what a ring
  takes, so it moves parameters off replicated stages: ResNet-50 becomes 8-1 on 4x4. `artifact` divides transfers by m
  and lets every worker have the link between servers to itself: it sees no harm in seven stages for ResNet-50, which
  the simulator, with shared ports, runs at a fraction of data parallelism's speed. `overlap` leaves ResNet-50 alone, as
  the paper does.
- **The paper's data parallelism is slow.** A pipeline on n workers is at most n times as fast as one, so a speed-up s
  says that data parallelism on n was at most n/s times as fast as one: 0.94 for AWD LM on 4 GPUs of one server, 1.33
  for S2VT on 4. A ring at the rates in `recipes/clusters` is never so slow; for AWD LM, inside a server, that rate is
  assumed. All three cost models keep AWD LM data parallel, or nearly so.
- **AWD LM.** By the analytic profile one GPU takes 358 ms per minibatch, four take 92 ms in data parallelism and 121 ms
  as a straight pipeline, whose first stage has two of the six LSTM layers. With links at an eighth of the rate, 1.25
  GB/s per GPU, straight is ours, at a speed-up of 1.33. The source calls 80 the batch size; were it that of all four
  GPUs, 20 each, the same links would make it 2.9.
- **S2VT.** The classifier with its loss takes 57 ms on one worker, more than four need for a whole minibatch in data
  parallelism: 51 ms, since half of the ring's 28 are hidden; so it gains nothing to leave the classifier unreplicated.
  With links at an eighth, 5 of the 40 Gbit/s, straight is ours, and 2-1-1 is 2.8 times as fast as data parallelism
  (published: 3.01).
- **GNMT on one server.** Straight but for GNMT-16 and for GNMT-8's measured profile, where 1-1-2 is 3 and 6 % faster:
  links at 0.75 of the assumed rate make straight ours.
- **GNMT on 12 and 16 workers.** The classifier with its loss takes 37 of 137 ms (GNMT-8) and of 222 ms (GNMT-16): no
  straight plan is faster than that, however many workers it has, so shorter ones, which leave workers idle, are as
  fast, and ours replicates stages inside servers instead. Where their links are slower, or minibatches smaller, so that
  replicas don't pay, straight plans win, shorter ones than the paper's but for GNMT-8's measured profile. The paper's
  takes 58 to 63 % more time than ours.
- **GNMT on 2x8.** `overlap` gives every server a stage, 8-8: between servers its activations take 5 ms per minibatch,
  and the ring of data parallelism 31 ms (GNMT-8) and 44 ms (GNMT-16). The paper has 16 for the one and straight for
  the other. Its speed-up for GNMT-16, 3.14, is nearer to our 8-8's than to our straight plan's; for GNMT-8 only links
  8 to 32 times as fast would make data parallelism ours. Whatever decided in the paper, it wasn't these profiles.
- **VGG-16.** 15-1 everywhere but on 2x8 with the measured profile, where 16 is 7 % faster than 15-1: at 128 images a
  minibatch computes twice as long for the same gradients as at the paper's 64, and a slower link or 64 images make
  15-1 ours. Speed-ups of the paper are higher: its data parallelism is slower than a ring at the published rate.
- **AlexNet.** 15-1 on 4x4, as published. On 2x8 `overlap` chooses 14-2: by the analytic profile the fully connected
  layers keep one worker busy for 9.2 ms per minibatch, two for half of that, and summing their gradients inside a
  server takes 3.9 ms, while fourteen workers need 7.3 ms for the convolutions.
- **Backends.** Section 4: pipelines ran on Gloo, data parallelism on NCCL. Two rates for one wire, which no cost model
  here has.
"""


@dataclass(frozen=True)
class Choice:
    """The plans that the planner makes for a row of Table 1."""

    plan: PlanEstimate  # the best one, without a limit on memory
    dp: PlanEstimate  # data parallelism on all workers
    theirs: PlanEstimate | None  # the paper's config; None if the model has too few layers for it
    limited: PlanEstimate | None  # the best plan within the cluster's memory; None if nothing fits


@dataclass(frozen=True)
class Case:
    """A row, planned with one profile under one cost model."""

    row: TableRow  # the published values
    subject: Subject  # the profile
    where: Cluster  # the cluster, with its limit on memory
    model: CostModel  # the cost model
    choice: Choice  # the plans

    @property
    def name(self) -> str:
        """The row's name without the table's."""
        return self.row.name.removeprefix("t1-")


def subjects(row: TableRow) -> list[Subject]:
    """Return the profiles of a row's model: measured, and analytic at the recipe's size."""
    found = (measured(row.model), analytic(row.model))
    return [subject for subject in found if subject is not None]


def choose(subject: Subject, where: Cluster, model: CostModel, row: TableRow) -> Choice:
    """Plan one row; `where` has its limit on memory."""
    free = replace(where, memory_bytes=None)
    request = Request(subject.profile, free, model, subject.size)
    planner = Planner(request, "pipedream")
    dp = planner.with_prediction(_fixed(planner, (row.workers,)))
    try:
        theirs = planner.with_prediction(_fixed(planner, row.replicas))
    except PlanError:
        theirs = None
    try:
        limited = Planner(replace(request, cluster=where), "pipedream").best()
    except PlanError:
        limited = None
    return Choice(planner.best(), dp, theirs, limited)


def _fixed(planner: Planner, replicas: tuple[int, ...]) -> PlanEstimate:
    request = planner.request
    return planner.estimate("", plan_fixed(planner.work, request.model, request.cluster, replicas))


def _speedup(plan: PlanEstimate | None, dp: PlanEstimate) -> str:
    return "-" if plan is None else f"{dp.minibatch_s / plan.minibatch_s:.2f}"


def _is(plan: PlanEstimate, row: TableRow) -> bool:
    return plan.plan.replicas == row.replicas


def _config(plan: PlanEstimate, row: TableRow) -> str:
    """Return a plan's config; a straight plan that leaves workers idle says how many stages it has."""
    is_shorter = str(plan.plan) == "straight" and len(plan.stages) < row.workers
    return f"straight of {len(plan.stages)}" if is_shorter else str(plan.plan)


def variations(case: Case) -> Iterator[tuple[str, Subject, Cluster, CostModel]]:
    """Yield what is varied, one thing at a time: cost model, profile, samples per GPU, bandwidth of each level."""
    subject, where, model = case.subject, replace(case.where, memory_bytes=None), case.model
    for name, other in COST_MODELS.items():
        if other is not model:
            yield f"under `{name}`", subject, where, other
    for other_subject in subjects(case.row):
        if other_subject is not subject:
            yield f"with the {other_subject.source} profile at {other_subject.size}", other_subject, where, model
    if subject.source == "analytic":
        for size in (subject.size // 4, subject.size // 2, subject.size * 2, subject.size * 4):
            yield f"at {size} samples", analytic(subject.model, size), where, model
    linked = [index for index, level in enumerate(where.levels) if level.count > 1]
    alone_and_together = [*([index] for index in linked), *([linked] if len(linked) > 1 else [])]
    for factor, chosen in itertools.product(FACTORS, alone_and_together):
        levels = tuple(
            replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * factor) if index in chosen else level
            for index, level in enumerate(where.levels)
        )
        which = " and ".join(f"{where.levels[index].name}'s" for index in chosen)
        yield f"with {which} links at {factor:g} of the rate", subject, replace(where, levels=levels), model


def reasons(case: Case) -> str:
    """Return the single changes that make the planner choose the paper's plan, then those that make a shorter one.

    Shorter is a straight plan of fewer stages than the paper's. Of changes of links only the first of each kind is
    named: more than one factor usually does the same.
    """
    same: list[str] = []
    shorter: list[str] = []
    for text, subject, where, model in variations(case):
        if _has_links(text) and any(map(_has_links, same)):
            break
        plan = Planner(Request(subject.profile, where, model, subject.size), "pipedream").best()
        if _is(plan, case.row):
            same.append(text)
        elif str(plan.plan) == case.row.config.lower() and not (_has_links(text) and any(map(_has_links, shorter))):
            shorter.append(f"{text} ({_config(plan, case.row)})")
    return "; ".join([*same, *shorter]) or "none of the variations"


def _has_links(text: str) -> bool:
    return " links " in text


def lost(choice: Choice) -> str:
    """Return how much more time the paper's config takes than our choice, by the simulator, as text."""
    if choice.theirs is None:
        return "can't be cut so often"
    slower = choice.theirs.minibatch_s / choice.plan.minibatch_s - 1
    return "as fast" if math.isclose(slower, 0, abs_tol=5e-3) else f"{100 * slower:+.0f} % time"


def _line(case: Case) -> tuple[str, ...]:
    row, choice = case.row, case.choice
    ours, within = _config(choice.plan, row), _config(choice.limited, row) if choice.limited else "nothing fits"
    if case.where.memory_bytes is not None and within != ours:
        ours += f"; {case.where.memory_bytes / 1e9:g} GB: {within}"
    return (
        *(case.name, f"{case.subject.source}, {case.subject.size}", row.config, f"{row.speedup:.2f}"),
        *(ours, _speedup(choice.plan, choice.dp), _speedup(choice.theirs, choice.dp)),
    )


def _agreement(cases: Sequence[Case]) -> str:
    """Return in how many rows the planner chooses the paper's config, per cost model and source of the profile."""
    lines = []
    for model in dict.fromkeys(case.model.name for case in cases):
        cells = []
        for source in ("analytic", "measured"):
            own = [
                _is(case.choice.plan, case.row)
                for case in cases
                if (case.model.name, case.subject.source) == (model, source)
            ]
            cells.append(f"{sum(own)} of {len(own)}" if own else "-")
        lines.append((f"`{model}`", *cells))
    return table(("rows where ours is the paper's", "analytic profile", "measured profile"), lines)


def _differences(cases: Sequence[Case]) -> str:
    head = ("model", "row", "profile", "paper", "ours", "paper's config takes", "ours would be the paper's")
    return table(
        head,
        (
            (case.model.name, *_line(case)[:3], _config(case.choice.plan, case.row), lost(case.choice), reasons(case))
            for case in cases
            if not _is(case.choice.plan, case.row)
        ),
    )


def main(rows: Sequence[TableRow] | None = None, models: Sequence[CostModel] = tuple(COST_MODELS.values())) -> None:
    """Print the page; all rows under all cost models unless given."""
    rows = published_rows() if rows is None else rows
    print(HEAD)
    if missing():
        print(f"Left out, for want of `../shared/profiles`: the measured {', '.join(missing())}.\n")
    cases = []
    for model, row in itertools.product(models, rows):
        where = cluster(row.cluster, row.servers, limited=True)
        cases += [Case(row, subject, where, model, choose(subject, where, model, row)) for subject in subjects(row)]
    print(_agreement(cases))
    head = ("row", "profile", "paper", "speed-up", "ours", "speed-up", "paper's config, by this model")
    for model in models:
        lines = [_line(case) for case in cases if case.model is model]
        print(f"\n## Under `{model.name}`\n\n{table(head, lines)}")
    print(DIFFERENCES)
    print(_differences(cases))
    print(NOTES)


if __name__ == "__main__":
    main()
