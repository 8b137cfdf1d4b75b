"""The recipe's schema: every key, its type, its default and its meaning.

Loaded recipes are objects of these dataclasses. What types can't express is in `ranges.py` and the rules. The comments
are the reference of recipe keys in the docs.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from omegaconf import MISSING

from pipebench.schedule.modes import MODES, RECOMPUTE, SWAP, Mode
from pipebench.schedule.syncs import NOT_SHARDED

# Columns of the table of modes that a recipe may change.
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
    # This and the next three are arguments of the class or target, which has its own defaults
    momentum: float | None = None
    # Most optimizers add an L2 penalty to the gradient; adamw shrinks the weights instead
    weight_decay: float | None = None
    betas: list[float] | None = None  # two decay rates of averages
    eps: float | None = None  # added to a divisor
    # `replicas` scales a stage's rate by its samples per update over the input stage's (the PipeDream artifact's rule);
    # `none` gives every stage the same rate; `linear` and `sqrt` scale it by its samples per update over
    # `minibatch_size`, or by the root of that
    lr_scaling: str = "replicas"
    # Largest gradient norm; null for no clipping. The norm is the whole model's in modes that flush, else each stage's
    clip_norm: float | None = None
    # Instead of a name, `package.module:function`: a class or a function that makes an optimizer of a list of
    # parameters and `lr`
    target: str | None = None
    # Other arguments of the class or target; they are written beside the other keys
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PeriodRecipe:
    """A period in epochs or in minibatches; one of the two is given."""

    epochs: int | None = None  # passes over the training data
    minibatches: int | None = None  # minibatches of training data


@dataclass(frozen=True)
class ScheduleRecipe:
    """How the learning rate changes with the samples seen."""

    # `constant`, `step` (times `factor` every `every_epochs`), `cosine` or `polynomial` (both to zero at `max_epochs`;
    # the latter with the remaining fraction of epochs to the `power`, 2 in the PipeDream artifact), or a class of
    # torch.optim.lr_scheduler in snake or class form (`step_lr`, `OneCycleLR`); null with a target
    name: str | None = "constant"
    every_epochs: float | None = None  # with `step`: epochs between two changes of the rate
    factor: float | None = None  # with `step`: factor of the rate; classes and targets may take it, and `power`
    power: float | None = None  # with `polynomial`: the exponent
    # How often a class of torch's is stepped, by samples seen; null for others
    step_every: PeriodRecipe | None = None
    warmup_epochs: float = 0.0  # epochs over which the rate first grows linearly
    # Instead of a name, `package.module:function`: a function that maps the fraction of training samples seen, from 0
    # to below 1, to a factor of the rate
    target: str | None = None
    # Other arguments of the class or target; they are written beside the other keys
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetRecipe:
    """The accuracy that ends the run."""

    metric: str = MISSING  # of the data set: `top1`, `bleu`, `perplexity`, ...
    value: float = MISSING  # the value to reach, on the metric's own scale: shares are fractions, never per cent


@dataclass(frozen=True)
class LossScaleRecipe:
    """Dynamic loss scaling (fp16); the defaults are torch.amp.GradScaler's."""

    initial: float = 65536.0  # the first scale
    # Factor of the scale after `growth_interval` updates in a row with finite gradients
    growth: float = 2.0
    # Factor of the scale after an update that was skipped because its gradients weren't finite
    backoff: float = 0.5
    growth_interval: int = 2000  # see `growth`


@dataclass(frozen=True)
class TrainRecipe:
    """How the model is trained, and until when."""

    seed: int = 0  # seed of all random numbers
    minibatch_size: int = MISSING  # samples that travel together, per replica (the papers' per-GPU G)
    # For text: minibatch k continues minibatch k - streams. A multiple of every stage's number of replicas, so that a
    # stream is always on the same replica, which has its hidden state; null: 1 for text
    streams: int | None = None
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    target: TargetRecipe | None = None  # null trains for throughput only, until `max_epochs`
    # `fp32` (the model's own types), or mixed precision: `bf16` or `fp16` for arithmetic, messages and weight versions,
    # with fp32 master weights. See docs/precision.md
    precision: str = "fp32"
    loss_scale: LossScaleRecipe | None = None  # fp16 only; null: the defaults
    max_epochs: int = MISSING  # epochs after which the run ends, whether the target is reached or not
    # How often the model is evaluated, and always at the end; the pipeline drains before
    evaluate_every: PeriodRecipe = field(default_factory=lambda: PeriodRecipe(epochs=1))
    # How often a checkpoint is written, besides those after the best evaluation so far and at the end; the pipeline
    # drains before. Null: after every evaluation in processes; by the virtual engine, if the last one is older than
    # ten minutes
    checkpoint_every: PeriodRecipe | None = None
    # How many of the newest checkpoints stay, besides that of the best evaluation. 0: none stays after the run; without
    # `checkpoint_every` the virtual engine writes none
    checkpoint_keep: int = 2


