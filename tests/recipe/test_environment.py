"""Values that recipes take from the environment may be tokens: all messages show the expression instead."""

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.errors import RecipeError, hide, printable_lines
from pipebench.recipe.load import load
from pipebench.recipe.preflight import preflight
from tests.recipe.conftest import VALID, Write
from tests.recipe.test_fuzz import KNOWN

TOKENS = {
    "short": "hunter2",
    "long": "hunter2-s3cret-token-of-somebody-which-is-long-and-is-cut-somewhere-in-messages",
    "digits": "54321",
    "quotes": "hunter2'\"\\ä\n2",
}
GIVEN = [
    *([f"{'.'.join(key)}=${{oc.env:TOKEN}}"] for key in KNOWN),
    ["train.minibatch_size=${oc.decode:${oc.env:TOKEN}}"],
    ["train.optimizer.betas=[0.9, '${oc.env:TOKEN}']"],
    ["train.optimizer.name=before-${oc.env:TOKEN}"],
    ["train.optimizer.name=${name}", "name=${oc.env:TOKEN}"],
    ["model.width=${oc.env:TOKEN},3"],
    ["parallelism={mode: gpipe, plan: straight, order: '${oc.env:TOKEN}.csv'}"],
    ["parallelism={plan: straight, vpipe: {live: false, moves: 'x/${oc.env:TOKEN}.json'}}"],
    ["parallelism.plan=${oc.env:TOKEN}.json"],
    ["engine.timing=./${oc.env:TOKEN}.json"],
    ["cluster.name=${oc.env:TOKEN}.yaml"],
    ["dataset={name: imagenet, root: '/no-such/${oc.env:TOKEN}'}", "train.minibatch_size=1"],
]


@pytest.mark.parametrize("kind", TOKENS)
def test_no_message_shows_the_value_of_an_environment_variable(
    write: Write, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TOKEN", TOKENS[kind])
    recipe, refused = str(write()), 0
    for overrides in GIVEN:
        try:
            preflight(load(recipe, overrides, builds=False))
        except RecipeError as error:
            refused += 1
            message = " ".join([str(error), *(f"{fault.file} {fault.problem}" for fault in error.faults)])
            assert "hunter" not in message, overrides
            assert "54321" not in message, overrides
            assert "s3cret" not in message, overrides
    assert refused > len(GIVEN) / 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallelism.mode=${oc.env:TOKEN}", "parallelism.mode: got '${oc.env:TOKEN}...', allowed are single, dp,"),
        ("train.seed=${oc.env:TOKEN}", "'${oc.env:TOKEN}' gives a wrong value: got '${oc.env:TOKEN}..., allowed"),
        (
            "train.seed=${oc.env:SIZE}",
            "allowed is a whole number; variables are text: write ${oc.decode:${oc.env:SIZE}}",
        ),
        ("train.minibatch_size=${oc.decode:${oc.env:SIZE}}", "got ${oc.decode:${oc.env:SIZE}}, allowed are 1 to 4000"),
        ("parallelism.plan=${oc.env:FOLDER}/x.json", "parallelism.plan: ${oc.env:FOLDER}/x.json: can't be read: No"),
    ],
)
def test_messages_show_the_expression_in_place_of_the_value(
    write: Write, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    for name, value in {"TOKEN": TOKENS["long"], "SIZE": "4001", "FOLDER": "/no/such/folder"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError) as refused:
        load(str(write()), [override])
    assert message in str(refused.value)


def test_words_that_contain_a_value_by_chance_are_unchanged() -> None:
    hide("data", "${oc.env:WHERE}")
    hide("4", "${oc.env:SERVERS}")
    hide("", "${oc.env:NOTHING}")
    hide("/", "${oc.env:ROOT}")
    given = "the dataset has 4000 samples on 4 servers, and metadata/"
    assert printable_lines(given) == [given]
    assert printable_lines("got 4, allowed is data") == ["got ${oc.env:SERVERS}, allowed is ${oc.env:WHERE}"]


def test_errors_of_a_user_s_code_are_shown_without_the_token(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", TOKENS["short"])
    write("def make(token):\n    raise ValueError(f'{token} is refused')\n", "of_a_token.py")
    text = VALID.replace(VALID.split("\n")[1], "model: {target: 'of_a_token:make', token: '${oc.env:TOKEN}'}")
    done = CliRunner().invoke(cli, ["run", str(write(text)), "--verbose"])
    assert done.exit_code == 2
    assert "ValueError: ${oc.env:TOKEN} is refused" in done.stderr
    assert "hunter2" not in done.output


def test_files_of_clusters_and_reports_resolve_no_expressions(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", TOKENS["short"])
    write(
        "device: v100\nmemory: '${oc.env:TOKEN}'\nlevels: [{name: a, count: 4, bandwidth: '${oc.env:TOKEN}'}]\n",
        "c.yaml",
    )
    for words in (["show", str(write()), "cluster.name=c.yaml"], ["plan", "r.yaml", "--cluster", "c.yaml"]):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 2
        assert "got '${oc.env:TOKEN}'" in done.stderr
    write("title: '${oc.env:TOKEN}'\nrows: '${oc.env:TOKEN}'\n", "report.yaml")
    done = CliRunner().invoke(cli, ["report", "report.yaml"])
    assert done.exit_code == 2
    assert "hunter2" not in done.output
