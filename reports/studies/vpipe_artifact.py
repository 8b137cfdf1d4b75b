"""Print what vPipe's published code says about Table 3: `python -m reports.studies.vpipe_artifact`.

The output is `vpipe_artifact.md`: the README's hours beside the table's times and beside simulated rates, and the work
that the code recomputes beside the table's utilisation. Nothing is fitted; simulated values are read from rendered
pages.
"""

import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence

from pipebench.profile.devices import device_of
from pipebench.profile.model import LayerProfile
from pipebench.recipe.load import load
from pipebench.report.catalog import reports_folder
from pipebench.report.values import VALUES, read_values
from reports.studies.markdown import table
from reports.studies.planned_models import recipe_rows
from reports.studies.vpipe_memory import COLUMN, NUM_DEVICES, Table

# From the README of github.com/hku-systems/vpipe: hours of an epoch of BERT on the 8 devices of Table 3.
HOURS: Mapping[str, float] = {"gpipe": 1.72, "pipedream-vpipe": 1.28, "pipedream": 2.14}
# From its runtime/configs/bert_8*.yml: samples of a minibatch.
SIZES: Mapping[str, int] = {"gpipe": 16, "pipedream-vpipe": 16, "pipedream": 4}
# From its runtime/bert/main_with_runtime.py and configs: updates of the whole schedule, epochs, minibatches per update.
UPDATES, EPOCHS, ACCUMULATED = 36_320, 40, 32
# From its runtime/*/vgpus=8/vpipe.json: the share of each stage's operators that is recomputed; nothing is swapped.
AGAIN: Mapping[str, tuple[float, ...]] = {
    "bert": (1, 0.85, 0.8, 0.6, 0.5, 0.2, 0, 0),
    "transformer": (0.9, 0.7, 0.7, 0.6, 0.5, 0.3, 0, 0),
}
BATCHES = {"bert": 16, "transformer": 128}  # Table 3, with vPipe
TITLES = {"gpipe": "GPipe", "pipedream-vpipe": "vPipe", "pipedream": "PipeDream", "bert": "BERT"}
TITLES["transformer"] = "Transformer"