@dataclass(frozen=True)
class ClusterRecipe:
    """The cluster, the number of servers (components of its outermost level), and numbers instead of its file's."""

    name: str = MISSING  # from `pipebench ls clusters`, or the path of a cluster's file
    servers: int = 1  # factor of the outermost level's count
    count: int | None = None  # devices in a component of the innermost level, such as GPUs per server
    # Bandwidth of the outermost level that joins several components, such as `1 Gbit/s`; its other limits stay
    bandwidth: Any = None
    latency: Any = None  # latency of the same level, such as `50 us`
    memory: Any = None  # memory of a device, such as `16 GB`

    @property
    def changes(self) -> dict[str, Any]:
        """The given numbers that replace the file's, for `load_cluster`."""
        given = {name: getattr(self, name) for name in ("count", "bandwidth", "latency", "memory")}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class VpipeRecipe:
    """vPipe: memory policies per layer, and layers that move between stages during training."""

    # Whether a layer's activations may be on the host between forward and backward. With `swap` or `recompute`, every
    # stage chooses a policy for each of its layers so that it fits in memory and is as fast as possible. A plan's file
    # has policies of its own
    swap: bool = True
    recompute: bool = True  # whether a layer's activations may be computed again for the backward
    # Whether stages are measured, and layers move to balance them (Algorithm 1); ignored if `moves` are given
    repartition: bool = True
    # Whether layers move while minibatches are in flight; false drains the pipeline before
    live: bool = True
    # Moves that are given beforehand: a list of `{at: {minibatches: 24}, cuts: [layer, ...]}`, where cuts are the first
    # layers of every stage but the first; or the artifact `moves.json` of another run
    moves: Any = None

    @property
    def policies(self) -> tuple[str, ...]:
        """Memory policies that stages may choose besides keeping activations; none leaves the choice to the mode."""
        return (*((SWAP,) if self.swap else ()), *((RECOMPUTE,) if self.recompute else ()))

    @property
    def balances(self) -> bool:
        """Whether layers move to balance measured stages."""
        return self.repartition and not self.moves


