"""One row per kind of wrong recipe, with the sentence that refuses it.

A row changes the valid recipe of conftest.py by an override: the same rules serve files and command line. Wrong files
are in test_file_errors.py, requirements of text and of predicted or rounded weights in test_training_errors.py, wrong
searches in test_search_errors.py.
"""

import pytest

from pipebench.errors import RecipeError
from pipebench.recipe import draft
from pipebench.recipe.load import load
from tests.recipe.conftest import VALID, Write

OVERRIDES = [
    # keys
    ("trian.seed=1", "trian: unknown key, allowed at the top of a recipe are name, .*did you mean 'train'"),
    ("train.sede=1", "train.sede: unknown key, allowed here are seed, .*did you mean 'seed'"),
    ("train.optimizer.learning_rate=1", "train.optimizer.learning_rate: unknown key"),
    ("train.seed.x=1", "train.seed: got a mapping, allowed is a whole number"),
    ("parallelism.cuts[0]=x", r"parallelism.cuts\[0\]: unknown key.*did you mean 'cuts'"),
    ("train.optimizer={}", None),
    ("train.target=0.9", "train.target: got 0.9, allowed .*; did you mean 'train.target.value=0.9'"),
    ("train.target={}", "train.target: got an empty mapping, allowed is a mapping with the keys metric, value"),
    ("train=3", "train: got 3, allowed is a mapping with the keys seed"),
    ("train=", "train: got no value after =; null takes a value away"),
    ("=3", "got '=3', allowed is key=value"),
    ("train..seed=3", "got 'train..seed=3', allowed is key=value"),
    ("extends=quickstart", "extends: is for files"),
    ("model.width=" + "${" * 400 + "name" + "}" * 400, "width: got '.*, whose brackets are nested more than 32 deep"),
    ("model.width=${oc.create:" + "[" * 99 + "]" * 99 + "}", "got '.*, whose brackets are nested more than 32 deep"),
    ("model.width=" + "[" * 400 + "]" * 400, "model.width: line 1: is not YAML we take: nested more than 32 deep"),
    ("model" + ".a" * 400 + "=1", "model.a: got 'model.a.a.a.*, keys are nested at most 32 deep"),
    ("train.seed=[1", "train.seed: line 1: is not YAML we take"),
    # types
    ("train.seed='3'", "train.seed: got '3', allowed is a whole number; remove the quotes"),
    ("train.seed=\u0661", "train.seed: got '\u0661', allowed is a whole number$"),
    ("train.seed=true", "train.seed: got true, allowed is a whole number"),
    ("train.seed=3.0", "train.seed: got 3.0, allowed is a whole number"),
    ("train.seed=null", "train.seed: got null, allowed is a whole number"),
    ("train.seed=[1]", r"train.seed: got a list, one value is needed here"),
    ("train.seed=99999999999999999999", "train.seed: got a whole number beyond"),
    ("train.optimizer.lr='0.1'", "train.optimizer.lr: got '0.1', allowed is a number; remove the quotes"),
    ("train.optimizer.lr=fast", "train.optimizer.lr: got 'fast', allowed is a number"),
    ("train.optimizer.lr=.nan", "train.optimizer.lr: got nan, allowed is a number"),
    ("train.optimizer.lr=.inf", "train.optimizer.lr: got inf, allowed is a number"),
    ("cluster.bandwidth=.inf", "cluster.bandwidth: got inf, allowed is a plain value; numbers are finite"),
    ("train.optimizer.lr=true", "train.optimizer.lr: got true, allowed is a number"),
    ("train.optimizer.betas=[0.9, x]", "train.optimizer.betas: got .*, allowed is a list of number"),
    ("engine.tf32=1", "engine.tf32: got 1, allowed is true or false"),
    ("engine.device=[cpu]", r"engine.device: got a list, one value is needed here"),
    (
        "parallelism={recompute: true, recompute_layers: [head]}",
        "parallelism.recompute: got true with recompute_layers, which says what is recomputed: allowed is null",
    ),
    ("parallelism.recompute_layers=3", "parallelism.recompute_layers: got 3, allowed is a list of text or null"),
    (
        "parallelism={mode: auto, plan: auto, recompute_layers: [head]}",
        r"parallelism.recompute_layers: got \['head'\] with mode auto, which plans every mode as it is: allowed is",
    ),
    (
        "parallelism={mode: pipedream, plan: straight, swap_layers: [head], vpipe: {}}",
        r"parallelism.swap_layers: got \['head'\] beside vpipe, which chooses layer by layer: allowed is null",
    ),
    (
        "parallelism.swap_layers=head",
        r"parallelism.swap_layers: got 'head', allowed is a list of text or null; did .*swap_layers=\[head\]'\?",
    ),
    (
        "parallelism={mode: auto, plan: auto, swap_layers: [head]}",
        r"parallelism.swap_layers: got \['head'\] with mode auto, which plans every mode as it is: allowed is null",
    ),
    (
        "parallelism={mode: zero-bubble, plan: straight, swap_layers: [head]}",
        r"parallelism.swap_layers: got \['head'\] with backward split, whose weight parts keep what the layers read",
    ),
    (
        "parallelism.vpipe={live: false, moves: 3}",
        "parallelism.vpipe.moves: got 3, allowed is a list of moves or the file moves.json of a run",
    ),
    (
        "parallelism.vpipe={live: false, moves: [{at: {epochs: 1}}]}",
        r"parallelism.vpipe.moves: \[0\]: 'cuts' is missing",
    ),
    ("parallelism.vpipe={live: false, moves: gone.json}", "parallelism.vpipe.moves: gone.json: can't be read: No such"),
    (
        "parallelism={mode: dp, plan: auto, vpipe: {swap: false, recompute: false}}",
        "parallelism.vpipe.repartition: got true in mode dp, which has one stage: allowed is false",
    ),
    (
        "parallelism={mode: auto, plan: auto, vpipe: {swap: false, recompute: false}}",
        "parallelism.vpipe.repartition: got true with mode auto, which plans every mode: allowed is false",
    ),
    (
        (
            "parallelism={mode: dp, plan: auto, vpipe: {swap: false, recompute: false, "
            "moves: [{at: {epochs: 1}, cuts: [x]}]}}"
        ),
        "parallelism.vpipe.moves: got .* in mode dp, which has one stage: allowed is null",
    ),
    (
        (
            "parallelism={mode: auto, plan: auto, vpipe: {swap: false, recompute: false, "
            "moves: [{at: {epochs: 1}, cuts: [x]}]}}"
        ),
        "parallelism.vpipe.moves: got .* with mode auto, which plans every mode: allowed is null",
    ),
    (
        (
            "parallelism={mode: interleaved, plan: straight, vpipe: {swap: false, recompute: false, "
            "moves: [{at: {epochs: 1}, cuts: [x]}]}}"
        ),
        "parallelism.vpipe.moves: got .*, and layers move between workers that have one stage each, .*: allowed is",
    ),
    ("parallelism.vpipe={}", None),
    (
        "parallelism={mode: dp, plan: auto, vpipe: {swap: false}}",
        "parallelism.vpipe.recompute: got true in mode dp, .*: allowed is false, or mode model or hybrid or gpipe",
    ),
    (
        "parallelism={mode: gpipe, backward: split, vpipe: {swap: false}}",
        "parallelism.vpipe.recompute: got true in mode gpipe, .*: allowed is false, or chunks: 1 and backward: whole",
    ),
    (
        "parallelism={mode: auto, plan: auto, vpipe: {recompute: true}}",
        "parallelism.vpipe: got a mapping with mode auto, which plans every mode as it is: allowed is null",
    ),
    (
        "parallelism={mode: gpipe, recompute: true, vpipe: {swap: false}}",
        "parallelism.recompute: got true beside vpipe, which chooses layer by layer: allowed is null, or vpipe with",
    ),
    (
        "parallelism={mode: gpipe, recompute_layers: [head], vpipe: {swap: false}}",
        r"parallelism.recompute_layers: got \['head'\] beside vpipe, which chooses layer by layer: allowed is null",
    ),
    ("parallelism.vpipe={swap: 3}", "parallelism.vpipe.swap: got 3, allowed is true or false"),
    ("parallelism.recompute=off!", "parallelism.recompute: got 'off!', allowed is true or false or null"),
    # architecture search
    ("search={}", "search: got an empty mapping, allowed is a mapping with the keys cells"),
    ("search={cells: []}", "search.cells: got an empty list, allowed are names or patterns of modules"),
    (
        "search={cells: [a], metric: top2}",
        "search.metric: got 'top2', allowed are top1, eval_loss; did you mean 'top1'",
    ),
    ("search={cells: [a], removes: youngest}", "search.removes: got 'youngest', allowed are oldest, worst"),
    ("search={cells: [a], population: 0}", "search.population: got 0, allowed is a whole number of at least 1"),
    ("search={cells: [a], tournament: 0}", "search.tournament: got 0, allowed is a whole number of at least 1"),
    ("search={cells: [a], mutations: 0}", "search.mutations: got 0, allowed is a whole number of at least 1"),
    ("search={cells: [a], smallest: -1}", "search.smallest: got -1, allowed is a whole number from 0 on"),
    ("search={cells: [a], hurdles: -1}", "search.hurdles: got -1, allowed is a whole number from 0 on"),
    ("search={cells: [a], trace: no.json}", "search.trace: no.json: can't be read: No such file"),
    # missing
    ("train.optimizer.lr='???'", "train.optimizer.lr: is missing and has no default"),
    ("train.target={metric: top1}", None),
    (f"parallelism.mode={'x' * 70}", r"parallelism.mode: got 'x{57}\.\.\.', allowed are single, dp, "),
    # values of another kind than a name: described, not quoted
    ("model.name={a: 1}", "model.name: got a mapping, allowed are alexnet, "),
    ("dataset={name: null, target: 'a:b', loss: {a: 1}}", "dataset.loss: got a mapping, allowed are cross_entropy, "),
    ("dataset={name: null, target: 'a:b', metrics: [[1]]}", r"dataset.metrics: got \[1\], allowed are top1, "),
    ("dataset={name: null, target: 'a:b', metrics: {x: true}}", "dataset.metrics.x: got true, allowed are top1, "),
    ("tracking=[{a: 1}]", "tracking: got a mapping, allowed are mlflow, "),
    ("parallelism.plan={a: 1}", "parallelism.plan: got a mapping, allowed are auto, straight, or"),
    ("cluster.bandwidth={a: 1}", "cluster.bandwidth: got a mapping, allowed is a bandwidth"),
    ("cluster.memory=true", "cluster.memory: got true, allowed is a size"),
    # ranges
    ("train.seed=-1", "train.seed: got -1, allowed is a whole number from 0 on"),
    ("train.minibatch_size=0", "train.minibatch_size: got 0, allowed is a whole number of at least 1"),
    ("train.minibatch_size=4001", "train.minibatch_size: got 4001, allowed are 1 to 4000"),
    ("train.loss_scale={initial: 1024.0}", "train.loss_scale: is for precision fp16, got fp32: allowed is null"),
    ("train.loss_scale={initial: 0.0}", "train.loss_scale.initial: got 0.0, allowed is a number above 0, at most 2.32"),
    ("train.loss_scale={backoff: 1.0}", "train.loss_scale.backoff: got 1.0, allowed is a number above 0 and below 1"),
    ("train.loss_scale={growth: 0.5}", "train.loss_scale.growth: got 0.5, allowed is a number from 1"),
    ("train.loss_scale={growth_interval: 0}", "train.loss_scale.growth_interval: got 0, allowed is a whole number"),
    ("train.precision=bfloat16", "train.precision: got 'bfloat16', allowed are fp32, bf16, fp16.*did you mean 'bf16'"),
    ("train.max_epochs=0", "train.max_epochs: got 0, allowed is"),
    ("train.optimizer.lr=0", "train.optimizer.lr: got 0, allowed is a number above 0"),
    ("train.optimizer.momentum=1.0", "train.optimizer.momentum: got 1.0, allowed is a number from 0 to below 1"),
    ("train.optimizer.weight_decay=-1", "train.optimizer.weight_decay: got -1, allowed is"),
    (
        "train.optimizer={name: adam, momentum: null, betas: [0.9]}",
        r"train.optimizer.betas: got \[0.9\], allowed is two numbers",
    ),
    ("train.optimizer={name: adam, momentum: null, eps: 0}", "train.optimizer.eps: got 0, allowed is"),
    ("train.optimizer.clip_norm=0", "train.optimizer.clip_norm: got 0, allowed is a number above 0, or null"),
    ("train.schedule.warmup_epochs=-1", "train.schedule.warmup_epochs: got -1, allowed is"),
    ("train.schedule.warmup_epochs=11", "train.schedule.warmup_epochs: got 11, allowed are 0 to max_epochs, 10"),
    ("train.evaluate_every.epochs=0", "train.evaluate_every.epochs: got 0, allowed is"),
    ("train.evaluate_every={epochs: 1, minibatches: 5}", "train.evaluate_every: got both .*exactly one"),
    ("train.checkpoint_every={epochs: 1, minibatches: 5}", "train.checkpoint_every: got both .*exactly one"),
    ("train.checkpoint_every.minibatches=0", "train.checkpoint_every.minibatches: got 0, allowed is"),
    ("train.evaluate_every=2", "train.evaluate_every: got 2, .*; did you mean 'train.evaluate_every.epochs=2'"),
    ("tracking=foo", "tracking: got 'foo', allowed is a list of mlflow, tensorboard, wandb"),
    ("tracking=[mlflow, wandbb]", "tracking: got 'wandbb', allowed are .*; did you mean 'wandb'"),
    ("cluster.name=/", "cluster.name: cluster '/': is a folder, allowed are .* or the path of a YAML file"),
    ("train.evaluate_every={epochs: null}", "train.evaluate_every: got neither .*exactly one"),
    ("cluster.servers=0", "cluster.servers: got 0, allowed is a whole number of at least 1"),
    ("cluster.servers=-2", "cluster.servers: got -2, allowed is a whole number of at least 1"),
    ("cluster.servers=1000000000000", "cluster.servers: got 1000000000000, allowed are 1 to 1024 servers"),
    ("train.max_epochs=3000000000", "train.max_epochs: got 3000000000, allowed is .* at most 2147483648"),
    ("cluster.servers=1000000", "cluster.servers: got 1000000, allowed are 1 to 1024 servers"),
    ("parallelism.microbatches=0", "parallelism.microbatches: got 0, allowed is"),
    ("parallelism.accumulate=0", "accumulate: got 0, allowed is a whole number of at least 1, largest or null"),
    ("parallelism.accumulate=larges", "parallelism.accumulate: got 'larges', allowed is .*did you mean 'largest'"),
    ("parallelism.accumulate=true", "parallelism.accumulate: got true, allowed is a whole number of at least 1"),
    ("parallelism.depth=0", "parallelism.depth: got 0, allowed is auto .* or a whole number"),
    ("parallelism.depth=1000000", "parallelism.depth: got 1000000, allowed are 1 to 256: an epoch has 125 minibatches"),
    (
        "parallelism={mode: gpipe, accumulate: 257}",
        "parallelism.accumulate: got 257, allowed are 1 to 256: an epoch has 125 minibatches",
    ),
    ("parallelism.depth=deep", "parallelism.depth: got 'deep', allowed is auto"),
    ("engine.threads=0", "engine.threads: got 0, allowed is auto or a whole number"),
    ("engine.threads=true", "engine.threads: got true, allowed is auto or a whole number"),
    # names
    ("name='a b'", "name: got 'a b', allowed are letters"),
    ("model.name=vgg61", "model.name: got 'vgg61', allowed are .*did you mean 'vgg16'"),
    ("dataset.name=mnist", "dataset.name: got 'mnist', allowed are .*did you mean 'mnist5k'"),
    ("cluster.name=cluster-aa", "cluster.name: cluster 'cluster-aa': no such cluster, allowed are .*mean 'cluster-a'"),
    ("cluster.name=no/such.yaml", "cluster.name: no/such.yaml: no such file"),
    ("parallelism.mode=pipedraem", "parallelism.mode: got 'pipedraem', allowed are .*did you mean 'pipedream'"),
    ("parallelism.order=1f2b", "parallelism.order: got '1f2b', allowed are all-forwards, 1f1b"),
    (
        "parallelism.relay=true",
        "parallelism.relay: got true with engine virtual, which hands .* engine.kind: simulated",
    ),
    ("parallelism.sync=parameter-servers", "parallelism.sync: got .*did you mean 'parameter-server'"),
    ("parallelism.weights=stashed", "parallelism.weights: got 'stashed', allowed are .*did you mean 'stash'"),
    ("train.optimizer.name=lambb", "train.optimizer.name: got 'lambb', allowed are adadelta, .*did you mean 'lamb'"),
    ("train.optimizer.name=null", "train.optimizer: got neither of name and target, allowed is one of the names adad"),
    ("train.optimizer.target='m:f'", "train.optimizer: got both of name and target"),
    ("train.optimizer={name: null, target: f}", "train.optimizer.target: got 'f', allowed is package.module:function"),
    (
        "train.optimizer.eps=1",
        "train.optimizer.eps: got 1, which sgd doesn't take .null takes it away., allowed are mo",
    ),
    (
        "train.optimizer.clip_nrm=1",
        "train.optimizer.clip_nrm: unknown key, allowed here are .*did you mean 'clip_norm'",
    ),
    ("train.optimizer.nestrov=true", "train.optimizer.nestrov: unknown key, .*did you mean 'nesterov'"),
    ("train.optimizer.nesterov=1", "train.optimizer.nesterov: got 1, allowed is true or false .sgd."),
    (
        "train.optimizer.amsgrad=true",
        "train.optimizer.amsgrad: got true, which sgd doesn't take .null takes it away., allowed are mo",
    ),
    ("train.schedule.gamma=3", "train.schedule.gamma: got 3, which constant doesn't take .null takes it away.$"),
    (
        "train.optimizer={name: nadam, momentum: null, momentum_decay: x}",
        "momentum_decay: got 'x', allowed is a number",
    ),
    (
        "train.optimizer.name=LBFGS",
        "train.optimizer.name: got lbfgs, whose step asks for the loss again .a closure.: a st",
    ),
    (
        "train.optimizer.name=sparse_adam",
        "name: got sparse_adam, which takes sparse gradients only, and those of a stage",
    ),
    ("train.schedule={name: cosine, target: 'm:f'}", "train.schedule: got both of name and target"),
    ("train.schedule.slope=2", "train.schedule.slope: unknown key, allowed here are name, every_epochs"),
    ("train.optimizer.lr_scaling=all", "train.optimizer.lr_scaling: got 'all', allowed are replicas, none, linear"),
    ("train.schedule.name=cosin", "train.schedule.name: got 'cosin', allowed are .*did you mean 'cosine'"),
    ("engine.kind=real", "engine.kind: got 'real', allowed are virtual, simulated, distributed"),
    ("engine.max_restarts=-1", "engine.max_restarts: got -1, allowed is a whole number from 0 on"),
    (
        "engine.stall_limit_s=0",
        "engine.stall_limit_s: got 0, allowed is a number of seconds from 0.1 to 604800, a week",
    ),
    ("engine.stall_limit_s=1e30", "engine.stall_limit_s: got 1e.30, allowed is a number of seconds from 0.1 to 604800"),
    (
        "engine.silence_limit_s=0",
        "engine.silence_limit_s: got 0, allowed is a number of seconds from 0.1 to 604800, a week",
    ),
    (
        "engine.join_limit_s=-1",
        "engine.join_limit_s: got -1, allowed is a number of seconds from 0.1 to 604800, a week",
    ),
    ("engine.device=gpu", "engine.device: got 'gpu', allowed are auto, cpu, cuda"),
    ("engine.timing=analitic", "engine.timing: got 'analitic', .*did you mean 'analytic'.* path of a profile file"),
    # model and data set
    ("model.widht=1.0", "model.widht: unknown option, allowed are width, .*did you mean 'width'"),
    ("model.width='1'", "model.width: got '1', allowed is a number; remove the quotes"),
    ("model.batch_norm=1", "model.batch_norm: got 1, allowed is true or false"),
    ("model.width=-1", "model: vgg16: width is -1"),
    ("dataset.image_size=64", "model.image_size: got 32, and the data set's images are 1 x 64 x 64 .*: allowed is 64"),
    ("model.in_channels=3", "model.in_channels: got 3, and the data set's images are 1 x 32 x 32 .*: allowed is 1"),
    ("model.name=null", "model: got neither of name and target"),
    ("model.target=m:f", "model: got both of name and target"),
    ("model={name: null, target: m.f}", "model.target: got 'm.f', allowed is package.module:function"),
    ("model.leaves=lstm", "model.leaves: got 'lstm', allowed is a list of text or null"),
    ("model.a-b=1", "model.a-b: is not a name an option can have"),
    ("dataset.rot=x", "dataset.rot: unknown option, allowed are"),
    ("dataset={name: wmt16, lengths: longest}", "dataset: wmt16: lengths is 'longest', allowed are fixed, declared"),
    ("dataset.leaves=[x]", "dataset.leaves: is for models"),
    ("dataset.target=x", "dataset: got both of name and target"),
    ("dataset={name: null}", "dataset.name: is missing, allowed are .*; or a target, package.module:function"),
    ("dataset={name: null, target: x}", "dataset.target: got 'x', allowed is package.module:function"),
    (
        "dataset={name: null, target: 'm:f', loss: cross}",
        "dataset.loss: got 'cross', allowed are cross_entropy, mse, model; did you mean 'cross_entropy'.*or a target",
    ),
    (
        "dataset={name: null, target: 'm:f', metrics: [top1, top2]}",
        "dataset.metrics: got 'top2', allowed are top1, top5, mse; did you mean 'top5'",
    ),
    ("dataset={name: null, target: 'm:f', metrics: 3}", "dataset.metrics: got 3, allowed is a list of top1, top5, mse"),
    (
        "dataset={name: null, target: 'm:f', metrics: {top1: 'm:g'}}",
        "dataset.metrics.top1: got 'm:g', which doesn't say whether higher or lower is better: .*best: max",
    ),
    (
        "dataset={name: null, target: 'm:f', metrics: {top1: {target: 'm:g'}}}",
        "dataset.metrics.top1.best: is missing, allowed are max .higher is better. and min",
    ),
    (
        "dataset={name: null, target: 'm:f', metrics: {top1: {target: 'm:g', best: up}}}",
        "dataset.metrics.top1.best: got 'up', allowed are max",
    ),
    (
        "dataset={name: null, target: 'm:f', metrics: {eval_loss: {target: 'm:g', best: min}}}",
        "dataset.metrics.eval_loss: is the name of what every run records: allowed are names beside train_loss, eval_",
    ),
    ("dataset={name: null, target: 'm:f', metrics: [top5]}", "train.target.metric: got 'top1', allowed are top5"),
    (
        "dataset={name: null, target: 'm:f', loader_processes: -1}",
        "dataset.loader_processes: got -1, allowed is a whole number from 0 to 1024",
    ),
    # target
    ("train.target.metric=top5", "train.target.metric: got 'top5', allowed are top1"),
    ("train.target.value=95", "train.target.value: got 95, allowed is a fraction .*did you mean 0.95"),
    ("train.target.value=-0.1", "train.target.value: got -0.1, allowed is a fraction"),
    # learning-rate schedule and optimizer
    ("train.schedule={name: step, factor: 0.1}", "train.schedule.every_epochs: is missing, the schedule step needs"),
    ("train.schedule={name: step, every_epochs: 3}", "train.schedule.factor: is missing"),
    ("train.schedule.factor=0.1", "train.schedule.factor: got 0.1, which only the schedule step takes"),
    ("train.schedule.name=polynomial", "train.schedule.power: is missing, the schedule polynomial needs a number"),
    ("train.schedule.power=2", "train.schedule.power: got 2, which only the schedule polynomial takes; .* needs null"),
    ("train.schedule={name: polynomial, power: 0}", "train.schedule.power: got 0, allowed is a number above 0"),
    (
        "train.optimizer.name=adam",
        "train.optimizer.momentum: got 0.9, which adam doesn't take .null takes it away., all",
    ),
    ("train.schedule.name=StepLR", "train.schedule.step_size: is missing, needed is a whole number .step_lr."),
    ("train.schedule={name: step_lr, step_size: 3.5}", "train.schedule.step_size: got 3.5, allowed is a whole number"),
    (
        "train.schedule={name: step_lr, step_size: 3, power: 2}",
        "power: got 2, which step_lr doesn't take .null takes it",
    ),
    ("train.schedule={name: step_lr, step_size: 3, gama: 2}", "gama: unknown key, .*did you mean 'gamma'"),
    ("train.schedule={name: step_lr, step_size: 3, last_epoch: 2}", "train.schedule.last_epoch: unknown key"),
    (
        "train.schedule.name=ReduceLROnPlateau",
        "got reduce_lr_on_plateau, whose step asks for metrics: a rate here is a",
    ),
    (
        "train.schedule.name=lambda_lr",
        "got lambda_lr, which takes a function .lr_lambda., and a recipe holds plain val",
    ),
    ("train.schedule.name=sequential_lr", "got sequential_lr, which takes schedulers .schedulers., and a recipe holds"),
    (
        "train.schedule={name: one_cycle_lr, max_lr: 1.0, total_steps: 10}",
        "got one_cycle_lr, which would change the momentum, too, .*: it needs cycle_momentum: false",
    ),
    (
        "train.schedule.step_every={epochs: 1}",
        "train.schedule.step_every: is for torch's schedulers, whose steps it co",
    ),
    (
        "train.schedule={name: step_lr, step_size: 3, step_every: {epochs: 1, minibatches: 2}}",
        "train.schedule.step_every: got both of epochs and minibatches",
    ),
    (
        "train.schedule={name: step_lr, step_size: 3, step_every: {epochs: 0}}",
        "train.schedule.step_every.epochs: got 0, allowed is a whole number of at least 1",
    ),
    # parallelism
    (
        "parallelism.plan=1-1-1-1-1-1-1-1-1-1-1-1-1",
        "parallelism.plan: got 1-1-1-1-1-1-1-1-1-1-1-1-1, which needs 13 workers; the cluster has 4",
    ),
    ("parallelism.plan=4-1", "parallelism.plan: got 4-1, which needs 5 workers; the cluster has 4"),
    ("parallelism.plan=2-0", "parallelism.plan: got '2-0', allowed are auto, straight, or replicas per stage"),
    ("parallelism.plan=strait", "parallelism.plan: got 'strait', .*did you mean 'straight'"),
    ("parallelism.plan=[2, 1]", "parallelism.plan: got a list, one value is needed here"),
    ("parallelism={mode: single, plan: 2}", "parallelism.plan: got 2, this mode takes a single worker"),
    ("parallelism={mode: dp, plan: 2-1}", "parallelism.plan: got 2-1, this mode takes one stage on all"),
    ("parallelism={mode: model, plan: 2-1}", "parallelism.plan: got 2-1, this mode takes one worker per stage"),
    ("parallelism.cuts=[a]", "parallelism.cuts: got 1 cut, a plan of 3 stages needs 2"),
    (
        "parallelism={mode: interleaved, plan: 1-1, cuts: [a]}",
        "parallelism.cuts: got 1 cut, a plan of 4 stages, 2 per worker, needs 3, the first layer of every stage but",
    ),
    ("parallelism={mode: single, plan: 1, cuts: [a]}", "parallelism.cuts: got 1 cut, a plan of 1 stage needs 0"),
    ("parallelism={mode: dp, plan: auto, cuts: [a, b]}", "parallelism.cuts: got 2 cuts, a plan of 1 stage needs 0"),
    ("parallelism.cuts=[a, a]", "parallelism.cuts: got .*, allowed is every layer once"),
    ("parallelism.microbatches=2", "parallelism.microbatches: got 2, mode pipedream has no flush here: allowed is 1"),
    ("parallelism={mode: dp, plan: 4, microbatches: 2}", "parallelism.microbatches: got 2, mode dp doesn't cut"),
    ("parallelism={mode: gpipe, microbatches: 5}", "microbatches: got 5, which doesn't divide minibatch_size 32"),
    ("parallelism.accumulate=2", "parallelism.accumulate: got 2, mode pipedream has no flush here"),
    (
        # Vertical sync numbers versions as if every minibatch gave an update: a worker asked for lost ones.
        "parallelism={mode: pipedream-2bw, plan: 2-2, weights: stash-vertical-sync}",
        "parallelism.accumulate: got null, as many .* in flight, mode pipedream-2bw has no flush here: allowed is 1",
    ),
    (
        "parallelism={mode: pipedream-flush, accumulate: largest}",
        "parallelism.accumulate: got largest with order 1f1b, in which more minibatches take no more memory: allow",
    ),
    (
        "parallelism={mode: auto, plan: auto, accumulate: largest}",
        "parallelism.accumulate: got largest with mode auto, which plans every mode: allowed is a whole number",
    ),
    (
        "parallelism.order=all-forwards",
        "parallelism.order: got order all-forwards without a flush, which it ends in: .*flush: true",
    ),
    ("parallelism.order=gone.csv", "parallelism.order: gone.csv: can't be read: No such file or directory"),
    ("parallelism.backward=both", "parallelism.backward: got 'both', allowed are whole, split"),
    (
        "parallelism={mode: gpipe, order: zero-bubble}",
        "parallelism.order: got order zero-bubble with backward whole, .*: allowed is backward: split, or order: all-f",
    ),
    (
        "parallelism={mode: zero-bubble, backward: whole}",
        "parallelism.backward: got order zero-bubble with backward whole, .*: allowed is backward: split, or order",
    ),
    (
        "parallelism.sync=asynchronous",
        "parallelism.sync: got sync asynchronous with weights stash: allowed is weights: newest-pulled, or sync: all-r",
    ),
    (
        "parallelism={mode: pipedream, sync: asynchronous, weights: newest-pulled}",
        "sync: got sync asynchronous with mode pipedream, which is for data parallelism only",
    ),
    (
        "parallelism={mode: dp-asp, plan: 4, sync: all-reduce}",
        "parallelism.sync: got sync all-reduce with weights newest-pulled: allowed is weights: one or stash .*asynchro",
    ),
    (
        "parallelism={mode: dp-asp, plan: 4, flush: true}",
        "parallelism.flush: got weights newest-pulled with a flush: allowed is flush: false, or weights: one",
    ),
    ("parallelism={mode: dp-asp, plan: 4, backward: split}", "parallelism.backward: got backward split with sync asyn"),
    ("parallelism.push_order=o.json", "parallelism.push_order: got 'o.json', which only sync asynchronous takes"),
    (
        "parallelism={mode: dp-asp, plan: 4, push_order: no/such.json}",
        "parallelism.push_order: no/such.json: can't be read: No such file",
    ),
    ("parallelism={mode: dp-asp, plan: 4, accumulate: 2}", "parallelism.accumulate: got 2, mode dp-asp has no flush"),
    (
        "parallelism={mode: gpipe, weights: stash}",
        "parallelism.weights: got weights stash with a flush: allowed is flush: false, or weights: one",
    ),
    (
        "parallelism={mode: gpipe, weights: predict}",
        "weights: got weights predict with a flush: allowed is flush: false",
    ),
    ("parallelism={mode: spectrain, flush: true}", "parallelism.flush: got weights predict with a flush: allowed is"),
    ("parallelism={mode: xpipe, plan: 2-1}", "parallelism.plan: got 2-1, this mode takes .*equally many workers"),
    (
        "parallelism={mode: spectrain, microbatches: 2}",
        "parallelism.microbatches: got 2, mode spectrain has no flush here",
    ),
    (
        "parallelism={mode: xpipe, plan: straight, accumulate: 2}",
        "parallelism.accumulate: got 2, mode xpipe has no flush here",
    ),
    (
        "parallelism.annealing_epochs=1",
        "annealing_epochs: got 1, which only weights correct take; weights stash needs null",
    ),
    ("parallelism.correction_decay=0.5", "correction_decay: got 0.5, which only weights correct take"),
    (
        "parallelism={mode: auto, plan: auto, correction_decay: 0.5}",
        "got 0.5, which only weights correct take; mode auto needs null",
    ),
    (
        "parallelism={mode: pipemare, correction_decay: 1}",
        "correction_decay: got 1, allowed is a number between 0 and 1",
    ),
    (
        "parallelism={mode: pipemare, annealing_epochs: -1}",
        "annealing_epochs: got -1, allowed is a number of at least 0",
    ),
    # engine
    ("engine.timing=measured", "engine.timing: got measured with cluster cluster-a, this machine's compute times are"),
    ("engine.timing=anew", "engine.timing: got anew with cluster cluster-a, this machine's compute times are"),
    ("cluster={name: local, servers: 2}", "cluster.servers: got 2, allowed is the 1 server of this cluster"),
    # interpolation
    ("name='${nothing}'", r"name: '\$\{nothing\}' can't be resolved: Interpolation key 'nothing' not found"),
    ("name='${'", "name: got '.{2,4}', which is no interpolation"),
    ("name='${name}'", "name: .*can't be resolved"),
    ("train.seed='${name}'", r"train.seed: '\$\{name\}' gives a wrong value: got 'small', allowed is a whole number"),
    ("train.seed='${nope:1}'", "train.seed: .* can't be resolved: Unsupported interpolation type nope"),
    ("name=['${oc.env:X}']", r"name: got a list, allowed is text"),
    ("train.optimizer.betas=['${oc.env:X}', a]", "betas: got .*, allowed is a list of number"),
    ("train='${model}'", "train: got an interpolation, allowed is a mapping"),
]


