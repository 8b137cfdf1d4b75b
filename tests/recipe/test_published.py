"""The full-size recipes agree with PipeDream's Table 1 and section 5.1: one file per row and mode."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipebench.cluster import Cluster
from pipebench.recipe.catalog import recipe_names
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.schedule.notation import format_plan

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "pipedream_sosp19.yaml"
FOLDERS = {
    "VGG-16": "vgg16",
    "ResNet-50": "resnet50",
    "AlexNet": "alexnet",
    "GNMT-8": "gnmt8",
    "GNMT-16": "gnmt16",
    "AWD LM": "awd_lm",
    "S2VT": "s2vt",
}
METRICS = {"top-1 accuracy": "top1", "BLEU": "bleu", "validation perplexity": "perplexity", "METEOR": "meteor"}
DATASETS = {
    "ImageNet": "imagenet",
    "Synthetic Data": "synthetic",
    "WMT16 EN-De": "wmt16",
    "Penn Treebank": "ptb",
    "MSVD": "msvd",
}


def entries() -> dict[str, Any]:
    return {entry["id"]: entry["values"] for entry in yaml.safe_load(PUBLISHED.read_text())["entries"]}


def table_rows() -> list[Any]:
    rows = [values for name, values in entries().items() if name.startswith("t1-")]
    assert len(rows) == 14
    return rows


def row_name(row: Any) -> str:
    cluster = row["cluster"].removeprefix("Cluster-").lower()
    return f"{FOLDERS[row['model']]}/{row['servers']}x{row['gpus_per_server']}-{cluster}"


def global_minibatch(name: str) -> int | None:
    """Return the samples of an update that a recipe's name ends with, as `awd_lm/1x4-a-dp-80`'s does: 80."""
    last = name.rpartition("-")[2]
    return int(last) if last.isdigit() else None


def test_every_row_has_its_two_recipes() -> None:
    names = {*recipe_names()}
    for row in table_rows():
        assert {f"{row_name(row)}-{mode}" for mode in ("dp", "pipedream")} <= names
    assert {f"{folder}/single" for folder in FOLDERS.values()} <= names


def test_recipes_are_on_the_rows_cluster_with_the_rows_plan_data_and_target() -> None:
    for row in table_rows():
        for mode in ("dp", "pipedream"):
            recipe = load(f"{row_name(row)}-{mode}").recipe
            cluster: Cluster = load_cluster(recipe.cluster.name, recipe.cluster.servers)
            assert (recipe.cluster.name, cluster.num_workers) == (row["cluster"].lower(), row["gpus_total"])
            assert recipe.dataset["name"] == DATASETS[row["dataset"]]
            assert recipe.parallelism.mode == mode
            if mode == "pipedream":
                assert str(recipe.parallelism.plan) == format_plan(row["stage_replicas"])
            threshold, target = row["accuracy_threshold"], recipe.train.target
            if threshold is None:
                assert target is None
                continue
            assert target is not None
            assert target.metric == METRICS[threshold["metric"]]
            scale = 0.01 if threshold["unit"] == "%" else 1.0
            assert target.value == pytest.approx(threshold["value"] * scale)


@pytest.mark.parametrize("model", FOLDERS)
def test_training_agrees_with_section_5_1(model: str) -> None:
    known = entries()
    settings = {values["model"]: values for name, values in known.items() if name.startswith("s51-train-")}
    printed = settings.get(model) or settings[model.split("-")[0]]
    mine = [name for name in recipe_names() if name.startswith(f"{FOLDERS[model]}/")]
    assert mine
    for name in mine:
        recipe = load(name).recipe
        train, wanted = recipe.train, printed["per_gpu_minibatch"]
        if global_minibatch(name) is not None:
            assert global_minibatch(name) == wanted
            assert recipe.parallelism.plan == {"dp": "auto", "pipedream": "straight"}[recipe.parallelism.mode]
            every_worker = load_cluster(recipe.cluster.name, recipe.cluster.servers).num_workers
            assert train.minibatch_size * (every_worker if recipe.parallelism.mode == "dp" else 1) == wanted
            assert train.streams in (None, wanted // train.minibatch_size)  # as many rows of a text
        else:
            assert train.minibatch_size == wanted
        if printed["optimizer"] is not None:
            assert train.optimizer.name == printed["optimizer"].lower()
            assert train.optimizer.lr == printed["initial_learning_rate"]


def test_modes_of_one_model_share_what_they_train() -> None:
    """A comparison varies one thing: nothing of model, data or training differs between the files of a folder.

    Recipes that read the minibatch as the update's are a separate comparison: as many samples an update, from
    as many rows of the text, however many replicas share them.
    """
    for folder in (*FOLDERS.values(), "inception_v3"):
        names = [name for name in recipe_names() if name.startswith(f"{folder}/")]
        for reading in {global_minibatch(name) for name in names}:
            flats = [load(name).flat for name in names if global_minibatch(name) == reading]
            for flat in flats:
                differing = {key for key in flat if flat[key] != flats[0].get(key)}
                differing -= set() if reading is None else {"train.minibatch_size", "train.streams"}
                assert {key.split(".")[0] for key in differing} <= {"name", "cluster", "parallelism"}, folder


def test_another_reading_of_the_minibatch_changes_only_how_samples_are_cut_and_shared() -> None:
    variants = [name for name in recipe_names() if name.split("/")[0] in FOLDERS.values() and global_minibatch(name)]
    assert variants
    for name in variants:
        other, known = load(name).flat, load(name.rpartition("-")[0]).flat
        differing = {key for key in other if other[key] != known.get(key)}
        assert differing <= {"name", "dataset.bptt", "train.minibatch_size", "train.streams"}
