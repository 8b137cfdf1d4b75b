"""Requirements of streams of text, targets, predicted and rounded weights, with the sentences that state them."""

import pytest

from pipebench.errors import RecipeError
from pipebench.recipe.load import load
from tests.recipe.conftest import VALID, Write

TEXT = """\
name: text
model: {name: awd_lm, vocabulary: 500, embedding_size: 8, hidden_size: 8, num_layers: 1}
dataset: {name: king_james, bptt: 10, train_tokens: 1000, eval_tokens: 100, vocabulary: 500}
train: {minibatch_size: 4, optimizer: {lr: 1}, max_epochs: 1, evaluate_every: {epochs: 1}}
cluster: {name: cluster-a}
parallelism: {mode: dp}
"""

STREAMS = [
    ([], "train.streams: got 1 with plan 4, whose replicas would take turns .*: allowed are multiples of 4"),
    (["train.streams=6"], "train.streams: got 6 with plan 4, .*: allowed are multiples of 4"),
    (["train.streams=4"], None),
    (["train.streams=6", "parallelism.mode=pipedream", "parallelism.plan=2-1"], None),
    (["train.streams=2", "parallelism.mode=pipedream"], None),
    (["train.streams=4", "train.minibatch_size=30"], "train.streams: got 4 streams of 30 rows .* allowed are 1 to 3"),
    (["train.streams=0"], "train.streams: got 0, allowed is a whole number of at least 1"),
    (
        ["train.streams=4", "train.evaluate_every={minibatches: 6, epochs: null}"],
        "train.evaluate_every.minibatches: got 6, .* some of the 4 streams behind: allowed are multiples of 4",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), STREAMS)
def test_streams_suit_text_plan_and_period(write: Write, overrides: list[str], message: str | None) -> None:
    path = str(write(TEXT))
    if message is None:
        assert load(path, overrides).recipe.name == "text"
        return
    with pytest.raises(RecipeError, match=message):
        load(path, overrides)


def test_targets_that_nothing_can_reach(write: Write) -> None:
    path = str(write(TEXT))
    with pytest.raises(RecipeError, match=r"train.target.value: got -3, allowed is a number above 1"):
        load(path, ["train.streams=4", "train.target={metric: perplexity, value: -3}"])
    with pytest.raises(RecipeError, match=r"train.target.value: got 101, allowed is a number above 0, at most 100"):
        load("small/gnmt8/dp", ["train.target.value=101"])


@pytest.mark.parametrize("mode", ["spectrain", "xpipe"])
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            "train.optimizer.momentum=0",
            "train.optimizer.name: got sgd without momentum, whose state has no direction .* allowed are sgd with",
        ),
        (
            "train.optimizer={name: null, target: 'torch.optim:RMSprop', momentum: null}",
            "train.optimizer.target: got 'torch.optim:RMSprop', whose state has no direction of the next step",
        ),
    ],
)
def test_predicted_weights_need_an_optimizer_with_momentum(
    write: Write, mode: str, optimizer: str, message: str
) -> None:
    mode = f"parallelism={{mode: {mode}, plan: straight}}"
    with pytest.raises(RecipeError, match=message):
        load(str(write()), [mode, optimizer])
    load(str(write()), [mode, "train.optimizer={name: AdamW, lr: 0.01, momentum: null}"])
    load(str(write()), ["parallelism={mode: pipemare, plan: straight}", optimizer])


@pytest.mark.parametrize("mode", ["spectrain", "xpipe", "pipemare"])
def test_predicted_or_corrected_weights_are_not_rounded(write: Write, mode: str) -> None:
    name = "adam" if mode == "xpipe" else "sgd"
    row = [f"parallelism.mode={mode}", f"train.optimizer.name={name}", "train.precision=bf16"]
    row += ["train.optimizer.momentum=0.9"] if name == "sgd" else []
    with pytest.raises(RecipeError, match=r"train.precision: got bf16, and weights \w+ change by fractions of an"):
        load(str(write(VALID)), row)


def test_weights_that_servers_send_are_not_rounded(write: Write) -> None:
    with pytest.raises(RecipeError, match=r"train.precision: got bf16, and sync [\w-]+ sends weights, which"):
        load(str(write(VALID)), ["parallelism.mode=dp-asp", "train.precision=bf16"])


def test_streams_are_for_text(write: Write) -> None:
    with pytest.raises(RecipeError, match=r"train.streams: got 2, which is for text, .*: allowed is null"):
        load(str(write()), ["train.streams=2"])


@pytest.mark.parametrize(("size", "most"), [(4, 1000), (3, 1334), (4000, 256)])
def test_no_more_minibatches_are_in_flight_than_an_epoch_has(write: Write, size: int, most: int) -> None:
    """But a few, so that a recipe can be tried on a few samples. A million was planned for hours."""
    row = ["parallelism.mode=pipedream-2bw", "parallelism.plan=straight", f"train.minibatch_size={size}"]
    load(str(write()), [*row, f"parallelism.depth={most}", f"parallelism.accumulate={most}"])
    beyond = [f"parallelism.depth={most + 1}", f"parallelism.accumulate={most + 1}"]
    with pytest.raises(RecipeError, match=rf"depth: .* 1 to {most}: .*\n.*accumulate: .* 1 to {most}: an epoch has"):
        load(str(write()), [*row, *beyond])
