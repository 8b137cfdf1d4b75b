"""A plan as a picture: its layers with their times and cuts, above each stage's computing, gradient sum and transfers.

Layers are coloured by stage, with the bytes that cross each cut; stages are compared with the bottleneck.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes

from pipebench.formats import num_bytes, seconds, shortened
from pipebench.planner.plans import PlanEstimate, StageTime
from pipebench.profile.model import LayerProfile
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.show.inline import InlineFigure
from pipebench.show.plan_answer import PlanFindings, bottleneck_of
from pipebench.show.profile_picture import LABEL_WIDTH, MOST_LABELS, finish, plain_text

_STAGE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_PARTS = (
    ("compute_s", "computing", "#56B4E9"),
    ("sync_s", "gradient sum", "#333333"),
    ("transfer_s", "transfers", "#0072B2"),
)
# Parts of a stage's time: attribute of `StageTime`, label, colour, hatch.
_TIMES = (
    ("computing", "simulated: computes", "#56B4E9", "////"),
    ("transfers", "waits for transfers", "#CC79A7", "////"),
    ("waiting", "waits for others", "#E8E8E8", "////"),
)
_HATCHES = {KEEP: "", RECOMPUTE: "///", SWAP: "..."}  # of layers' bars, by memory policy
_SAID = {RECOMPUTE: "striped: recomputed", SWAP: "dotted: swapped"}
MADE_BY = "pipebench plan"
_WIDTH_IN, _HEIGHT_IN = 14.0, 7.5
_ROOMY_LAYERS = 9.0  # per cent of the width that a horizontal label needs
_MOST_STAGES_LABELLED = 40


def plan_figure(answer: PlanFindings) -> InlineFigure:
    """Return a picture of the best plan."""
    found = answer.comparison.best
    figure = InlineFigure(_WIDTH_IN, _HEIGHT_IN, MADE_BY)
    layers, stages = figure.subplots(2, 1, height_ratios=(3, 2))
    unit = "minibatch" if answer.rows_size == answer.request.minibatch_size else "microbatch"
    _draw_layers(layers, answer.rows, found, unit)
    _draw_stages(stages, found, answer.times)
    cluster = answer.request.cluster
    bottleneck = f"bottleneck: {bottleneck_of(answer, found)}, {seconds(found.bottleneck_s)} per minibatch"
    heading = f"{answer.name}: {shortened(str(found.plan), 60)} ({found.plan.mode}), {cluster.num_workers:,} workers"
    figure.suptitle(f"{plain_text(heading, 120)}\ncost model {answer.request.model.name}; {bottleneck}", fontsize=10)
    return figure


def cut_bytes(rows: Sequence[LayerProfile], found: PlanEstimate) -> list[int]:
    """Return the bytes of activations that cross each cut, those that skip stages included."""
    place = {layer: position for position, layer in enumerate(found.order)}
    place[len(rows) - 1] = len(found.order)  # the loss is computed at the end of the last stage
    last_reader: dict[int, int] = {}
    for reader, row in enumerate(rows):
        for read in row.reads:
            if reader in place and read in place:
                last_reader[read] = max(last_reader.get(read, 0), place[reader])
    return [
        sum(rows[read].output_bytes for read, reader in last_reader.items() if place[read] < start <= reader)
        for start in found.plan.starts
    ]


def _draw_layers(axes: Axes, rows: Sequence[LayerProfile], found: PlanEstimate, unit: str) -> None:
    ordered = [rows[layer] for layer in found.order]
    bounds = [0, *(stage.stop for stage in found.plan.stages)]
    heights = [row.forward_s + row.backward_s for row in ordered]
    top = max(heights, default=0.0) or 1.0
    # Of many stages only some have a label, and no cut has its bytes.
    many = len(found.stages) > _MOST_STAGES_LABELLED
    for index, stage in enumerate(found.plan.stages):
        start, stop = bounds[index], bounds[index + 1]
        colour = _STAGE_COLOURS[index % len(_STAGE_COLOURS)]
        hatches = [_HATCHES[policy] for policy in stage.memory]
        axes.bar(
            range(start, stop), heights[start:stop], 0.85, color=colour, edgecolor="white", linewidth=0, hatch=hatches
        )
        axes.axvspan(start - 0.5, stop - 0.5, color=colour, alpha=0.08, linewidth=0)
        if not many or index % (len(found.stages) // _MOST_STAGES_LABELLED + 1) == 0:
            upright = 100 * (stop - start) / len(ordered) < _ROOMY_LAYERS
            name = f"{index} x {stage.replicas:,}" if upright else f"stage {index} x {stage.replicas:,}"
            place = (start + stop - 1) / 2
            axes.text(place, 1.28 * top, name, ha="center", va="center", rotation=90 if upright else 0, fontsize=8)
    for index, num in enumerate(cut_bytes(rows, found)):
        border = bounds[index + 1] - 0.5
        axes.axvline(border, color="#333333", linewidth=0.8, linestyle="--")
        if not many:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
            axes.text(border, 1.06 * top, num_bytes(num), ha="center", va="center", rotation=90, fontsize=7, bbox=box)
    axes.set_ylim(0, 1.42 * top)
    axes.set_xlim(-0.5, len(ordered) - 0.5)
    finish(axes, f"forward and backward per {unit}", "s")
    step = -(-len(ordered) // MOST_LABELS)
    labels = [_layer_label(row) for row in ordered[::step]]
    axes.set_xticks(range(0, len(ordered), step), labels, rotation=90, fontsize=7)
    axes.set_xlabel(
        f"layers in the order of the stages; at every cut the activations that cross it per {unit}"
        + (f"; one in {step} named" if step > 1 else "")
        + "".join(f"; {said}" for policy, said in _SAID.items() if any(policy in s.memory for s in found.plan.stages)),
        fontsize=8,
    )


def _draw_stages(axes: Axes, found: PlanEstimate, times: Sequence[StageTime]) -> None:
    """Draw every stage's times by the cost model, beside the parts of its time in the simulator."""
    width = 0.2
    for number, (attribute, label, colour) in enumerate(_PARTS):
        places = [index + (number - 1.5) * width for index in range(len(found.stages))]
        heights = [getattr(stage, attribute) for stage in found.stages]
        axes.bar(places, heights, width, color=colour, label=label, linewidth=0)
    bottom_s = [0.0] * len(times)
    for attribute, label, colour, hatch in _TIMES if times else ():
        heights = [getattr(each, attribute) * found.minibatch_s for each in times]
        places = [index + 1.5 * width for index in range(len(times))]
        axes.bar(
            places, heights, width, bottom_s, color=colour, label=label, linewidth=0.5, edgecolor="#333333", hatch=hatch
        )
        bottom_s = [below + height for below, height in zip(bottom_s, heights, strict=True)]
    positions = range(len(found.stages))
    totals = [stage.stage_s for stage in found.stages]
    left, right = ([index + side for index in positions] for side in (-0.45, 0.45))
    axes.hlines(totals, left, right, colors="#D55E00", linewidth=1.6, label="in all, by the cost model")
    axes.axhline(found.bottleneck_s, color="#D55E00", linewidth=1.0, linestyle="--", label="bottleneck")
    step = -(-len(found.stages) // MOST_LABELS)
    names = [f"{index} x {stage.replicas:,}" for index, stage in enumerate(found.plan.stages)][::step]
    axes.set_xticks(range(0, len(found.stages), step), names, rotation=90 if len(found.stages) > 20 else 0, fontsize=8)
    axes.set_xlim(-0.6, len(found.stages) - 0.4)
    axes.set_ylim(0, 1.08 * max(found.bottleneck_s, *totals, *bottom_s))  # bars on bars allow no margin
    axes.set_xlabel("stage x replicas", fontsize=8)
    finish(axes, "per minibatch", "s")
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=8)


def _layer_label(row: LayerProfile) -> str:
    """Return the layer's name, with its kind if the name is only a number, as in the PipeDream artifact's files."""
    number = row.name.removeprefix("node")
    kind = row.kind.partition("(")[0].strip("_")
    return plain_text(f"{number} {kind}" if number.isdecimal() and kind else row.name, LABEL_WIDTH)
