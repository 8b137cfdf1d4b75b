"""Print the analytic profile beside measured ones: `python -m reports.studies.analytic_profile`.

It needs the PipeDream artifact's two V100 profiles in `../shared/profiles`. The output is `analytic_profile.md`.
"""

import statistics
from collections.abc import Callable, Sequence

from pipebench.profile.devices import DEVICES
from pipebench.profile.efficiencies import LAUNCH_S, SHIPPED, Efficiencies
from reports.studies.markdown import table
from tests.profile.judging import (
    FILE_WORDS,
    FITTED_ON,
    NOT_FITTED,
    SENTENCES,
    V100,
    V100_SXM2,
    Judged,
    Rate,
    fitted,
    gnmt,
    mean_words,
    rank_correlation,
    ratio,
    rejoined,
    vgg,
    without_swapped,
)

HEAD = """# The analytic profile against measured ones

`python -m reports.studies.analytic_profile` makes this page.
Times are milliseconds of forward plus backward, ratios are
computed over measured. Measured: the two V100 profiles of the PipeDream artifact (fp32): VGG-16 with 128 images, GNMT
with 8 LSTM layers and 32 sentences. Left out: VGG-16's `Input` row, 18 ms of loading; rows that the artifact doesn't
time (functions such as add and concatenation, the loss), on both sides.
"""

NOT_FITTED_TEXT = """Nothing is fitted on these. NVIDIA's rate for the V100 is of 2021, with a much newer cuDNN than the
P100's and the profiles'. TensorFlow's AlexNet isn't torchvision's. The K80s of a cloud run nearer to their base clock,
2.8 Tflop/s, than to the boost clock of the catalogue.
"""
RECURRENT_TEXT = """
Recurrent products by themselves: an nvprof listing of an LSTM 650 wide on a V100 (apache/mxnet issue 14725; 32
sentences by the script's default, as remembered) has 29 us for the forward's product of one step and 69 us for the
backward's. Computed: 20 and 27 us. With few rows these products may be slower than their tiles say, and GNMT's
sentences shorter than derived above.
"""


def main() -> None:
    """Print the page."""
    words = mean_words()
    measured_vgg, file_gnmt, mean_gnmt = vgg(), gnmt(FILE_WORDS), gnmt(words)
    print(HEAD)
    print(_constants())
    print(_totals(measured_vgg, file_gnmt, mean_gnmt, words))
    print(_both_ways(words))
    print(_lengths(file_gnmt, words))
    print(_looks_wrong(measured_vgg, file_gnmt))
    print(_rates())
    print(RECURRENT_TEXT)
    print("\n## Layer by layer: VGG-16\n")
    print(_layers(measured_vgg))
    print(f"\n## Layer by layer: GNMT with {words} source words\n")
    print(_layers(mean_gnmt))


def _constants() -> str:
    return f"""## Constants

Products {SHIPPED.product:g} of the peak (published), convolutions {SHIPPED.convolution:g} (fitted on published training
rates on another card), memory {SHIPPED.memory:g} (published), {LAUNCH_S * 1e6:g} us per kernel and
{SHIPPED.library_launch_s * 1e6:g} us inside cuDNN's recurrent layers (assumed). `pipebench/profile/efficiencies.py`
names each source. The rule: a published figure where there is one, otherwise a fit on published figures; never a fit on
the profiles below. What is counted (tiles, Winograd, cuDNN's steps) was chosen with both profiles in sight, though.
"""


def _totals(measured_vgg: list[Judged], file_gnmt: list[Judged], mean_gnmt: list[Judged], words: int) -> str:
    rows = []
    for name, layers in (
        ("VGG-16", measured_vgg),
        (f"GNMT, {words} source words (mean, see below)", mean_gnmt),
        (f"GNMT, {FILE_WORDS} source words (the file's sizes)", file_gnmt),
    ):
        total = sum(layer.computed for layer in layers), sum(layer.measured for layer in layers)
        rows.append(
            (
                *(name, f"{total[0]:.1f}", f"{total[1]:.1f}", f"{ratio(layers):.3f}"),
                *(f"{rank_correlation(each):.3f}" for each in (layers, rejoined(layers), without_swapped(layers))),
            )
        )
    head = ("profile", "computed", "measured", "ratio", "all rows", "mixed-up rows as one", "without them")
    note = """
The last three columns are Spearman's rank correlation over the layers, weighted by measured time. VGG-16's total is
better than its rows: the first two convolutions are computed too fast and the deep ones too slow, see below.
"""
    return "## Totals, with the shipped constants\n\n" + table(head, rows) + "\n" + note


