"""The recipe's schema: every key, its type, its default and what it means.

The dataclasses are the frozen values that the rest of pipebench reads once a recipe is loaded. What types can't express
is in `ranges.py` and the rules.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from omegaconf import MISSING

from pipebench.schedule.modes import MODES, RECOMPUTE, SWAP, Mode
from pipebench.schedule.syncs import NOT_SHARDED

# Of the table of modes: what the recipe of any mode may change.
COLUMNS = (
    "order", "flush", "weights", "sync", "chunks", "recompute", "backward", "sums", "shard", "reshard_after_forward",
)  # fmt: skip
LARGEST = "largest"  # minibatches per update: as many as fit in memory


@dataclass(frozen=True)
class OptimizerRecipe:
    """How a stage's parameters are updated."""

    # A class of torch.optim in snake or class form (`sgd`, `adamw`, `rmsprop`, `asgd`), `lars` or `lamb`; null with a
    # target
    name: str | None = "sgd"
    lr: float = MISSING  # learning rate of the input stage
    # This and the next three are arguments of the class or target, its own default unless given
    momentum: float | None = None
    # See there: most add an L2 penalty to the gradient, adamw shrinks the weights instead
    weight_decay: float | None = None
    betas: list[float] | None = None  # two decay rates of averages
    eps: float | None = None  # added to a divisor
    # `replicas` scales a stage's rate by its samples per update over the input stage's (the PipeDream artifact's rule);
    # `none` gives every stage the same rate; `linear` and `sqrt` scale it by its samples per update over
    # `minibatch_size`, or by the root of that
    lr_scaling: str = "replicas"
    # Largest gradient norm; null for no clipping. Exact in flushing modes; per stage otherwise
    clip_norm: float | None = None
    # Instead of a name, `package.module:function`: a class or a function that makes an optimizer of a list of
    # parameters and `lr`
    target: str | None = None
    # What else the class or target takes; written beside the other keys
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PeriodRecipe:
    """A period: so many epochs or so many minibatches, one of the two."""

    epochs: int | None = None  # so many passes over the training data
    minibatches: int | None = None  # so many minibatches


@dataclass(frozen=True)
class ScheduleRecipe:
    """How the learning rate changes with the samples seen."""

    # `constant`, `step` (times `factor` every `every_epochs`), `cosine` or `polynomial` (both to zero at `max_epochs`;
    # the latter as the `power` of what is left of them, the PipeDream artifact's with 2), or a class of
    # torch.optim.lr_scheduler in snake or class form (`step_lr`, `OneCycleLR`); null with a target
    name: str | None = "constant"
    every_epochs: float | None = None  # step only
    factor: float | None = None  # step only; this and the next are arguments of classes and targets, too
    power: float | None = None  # polynomial only
    # How often a class of torch's is stepped, by samples seen; null for the others, which have no steps
    step_every: PeriodRecipe | None = None
    warmup_epochs: float = 0.0  # the rate grows linearly over so many epochs first
    # Instead of a name, `package.module:function`: a function that maps the fraction of all training samples that were
    # seen, from 0 to below 1, to a factor of the rate
    target: str | None = None
    # What else the class or target takes; written beside the other keys
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetRecipe:
    """The accuracy that ends the run."""

    metric: str = MISSING  # of the data set: `top1`, `bleu`, `perplexity`, ...
    value: float = MISSING  # what it has to reach, in the metric's own scale: shares are fractions, never per cent


@dataclass(frozen=True)
class LossScaleRecipe:
    """Dynamic loss scaling (fp16); the defaults are torch.amp.GradScaler's."""

    initial: float = 65536.0  # the scale to begin with
    # What the scale is multiplied by after `growth_interval` updates in a row with finite gradients
    growth: float = 2.0
    # What it is multiplied by after an update that was skipped, since its gradients were not finite
    backoff: float = 0.5
    growth_interval: int = 2000  # see `growth`


