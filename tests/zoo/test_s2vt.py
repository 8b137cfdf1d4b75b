"""S2VT: sizes as published, the network against a loop over steps, decoding against running whole prefixes."""

import pytest
import torch
from torch import nn

from pipebench import zoo
from pipebench.model.graph import trace
from pipebench.zoo.moving_digits import moving_digits
from pipebench.zoo.s2vt import S2VT, s2vt
from pipebench.zoo.text import BOS, EOS, PAD
from tests.zoo.cuts import check_every_cut, num_parameters

FRAMES, WORDS, VOCABULARY, FEATURES = 5, 6, 11, 7


def small(dropout: float = 0.0, init_range: float = 0.5, seed: int = 0) -> S2VT:
    torch.manual_seed(seed)
    return s2vt(FEATURES, 4, 8, VOCABULARY, FRAMES, WORDS, dropout, init_range)


def video(num_samples: int = 3, frames: int = FRAMES) -> torch.Tensor:
    return torch.randn(num_samples, frames, FEATURES, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("options", "expected"), [({}, 87_362_668), ({"vocabulary": 12_594}, 36_968_094)])
def test_published_sizes(options: dict[str, int], expected: int) -> None:
    """The released weights are a file of 349,436,137 bytes: a Caffe LSTM has one bias per gate, PyTorch's two."""
    with torch.device("meta"):
        model = s2vt(**options)
    assert num_parameters(model) == expected
    if not options:
        second_biases = 2 * 4 * 1000
        assert 4 * (num_parameters(model) - second_biases) == pytest.approx(349_436_137, rel=1e-4)


def test_equals_a_loop_over_steps() -> None:
    """Frames and zeros through one cell, its output with zeros and words through another, as in the paper's figure."""
    model = small().double()
    frames, caption = video().double(), torch.tensor([[BOS, 4, 5, 6, 7, 8], [BOS, 9, 4, 4, PAD, PAD]])
    frames = frames[:2]
    cells = []
    for lstm in (model.video_lstm, model.language_lstm):
        cell = nn.LSTMCell(lstm.input_size, lstm.hidden_size).double()
        cell.load_state_dict({name.removesuffix("_l0"): value for name, value in lstm.state_dict().items()})
        cells.append(cell)
    states = [(torch.zeros(2, 8).double(), torch.zeros(2, 8).double()) for _ in cells]
    nothing, logits = torch.zeros(2, 4).double(), []
    for step in range(FRAMES + WORDS):
        reads = step < FRAMES
        states[0] = cells[0](model.frame_embedding(frames[:, step]) if reads else nothing, states[0])
        word = nothing if reads else model.word_embedding(caption[:, step - FRAMES])
        states[1] = cells[1](torch.cat([states[0][0], word], 1), states[1])
        if not reads:
            logits.append(model.classifier(states[1][0]))
    torch.testing.assert_close(model(frames, caption), torch.stack(logits, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_describing_equals_running_every_prefix_again(seed: int) -> None:
    model, frames = small(init_range=1.5, seed=seed).eval(), video(6)
    expected = []
    for sample in frames:
        caption = [BOS]
        while len(caption) <= WORDS:
            rows = torch.tensor([caption[:WORDS] + [PAD] * (WORDS - len(caption))])
            caption.append(int(model(sample[None], rows)[0, len(caption) - 1].argmax()))
            if caption[-1] == EOS:
                break
        expected.append([word for word in caption if word not in (BOS, EOS, PAD)])
    written = model.describe(frames, max_length=WORDS)
    assert written == expected
    assert len({tuple(caption) for caption in written}) > 1


def test_describing_ends_at_the_end_token() -> None:
    """A model that always writes EOS writes no word; one that never does writes as many as allowed."""
    model = small()
    with torch.no_grad():
        model.classifier.bias[EOS] = 100
    assert model.describe(video(), max_length=4) == [[], [], []]
    with torch.no_grad():
        model.classifier.bias[EOS], model.classifier.bias[9] = 0, 100
    assert model.describe(video(2), max_length=4) == [[9] * 4, [9] * 4]
    assert model.describe(video(2), max_length=WORDS + 3) == [[9] * (WORDS + 3)] * 2
    assert model.describe(video(2), max_length=0) == [[], []]


def test_describing_draws_no_dropout() -> None:
    model = small(dropout=0.9, init_range=1.5)
    first = model.train().describe(video(), max_length=WORDS)
    assert model.training
    assert first == model.eval().describe(video(), max_length=WORDS)


def test_words_are_read_only_by_later_steps() -> None:
    model, caption = small(), torch.tensor([[BOS, 4, 5, 6, 7, 8]])
    before = model(video(1), caption)
    caption[0, 3] = 9
    after = model(video(1), caption)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.isclose(before[:, 3:], after[:, 3:]).all(2).any()


def test_layers() -> None:
    """Two LSTM calls, and dropout as separate layers; the graph has only layers and constants."""
    kinds = [layer.kind for layer in trace(small(dropout=0.5)).layers]
    assert kinds.count("LSTMLayer") == 2
    assert kinds.count("Dropout") == 3
    assert {kinds[0], kinds[-1]} == {"Linear"}
    assert not {"getattr", "size"} & set(kinds)
    assert len(kinds) == 12


def test_every_cut() -> None:
    dataset = moving_digits(num_train=8, num_eval=4)
    sizes = {"frames": dataset.frames, "words": dataset.words, "num_features": dataset.num_features}
    torch.manual_seed(0)
    model = s2vt(embedding=4, hidden=5, vocabulary=len(dataset.vocabulary()), dropout=0.0, **sizes)
    assert check_every_cut(model, dataset, 3) == len(trace(model).layers) - 1
    assert check_every_cut(model, dataset, 3, num_stages=4, num_random=6) == 3 * 6


def test_initialisation() -> None:
    first, again, other = small(), small(), small(seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.classifier.weight, other.classifier.weight)
    for name, parameter in small(init_range=0.08).named_parameters():
        if "bias" in name:
            assert not parameter.any()
        else:
            assert parameter.abs().max() <= 0.08
            assert parameter.std().item() == pytest.approx(0.08 / 3**0.5, rel=0.25)


def test_registered() -> None:
    assert zoo.MODELS["s2vt"].make is s2vt


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((option, 0) for option in ("num_features", "embedding", "hidden", "frames", "words")),
        *(("vocabulary", 4), ("dropout", 1.0), ("dropout", -0.1), ("init_range", 0.0)),
    ],
)
def test_options_out_of_range(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^s2vt: {option} is {value}, allowed is"):
        zoo.MODELS["s2vt"].make(**{option: value})