def _both_ways(words: int) -> str:
    def gnmt_at(length: int) -> Callable[[Efficiencies], list[Judged]]:
        return lambda efficiencies: gnmt(length, efficiencies)

    cases = (
        ("VGG-16", vgg, f"GNMT, {words} words", gnmt_at(words)),
        (f"GNMT, {words} words", gnmt_at(words), "VGG-16", vgg),
        ("VGG-16", vgg, f"GNMT, {FILE_WORDS} words", gnmt_at(FILE_WORDS)),
        (f"GNMT, {FILE_WORDS} words", gnmt_at(FILE_WORDS), "VGG-16", vgg),
    )
    rows = []
    for fitted_on, fit, judged_on, judge in cases:
        factor, efficiencies = fitted(fit)
        judged = judge(efficiencies)
        rows.append(
            (fitted_on, f"{factor:.3f}", judged_on, f"{ratio(judged):.3f}", f"{rank_correlation(rejoined(judged)):.3f}")
        )
    head = ("fitted on", "factor", "judged on", "ratio", "rank correlation, mixed-up rows as one")
    return (
        "## Fitted on one, judged on the other\n\n"
        "One factor on the efficiencies of products and convolutions, such that the total of one profile is met.\n\n"
        + table(head, rows)
        + "\n"
    )


def _lengths(file_gnmt: list[Judged], words: int) -> str:
    classifier, wide, narrow = (
        next(layer for layer in file_gnmt if layer.name == name) for name in ("classifier", "encoder_0", "encoder_1")
    )
    logits = 2 * (FILE_WORDS - 1) * SENTENCES * 1024 * 32320
    inputs = 2 * FILE_WORDS * SENTENCES * 1024 * 4096  # 1024 inputs more make 4096 gates
    rates = (
        logits / classifier.measured_forward,
        inputs / (wide.measured_forward - narrow.measured_forward),
        2 * inputs / (wide.measured_backward - narrow.measured_backward),
    )
    lengths = (28, 30, 32, 34, 36, 38, 40, 44, 48)
    ratios = table(("source words", *map(str, lengths)), [("ratio", *(f"{ratio(gnmt(n)):.3f}" for n in lengths))])
    return f"""## How long GNMT's sentences were

The file's sizes say {FILE_WORDS} source and {FILE_WORDS - 1} target words. Its times don't belong to them: the
artifact's trainer takes the sizes from the first minibatch and averages the times over 101 minibatches of whatever
length (`profiler/translation/seq2seq/train/trainer.py` of the artifact). At the file's sizes the classifier's forward
would run at {rates[0] / 1e9:.1f} Tflop/s, and the difference between the LSTMs with 2048 and 1024 inputs, one product,
at {rates[1] / 1e9:.1f} forward and {rates[2] / 1e9:.1f} backward; the card's peak is {V100.flops_per_s / 1e12:g} (PCIe)
or {V100_SXM2.flops_per_s / 1e12:g} (SXM2).

So the mean length is derived: the number of words at which the classifier's forward, one large product, takes its
measured time at the published efficiency: {words}, and one less in the target. That uses one row,
{classifier.measured_forward:.1f} of {sum(x.measured for x in file_gnmt):.1f} ms. How the ratio depends on it:

{ratios}
"""


