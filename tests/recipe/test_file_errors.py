"""Files without a recipe or with a wrong one, and references to none, with the sentence that refuses them."""

import os
import re
from pathlib import Path

import pytest

from pipebench.errors import RecipeError
from pipebench.recipe.catalog import find_recipes
from pipebench.recipe.load import load
from pipebench.recipe.preflight import preflight
from tests.lined import lined
from tests.patience import within_patience
from tests.recipe.conftest import VALID, Write

FILES: list[tuple[str | bytes, str]] = [
    ("", r"r.yaml: is empty; a mapping of keys to values is needed"),
    ("# nothing\n", "r.yaml: is empty"),
    ("- a\n- b\n", "r.yaml: holds a list; a mapping"),
    ("just words", "r.yaml: holds text; a mapping"),
    ("name: [1, 2\n", "r.yaml: line 2: is not YAML we take"),
    ("name: a\n\tb: c\n", "r.yaml: line 2: is not YAML we take"),
    ("name: a\nname: b\n", "r.yaml: line 2: .*the key 'name' is there twice"),
    ("a: &x 1\nb: *x\n", "r.yaml: line 1: .*anchors"),
    ("? [a, b]\n: c\n", "r.yaml: line 1: .*a key is not a plain word"),
    ("name: !!python/object:os.system {}\n", "r.yaml: line 1: is not YAML we take: could not determine"),
    ("name: !!int x\n", "r.yaml: is not YAML we take: a value can't be read"),
    ("name: a\n---\nname: b\n", "r.yaml: line 2: .*expected a single document in the stream, but found another"),
    (b"name: a\nb: \x00\x01", r"r.yaml: line 2: is not YAML: the character U\+0000 is not allowed"),
    (VALID.replace("mode: pipedream", "mode:dp"), "parallelism.mode: got 'mode:dp'; put a space .*: 'mode: dp'"),
    (b"\xff\xfe\x00n", "r.yaml: is not text in UTF-8"),
    (b"a: 1\n" * 300_000, "r.yaml: is larger than 1000000 bytes"),
    ("[" * 5000, "r.yaml: line 1: is not YAML we take: nested more than 32 deep"),
    (VALID + "x: " + "{a: " * 40 + "1" + "}" * 40, "r.yaml: line 11: is not YAML we take: nested more than 32 deep"),
    (VALID.replace("small", '"a\\0b"'), r"r.yaml: name: got 'a\\x00b', allowed are letters, digits"),
    (b"\xef\xbb\xbf" + VALID.replace("small", "''").encode(), "r.yaml: name: got '', allowed are letters, digits"),
    (
        VALID.replace("10\n", "9" * 5000 + "\n"),
        "r.yaml: is not YAML we take: a value can't be read .* thousands of digits",
    ),
    (VALID + "a: &a [x]\nb: [*a, *a]\n", "r.yaml: line 11: .*anchors"),
    (VALID.replace("{name: mnist5k}", "{name: mnist5k, name: x}"), "line 3: .*the key 'name' is there twice"),
    (VALID + "1: 2\n", "r.yaml: 1: unknown key"),
    (VALID + "null: 2\n", "r.yaml: None: unknown key"),
    (VALID.replace("small", "2019"), "r.yaml: name: got 2019, allowed is text; put it in quotes"),
    (VALID.replace("name: small\n", ""), "r.yaml: name: is missing and has no default"),
    (
        VALID.replace(VALID.split("\n")[1], "model: {}"),
        "model: is missing and .*, needed is a name, a target or a profile",
    ),
    (
        VALID.replace("mnist5k", "wmt16, lengths: declared").replace("top1", "token_accuracy"),
        "dataset.lengths: got declared, which is for engine.kind simulated: kind virtual trains, on samples as long as",
    ),
    (
        VALID.replace("cluster-a", "local") + "engine: {timing: analytic}",
        "engine.timing: got analytic with cluster local",
    ),
    (
        VALID.replace("cluster-a", "local").replace("mode: pipedream", "mode: gpipe, accumulate: largest"),
        "parallelism.accumulate: got largest on cluster local, whose file gives no memory size: allowed is a whole",
    ),
    (VALID + "extends: r.yaml\n", "r.yaml: extends: goes round in a circle: r.yaml -> r.yaml"),
    (VALID + "extends: bas.yaml\n", "r.yaml: extends: bas.yaml: no such file"),
    (VALID + "extends: [a]\n", r"r.yaml: extends: got \['a'\], allowed is a file beside this one"),
    (
        VALID.replace(VALID.split("\n")[1], "model: {profile: x.graph.txt}"),
        "model.profile: got a profile, which is for engine.kind simulated: kind virtual trains, and costs can't be",
    ),
    (
        VALID.replace(VALID.split("\n")[1], "model: {profile: x.graph.txt, name: vgg16}") + "engine: {kind: simulated}",
        "model.name: got 'vgg16' beside profile, which says all that is known: allowed is null",
    ),
    (VALID + "extends: recipes/quickstart\n", "r.yaml: extends: got 'recipes/quickstart', which is a folder"),
]