@dataclass(frozen=True)
class TrainRecipe:
    """What is trained, until when."""

    seed: int = 0  # everything random derives from it
    minibatch_size: int = MISSING  # samples that travel together, per replica (the papers' per-GPU G)
    # Text only: minibatch k continues minibatch k - streams. A multiple of every stage's replicas, so that the replica
    # that carries a stream's state on is always the same one; null: 1 for text
    streams: int | None = None
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    target: TargetRecipe | None = None  # null trains for throughput only, until `max_epochs`
    # `fp32` (the types that the model has), or mixed: `bf16` or `fp16` for arithmetic, links and weight versions,
    # beside fp32 masters. See docs/precision.md
    precision: str = "fp32"
    loss_scale: LossScaleRecipe | None = None  # fp16 only; null: the defaults
    max_epochs: int = MISSING  # the run ends after so many, target reached or not
    # The pipeline drains before every evaluation; there is always one at the end
    evaluate_every: PeriodRecipe = field(default_factory=lambda: PeriodRecipe(epochs=1))
    # The pipeline drains before every checkpoint, too. There is one where an evaluation is the best so far, and at the
    # end, anyway. Null: processes write one after every evaluation, the virtual engine where the last is older than
    # ten minutes
    checkpoint_every: PeriodRecipe | None = None
    # How many checkpoints stay, the newest, beside that of the best evaluation; 0: none once the run has ended, and
    # none at all where no process needs them
    checkpoint_keep: int = 2


@dataclass(frozen=True)
class ClusterRecipe:
    """Which cluster, how many components of its outermost level (servers), and numbers in place of its file's."""

    name: str = MISSING  # of `pipebench ls clusters`, or the path of a cluster's file
    servers: int = 1  # multiplies the outermost level
    count: int | None = None  # devices in a component of the innermost level, such as GPUs per server
    # Of the outermost level that joins several components, such as `1 Gbit/s`; its other limits stay
    bandwidth: Any = None
    latency: Any = None  # of the same level, such as `50 us`
    memory: Any = None  # of a device, such as `16 GB`

    @property
    def changes(self) -> dict[str, Any]:
        """The keys in place of the file's, for `load_cluster`."""
        given = {name: getattr(self, name) for name in ("count", "bandwidth", "latency", "memory")}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class VpipeRecipe:
    """vPipe: what is decided layer by layer, and what changes about a plan while training goes on."""

    # Whether a layer's activations may be on the host between forward and backward. With this or the next, every stage
    # chooses what its layers do so that it fits in memory, in as few seconds as that takes; a plan's file says itself
    # what they do
    swap: bool = True
    recompute: bool = True  # whether they may be computed again for the backward
    # Whether stages are measured, and layers move to balance them (Algorithm 1); not where `moves` are given
    repartition: bool = True
    # Whether layers move while minibatches are in flight; false empties the pipeline first, and fills it again
    live: bool = True
    # Cuts that are decided beforehand: a list of `{at: {minibatches: 24}, cuts: [layer, ...]}`, the first layer of
    # every stage but the first; or the artifact `moves.json` of another run
    moves: Any = None

    @property
    def policies(self) -> tuple[str, ...]:
        """What may be done with a layer's activations, beside keeping them; nothing leaves that to the mode."""
        return (*((SWAP,) if self.swap else ()), *((RECOMPUTE,) if self.recompute else ()))

    @property
    def balances(self) -> bool:
        """Whether layers move to where measurements say."""
        return self.repartition and not self.moves


