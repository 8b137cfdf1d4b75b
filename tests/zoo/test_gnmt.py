"""GNMT: sizes by closed formulas, padding without influence, every cut, and translation against the forward."""

from typing import Any

import pytest
import torch
from torch import nn

from pipebench import zoo
from pipebench.model.graph import trace
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.devices import DEVICES
from pipebench.profile.request import ProfileRequest
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.zoo.gnmt import GNMT, gnmt8, gnmt16
from pipebench.zoo.text import BOS, EOS, PAD, pad_rows
from tests.zoo.cuts import check_every_cut, num_parameters
from tests.zoo.pairs import Pairs
from tests.zoo.translators import check_padding_of_the_source, check_translation, check_what_is_not_padding

SMALL: dict[str, Any] = {"hidden_size": 6, "source_vocabulary": 11, "target_vocabulary": 13, "init_range": 0.5}
LOUD: dict[str, Any] = {
    "hidden_size": 16,
    "init_range": 1.0,
}  # outputs that differ from sentence to sentence without training
WIDTH, VOCABULARY = 1024, 32320


def make(num_layers: int = 8, **options: Any) -> GNMT:
    torch.manual_seed(1)
    model: GNMT = (gnmt8 if num_layers == 8 else gnmt16)(**(SMALL | {"dropout": 0.0} | options))
    return model.double()


def expected_parameters(num_layers: int, width: int, source: int, target: int) -> int:
    """Per LSTM four gates, each with a matrix for its input, one for its output and two biases."""

    def lstm(inputs: int) -> int:
        return 4 * width * (inputs + width + 2)

    half = num_layers // 2
    embeddings, classifier = (source + target) * width, target * (width + 1)
    encoder = 2 * lstm(width) + lstm(2 * width) + (half - 2) * lstm(width)
    attention = 2 * width**2 + 2 * width + 1
    decoder = lstm(width) + attention + (half - 1) * lstm(2 * width)
    return embeddings + encoder + decoder + classifier


@pytest.mark.parametrize(("name", "num_layers", "millions"), [("gnmt8", 8, 193.8), ("gnmt16", 16, 277.7)])
def test_full_size_by_a_closed_formula(name: str, num_layers: int, millions: float) -> None:
    with torch.device("meta"):
        model = zoo.MODELS[name].make()
    expected = expected_parameters(num_layers, WIDTH, VOCABULARY, VOCABULARY)
    assert num_parameters(model) == expected
    assert expected / 1e6 == pytest.approx(millions, abs=0.05)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_shared_embedding_saves_one_matrix() -> None:
    with torch.device("meta"):
        model = gnmt8(share_embedding=True)
    assert num_parameters(model) == expected_parameters(8, WIDTH, 0, VOCABULARY)
    graph = trace(model)
    assert graph.layers[graph.index_of("source_embedder")].parameters == ("source_embedder.weight",)
    assert graph.layers[graph.index_of("source_embedder_1")].parameters == ("source_embedder.weight",)


@pytest.mark.parametrize("num_layers", [8, 16])
def test_layers_equal_those_of_the_artifact_s_profile(num_layers: int) -> None:
    """Without `leaves`; there is a dropout before every LSTM but the two that read embeddings."""
    half = num_layers // 2
    graph = trace(make(num_layers, dropout=0.2))
    residual_encoder = ["Dropout", "LSTMLayer", "add"]
    first = ["WordEmbedding", "BidirectionalLSTM", "Dropout", "LSTMLayer", *residual_encoder * (half - 2)]
    attention = ["WordEmbedding", "RecurrentAttention", "getitem", "getitem", "Dropout", "cat", "LSTMLayer"]
    decoder = ["Dropout", "cat", "LSTMLayer", "add"] * (half - 2)
    assert [layer.kind for layer in graph.layers] == [*first, *attention, *decoder, "Classifier"]
    attended = graph.layers[graph.index_of("getitem_1")].index
    readers = [layer.kind for layer in graph.layers if attended in layer.reads]
    assert readers == ["cat"] * (half - 1)


def test_dropout_of_the_embeddings_is_an_option() -> None:
    kinds = [layer.kind for layer in trace(make(input_dropout=0.2)).layers]
    assert kinds[:3] == ["WordEmbedding", "Dropout", "BidirectionalLSTM"]
    assert kinds.count("Dropout") == 6 + 2


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = gnmt8(hidden_size=32, source_vocabulary=50, target_vocabulary=60)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias_hh_l0", "normalize_bias")):
            assert not parameter.any()
        elif name.endswith("normalize_scalar"):
            assert parameter.item() == pytest.approx(32**-0.5)
        else:
            assert 0.08 < parameter.abs().max() <= 0.1
    torch.manual_seed(0)
    again = gnmt8(hidden_size=32, source_vocabulary=50, target_vocabulary=60)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_lstm_layer_equals_torch_s() -> None:
    layer = make().encoder[0]
    theirs = nn.LSTM(12, 6).double()
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    output, (hidden, cell) = theirs(x)
    torch.testing.assert_close(layer(x), output)
    state = torch.zeros(3, 2, 6, dtype=torch.float64)
    for step in range(5):
        y, state = layer.step(x[step], state)  # type: ignore[operator]
        torch.testing.assert_close(y, output[step])
    torch.testing.assert_close(state, torch.stack((hidden[0], cell[0]), 1))


