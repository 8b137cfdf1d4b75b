"""Files that hold no recipe, or a wrong one, and references to none: what is refused, and the sentence that says so."""

import pytest

from pipebench.errors import RecipeError
from pipebench.recipe.catalog import find_recipes
from pipebench.recipe.load import load
from tests.recipe.conftest import VALID, Write

FILES: list[tuple[str | bytes, str]] = [
    ("", r"r.yaml: is empty; a mapping of keys to values is needed"),
    ("# nothing\n", "r.yaml: is empty"),
    ("- a\n- b\n", "r.yaml: holds a list; a mapping"),
    ("just words", "r.yaml: holds a str; a mapping"),
    ("name: [1, 2\n", "r.yaml: line 2: is not YAML we take"),
    ("name: a\n\tb: c\n", "r.yaml: line 2: is not YAML we take"),
    ("name: a\nname: b\n", "r.yaml: line 2: .*the key 'name' is there twice"),
    ("a: &x 1\nb: *x\n", "r.yaml: line 1: .*anchors"),
    ("? [a, b]\n: c\n", "r.yaml: line 1: .*a key is not a plain word"),
    ("name: !!python/object:os.system {}\n", "r.yaml: line 1: is not YAML we take: could not determine"),
    ("name: !!int x\n", "r.yaml: is not YAML we take: a value can't be read"),
    (b"\x00\x01\x02", "r.yaml: is not YAML"),
    (b"\xff\xfe\x00n", "r.yaml: is not text in UTF-8"),
    (b"a: 1\n" * 300_000, "r.yaml: is larger than 1000000 bytes"),
    ("[" * 5000, "r.yaml: (is nested too deeply|line 1: )"),
    (VALID + "1: 2\n", "r.yaml: 1: unknown key"),
    (VALID + "null: 2\n", "r.yaml: None: unknown key"),
    (VALID.replace("small", "2019"), "r.yaml: name: got 2019, allowed is text; put it in quotes"),
    (VALID.replace("name: small\n", ""), "r.yaml: name: is missing and has no default"),
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
    with pytest.raises(RecipeError, match=message) as caught:
        load(str(write(content)))
    assert len(caught.value.faults) == 1, str(caught.value)
    assert "\n" not in str(caught.value)


def test_longer_circle_is_drawn(write: Write) -> None:
    write("extends: b.yaml\n", "a.yaml")
    write("extends: a.yaml\n", "b.yaml")
    with pytest.raises(
        RecipeError, match=r"r.yaml: extends: goes round in a circle: r.yaml -> b.yaml -> a.yaml -> b.yaml"
    ):
        load(str(write("extends: b.yaml\n")))


def test_folder_without_recipes(write: Write) -> None:
    write(VALID, "empty/base.yaml")
    with pytest.raises(RecipeError, match=r"empty: this folder holds no recipe"):
        find_recipes("empty")


@pytest.mark.parametrize("reference", ["no-such", "", " ", "a\x00b", "x" * 5000, "quikstart"])
def test_nothing_there(write: Write, reference: str) -> None:
    with pytest.raises(RecipeError, match="no such file, folder or short name") as caught:
        load(reference)
    assert len(str(caught.value)) < 300


def test_a_device_file_is_not_read() -> None:
    with pytest.raises(RecipeError, match="/dev/zero: is not a file"):
        load("/dev/zero")