@dataclass(frozen=True)
class ParallelismRecipe:
    """The parallelism mode, and the columns of the table of modes where they differ from the mode's own."""

    # A row of `pipebench/schedule/modes.py`, or `auto`: the one that the planner predicts to be fastest
    mode: str = MISSING
    # `auto` (the planner's), `straight`, replicas per stage the papers' way: `15-1`, `2-1-1`, `16`, or a file that
    # `pipebench plan --out` wrote: `plan.json`
    plan: Any = "auto"
    # First layer of every stage but the first, in order of execution; where workers have several stages (`chunks`), of
    # all of them: 7 for `1-1-1-1` with 2 each. Null cuts where the cost model says
    cuts: list[str] | None = None
    cost_model: str = "overlap"  # what the planner minimises: `overlap`, `sosp19` or `artifact`
    # Minibatches in flight per input-stage replica; `auto` is NOAM, and with `plan: auto` one more where that is
    # faster, or less where it wouldn't fit
    depth: Any = "auto"
    # Microbatches per minibatch (modes that cut one); by default as many as there are stages, or fewer that divide a
    # minibatch, and 1 with `accumulate` above 1
    microbatches: int = 1
    # Whole minibatches of every replica per update; `largest`: as many as a device's memory holds, where all of them
    # are kept until the first backward; null: the mode's own, 1, or as many as are in flight
    accumulate: Any = None
    # Drop activations after the forward and compute them again for the backward; null: the mode's own, or with `plan:
    # auto` in pipelines, where memory binds, what the planner chooses
    recompute: bool | None = None
    # Do so for these layers only, by name or pattern such as `encoder_*`; as `pipebench profile` lists them. Open cuts
    # are made for what layers take then. A plan's file says it layer by layer
    recompute_layers: list[str] | None = None
    # Keep activations of these layers on the host between forward and backward, named likewise; what else there is goes
    # by `recompute` and `recompute_layers`
    swap_layers: list[str] | None = None
    # `all-forwards`, `1f1b`, `interleaved`, `zero-bubble`, `zbv`, `dualpipe`, `dualpipev`, `sequential` (zero1, zero2,
    # fsdp), or a file in the CSV form of torch.distributed.pipelining: `schedule.csv`. Null: the mode's own, as in the
    # other columns below
    order: str | None = None
    flush: bool | None = None  # whether every update empties the pipeline
    # `one`, `stash`, `stash-vertical-sync`, `double-buffer`, `predict`, `correct`, `newest-pulled` or `none`
    weights: str | None = None
    # How replicas agree: `all-reduce`, `parameter-server`, either with `-after` (once a backward is over), or
    # `asynchronous`
    sync: str | None = None
    # The artifact `push-order.json` of another run, to repeat its order; sync `asynchronous` only
    push_order: str | None = None
    # In which order replicas' gradients are added: `ring`, or `ordered`, that of the replicas, whatever their number:
    # the same bits in one process and in many
    sums: str | None = None
    # What replicas of a stage share out instead of each holding all of it: `none`, `optimizer` (its state), `gradients`
    # (those, too) or `parameters` (those, too); null: the mode's own; with `plan: auto`,
    # where memory binds, the planner may choose `optimizer` instead
    shard: str | None = None
    # Shard `parameters` only: whether they are freed between forward and backward
    reshard_after_forward: bool | None = None
    # Stages per worker: any number in orders `interleaved` and `all-forwards`, 2 in `zbv`, `dualpipe` and `dualpipev`,
    # in an order file as many as its rows have, else 1. In modes zero1, zero2 and fsdp: groups of layers, at most
    chunks: int | None = None
    # `whole`, or `split`: gradients of the input leave a stage before those of its weights are computed
    backward: str | None = None
    # Weights `correct` only: epochs over which late stages' learning rates grow to the recipe's, PipeMare's K; null:
    # five warm-ups, or a quarter of the time until the rate first falls
    annealing_epochs: float | None = None
    correction_decay: float | None = None  # weights `correct` only: PipeMare's D; null: 0.135
    # Neighbouring devices among which every worker's layers are divided (Megatron's slices); `auto`, with `mode: auto`:
    # as many as is fastest
    tensor: Any = 1
    # Let what skips stages go through all of those between, as the PipeDream artifact does; else it goes to the stages
    # that read it. In simulations only
    relay: bool = False
    # Null: layers do with their activations what the mode and the keys above say, and stages stay as they are
    vpipe: VpipeRecipe | None = None

    @property
    def accumulate_given(self) -> int | None:
        """The number of `accumulate`, where there is one: the largest that fits is known of whole plans only."""
        return None if self.accumulate is None or self.accumulate == LARGEST else int(self.accumulate)

    @property
    def row(self) -> Mode:
        """The mode's row of the table, with the columns that the recipe changes; there is none of `auto`."""
        columns = {name: getattr(self, name) for name in COLUMNS} | {"accumulate": self.accumulate_given}
        if self.recompute_layers is not None or (self.vpipe is not None and self.vpipe.policies):
            columns["recompute"] = False  # not all of them
        row = MODES[self.mode]
        if row.shape == "one-stage" and row.flush and self.shard not in (None, row.shard, NOT_SHARDED):
            row = next(each for each in MODES.values() if each.shard == self.shard)
        if row.is_sharded and row.shape == "one-stage" and self.cuts is not None and self.chunks is None:
            columns["chunks"] = len(self.cuts) + 1
        return replace(row, **{name: value for name, value in columns.items() if value is not None})