def test_the_first_layer_is_a_bidirectional_lstm_over_packed_sentences() -> None:
    """Torch's own, on sentences packed by length, is the oracle."""
    layer = make().bidirectional
    theirs = nn.LSTM(6, 6, bidirectional=True).double()
    weights = dict(layer.there.state_dict())
    weights |= {f"{name}_reverse": value for name, value in layer.back.state_dict().items()}
    theirs.load_state_dict(weights)
    lengths = torch.tensor([4, 1, 7, 5])
    x = torch.randn(7, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    expected, _ = nn.utils.rnn.pad_packed_sequence(theirs(packed)[0])
    is_token = (torch.arange(7).unsqueeze(1) < lengths).unsqueeze(2)
    found = layer(x, lengths)
    torch.testing.assert_close(found * is_token, expected)
    torch.testing.assert_close(found[:, :, :6], expected[:, :, :6])  # zeros where padding is


def after(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the outputs of torch's own LSTM with a layer's weights for one sentence, [tokens, features]."""
    theirs = nn.LSTM(x.shape[1], 6).double()
    theirs.load_state_dict(layer.state_dict())
    return theirs(x)[0]


@pytest.mark.parametrize("num_layers", [8, 16])
def test_outputs_equal_the_artifact_s_network_for_single_sentences(num_layers: int) -> None:
    """As MLPerf and PipeDream: residuals from the third layer on, and one attention that all later layers read."""
    model = make(num_layers)
    source, lengths = torch.tensor([[BOS, 5, 6, 7, EOS], [BOS, 8, EOS, PAD, PAD]]), torch.tensor([5, 3])
    target = torch.tensor([[BOS, 4, 5], [BOS, 9, 12]])
    for found, read, length, written in zip(model(source, lengths, target), source, lengths, target, strict=True):
        words = model.source_embedder.weight[read[:length]]
        there, back = model.bidirectional.there, model.bidirectional.back
        memory = after(model.encoder[0], torch.cat((after(there, words), after(back, words.flip(0)).flip(0)), 1))
        for layer in model.encoder[1:]:
            memory = memory + after(layer, memory)
        y = after(model.attention.rnn, model.target_embedder.weight[written])
        attention = model.attention.attention
        compared = y.unsqueeze(1) @ attention.linear_q.weight.T + memory @ attention.linear_k.weight.T
        direction = attention.normalize_scalar * nn.functional.normalize(attention.linear_att, dim=0)
        attended = ((compared + attention.normalize_bias).tanh() @ direction).softmax(1) @ memory
        for index, layer in enumerate(model.decoder):
            y = after(layer, torch.cat((y, attended), 1)) + (y if index else 0)
        torch.testing.assert_close(found, y @ model.classifier.weight.T + model.classifier.bias)


@pytest.mark.parametrize("num_layers", [8, 16])
def test_padding_of_the_source_influences_nothing(num_layers: int) -> None:
    """Neither other tokens in place of padding nor more padding change an output or a gradient."""
    model = make(num_layers)
    check_padding_of_the_source(model, rtol=1e-12, atol=1e-13)
    assert model.source_embedder.weight.grad is not None
    assert not model.source_embedder.weight.grad[PAD].any()


def test_tokens_that_are_not_padding_matter() -> None:
    check_what_is_not_padding(make())


def test_every_cut_computes_the_whole() -> None:
    """Sources of different lengths; the attention's memory and its results cross cuts."""
    assert check_every_cut(make(), Pairs(), 5, apart=5) == 25
    assert check_every_cut(make(), Pairs((12, 10)), 4, num_stages=5, num_random=2) == 8


def test_every_cut_of_sixteen_layers() -> None:
    assert check_every_cut(make(16), Pairs(), 3, apart=6) == 53


def test_cuts_inside_a_shared_embedding_are_refused() -> None:
    """The only places left are after the embedding's second reader: there are none before the first."""
    num_layers = len(trace(make()).layers)
    shared = make(share_embedding=True, source_vocabulary=13)
    between = trace(shared).index_of("source_embedder_1")
    assert check_every_cut(shared, Pairs(), 3) == num_layers - 1 - between


@pytest.mark.parametrize("num_layers", [8, 16])
def test_carried_states_translate_like_the_whole_forward(num_layers: int) -> None:
    check_translation(make(num_layers, **LOUD).eval())


def test_more_hypotheses_find_other_sentences() -> None:
    model = make(**LOUD).eval()
    sentences = [[BOS, *row, EOS] for row in Pairs().tokens("source", "train", range(6))]
    source, lengths = pad_rows(sentences), torch.tensor([len(row) for row in sentences])
    together = model.translate(source, lengths, max_length=7)
    greedy = model.translate(source, lengths, max_length=7, beam_size=1)
    assert together != greedy


@pytest.mark.parametrize("make_model", [gnmt8, gnmt16])
def test_a_v100_s_profile_takes_seconds(make_model: Any) -> None:
    """From shapes only, of the full-size model on the meta device."""
    with torch.device("meta"):
        graph = trace(make_model())
    optimizer = OptimizerRecipe(name="adam", lr=3e-4)
    profile = analytic_profile(ProfileRequest(graph, Pairs(typical=(50, 50)), [64], optimizer, "gnmt"), DEVICES["V100"])
    rows = {row.name: row for row in profile.layers[64]}
    assert rows["encoder_1"].output_bytes == 50 * 64 * WIDTH * 4
    assert rows["classifier"].output_bytes == 64 * 50 * VOCABULARY * 4
    assert 0.1 < sum(row.forward_s + row.backward_s for row in rows.values()) < 1


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_size": 0},
        {"source_vocabulary": 3},
        {"target_vocabulary": 3},
        {"dropout": 1.0},
        {"input_dropout": -0.1},
        {"init_range": 0.0},
        {"share_embedding": True, "source_vocabulary": 10},
    ],
)
@pytest.mark.parametrize("name", ["gnmt8", "gnmt16"])
def test_options_out_of_range(name: str, options: dict[str, Any]) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=rf"^{name}: {next(iter(options))} is .* allowed is"):
        zoo.MODELS[name].make(**options)