HEAD = """# What vPipe's published code says of Table 3

`python -m reports.studies.vpipe_artifact` makes this page. The code is github.com/hku-systems/vpipe (`runtime/`, as of
f167db65): BERT and the Transformer under each system, and a README with hours of BERT's epoch on the table's 8 devices.
GNMT and AmoebaNet aren't in it. What is simulated is read from [vpipe_table3](rendered/vpipe_table3/report.md) and
[vpipe_figure9](rendered/vpipe_figure9/report.md), from the planner's cuts. Nothing on this page is fitted.
"""
HOURS_TEXT = """
## Hours of an epoch

*Hypothesis:* an epoch is 36,320 updates / 40 epochs x 32 minibatches x 16 samples = 464,896 samples, by the code's own
schedule, the only reading that was tried. *Busy devices* is what 8 devices that never wait would finish at Table 3's
forward and backward.

GPipe's and vPipe's hours agree with Table 3: they are 93 to 95 % of what busy devices do. PipeDream's don't. Its
hours are 1.45 times as fast as 8 devices could be at the table's 0.77 s; and however many samples an epoch has, vPipe
is 1.67 times as fast as PipeDream by the hours, 2.57 times by the table. So either another PipeDream ran, or the 0.77 s
hold a wait that a pipeline doesn't have: at most 0.53 s of them can be what devices need. What
[vpipe_minibatches](vpipe_minibatches.md) calls a constant is then at most some 0.39 s of a minibatch of BERT instead of
0.63 s. No reproduction can meet both published numbers; here it is 1.20.
"""
RATES_TEXT = """
## A test of what utilisation says

*Hypothesis:* by Table 3's utilisation ([vpipe_minibatches](vpipe_minibatches.md)) a roofline of BERT is 1.31 to 1.37
times too fast. That doesn't use the hours. Simulated rates that are slowed by this factor, and for vPipe by what its
code recomputes, should equal the hours':

They are for two of three. So BERT's roofline is a third too fast, in any minibatch; what is left
unexplained is PipeDream's minibatch of 4 alone: one is finished every {stated_ms:.0f} ms by the hours, every
{here_ms:.0f} ms here.
"""
NOT_TEXT = """
## What PipeDream's small minibatches don't wait for

- *Updates and copies of weights.* The code updates after every minibatch under PipeDream and vPipe, and after 32 under
  GPipe; and it copies a stage's weights three times per update. But forward and backward of GPipe with vPipe and of
  PipeDream with vPipe are the same in Table 3 (to {flush:.0%}), so neither is in the times. The hours have them; by the
  memory's peak rate the copies are {copies_ms:.1f} ms per stage and minibatch of BERT.
- *Python.* A stage's forward is text that `exec` compiles again for every minibatch. All 490 lines of BERT take less
  than a tenth of what is missing from its forward, by a test on this project's machines.
- *Messages.* Each goes through the host by Gloo, in a thread of its own, and takes as long per sample in any minibatch.

Not known: whether the hosts' threads hold up each other (Python runs one at a time), and where the times were taken:
the code as published prints none of a forward or a backward.
"""
AGAIN_TEXT = """
## What is recomputed, and what is left for PCIe

Published vPipe recomputes a share of each stage and swaps nothing. Table 3's total over its effective utilisation says
that the system measured there recomputed less than half as much. *Hypothesis:* what it didn't recompute it swapped, out
and in. By the roofline's tensors, and Table 3's times, that keeps PCIe busy for 1.6 to 1.9 of 8 devices' time. Plans
here, which swap only what they must, keep it busy for 0.9 to 1.0; the table has 6.0 and 6.3. So need explains a third
at most. The rest is swapped without need, as Algorithm 2 as printed does: by equation (2) that is 4.9 and 5.3
([vpipe_memory](vpipe_memory.md)).
"""
HOURS_HEAD = ("system", "hours", "samples/s", "busy devices at Table 3's times", "hours / busy devices")
RATES_HEAD = (
    "system", "simulated", "slowed by", "recomputation", "slowed, samples/s", "by the hours", "slowed / by the hours",
)  # fmt: skip
AGAIN_HEAD = (
    "model", "recomputed, code", "recomputed, Table 3", "left to swap", "PCIe busy, of 8 devices", "PCIe, published",
)  # fmt: skip


def samples_per_s(system: str) -> float:
    """Return the throughput of an epoch by the README's hours."""
    return UPDATES / EPOCHS * ACCUMULATED * SIZES["gpipe"] / (3600 * HOURS[system])


def hours_rows(of: Table) -> Iterator[tuple[str, ...]]:
    """Yield a row per system: the README's hours beside Table 3's times."""
    for system, hours in HOURS.items():
        row = f"bert-{system}"
        took_s = of.published(row, "forward") + of.published(row, "backward")
        rate, busy = samples_per_s(system), NUM_DEVICES * SIZES[system] / took_s
        yield TITLES[system], f"{hours:g}", f"{rate:.1f}", f"{busy:.1f}", f"{rate / busy:.2f}"


def slowness(of: Table, row: str) -> float:
    """Return the busy seconds of devices per sample, by Table 3's times and utilisation, over the roofline's."""
    share = of.published(row, "effective") / NUM_DEVICES
    published, roofline = (
        sum(find(row, measure) for measure in ("forward", "backward")) for find in (of.published, of.here)
    )
    return share * published / roofline