def _looks_wrong(measured_vgg: list[Judged], file_gnmt: list[Judged]) -> str:
    g = {layer.name: layer for layer in file_gnmt}
    v = {layer.name: layer for layer in measured_vgg}
    surplus = g["decoder_2"].measured_backward - g["decoder_1"].measured_backward
    pairs = "\n".join(
        f"- VGG-16, {a} and {b}, equal work: forward {v[a].measured_forward} and {v[b].measured_forward} ms, backward\n"
        f"  {v[a].measured_backward} and {v[b].measured_backward} ms."
        for a, b in (("features_12", "features_14"), ("features_19", "features_21"))
    )
    shift = (surplus + g["classifier"].measured_backward) / g["classifier"].measured_forward
    return f"""## Rows of the measured profiles that look wrong

- GNMT, bidirectional LSTM: backward {g["bidirectional"].measured_backward} ms, forward
  {g["bidirectional"].measured_forward} ms. The embedding before it: backward {g["source_embedder"].measured_backward}
  ms, the decoder's equal one {g["target_embedder"].measured_backward} ms. The LSTM's backward is booked on it.
- GNMT, last LSTM of the decoder: backward {g["decoder_2"].measured_backward} ms, its equals
  {g["decoder_0"].measured_backward} and {g["decoder_1"].measured_backward} ms. Classifier: backward
  {g["classifier"].measured_backward} ms, although it does the product of the forward's
  {g["classifier"].measured_forward} ms twice. The {surplus:.1f} ms too many and these
  {g["classifier"].measured_backward} ms are {shift:.2f} times its forward: its backward is booked on the LSTM.
- GNMT, all rows: sizes and times are of different minibatches (above).
{pairs}
- VGG-16, first convolution: {v["features_0"].measured_forward} ms forward and {v["features_0"].measured_backward}
  backward for 22 Gflop and 1.7 GB each, computed {v["features_0"].computed_forward:.1f} and
  {v["features_0"].computed_backward:.1f} ms. Either a slow algorithm or not this layer's time; it isn't modelled.
- VGG-16, ReLUs of the classifier: forward {v["classifier_1"].measured_forward} and
  {v["classifier_4"].measured_forward} ms, backward {v["classifier_1"].measured_backward} and
  {v["classifier_4"].measured_backward} ms, for 4 MB: about 0.3 ms of each forward are the profiler's own.
- VGG-16, last layer: nothing wrong; its 16,388,000 bytes of parameters are 4 * (4096 * 1000 + 1000).
"""


def _rates() -> str:
    def row(rate: Rate) -> tuple[object, ...]:
        computed = rate.computed()
        return (
            *(rate.model, rate.device.name, rate.batch, rate.published),
            *(f"{computed:.0f}", f"{computed / rate.published:.2f}"),
        )

    head = ("model", "device", "batch", "published samples/s", "computed", "computed / published")
    mean = statistics.geometric_mean(rate.computed() / rate.published for rate in FITTED_ON)
    others = (
        (name, rate.make, batch, rate.side)
        for name, batches, rate in (
            ("ResNet-50", (64, 128), NOT_FITTED[0]),
            ("AlexNet", (256,), NOT_FITTED[1]),
            ("Inception-v3", (64,), FITTED_ON[0]),
        )
        for batch in batches
    )
    totals = []
    for name, make, batch, side in others:
        computed = Rate(name, make, DEVICES["V100"], batch, 1.0, side).computed()
        totals.append((name, batch, f"{batch / computed * 1e3:.1f}", f"{computed:.0f}"))
    return (
        "## Published training rates\n\nA rate above the published one means computed too fast. The published ones "
        "include the update.\n\n"
        f"The convolutions' efficiency is fitted on these (geometric mean {mean:.3f}):\n\n"
        + table(head, map(row, FITTED_ON))
        + "\n\n"
        + NOT_FITTED_TEXT
        + "\n"
        + table(head, map(row, NOT_FITTED))
        + "\n\nWhat the catalogue's V100 (PCIe) is computed to take:\n\n"
        + table(("model", "batch", "ms", "samples/s"), totals)
    )


def _layers(layers: Sequence[Judged]) -> str:
    def cell(computed: float, measured: float) -> str:
        return f"{computed:.2f} / {measured:.2f}"

    rows = [
        (
            *(layer.name, layer.kind, cell(layer.computed_forward, layer.measured_forward)),
            *(cell(layer.computed_backward, layer.measured_backward), cell(layer.computed, layer.measured)),
        )
        for layer in layers
    ]
    head = ("layer", "kind", "forward, computed / measured", "backward", "both")
    return table(head, rows)


if __name__ == "__main__":
    main()
