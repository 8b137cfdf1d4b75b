"""AWD-LM: sizes, state, tying, and every cut."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from pipebench import zoo
from pipebench.model.graph import trace
from pipebench.model.sampling import Streams
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.devices import DEVICES
from pipebench.profile.request import ProfileRequest
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.zoo.awd_lm import AwdLm, awd_lm
from pipebench.zoo.recurrent import CarriedLSTM
from tests.support import make_engine, make_setup, parameters_of
from tests.zoo.cuts import check_every_cut, num_parameters
from tests.zoo.texts import PANGRAM, Letters

NO_DROPOUT = {
    "weight_drop": 0.0,
    "dropout_embedding": 0.0,
    "dropout_input": 0.0,
    "dropout_hidden": 0.0,
    "dropout_output": 0.0,
}


def small(*, tied: bool = False, num_layers: int = 3, dropout: bool = False) -> AwdLm:
    torch.manual_seed(0)
    rates = {} if dropout else NO_DROPOUT
    return awd_lm(vocabulary=27, embedding_size=6, hidden_size=8, num_layers=num_layers, tied=tied, **rates)


def lstms(model: nn.Module) -> list[CarriedLSTM]:
    return [module for module in model.modules() if isinstance(module, CarriedLSTM)]


@pytest.mark.parametrize(("tied", "hidden"), [(False, 1570), (True, 1600)])
def test_full_size_is_six_lstm_layers_of_041_gb(tied: bool, hidden: int) -> None:
    """PipeDream, SOSP'19, section 5.2: six LSTM layers, 0.41 GB."""
    with torch.device("meta"):
        model = awd_lm() if not tied else awd_lm(tied=True, hidden_size=hidden)
    words, embedding = 10_000, 400
    widths = [embedding, *[hidden] * 5, embedding]
    recurrent = sum(4 * b * (a + b) + 2 * 4 * b for a, b in pairwise(widths))
    expected = recurrent + words * embedding * (1 if tied else 2) + words
    assert num_parameters(model) == expected
    assert expected == (101_997_200 if tied else 102_476_400)
    assert round(4 * expected / 1e9, 2) == 0.41
    assert len(lstms(model)) == 6
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())


def test_default_width_is_the_multiple_of_ten_nearest_to_041_gb() -> None:
    def distance(hidden_size: int) -> float:
        with torch.device("meta"):
            return abs(4 * num_parameters(awd_lm(hidden_size=hidden_size)) - 0.41e9)

    assert min((1560, 1570, 1580), key=distance) == 1570


def test_dropouts_of_the_paper_in_their_places() -> None:
    """Merity et al. (2018), section 4: 0.4 on the first input and the output, 0.25 between layers, 0.1, 0.5."""
    with torch.device("meta"):
        model = awd_lm()
    kinds = [type(module).__name__ for module in model.layers]
    assert kinds == ["VariationalDropout", *["CarriedLSTM", "VariationalDropout"] * 6]
    assert [module.p for module in model.layers[::2]] == [0.4, *[0.25] * 5, 0.4]
    assert {module.weight_drop for module in lstms(model)} == {0.5}
    assert model.embedding.p == 0.1


def test_logits_and_initial_weights() -> None:
    model = small()
    tokens = torch.randint(27, (4, 5), generator=torch.Generator().manual_seed(1))
    assert model(tokens).shape == (4, 5, 27)
    assert model.embedding.weight.abs().max() <= 0.1
    assert model.decoder.weight.abs().max() <= 0.1
    assert model.embedding.weight.std() > 0.04
    assert not model.decoder.bias.any()
    again = small().state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_state_is_carried_until_reset() -> None:
    model = small().eval()
    tokens = torch.randint(27, (4, 6), generator=torch.Generator().manual_seed(1))
    whole = model(tokens)
    model.reset_state()
    assert all(lstm.carried_state is None for lstm in lstms(model))
    halves = [model(tokens[:, :3]), model(tokens[:, 3:])]
    torch.testing.assert_close(torch.cat(halves, dim=1), whole, rtol=1e-5, atol=1e-6)
    model.reset_state()
    assert not torch.allclose(model(tokens[:, 3:]), halves[1])


def test_tied_weights_are_one_parameter() -> None:
    model = small(tied=True)
    assert model.decoder.weight is model.embedding.weight
    assert num_parameters(model) == num_parameters(small()) - 27 * 6
    tokens = torch.tensor([[0, 1]])
    model(tokens).sum().backward()
    gradient = model.embedding.weight.grad
    assert gradient is not None
    assert bool((gradient[5] != 0).any())  # from the decoder: the word isn't among the tokens


def test_layers_that_are_traced() -> None:
    """Without `leaves`, an LSTM is one layer, and so is every dropout."""
    layers = trace(small(dropout=True)).layers
    kinds = [layer.kind for layer in layers]
    middle = ["VariationalDropout", *["CarriedLSTM", "VariationalDropout"] * 3]
    assert kinds == ["WordDropoutEmbedding", *middle, "Linear"]
    assert [len(layer.parameters) for layer in layers] == [1, 0, 4, 0, 4, 0, 4, 0, 2]


def test_every_cut() -> None:
    assert check_every_cut(small(num_layers=2), Letters(), 4) == 6
    assert check_every_cut(small(), Letters(), 4, num_stages=4, num_random=5) == 15  # three in each of five plans


