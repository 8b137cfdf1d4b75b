"""The recipe's schema: every key, its type, its default and what it means.

The dataclasses are the frozen values that the rest of pipebench reads once a recipe is loaded. What types can't express
is in `ranges.py` and the rules.
"""

from dataclasses import dataclass, field, replace
from typing import Any

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
    """How a stage's parameters are updated.

    Attributes:
        name: a class of torch.optim in snake or class form (`sgd`, `adamw`, `rmsprop`, `asgd`), `lars` or `lamb`; null
            with a target.
        lr: learning rate of the input stage.
        momentum: this and the next three are arguments of the class or target, its own default unless given.
        weight_decay: see there: most add an L2 penalty to the gradient, adamw shrinks the weights instead.
        betas: two decay rates of averages.
        eps: added to a divisor.
        lr_scaling: `replicas` scales a stage's rate by its samples per update over the input stage's (the
            PipeDream artifact's rule); `none` gives every stage the same rate; `linear` and `sqrt` scale it by its
            samples per update over `minibatch_size`, or by the root of that.
        clip_norm: largest gradient norm; null for no clipping. Exact in flushing modes; per stage otherwise.
        target: instead of a name, `package.module:function`: a class or a function that makes an optimizer of a list of
            parameters and `lr`.
        arguments: what else the class or target takes; written beside the other keys.
    """

    name: str | None = "sgd"
    lr: float = MISSING
    momentum: float | None = None
    weight_decay: float | None = None
    betas: list[float] | None = None
    eps: float | None = None
    lr_scaling: str = "replicas"
    clip_norm: float | None = None
    target: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PeriodRecipe:
    """A period: so many epochs or so many minibatches, one of the two.

    Attributes:
        epochs: so many passes over the training data.
        minibatches: so many minibatches.
    """

    epochs: int | None = None
    minibatches: int | None = None


@dataclass(frozen=True)
class ScheduleRecipe:
    """How the learning rate changes with the samples seen.

    Attributes:
        name: `constant`, `step` (times `factor` every `every_epochs`), `cosine` or `polynomial` (both to zero at
            `max_epochs`; the latter as the `power` of what is left of them, the PipeDream artifact's with 2), or a
            class of torch.optim.lr_scheduler in snake or class form (`step_lr`, `OneCycleLR`); null with a target.
        every_epochs: step only.
        factor: step only; this and the next are arguments of classes and targets, too.
        power: polynomial only.
        step_every: how often a class of torch's is stepped, by samples seen; null for the others, which have no steps.
        warmup_epochs: the rate grows linearly over so many epochs first.
        target: instead of a name, `package.module:function`: a function that maps the fraction of all training samples
            that were seen, from 0 to below 1, to a factor of the rate.
        arguments: what else the class or target takes; written beside the other keys.
    """

    name: str | None = "constant"
    every_epochs: float | None = None
    factor: float | None = None
    power: float | None = None
    step_every: PeriodRecipe | None = None
    warmup_epochs: float = 0.0
    target: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetRecipe:
    """The accuracy that ends the run.

    Attributes:
        metric: of the data set: `top1`, `bleu`, `perplexity`, ...
        value: what it has to reach, in the metric's own scale: shares are fractions, never per cent.
    """

    metric: str = MISSING
    value: float = MISSING