@pytest.mark.parametrize(("content", "message"), FILES)
def test_file_is_refused_in_one_sentence(write: Write, content: str | bytes, message: str) -> None:
    with pytest.raises(RecipeError, match=lined(message)) as caught:
        load(str(write(content)))
    assert len(caught.value.faults) == 1, str(caught.value)
    assert "\n" not in str(caught.value)


def test_longer_circle_is_drawn(write: Write) -> None:
    write("extends: b.yaml\n", "a.yaml")
    write("extends: a.yaml\n", "b.yaml")
    with pytest.raises(
        RecipeError, match=r"r.yaml:1: extends: goes round in a circle: r.yaml -> b.yaml -> a.yaml -> b.yaml"
    ):
        load(str(write("extends: b.yaml\n")))


def test_folder_without_recipes(write: Write) -> None:
    write(VALID, "empty/base.yaml")
    with pytest.raises(RecipeError, match=r"empty: this folder holds no recipe"):
        find_recipes("empty")


@pytest.mark.parametrize("reference", ["no-such", "", " ", "a\x00b", "x" * 5000, "quikstart"])
def test_a_reference_to_nothing_is_refused(write: Write, reference: str) -> None:
    with pytest.raises(RecipeError, match="no such file, folder or short name") as caught:
        load(reference)
    assert len(str(caught.value)) < 300


def test_a_device_file_is_not_read() -> None:
    with pytest.raises(RecipeError, match="/dev/zero: is not a file"):
        load("/dev/zero")


MODEL = VALID.split("\n")[1]
NAMED = {
    "engine.timing": VALID + "engine: {timing: x.json}",
    "model.profile": VALID.replace(MODEL, "model: {profile: x.json}") + "engine: {kind: simulated}",
    "parallelism.plan": VALID.replace("2-1-1", "x.json"),
    "parallelism.order": VALID.replace("mode: pipedream, plan: 2-1-1", "mode: gpipe, plan: straight, order: x.csv"),
    "parallelism.push_order": VALID.replace("mode: pipedream, plan: 2-1-1", "mode: dp-asp, push_order: x.json"),
    "parallelism.vpipe.moves": VALID.replace("2-1-1", "straight, vpipe: {live: false, moves: x.json}"),
    "search.trace": VALID + "search: {cells: [a], trace: x.json}",
    "cluster.name": VALID.replace("cluster-a", "x.yaml"),
    "extends": VALID + "extends: x.yaml",
}


@pytest.mark.parametrize("key", NAMED)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge", "bytes", "circle"])
def test_pipes_and_devices_are_refused_wherever_a_recipe_names_a_file(write: Write, key: str, kind: str) -> None:
    """A pipe was waited for, whatever the key; a file without end was read until memory ran out."""
    path = next(Path(name) for name in ("x.json", "x.csv", "x.yaml") if name in NAMED[key])
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/null")
        case "folder":
            path.mkdir()
        case "huge":
            path.touch()
            os.truncate(path, 1 << 42)
        case "bytes":
            path.write_bytes(b"\xff\xfe{}")
        case "circle":
            path.symlink_to(path)
    with within_patience(), pytest.raises(RecipeError) as refused:
        preflight(load(str(write(NAMED[key]))), trains=False)
    sentences = [str(fault) for fault in refused.value.faults if fault.key == key or kind in ("huge", "bytes")]
    said = "isn't a file|is not a file|which is a folder|can't be read|is larger than|is not text|no such file"
    assert sentences, str(refused.value)
    assert all(re.search(said, sentence) and "\n" not in sentence for sentence in sentences), sentences