@dataclass(frozen=True)
class ParallelismRecipe:
    """The parallelism mode, and columns of the table of modes that differ from the mode's own."""

    # From `pipebench ls modes`, or `auto`: the mode that the planner predicts to be fastest
    mode: str = MISSING
    # `auto` (the planner's), `straight` (one worker per stage), replicas per stage as in the papers (`15-1`, `2-1-1`,
    # `16`), or a file that `pipebench plan --out` wrote (`plan.json`)
    plan: Any = "auto"
    # First layers of all stages but the first, in order of execution. If workers have several stages (`chunks`), there
    # are cuts for all of these: 7 for `1-1-1-1` with 2 each. Null: the planner's
    cuts: list[str] | None = None
    cost_model: str = "overlap"  # what the planner minimises: `overlap`, `sosp19` or `artifact`
    # Minibatches in flight per input-stage replica; `auto` is NOAM, and with `plan: auto` one more if that is faster,
    # or fewer if NOAM doesn't fit in memory
    depth: Any = "auto"
    # Microbatches per minibatch, in modes that cut minibatches; by default the number of stages, or a smaller one that
    # divides a minibatch, and 1 with `accumulate` above 1
    microbatches: int = 1
    # Whole minibatches of every replica per update; `largest`: as many as fit in a device's memory, in orders that keep
    # all of them until the first backward; null: the mode's own, which is 1, or as many as are in flight
    accumulate: Any = None
    # Whether activations are dropped after the forward and computed again for the backward; null: the mode's own, or
    # with `plan: auto` in pipelines what the planner chooses if memory is short
    recompute: bool | None = None
    # Layers to recompute, by the names that `pipebench profile` lists, or by patterns such as `encoder_*`, instead of
    # all. The planner places cuts for this. A plan's file says it layer by layer
    recompute_layers: list[str] | None = None
    # Layers, by name or pattern, whose activations are on the host between forward and backward; for all others,
    # `recompute` and `recompute_layers` hold
    swap_layers: list[str] | None = None
    # Order of work: `all-forwards`, `1f1b`, `interleaved`, `zero-bubble`, `zbv`, `dualpipe`, `dualpipev`, `sequential`
    # (zero1, zero2, fsdp), or a file in the CSV form of torch.distributed.pipelining: `schedule.csv`. Null: the mode's
    # own, as for the next keys
    order: str | None = None
    flush: bool | None = None  # whether every update empties the pipeline
    # Weight policy: `one`, `stash`, `stash-vertical-sync`, `double-buffer`, `predict`, `correct`, `newest-pulled` or
    # `none`
    weights: str | None = None
    # How replicas combine gradients: `all-reduce`, `parameter-server`, either with `-after` (once a backward is over),
    # or `asynchronous`
    sync: str | None = None
    # The artifact `push-order.json` of another run, whose order of pushes is repeated; for sync `asynchronous`
    push_order: str | None = None
    # Order in which replicas' gradients are added: `ring`, or `ordered`, by replica, which gives the same bits in one
    # process and in many
    sums: str | None = None
    # What is sharded among the replicas of a stage: `none`, `optimizer` (its state), `gradients` (and the state) or
    # `parameters` (and both); null: the mode's own, or with `plan: auto`, if memory is short, `optimizer` where the
    # planner chooses so
    shard: str | None = None
    # With shard `parameters`: whether gathered parameters are freed between forward and backward
    reshard_after_forward: bool | None = None
    # Stages per worker: any number in orders `interleaved` and `all-forwards`, 2 in `zbv`, `dualpipe` and `dualpipev`,
    # in an order file as many as its rows have, else 1. In modes zero1, zero2 and fsdp: groups of layers, at most
    chunks: int | None = None
    # `whole`, or `split`: gradients of the input leave a stage before those of its weights are computed
    backward: str | None = None
    # With weights `correct`: epochs over which the rates of stages with delayed weights grow to the recipe's,
    # PipeMare's K; null: five warm-ups, or a quarter of the time until the rate first falls
    annealing_epochs: float | None = None
    correction_decay: float | None = None  # with weights `correct`: PipeMare's D; null: 0.135
    # Tensor parallelism: neighbouring devices among which every worker's layers are divided, as in Megatron; `auto`,
    # with `mode: auto`: the fastest number
    tensor: Any = 1
    # Whether activations that skip stages are passed on by the stages between, as in the PipeDream artifact, and not
    # sent directly; in simulations only
    relay: bool = False
    # Null: the mode and the keys above decide on activations, and layers don't move
    vpipe: VpipeRecipe | None = None

    @property
    def accumulate_given(self) -> int | None:
        """The number of `accumulate`; None for null and `largest`, which depends on the plan."""
        return None if self.accumulate is None or self.accumulate == LARGEST else int(self.accumulate)

    @property
    def row(self) -> Mode:
        """The mode's row of the table with the columns that the recipe changes; the mode must not be `auto`."""
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
    """The engine that executes the schedule."""

    # `virtual` (real arithmetic on a virtual clock), `simulated` (durations only, no training) or `distributed` (a
    # process per worker, on the wall clock)
    kind: str = "virtual"
    device: str = "auto"  # where arithmetic happens: `auto`, `cpu` or `cuda`
    threads: Any = "auto"  # torch's number of threads; `auto`: the number of usable cores
    # Where the times of layers come from: `auto` (measured on cluster `local`, analytic elsewhere), `measured`, `anew`
    # (measured even if the cache has a profile), `analytic` or a profile file
    timing: str = "auto"
    deterministic: bool = True  # deterministic kernels only
    tf32: bool = False  # allow TF32 on GPUs that have it
    compile: bool = False  # compile every stage's layers, forward and backward, with torch.compile
    channels_last: bool = False  # store images and the weights of convolutions channels last (NHWC)
    max_restarts: int = 3  # distributed: how often all processes start again after one has died
    stall_limit_s: float = 300.0  # distributed: seconds without progress of a worker after which the run ends
    # Distributed over several hosts: seconds without a heartbeat of a worker after which the run ends
    silence_limit_s: float = 30.0
    join_limit_s: float = 120.0  # distributed: seconds to wait for all processes at the start


@dataclass(frozen=True)
class Recipe:
    """A recipe: model, data set, training, cluster, parallelism and engine."""

    name: str = MISSING  # names the run; letters, digits, `.`, `_`, `-`
    # `name` (of the zoo) or `target` (`package.module:function`), `leaves` (modules not traced into), and the model's
    # own options; or `profile`, a file with the costs of a model, to plan and simulate without the model
    model: dict[str, Any] = MISSING
    # `name`, `root` and `loader_processes` where the dataset takes them, and its own options; or `target`
    # (`package.module:function`) and the function's own options, and where it returns a pair of torch's data sets
    # `loss`, `metrics`, `inputs` and `targets` (the fields of a sample that the model and the loss get) and
    # `loader_processes`
    dataset: dict[str, Any] = MISSING
    train: TrainRecipe = field(default_factory=TrainRecipe)
    cluster: ClusterRecipe = field(default_factory=ClusterRecipe)
    parallelism: ParallelismRecipe = field(default_factory=ParallelismRecipe)
    engine: EngineRecipe = field(default_factory=EngineRecipe)
    # Where runs are recorded: always in `mlflow`; curves and results also in `tensorboard` and `wandb`, if installed
    tracking: list[Literal["mlflow", "tensorboard", "wandb"]] = field(default_factory=lambda: ["mlflow"])
