"""Processes end with the weights of the virtual engine, by the same losses and bytes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.recipe.schema import LossScaleRecipe
from tests.distributed.cases import Case, Outcome, compare, random_case, virtually
from tests.model.test_optimizer import OPTIMIZERS, named
from tests.processes import Processes
from tests.schedule.test_csv_form import ANY_ORDER
from tests.support import flat_cluster

INTERLEAVED = {"weights": "one", "order": "interleaved", "chunks": 2}
ZBV = {"weights": "one", "order": "zbv", "chunks": 2, "backward": "split"}
ZERO_BUBBLE = {"weights": "one", "order": "zero-bubble", "backward": "split"}
SOME = ["keep", "swap", "recompute", "swap", "swap"] * 6  # of more layers than there are
TWO = {
    "single-stage dp": Case("conv", (), (2,), {"weights": "one", "depth": 1}),
    "dp, parameter servers": Case("conv", (), (2,), {"weights": "one", "depth": 1, "sync": "parameter-server"}),
    "dp, gradients summed after the backward": Case("conv", (), (2,), {"weights": "one", "sync": "all-reduce-after"}),
    "dp, parameter servers after the backward": Case(
        "skip", (), (2,), {"weights": "one", "sync": "parameter-server-after"}
    ),
    "dp, accumulated": Case("skip", (), (2,), {"weights": "one", "depth": 1, "accumulate": 2}),
    "model": Case("conv", (4,), (1, 1), {"weights": "one", "depth": 1}),
    "gpipe": Case("skip", (4,), (1, 1), {"weights": "one", "order": "all-forwards", "microbatches": 3}),
    "gpipe, recompute": Case(
        "conv", (4,), (1, 1), {"weights": "one", "order": "all-forwards", "microbatches": 4, "recompute": True}
    ),
    "pipedream-flush": Case("skip", (4,), (1, 1), {"weights": "one", "microbatches": 3}),
    "pipedream": Case("conv", (4,), (1, 1)),
    "pipedream, depth 4": Case("skip", (4,), (1, 1), {"depth": 4}),
    "vertical sync": Case("skip", (4,), (1, 1), {"weights": "stash-vertical-sync", "depth": 3}),
    "naive": Case("mlp", (4,), (1, 1), {"weights": "none"}),
    "predicted": Case("conv", (4,), (1, 1), {"weights": "predict", "recompute": True}),
    "channels last": Case("conv", (4,), (1, 1), {"channels_last": True}),
    "channels last, by sockets": Case("conv", (3,), (1, 1), {"channels_last": True}, shares_memory=False),
    "dp, channels last": Case("conv", (), (2,), {"weights": "one", "depth": 1, "channels_last": True}),
    "predicted, cut": Case("skip", (4,), (1, 1), {"weights": "predict", "microbatches": 3}),
    "corrected": Case("conv", (4,), (1, 1), {"weights": "correct"}),
    "corrected, recompute": Case("skip", (4,), (1, 1), {"weights": "correct", "depth": 3, "recompute": True}),
    "clipped": Case("skip", (4,), (1, 1), {"weights": "one", "microbatches": 2, "clip_norm": 0.3}),
    "other devices": Case("conv", (4,), (1, 1), {"cluster": flat_cluster(3), "devices": (2, 0)}),
    "clipped dp": Case("skip", (), (2,), {"weights": "one", "depth": 1, "clip_norm": 0.3}),
    "a named tuple of torch's crosses": Case("structures", (5,), (1, 1)),
    "parameters of three types": Case("mixed", (4,), (1, 1), {"sizes": (2, 4)}),
    "dp, parameters of three types": Case("mixed", (), (2,), {"weights": "one", "depth": 1, "sizes": (2, 4)}),
    "dp, parameters without a gradient": Case("frozen", (), (2,), {"weights": "one", "depth": 1}),
    "a gate without a gradient": Case("gated", (2,), (1, 1)),
    "a gate without a gradient, sockets": Case("gated", (3,), (1, 1), ZERO_BUBBLE, shares_memory=False),
    "two buffers": Case("skip", (4,), (1, 1), {"weights": "double-buffer", "accumulate": 2}, segments=(13, 4)),
    "two buffers, depth 3, a short round": Case(
        "conv", (4,), (1, 1), {"weights": "double-buffer", "depth": 3, "accumulate": 3}, segments=(11,)
    ),
    "two chunks": Case("conv", (2, 4, 6), (1, 1, 1, 1), INTERLEAVED | {"microbatches": 4}),
    "two chunks, values stay in a worker": Case("skip", (2, 4, 6), (1, 1, 1, 1), INTERLEAVED | {"microbatches": 3}),
    "zero bubble": Case("conv", (4,), (1, 1), ZERO_BUBBLE | {"microbatches": 4}),
    "zero bubble, clipped": Case(
        "skip", (4,), (1, 1), ZERO_BUBBLE | {"microbatches": 3, "accumulate": 2, "clip_norm": 0.3, "recompute": True}
    ),
    "in a V, forwards beside backwards": Case(
        "skip", (2, 4, 6), (1, 1, 1, 1), ZBV | {"order": "dualpipev", "microbatches": 4}
    ),
    "two ways": Case("conv", (4,), (2, 2), ZBV | {"order": "dualpipe", "microbatches": 2}),
    "two ways, clipped": Case(
        "skip",
        (4,),
        (2, 2),
        ZBV | {"order": "dualpipe", "microbatches": 3, "accumulate": 2, "clip_norm": 0.3, "recompute": True},
    ),
    "in a V": Case("conv", (2, 4, 6), (1, 1, 1, 1), ZBV | {"microbatches": 4}),
    "in a V, clipped": Case(
        "skip", (2, 4, 6), (1, 1, 1, 1), ZBV | {"microbatches": 3, "accumulate": 2, "clip_norm": 0.3, "recompute": True}
    ),
    "zero bubble, two replicas": Case("conv", (), (2,), ZERO_BUBBLE | {"microbatches": 2}),
    "split without a flush": Case("conv", (4,), (1, 1), {"backward": "split"}),
    "two chunks, clipped": Case(
        "skip", (2, 4, 6), (1, 1, 1, 1), INTERLEAVED | {"accumulate": 3, "clip_norm": 0.3, "recompute": True}
    ),
    "three chunks, all forwards": Case(
        "skip", (1, 2, 4, 5, 6), (1,) * 6, INTERLEAVED | {"order": "all-forwards", "chunks": 3, "microbatches": 2}
    ),
    "two chunks, two replicas": Case("conv", (4,), (2, 2), INTERLEAVED | {"microbatches": 2}),
    "bf16, pipedream": Case("conv", (4,), (1, 1), {"precision": "bf16"}),
    "bf16, dp": Case("conv", (), (2,), {"weights": "one", "depth": 1, "precision": "bf16"}),
    "bf16, gpipe, recompute, clipped": Case(
        "conv",
        (4,),
        (1, 1),
        {
            "weights": "one",
            "order": "all-forwards",
            "microbatches": 2,
            "recompute": True,
            "clip_norm": 0.3,
            "precision": "bf16",
        },
    ),
    "bf16, two buffers": Case(
        "conv", (4,), (1, 1), {"weights": "double-buffer", "accumulate": 2, "precision": "bf16"}, segments=(13, 4)
    ),
    "bf16, two chunks": Case("conv", (2, 4, 6), (1, 1, 1, 1), INTERLEAVED | {"microbatches": 2, "precision": "bf16"}),
    "swapped": Case("conv", (4,), (1, 1), {"memory": ["swap"] * 10}),
    "swapped, gpipe": Case(
        "skip", (4,), (1, 1), {"memory": SOME, "weights": "one", "order": "all-forwards", "microbatches": 3}
    ),
    "swapped, pipedream-flush": Case("skip", (4,), (1, 1), {"memory": SOME, "weights": "one", "microbatches": 4}),
    "swapped, dp": Case("skip", (), (2,), {"memory": SOME, "weights": "one", "depth": 1, "accumulate": 2}),
    "swapped, a named tuple of torch's crosses": Case("structures", (5,), (1, 1), {"memory": ["swap"] * 20}),
    "swapped, two chunks": Case("conv", (2, 4, 6), (1,) * 4, INTERLEAVED | {"memory": SOME, "microbatches": 4}),
    "cut anew": Case("conv", (4,), (1, 1), {"recompute": {3, 4, 5}}, (7, 5, 6), recuts=((2,), (6,))),
    "cut anew, sockets": Case("skip", (4,), (1, 1), {}, (7, 5, 6), shares_memory=False, recuts=((7,), (2,))),
    "cut anew, a flush": Case("conv", (4,), (1, 1), {"weights": "one", "microbatches": 3}, recuts=((2,),)),
    "cut anew, bf16": Case("conv", (4,), (1, 1), {"precision": "bf16"}, recuts=((2,),)),
    "a layer moves to the left": Case("conv", (3,), (1, 1), {}, (17, 5), moves=(Repartition(6, (5,)),)),
    "a layer moves behind a gate": Case("gated", (3,), (1, 1), {}, (17, 5), moves=(Repartition(6, (2,)),)),
    "a layer moves to the right": Case("skip", (7,), (1, 1), {}, (17, 5), moves=(Repartition(6, (4,)),)),
    "layers move to and fro, sockets": Case(
        "conv",
        (3,),
        (1, 1),
        {"recompute": {3, 4}},
        (25, 5),
        shares_memory=False,
        moves=(Repartition(6, (5,)), Repartition(14, (2,))),
    ),
    "a layer moves between flushes": Case(
        "conv", (3,), (1, 1), {"weights": "one", "microbatches": 2}, (12, 5), moves=(Repartition(4, (5,)),)
    ),
    "a segment ends while a layer moves": Case("skip", (7,), (1, 1), {}, (6, 5), moves=(Repartition(7, (4,)),)),
    "layers move and change policies": Case(
        "skip", (7,), (1, 1), {"memory": SOME}, (17, 5), moves=(Repartition(6, (4,), (*SOME[:20][::-1],)),)
    ),
    "layers change policies where they are, then move, sockets": Case(
        "skip",
        (7,),
        (1, 1),
        {"memory": SOME},
        (25, 5),
        shares_memory=False,
        moves=(Repartition(6, (7,), (*SOME[:20][::-1],)), Repartition(14, (9,), (*SOME[:20],))),
    ),
    "a named tuple of the user's crosses": Case("structures", (9,), (1, 1), {"weights": "one", "microbatches": 3}),
    "cells left out and put back": Case(
        "stack", (12,), (1, 1), {"sizes": (2, 4)}, segments=(7, 6, 5), left_out=("bc", "a")
    ),
    "cells left out, then layers moved, a flush": Case(
        "stack",
        (12,),
        (1, 1),
        {"sizes": (2, 4), "weights": "one"},
        segments=(5, 6, 5),
        left_out=("bcd", ""),
        recuts=((18,), (5,)),
    ),
    "cells left out of dp": Case("stack", (), (2,), {"sizes": (2, 4), "weights": "one"}, left_out=("bd",)),
}
TIED = {"weights": "one", "ties": True}
TWO |= {
    "tied": Case("tied", (5,), (1, 1), TIED | {"depth": 1}),
    "tied, gpipe, recompute, clipped": Case(
        "tied", (5,), (1, 1), TIED | {"order": "all-forwards", "microbatches": 3, "recompute": True, "clip_norm": 0.1}
    ),
    "tied, parameter servers": Case("tied", (3,), (1, 1), TIED | {"microbatches": 2, "sync": "parameter-server"}),
    "tied, zero bubble": Case("tied", (5,), (1, 1), TIED | ZERO_BUBBLE | {"microbatches": 4}),
    "tied, two chunks, sockets": Case(
        "tied", (2, 3, 5), (1,) * 4, TIED | INTERLEAVED | {"microbatches": 4}, shares_memory=False
    ),
    "tied, two buffers, clipped": Case(
        "tied", (5,), (1, 1), TIED | {"weights": "double-buffer", "accumulate": 2, "clip_norm": 0.1}, segments=(13, 4)
    ),
    "tied, cut anew": Case("tied", (5,), (1, 1), TIED | {"microbatches": 2}, (7, 5, 6), recuts=((9,), (1,))),
    "tied, bf16": Case("tied", (5,), (1, 1), TIED | {"precision": "bf16", "microbatches": 2}),
}
THREE = {
    "tied": Case("tied", (3, 6), (1, 1, 1), TIED | {"microbatches": 2, "clip_norm": 0.1}),
    "tied, 2-1": Case("tied", (5,), (2, 1), TIED | {"sync": "parameter-server"}),
    "tied, 2-1, a short round": Case(
        "tied", (5,), (2, 1), TIED | {"sync": "parameter-server", "microbatches": 2}, segments=(7, 5)
    ),
    "three stages": Case("skip", (3, 6), (1, 1, 1)),
    "three stages, flush": Case("conv", (3, 6), (1, 1, 1), {"weights": "one", "microbatches": 4}),
    "vertical sync, a stage without parameters": Case("mlp", (3, 4), (1, 1, 1), {"weights": "stash-vertical-sync"}),
    "three stages, beyond NOAM": Case("skip", (3, 6), (1, 1, 1), {"depth": 6}, segments=(13, 5)),
    "three stages, beyond NOAM, vertical sync": Case(
        "conv", (3, 6), (1, 1, 1), {"depth": 5, "weights": "stash-vertical-sync"}, segments=(11, 4)
    ),
    "three stages, beyond NOAM, flush": Case(
        "conv", (3, 6), (1, 1, 1), {"depth": 5, "weights": "one", "microbatches": 4}
    ),
    "three stages, cut anew, both ways": Case("skip", (3, 6), (1, 1, 1), {}, (7, 5, 6), recuts=((1, 8), (5, 6))),
    "three stages, layers move both ways": Case(
        "skip", (5, 12), (1, 1, 1), {}, (30, 5), moves=(Repartition(8, (7, 9)), Repartition(17, (4, 14)))
    ),
    "three stages, layers move, adam, sockets": Case(
        "conv",
        (3, 6),
        (1, 1, 1),
        {},
        (20, 5),
        shares_memory=False,
        moves=(Repartition(8, (2, 5)),),
        optimizer=named("adam"),
    ),
    "2-1": Case("conv", (4,), (2, 1)),
    "2-1, cut anew": Case("conv", (4,), (2, 1), {}, (7, 5, 6), recuts=((2,), (6,))),
    "2-1, beyond NOAM": Case("skip", (4,), (2, 1), {"depth": 4}, segments=(13, 5)),
    "1-2": Case("skip", (4,), (1, 2)),
    "three stages, predicted": Case("skip", (3, 6), (1, 1, 1), {"weights": "predict"}),
    "three stages, predicted, cut": Case("mlp", (3, 5), (1, 1, 1), {"weights": "predict", "microbatches": 4}),
    "2-1, predicted": Case("conv", (4,), (2, 1), {"weights": "predict"}),
    "1-2, corrected": Case("skip", (4,), (1, 2), {"weights": "correct"}),
    "three stages, corrected": Case("mlp", (3, 5), (1, 1, 1), {"weights": "correct", "clip_norm": 0.3}),
    # Servers add in the order of the replicas: the same bits however many there are.
    "dp, parameter servers": Case("skip", (), (3,), {"weights": "one", "sync": "parameter-server"}),
    "2-1, parameter servers": Case("conv", (4,), (2, 1), {"sync": "parameter-server"}),
    "2-1, hybrid": Case("skip", (4,), (2, 1), {"weights": "one", "depth": 1}),
    "2-1, gpipe": Case("skip", (4,), (2, 1), {"weights": "one", "order": "all-forwards", "microbatches": 2}),
    "clipped": Case("skip", (3, 6), (1, 1, 1), {"weights": "one", "microbatches": 2, "clip_norm": 0.3}),
    "two buffers": Case("conv", (3, 6), (1, 1, 1), {"weights": "double-buffer", "accumulate": 3}, segments=(11, 4)),
    "two chunks": Case("skip", (1, 2, 4, 5, 6), (1,) * 6, INTERLEAVED | {"microbatches": 4}),
    "zero bubble": Case("conv", (3, 6), (1, 1, 1), ZERO_BUBBLE | {"microbatches": 4}),
    "2-1, zero bubble": Case("skip", (4,), (2, 1), ZERO_BUBBLE | {"microbatches": 2}),
}
# A scale that overflows at first, and then grows and overflows again within a few updates.
FP16 = {"precision": "fp16", "loss_scale": LossScaleRecipe(2.0**24, growth=4.0, backoff=0.25, growth_interval=2)}
TWO |= {
    "fp16, pipedream": Case("conv", (4,), (1, 1), FP16, segments=(13, 4)),
    "fp16, dp": Case("conv", (), (2,), FP16 | {"weights": "one", "depth": 1}, segments=(9,)),
    "tied, fp16": Case("tied", (5,), (1, 1), FP16 | TIED | {"microbatches": 2}, segments=(9,)),
    "fp16, flush": Case("conv", (4,), (1, 1), FP16 | {"weights": "one", "microbatches": 2}, segments=(9,)),
}
THREE |= {
    "fp16, 2-1": Case("conv", (4,), (2, 1), FP16, segments=(13, 4)),
    "bf16, 2-1": Case("conv", (4,), (2, 1), {"precision": "bf16"}),
    "bf16, three stages, flush, clipped": Case(
        "conv", (3, 6), (1, 1, 1), {"weights": "one", "microbatches": 2, "clip_norm": 0.3, "precision": "bf16"}
    ),
}
SHARDED = {"weights": "one", "order": "sequential", "sums": "ordered", "chunks": 3, "depth": 1}
TWO |= {
    "zero1": Case("conv", (2, 4), (2, 2, 2), SHARDED | {"shard": "optimizer"}),
    "zero2, clipped, accumulated": Case(
        "skip", (2, 4), (2, 2, 2), SHARDED | {"shard": "gradients", "clip_norm": 0.3, "accumulate": 2}
    ),
    "fsdp": Case("conv", (2, 4), (2, 2, 2), SHARDED | {"shard": "parameters"}),
    "fsdp, not resharded, recompute": Case(
        "skip", (2, 4), (2, 2, 2), SHARDED | {"shard": "parameters", "reshards": False, "recompute": True}
    ),
    "fsdp, bf16": Case("conv", (2, 4), (2, 2, 2), SHARDED | {"shard": "parameters", "precision": "bf16"}),
    "tied, zero2, clipped": Case(
        "wide tied", (2, 11), (2, 2, 2), TIED | SHARDED | {"shard": "gradients", "clip_norm": 0.3, "accumulate": 2}
    ),
    "tied, fsdp, 4 groups": Case(
        "wide tied", (2, 5, 7), (2,) * 4, TIED | SHARDED | {"shard": "parameters", "chunks": 4}
    ),
    "two ways, sharded optimizer": Case(
        "conv", (4,), (2, 2), ZBV | {"order": "dualpipe", "microbatches": 2, "sums": "ordered", "shard": "optimizer"}
    ),
    "zero2, parameters of three types": Case(
        "mixed", (2, 4), (2, 2, 2), SHARDED | {"shard": "gradients", "sizes": (2, 4)}
    ),
    "zero1, parameters without a gradient": Case(
        "frozen", (), (2,), {"shard": "optimizer", "weights": "one", "depth": 1}
    ),
}
# Added in the order of replicas: processes have the virtual engine's bits beyond two, too, and in short rounds.
THREE |= {
    "dp, ordered": Case("conv", (), (3,), {"weights": "one", "depth": 1, "sums": "ordered"}),
    "zero1 of three": Case("conv", (2, 4), (3, 3, 3), SHARDED | {"shard": "optimizer", "clip_norm": 0.3}),
    "zero2 of three": Case("skip", (2, 4), (3, 3, 3), SHARDED | {"shard": "gradients"}),
    "1F1B, sharded optimizer": Case(
        "skip",
        (4,),
        (2, 1),
        {"weights": "one", "microbatches": 2, "sums": "ordered", "shard": "optimizer", "clip_norm": 0.3},
    ),
    "pipedream, sharded optimizer": Case("conv", (4,), (2, 1), {"sums": "ordered", "shard": "optimizer"}),
    "fsdp of three": Case("conv", (2, 4), (3, 3, 3), SHARDED | {"shard": "parameters"}),
    "tied, fsdp of three, sockets": Case(
        "wide tied", (5, 11), (3, 3, 3), TIED | SHARDED | {"shard": "parameters"}, shares_memory=False
    ),
}
THREE_REPLICAS = {
    "tied, 2-1": Case("tied", (5,), (2, 1), TIED | {"clip_norm": 0.1}),
    "dp": Case("conv", (), (3,), {"weights": "one", "depth": 1}),
}


def check(case: Case, found: list[Outcome], tolerance: float = 0.0) -> None:
    expected = virtually(case)
    compare(found, expected, tolerance)
    peaks = [peak for outcome in sorted(found, key=lambda each: each.worker) for peak in outcome.peaks]
    if case.columns.get("recompute") and case.columns.get("chunks", 1) > 1:
        # Views that a recomputed layer keeps are whole in one process, and between two copies of their part.
        assert all(peak <= most for peak, most in zip(peaks, expected.peaks, strict=True))
    else:
        assert peaks == expected.peaks


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TWO)
def test_two_processes_end_with_the_virtual_engine_s_weights(two: Processes, name: str) -> None:
    check(TWO[name], two.run("tests.distributed.cases:distributed", TWO[name]))


V_SHAPED = """\
0F0,3F0,3I0,0F1,3W0,3F1,3I1,0I0,3W1,0W0,0B1
1F0,2F0,1F1,2B0,2F1,1I0,2B1,1B1,1W0
"""


def test_the_schedule_of_a_file_whose_stages_stand_in_a_v(two: Processes, tmp_path: Path) -> None:
    path = tmp_path / "v.csv"
    path.write_text(V_SHAPED)
    columns = {"weights": "one", "order": str(path), "chunks": 2, "accumulate": 2, "backward": "split"}
    for model, clip_norm in (("skip", None), ("conv", 0.3)):
        case = Case(model, (2, 4, 6), (1, 1, 1, 1), columns | {"clip_norm": clip_norm})
        check(case, two.run("tests.distributed.cases:distributed", case))
    case = Case(
        "tied", (2, 5, 8), (1, 1, 1, 1), columns | {"ties": True}
    )  # both copies of either weight in one process
    check(case, two.run("tests.distributed.cases:distributed", case))


@pytest.mark.parametrize("shares_memory", [True, False])
def test_the_schedule_of_a_file_whose_stages_have_different_orders(
    shares_memory: bool, two: Processes, tmp_path: Path
) -> None:
    """Messages arrive in the order of the sending stage; those that come early are stored."""
    path = tmp_path / "any.csv"
    path.write_text(ANY_ORDER)
    columns = {"weights": "one", "order": str(path), "microbatches": 4, "backward": "split"}
    for model in ("skip", "conv"):
        case = Case(model, (4,), (1, 1), columns, shares_memory=shares_memory)
        check(case, two.run("tests.distributed.cases:distributed", case))


def test_every_optimizer_ends_with_the_virtual_engine_s_weights(two: Processes) -> None:
    """Optimizers with averages are scored with the averages."""
    cases = [
        Case("matrices" if name == "muon" else "mlp", (3,), (1, 1), optimizer=named(name), segments=(4, 3))
        for name in OPTIMIZERS
    ]
    cases += [Case("skip", (), (2,), {"depth": 1}, optimizer=named(name)) for name in ("lars", "lamb", "asgd")]
    found = two.run("tests.distributed.cases:all_distributed", cases)
    for case, outcomes in zip(cases, zip(*found, strict=True), strict=True):
        check(case, list(outcomes))


def test_minibatches_padded_to_their_longest_sample(two: Processes) -> None:
    """Messages of many layouts, the largest of which aren't the first."""
    cases = [
        Case("reader", (start,), (1, 1), columns, segments=(13, 4), shares_memory=shares)
        for start, columns in ((4, {}), (9, {"weights": "one", "order": "all-forwards", "microbatches": 3}))
        for shares in (True, False)
    ]
    cases.append(Case("reader", (), (2,), {"weights": "one", "depth": 1, "shard": "parameters"}))
    # A loss that is a mean over labels, of which some microbatches have none.
    flushed = {"weights": "one", "microbatches": 4}
    cases += [
        Case("tagger", starts, (2,) if not starts else (1, 1), flushed, segments=(13, 4)) for starts in ((), (9,))
    ]
    found = two.run("tests.distributed.cases:all_distributed", cases)
    for case, outcomes in zip(cases, zip(*found, strict=True), strict=True):
        check(case, list(outcomes))