@pytest.mark.parametrize(("override", "message"), [row for row in OVERRIDES if row[1]])
def test_override_is_refused_in_one_sentence(write: Write, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load(str(write()), [override])
    assert len(caught.value.faults) == 1, str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", [row[0] for row in OVERRIDES if not row[1]])
def test_unusual_but_valid_overrides_are_accepted(write: Write, override: str) -> None:
    """An empty mapping, or one with a part of the keys, leaves the others as they were."""
    assert load(str(write()), [override]).recipe.train.target is not None


def test_a_model_by_default_for_other_images_than_the_data_sets_is_refused(write: Write) -> None:
    path = write(VALID.replace(", in_channels: 1, image_size: 32", ""))
    with pytest.raises(RecipeError) as caught:
        load(str(path))
    channels, size = map(str, caught.value.faults)
    assert "model.in_channels: is by default 3, and the data set's images are 1 x 32 x 32" in channels
    assert "model.image_size: is by default 224, and" in size


@pytest.mark.parametrize("last_first", [False, True])
def test_all_faults_are_reported_together(write: Write, monkeypatch: pytest.MonkeyPatch, last_first: bool) -> None:
    """Also in a process that has imported another module of rules before `load`, as the training loop does."""
    registered = sorted(draft.RULES, key=lambda each: each[1].__module__, reverse=last_first)
    monkeypatch.setattr(draft, "RULES", registered)
    write("trian: {}\nparallelism: {mode: gpipe, microbatches: 5}\n" + VALID.partition("parallelism")[0], "base.yaml")
    path = write("extends: base.yaml\ntrain: {seed: x, target: {value: 95}}\n")
    with pytest.raises(RecipeError) as caught:
        load(str(path), ["cluster.servers=0"])
    assert [str(fault).split(": ")[:2] for fault in caught.value.faults] == [
        ["base.yaml:1", "trian"],
        ["r.yaml:2", "train.seed"],
        ["command line", "cluster.servers"],
        ["base.yaml:2", "parallelism.microbatches"],
        ["r.yaml:2", "train.target.value"],
    ]