def rate_rows(of: Table) -> Iterator[tuple[str, ...]]:
    """Yield a row per system: simulated throughput, slowed as Table 3's utilisation says, beside the README's."""
    values = read_values(reports_folder() / "rendered" / "vpipe_figure9" / VALUES)
    simulated = {each.row: float(each.value) for each in values.cells
                 if (each.column, each.measure) == (COLUMN, "throughput")}  # fmt: skip
    for system in HOURS:
        row = f"bert-{system}"
        slower = slowness(of, "bert-pipedream" if system == "pipedream" else "bert-pipedream-vpipe")
        again = 1 + (work_again(of, "bert") if system == "pipedream-vpipe" else 0.0)
        rate, stated = simulated[row] / slower / again, samples_per_s(system)
        yield (
            TITLES[system], f"{simulated[row]:.0f} samples/s", f"{slower:.2f}", f"{again:.2f}", f"{rate:.1f}",
            f"{stated:.1f}", f"{rate / stated:.2f}",
        )  # fmt: skip


def work_again(of: Table, model: str) -> float:
    """Return the seconds that the code recomputes over those of forward and backward, by Table 3's times."""
    forward, backward = (of.published(f"{model}-pipedream-vpipe", measure) for measure in ("forward", "backward"))
    return statistics.mean(AGAIN[model]) * forward / (forward + backward)


def again_rows(of: Table) -> Iterator[tuple[str, ...]]:
    """Yield a row per model: recomputed work by the code and by Table 3, and PCIe if the difference were swapped."""
    for model in BATCHES:
        row, code = f"{model}-pipedream-vpipe", work_again(of, model)
        published = of.published(row, "total") / of.published(row, "effective") - 1
        left = statistics.mean(AGAIN[model]) * (1 - published / code)
        took_s = of.published(row, "forward") + of.published(row, "backward")
        copies_s = 2 * left * saved_bytes(model) / pcie_bytes_per_s(model)
        yield (
            TITLES[model], f"{code:.1%}", f"{published:.1%}", f"{left:.1%} of the activations",
            f"{copies_s * NUM_DEVICES / took_s:.1f}", f"{of.published(row, 'pcie'):g}",
        )  # fmt: skip


@functools.cache
def rows_of(model: str) -> Sequence[LayerProfile]:
    """Return a model's layers at Table 3's minibatch with vPipe."""
    return recipe_rows(f"vpipe/{model}/pipedream", BATCHES[model])


def saved_bytes(model: str) -> int:
    """Return the bytes that all layers of a model save for their backward of a minibatch."""
    return sum(dict(storage for row in rows_of(model) for storage in row.saved_storages).values())


def pcie_bytes_per_s(model: str) -> float:
    """Return the rate of one direction of a device's PCIe."""
    rate = load(f"vpipe/{model}/pipedream").cluster.pcie_bytes_per_s
    assert rate is not None
    return rate


def copies_ms(model: str) -> float:
    """Return the milliseconds of three copies of a stage's weights, on average, at the memory's peak rate."""
    sizes = {name: num_bytes for row in rows_of(model) for name, num_bytes in row.parameter_sizes.items()}
    device = device_of(load(f"vpipe/{model}/pipedream").cluster)
    return 1e3 * 3 * 2 * sum(sizes.values()) / NUM_DEVICES / device.memory_bytes_per_s


def flush_difference(of: Table) -> float:
    """Return the largest difference between times of GPipe and of PipeDream, both with vPipe."""
    return max(
        abs(of.published(f"{model}-pipedream-vpipe", measure) / of.published(f"{model}-gpipe-vpipe", measure) - 1)
        for model in ("bert", "transformer", "amoebanet", "gnmt")
        for measure in ("forward", "backward")
    )


def main() -> None:
    """Print the page."""
    of = Table()
    print(HEAD)
    print(HOURS_TEXT + "\n" + table(HOURS_HEAD, hours_rows(of)))
    rates = [*rate_rows(of)]
    here, stated = (1e3 * SIZES["pipedream"] / float(rates[-1][index]) for index in (4, 5))
    print(RATES_TEXT.format(stated_ms=stated, here_ms=here) + "\n" + table(RATES_HEAD, rates))
    print(NOT_TEXT.format(flush=flush_difference(of), copies_ms=copies_ms("bert")))
    print(AGAIN_TEXT + "\n" + table(AGAIN_HEAD, again_rows(of)))


if __name__ == "__main__":
    main()