def test_sharded_replicas_exchange_by_sockets_too(two: Processes) -> None:
    case = replace(TWO["fsdp"], shares_memory=False)
    check(case, two.run("tests.distributed.cases:distributed", case))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", THREE)
def test_three_processes_end_with_the_virtual_engine_s_weights(three: Processes, name: str) -> None:
    check(THREE[name], three.run("tests.distributed.cases:distributed", THREE[name]))


@pytest.mark.parametrize("name", THREE_REPLICAS)
def test_three_replicas_agree_to_float_tolerance(three: Processes, name: str) -> None:
    """A ring adds three summands in another order."""
    check(THREE_REPLICAS[name], three.run("tests.distributed.cases:distributed", THREE_REPLICAS[name]), 1e-5)


@pytest.mark.parametrize("name", ["2-1", "three stages"])
def test_a_run_repeated_has_the_same_bits(three: Processes, name: str) -> None:
    first, second = (three.run("tests.distributed.cases:distributed", THREE[name]) for _ in range(2))
    for mine, theirs in zip(first, second, strict=True):
        (ours,), (others,) = mine.tensors, theirs.tensors
        assert all(torch.equal(tensor, others[key]) for key, tensor in ours.items())
        assert mine.losses == theirs.losses


@pytest.mark.parametrize("num_workers", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_random_plans_neither_hang_nor_differ(request: pytest.FixtureRequest, num_workers: int) -> None:
    """Models, cuts, replicas, modes, depths, microbatches, drains and placements, drawn."""
    processes: Processes = request.getfixturevalue({2: "two", 3: "three", 4: "four"}[num_workers])
    cases = [random_case(seed, num_workers) for seed in range(6)]
    found = processes.run("tests.distributed.cases:all_distributed", cases)
    for case, outcomes in zip(cases, zip(*found, strict=True), strict=True):
        try:
            check(case, list(outcomes))
        except AssertionError as error:
            raise AssertionError(str(case)) from error