def test_every_cut_of_tied_weights_is_refused() -> None:
    assert check_every_cut(small(tied=True), Letters(), 4) == 0


def test_no_cut_changes_dropout_masks_or_states() -> None:
    """With all dropouts, two streams of one row and two epochs, weights have the bits of a single worker's."""
    found = []
    data = Letters(PANGRAM * 2, bptt=5)
    for starts in ([], [3], [1, 4, 5, 7]):
        setup = make_setup(
            small(dropout=True), (starts, [1] * (len(starts) + 1)), weights="one", depth=1, minibatch_size=1,
            dataset=data, sampler=Streams(data.num_train, 1, 2), held_out=Streams(data.num_eval, 1, 1, covers=True),
            lr=lambda *_: 1.0,
        )  # fmt: skip
        engine = make_engine(setup)
        engine.train(0, 2 * setup.sampler.minibatches_per_epoch)
        found.append(parameters_of(engine))
    before = dict(small(dropout=True).named_parameters())
    for name, value in found[0].items():
        assert not torch.equal(value, before[name]), name
        assert torch.equal(value, found[1][name]), name
        assert torch.equal(value, found[2][name]), name


def test_the_model_learns_a_repeating_text() -> None:
    """In a plain loop with all dropouts, a repeating text is predicted far better than by its letters' frequencies."""
    torch.manual_seed(0)
    model = awd_lm(vocabulary=27, embedding_size=24, hidden_size=24, num_layers=2, weight_drop=0.1, dropout_input=0.1)
    data = Letters("the cat sat on the mat and " * 80, bptt=9)
    optimizer = torch.optim.SGD(model.parameters(), 10.0)
    row = data.num_train // 8

    def mean(split: str, chunk: int) -> torch.Tensor:
        indices = range(chunk, chunk + 8 * row, row)
        fields = data.fetch(split, indices, ["tokens", "next_tokens"])
        return data.loss(model(fields["tokens"]), fields) / data.weight(split, indices)

    before = mean("train", 0).item()
    for _ in range(4):
        model.reset_state()
        for chunk in range(row):
            optimizer.zero_grad()
            mean("train", chunk).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
    model.eval()
    model.reset_state()
    mean("train", 0)  # warms the state up
    assert before == pytest.approx(3.3, abs=0.1)  # ln 27
    assert mean("train", 1).item() < 1


def test_analytic_profile_of_the_full_size() -> None:
    """A V100 spends its time in the LSTM layers and the decoder; no layer is slower than its arithmetic explains."""
    with torch.device("meta"):
        graph = trace(awd_lm().train())
    recipe = OptimizerRecipe(name="sgd", lr=30.0, clip_norm=0.25)
    dataset = zoo.DATASETS["ptb"].make()
    rows = analytic_profile(ProfileRequest(graph, dataset, [80], recipe, "awd_lm"), DEVICES["V100"]).layers[80]
    by_kind: dict[str, list[float]] = {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(row.forward_s + row.backward_s)
    total = sum(sum(times) for times in by_kind.values())
    assert len(by_kind["CarriedLSTM"]) == 6
    assert sum(by_kind["CarriedLSTM"]) > 0.6 * total
    flops = 3 * 2 * 80 * 70 * 4 * 1570 * 3140
    assert flops / DEVICES["V100"].flops_per_s < by_kind["CarriedLSTM"][2] < 2 * flops / DEVICES["V100"].flops_per_s
    assert rows[2].output_bytes == 80 * 70 * 1570 * 4


class TorchLm(nn.Module):
    """The same with `torch.nn.LSTM` and no dropout: one layer."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.lstm(self.embedding(tokens))[0])


def test_analytic_profile_knows_the_lstm_as_cudnn_s() -> None:
    """It costs as much as torch's LSTM plus a copy of the weights each way: it isn't split into small kernels."""
    dataset, recipe, width = zoo.DATASETS["ptb"].make(), OptimizerRecipe(name="sgd", lr=30.0), 1024
    with torch.device("meta"):
        models = [zoo.MODELS["awd_lm"].make(embedding_size=width, num_layers=1, **NO_DROPOUT), TorchLm(10_000, width)]
    requests = [ProfileRequest(trace(model.train()), dataset, [80], recipe, "") for model in models]
    profiles = [analytic_profile(request, DEVICES["V100"]) for request in requests]
    ours, theirs = (next(row for row in each.layers[80] if "LSTM" in row.kind) for each in profiles)
    copies_s = 6 * ours.parameter_bytes / DEVICES["V100"].memory_bytes_per_s
    for our_s, their_s in ((ours.forward_s, theirs.forward_s), (ours.backward_s, theirs.backward_s)):
        assert their_s <= our_s < their_s + copies_s + 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary": 0}, "awd_lm: vocabulary is 0, allowed is 1 or more"),
        ({"embedding_size": 0}, "awd_lm: embedding_size is 0, allowed is 1 or more"),
        ({"hidden_size": -1}, "awd_lm: hidden_size is -1, allowed is 1 or more"),
        ({"num_layers": 0}, "awd_lm: num_layers is 0, allowed is 1 or more"),
        ({"weight_drop": 1.0}, "awd_lm: weight_drop is 1.0, allowed is 0 to below 1"),
        ({"dropout_output": -0.1}, "awd_lm: dropout_output is -0.1, allowed is 0 to below 1"),
    ],
)
def test_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        zoo.MODELS["awd_lm"].make(**options)