@dataclass(frozen=True)
class EngineRecipe:
    """What plays the schedule."""

    # `virtual` (real arithmetic on a virtual clock), `simulated` (durations only, no training) or `distributed` (a
    # process per worker, on the wall clock)
    kind: str = "virtual"
    device: str = "auto"  # `auto`, `cpu` or `cuda`: where arithmetic happens
    threads: Any = "auto"  # `auto`, as many as it may use cores, or torch's number of threads
    # `auto` (measured on cluster `local`, analytic elsewhere), `measured`, `anew` (measured, whatever the cache has),
    # `analytic` or a profile file
    timing: str = "auto"
    deterministic: bool = True  # deterministic kernels only
    tf32: bool = False  # allow TF32 on GPUs that have it
    compile: bool = False  # compile every stage's layers, forward and backward, with torch.compile
    channels_last: bool = False  # lay images and the weights of convolutions out channels last (NHWC)
    max_restarts: int = 3  # distributed only: how often all processes start again after one has died
    stall_limit_s: float = 300.0  # distributed only: seconds after which a worker that doesn't get on ends the run
    # Distributed over several hosts only: seconds without any sign of life of a worker, after which the run ends
    silence_limit_s: float = 30.0
    join_limit_s: float = 120.0  # distributed only: seconds to wait for all processes at the start


@dataclass(frozen=True)
class Recipe:
    """One question: this model, this data, this cluster, this way of parallelising."""

    name: str = MISSING  # names the run; letters, digits, `.`, `_`, `-`
    # `name` (of the zoo) or `target` (`package.module:function`), `leaves` (modules not traced into), and the model's
    # own options; or `profile`, a file with the costs of a model that isn't here
    model: dict[str, Any] = MISSING
    # `name`, `root` and `loader_processes` where the dataset takes them, and its own options; or `target`
    # (`package.module:function`) and the function's own options, and where it returns a pair of torch's data sets
    # `loss`, `metrics`, `inputs`, `targets` (which fields of a sample are the model's, and the loss's) and
    # `loader_processes`
    dataset: dict[str, Any] = MISSING
    train: TrainRecipe = field(default_factory=TrainRecipe)
    cluster: ClusterRecipe = field(default_factory=ClusterRecipe)
    parallelism: ParallelismRecipe = field(default_factory=ParallelismRecipe)
    engine: EngineRecipe = field(default_factory=EngineRecipe)
    # Where runs are recorded: `mlflow` always, and curves and results also by `tensorboard` and `wandb`, where these
    # are installed
    tracking: list[Literal["mlflow", "tensorboard", "wandb"]] = field(default_factory=lambda: ["mlflow"])