@dataclass(frozen=True)
class LossScaleRecipe:
    """Dynamic loss scaling (fp16); the defaults are torch.amp.GradScaler's.

    Attributes:
        initial: the scale to begin with.
        growth: what the scale is multiplied by after `growth_interval` updates in a row with finite gradients.
        backoff: what it is multiplied by after an update that was skipped, since its gradients were not finite.
        growth_interval: see `growth`.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000


@dataclass(frozen=True)
class TrainRecipe:
    """What is trained, until when.

    Attributes:
        seed: everything random derives from it.
        minibatch_size: samples that travel together, per replica (the papers' per-GPU G).
        streams: text only: minibatch k continues minibatch k - streams. A multiple of every stage's replicas, so that
            the replica that carries a stream's state on is always the same one; null: 1 for text.
        target: null trains for throughput only, until `max_epochs`.
        evaluate_every: the pipeline drains before every evaluation; there is always one at the end.
        precision: `fp32` (the types that the model has), or mixed: `bf16` or `fp16` for arithmetic, links and weight
            versions, beside fp32 masters. See docs/precision.md.
        loss_scale: fp16 only; null: the defaults.
        max_epochs: the run ends after so many, target reached or not.
        checkpoint_every: the pipeline drains before every checkpoint, too. Null: processes write one at every drain
            that there is (after every evaluation), the virtual engine where an evaluation is the best so far, and at
            the end.
        checkpoint_keep: how many checkpoints stay, the newest, beside that of the best evaluation; 0: none once the run
            has ended, and none at all where no process needs them.
    """

    seed: int = 0
    minibatch_size: int = MISSING
    streams: int | None = None
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    target: TargetRecipe | None = None
    precision: str = "fp32"
    loss_scale: LossScaleRecipe | None = None
    max_epochs: int = MISSING
    evaluate_every: PeriodRecipe = field(default_factory=lambda: PeriodRecipe(epochs=1))
    checkpoint_every: PeriodRecipe | None = None
    checkpoint_keep: int = 2


@dataclass(frozen=True)
class ClusterRecipe:
    """Which cluster, how many components of its outermost level (servers), and numbers in place of its file's.

    Attributes:
        name: of `pipebench ls clusters`, or the path of a cluster's file.
        servers: multiplies the outermost level.
        count: devices in a component of the innermost level, such as GPUs per server.
        bandwidth: of the outermost level that joins several components, such as `1 Gbit/s`; its other limits stay.
        latency: of the same level, such as `50 us`.
        memory: of a device, such as `16 GB`.
    """

    name: str = MISSING
    servers: int = 1
    count: int | None = None
    bandwidth: Any = None
    latency: Any = None
    memory: Any = None

    @property
    def changes(self) -> dict[str, Any]:
        """The keys in place of the file's, for `load_cluster`."""
        given = {name: getattr(self, name) for name in ("count", "bandwidth", "latency", "memory")}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class VpipeRecipe:
    """vPipe: what is decided layer by layer, and what changes about a plan while training goes on.

    Attributes:
        swap: whether a layer's activations may be on the host between forward and backward. With this or the next,
            every stage chooses what its layers do so that it fits in memory, in as few seconds as that takes; a plan's
            file says itself what they do.
        recompute: whether they may be computed again for the backward.
        repartition: whether stages are measured, and layers move to balance them (Algorithm 1); not where `moves` are
            given.
        live: whether layers move while minibatches are in flight; false empties the pipeline first, and fills it again.
        moves: cuts that are decided beforehand: a list of `{at: {minibatches: 24}, cuts: [layer, ...]}`, the first
            layer of every stage but the first; or the artifact `moves.json` of another run.
    """

    swap: bool = True
    recompute: bool = True
    repartition: bool = True
    live: bool = True
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
    """The parallelism mode, and the columns of the table of modes where they differ from the mode's own.

    Attributes:
        mode: a row of `pipebench/schedule/modes.py`, or `auto`: the one that the planner predicts to be fastest.
        plan: `auto` (the planner's), `straight`, replicas per stage the papers' way: `15-1`, `2-1-1`, `16`, or a file
            that `pipebench plan --out` wrote: `plan.json`.
        cuts: first layer of every stage but the first, in order of execution; where workers have several stages
            (`chunks`), of all of them: 7 for `1-1-1-1` with 2 each. Null cuts where the cost model says.
        cost_model: what the planner minimises: `overlap`, `sosp19` or `artifact`.
        depth: minibatches in flight per input-stage replica; `auto` is NOAM, less where `plan: auto` wouldn't fit.
        microbatches: microbatches per minibatch (modes that cut one); by default as many as there are stages, or fewer
            that divide a minibatch, and 1 with `accumulate`.
        accumulate: whole minibatches of every replica per update; `largest`: as many as a device's memory holds, where
            all of them are kept until the first backward; null: the mode's own, 1, or as many as are in flight.
        recompute: drop activations after the forward and compute them again for the backward; null: the mode's own, or
            with `plan: auto` in pipelines, where memory binds, what the planner chooses.
        recompute_layers: do so for these layers only, by name or pattern such as `encoder_*`; as `pipebench profile`
            lists them. Open cuts are made for what layers take then. A plan's file says it layer by layer.
        swap_layers: keep activations of these layers on the host between forward and backward, named likewise; what
            else there is goes by `recompute` and `recompute_layers`.
        order: `all-forwards`, `1f1b`, `interleaved`, `zero-bubble` or a file in the CSV form of
            torch.distributed.pipelining, `schedule.csv`; null: the mode's own, like the next five.
        flush: whether every update empties the pipeline.
        weights: `one`, `stash`, `stash-vertical-sync`, `double-buffer`, `predict`, `correct`, `newest-pulled` or
            `none`.
        sync: how replicas agree: `all-reduce`, `parameter-server`, either with `-after` (once a backward is over), or
            `asynchronous`.
        push_order: the artifact `push-order.json` of another run, to repeat its order; sync `asynchronous` only.
        sums: in which order replicas' gradients are added: `ring`, or `ordered`, that of the replicas, whatever their
            number: the same bits in one process and in many.
        shard: what replicas of a stage share out instead of each holding all of it: `none`, `optimizer` (its state),
            `gradients` (those, too) or `parameters` (those, too); null: the mode's own, or `optimizer` where the
            planner chooses it likewise.
        reshard_after_forward: shard `parameters` only: whether they are freed between forward and backward.
        chunks: stages per worker (`interleaved` and `all-forwards`); of a sharded model, groups of layers at most.
        backward: `whole`, or `split`: gradients of the input leave a stage before those of its weights are computed.
        annealing_epochs: weights `correct` only: epochs over which late stages' learning rates grow to the recipe's,
            PipeMare's K; null: five warm-ups, or a quarter of the time until the rate first falls.
        correction_decay: weights `correct` only: PipeMare's D; null: 0.135.
        tensor: neighbouring devices among which every worker's layers are divided (Megatron's slices); `auto`, with
            `mode: auto`: as many as is fastest.
        relay: let what skips stages go through all of those between, as the PipeDream artifact does; else it goes to
            the stages that read it. In simulations only.
        vpipe: null: layers do with their activations what the mode and the keys above say, and stages stay as they are.
    """

    mode: str = MISSING
    plan: Any = "auto"
    cuts: list[str] | None = None
    cost_model: str = "overlap"
    depth: Any = "auto"
    microbatches: int = 1
    accumulate: Any = None
    recompute: bool | None = None
    recompute_layers: list[str] | None = None
    swap_layers: list[str] | None = None
    order: str | None = None
    flush: bool | None = None
    weights: str | None = None
    sync: str | None = None
    push_order: str | None = None
    sums: str | None = None
    shard: str | None = None
    reshard_after_forward: bool | None = None
    chunks: int | None = None
    backward: str | None = None
    annealing_epochs: float | None = None
    correction_decay: float | None = None
    tensor: Any = 1
    relay: bool = False
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
        if row.shape == "one-stage" and self.shard not in (None, row.shard, NOT_SHARDED):
            row = next(each for each in MODES.values() if each.shard == self.shard)
        if row.is_sharded and row.shape == "one-stage" and self.cuts is not None and self.chunks is None:
            columns["chunks"] = len(self.cuts) + 1
        return replace(row, **{name: value for name, value in columns.items() if value is not None})


@dataclass(frozen=True)
class EngineRecipe:
    """What plays the schedule.

    Attributes:
        kind: `virtual` (real arithmetic on a virtual clock), `simulated` (durations only, no training) or `distributed`
            (a process per worker, on the wall clock).
        device: `auto`, `cpu` or `cuda`: where arithmetic happens.
        threads: `auto` or torch's number of threads.
        timing: `auto` (measured on cluster `local`, analytic elsewhere), `measured`, `analytic` or a profile file.
        deterministic: deterministic kernels only.
        tf32: allow TF32 on GPUs that have it.
        max_restarts: distributed only: how often all processes start again after one has died.
        stall_limit_s: distributed only: seconds after which a worker that doesn't get on ends the run.
        silence_limit_s: distributed over several hosts only: seconds without any sign of life of a worker, after which
            the run ends.
        join_limit_s: distributed only: seconds to wait for all processes at the start.
    """

    kind: str = "virtual"
    device: str = "auto"
    threads: Any = "auto"
    timing: str = "auto"
    deterministic: bool = True
    tf32: bool = False
    max_restarts: int = 3
    stall_limit_s: float = 300.0
    silence_limit_s: float = 30.0
    join_limit_s: float = 120.0


@dataclass(frozen=True)
class Recipe:
    """One question: this model, this data, this cluster, this way of parallelising.

    Attributes:
        name: names the run; letters, digits, `.`, `_`, `-`.
        model: `name` (of the zoo) or `target` (`package.module:function`), `leaves` (modules not traced into), and
            the model's own options; or `profile`, a file with the costs of a model that isn't here.
        dataset: `name`, `root` and `loader_processes` where the dataset takes them, and its own options; or `target`
            (`package.module:function`), `loss`, `metrics` and `loader_processes` where it returns a pair of torch's
            data sets, and the function's own options.
        tracking: where runs are recorded: `mlflow` always, and curves and results also by `tensorboard` and `wandb`,
            where these are installed.
    """

    name: str = MISSING
    model: dict[str, Any] = MISSING
    dataset: dict[str, Any] = MISSING
    train: TrainRecipe = field(default_factory=TrainRecipe)
    cluster: ClusterRecipe = field(default_factory=ClusterRecipe)
    parallelism: ParallelismRecipe = field(default_factory=ParallelismRecipe)
    engine: EngineRecipe = field(default_factory=EngineRecipe)
    tracking: list[str] = field(default_factory=lambda: ["mlflow"])
