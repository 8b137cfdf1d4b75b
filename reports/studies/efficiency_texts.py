"""Texts of the page on statistical efficiency; `statistical_efficiency.py` makes its tables."""

HEAD = """# Statistical efficiency

How many epochs does it take to a target when gradients are late, wrong, predicted, corrected, or of larger
minibatches? `nox -s efficiency` makes this page and its pictures from `reports/kept/`, which other pages read, too,
after training what isn't there yet: real training with exact weight versions on the virtual engine; the clock is that
of four V100s of Cluster-A, computed. The recipes are those of `recipes/steep/`, which differ in the way of
parallelising only (and, for LARS, in the optimizer).

Both tasks are made so that the target lies on the steep part of the curve, which is evaluated every half epoch.
**vgg16**: the narrow VGG-16 with BatchNorm on 2,000 real digits. **gnmt8**: all eight layers, 64 wide, on 3,000 number
words of five digits (English to German); the target is a BLEU on characters that training passes on its way to 100.
Minibatches of 32; straight plans of four stages; five seeds, of which tables have the median and the range.

## Rates

No mode has a rate of its own. The rate is the one of four with which *one worker* needs the fewest epochs (seed 0);
updates of n minibatches take n times that with SGD (`lr_scaling: linear`, Goyal et al. 2017) and root n times that
with Adam (`sqrt`): `dp`, `pipedream-2bw` and large minibatches alike. LARS's is on another scale and was chosen by the
same rule. One epoch of warm-up everywhere, and constant from then on. The table is of version 0.1.0; the runs with the
rates chosen have come out the same since, on the same processor.
"""
SAID = """
## What the papers say

| way | said | where |
| --- | --- | --- |
| weight stashing | about as many epochs as BSP | PipeDream (SOSP'19), section 5.2 and figure 11 |
| vertical sync | hardly any effect, so it is off by default | PipeDream, 2018 preprint |
| no stashing | no gradient of the loss for any weights, which can prevent convergence; doesn't reach the accuracy \
of data parallelism | SOSP'19, section 3.3; 2018 preprint |
| ASP | fewer stalls, more epochs; VGG-16 on four servers of Cluster-B took 7.4 times PipeDream's time to 48% | 2018 \
preprint; SOSP'19, section 5.2 |
| large minibatches, LARS | VGG-16 on 8 GPUs of Cluster-C: 1,024 is the fastest, 4,096 and 8,192 miss the target; \
PipeDream is more than 2.4 times as fast to it | SOSP'19, section 5.2 and figure 13 |
| 2BW | similar final accuracy | Narayanan et al. (ICML'21), abstract |
| SpecTrain | staleness costs stability and accuracy; with prediction accuracy is comparable | Chen et al. (2018), \
abstract |
| XPipe | accuracy very comparable to the synchronous counterpart's, or slightly better | Guan et al. (2019), abstract |
| PipeMare | similar model quality to synchronous pipelines | Yang et al. (MLSys'21), abstract |

The papers' models are larger, and trained for long to a final accuracy; here is a short way to a target.
"""
NOTES = """## What it says

- **Stashing is as good as BSP here**, as the papers say: fewer epochs than `dp` on vgg16 and about as many on gnmt8,
  where {gnmt8[dp].missed} seeds of `dp` missed. On gnmt8 both take twice as many as one worker: that is what
  late gradients cost at one worker's best rate, and four times the samples per update at the rate scaled from it.
- **Vertical sync is far from negligible here**: {vgg16[vertical-sync].missed} seeds missed vgg16's target within 16
  epochs, and the median is {vgg16[vertical-sync].over_stashing} stashing's; {gnmt8[vertical-sync].missed} missed
  gnmt8's within eight. With it every stage is three updates late, without it only the first is. A smaller rate would
  leave late gradients more room; nothing here contradicts an effect that is small there.
- **Not stashing costs little here**: {vgg16[no-stashing].over_stashing} stashing's epochs on vgg16 and
  {gnmt8[no-stashing].over_stashing} on gnmt8, but on another processor, on which one worker needs fewer, too; some 40%
  more on vgg16 by version 0.1.0's three seeds. A backward that meets weights up to three updates newer is wrong, but so
  few updates change little. The papers' warning is about where training ends, which these runs don't see.
- **2BW misses both targets**: its rate is scaled like `dp`'s, which reaches them at as many samples per update, but its
  gradients are one such update late, and that is more than the scaled rate bears.
- **ASP needs one and a half times `dp`'s epochs on vgg16 and misses on gnmt8**, which agrees with "fewer stalls, more
  epochs"; it is about as late as vertical sync, and about as good.
- **Predicting weights works**: SpecTrain and XPipe need the fewest epochs of all modes with four workers, on both
  models, on vgg16 no more than one worker does; two seeds of SpecTrain took up to twice as long on gnmt8. XPipe's four
  microbatches cost virtual time, since so narrow a network spends its time on launching kernels, and let BatchNorm see
  eight samples.
- **PipeMare** stashes nothing and is close to stashing: better on gnmt8, a third more epochs on vgg16.
- **Large minibatches** (vgg16, 512 samples: four updates per epoch) miss the target within 16 epochs, with LARS as
  without: the rates that the rules give are too large or the updates too few. LARS gets further, to 0.72 at best and
  0.53 without, medians of five seeds.

## How to read it

Two tasks, four stages, five seeds, half an epoch between evaluations: differences below an epoch mean little, and
BatchNorm lets accuracy jump from one evaluation to the next. The rate is one worker's best, by one seed, which is hard
on whatever is late: the page says how much room a method leaves, not how good it could be made. Time is virtual, of
V100s that are hardly busy with such narrow networks. Every evaluation drains the pipeline, after which recurrences
start over; that spares late gradients a little. Epochs are medians of all seeds, with their range, where a seed that
missed took infinitely many; a mode of which most missed has no ratio. *best* is the median of the seeds' best values;
*misses in full* counts all epochs of a seed that missed, which is the least that it needs.

Some of the set-up was chosen with results in view, of one worker or of some modes: vgg16's target and the half epochs
between evaluations after two of the rates had been tried at a target of 0.90; a fourth rate in each grid, so that the
best one lies inside; and the epochs after which a run is given up, which were 20 and 12 at first and are 16 and 8. Runs
that were there by then are cut off at that; the two rates of LARS that missed lack their evaluation after epoch 16.
"""
OTHER = """## On another processor

The same recipes and seeds with the same versions of torch and numpy on another processor, {processor}, by tree
{tree}. Of {twice} of these runs that tree {agrees} made there, too, which most kept results are of, {equal}
have every value of the curve in common. So it is the processor's rounding that changes epochs, not what changed between
the trees; and a processor changes a run as another seed does. Rows of two processors differ by that, too:
`vertical-sync` and `no-stashing` are of another than the other rows. Of these two there are also runs of version
0.1.0, which named no processor; those of one worker, which the table of rates has, came out again on the processor of
the other rows.
"""
