"""Beam search against exhaustive search, greedy search and the papers' formulas."""

import itertools
import math

import pytest
import torch

from pipebench.zoo.beam_search import MLPERF, Penalties, Tensors, beam_search, coverage_penalty, length_norm
from pipebench.zoo.text import BOS, EOS

VOCABULARY, SOURCE = 5, 3  # tokens 0 to 4, of which 3 ends
PLAIN = Penalties(length_power=0.0, coverage=0.0)


class Table:
    """A decoder whose probabilities and attention depend on the sentence, the position and the last two tokens."""

    def __init__(self, num_sentences: int, max_length: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (num_sentences, max_length, VOCABULARY, VOCABULARY)
        logits = 2 * torch.randn(*shape, VOCABULARY, generator=generator, dtype=torch.float64)
        logits[..., EOS] -= 1  # or most sentences would be empty
        self.log_probabilities = logits.log_softmax(-1)
        weights = torch.randn(*shape, SOURCE, generator=generator, dtype=torch.float64).softmax(-1)
        weights[0, ..., -1] = 0  # the first sentence is shorter
        self.attention = weights / weights.sum(-1, keepdim=True)
        self.num_steps = 0

    def step(
        self, tokens: torch.Tensor, state: Tensors, context: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        """Look up the last two tokens; the state is the one before the last, the context the sentence's index."""
        position, row = self.num_steps, context[0].unsqueeze(1).expand_as(tokens)
        self.num_steps += 1
        before = state[0].long()
        here = (row, torch.full_like(tokens, position), before, tokens)
        return self.log_probabilities[here], self.attention[here], (tokens.to(state[0].dtype),)

    def search(self, max_length: int, beam_size: int, penalties: Penalties = MLPERF) -> list[list[int]]:
        self.num_steps = 0
        num_sentences = len(self.log_probabilities)
        state = (torch.zeros(num_sentences, beam_size, dtype=torch.float64),)
        context = (torch.arange(num_sentences),)
        return beam_search(self.step, state, context, max_length=max_length, beam_size=beam_size, penalties=penalties)

    def score(self, row: int, tokens: tuple[int, ...], penalties: Penalties) -> float:
        """Score one hypothesis by the papers' formulas, in plain numbers."""
        log_probability, coverage, before, last = 0.0, [0.0] * SOURCE, 0, BOS
        for position, token in enumerate(tokens):
            log_probability += float(self.log_probabilities[row, position, before, last, token])
            coverage = [
                c + float(a) for c, a in zip(coverage, self.attention[row, position, before, last], strict=True)
            ]
            before, last = last, token
        norm: float = ((5 + 1 + len(tokens)) / (5 + 1)) ** penalties.length_power
        penalty = sum(math.log(min(c, 1.0)) for c in coverage if c > 0)
        return log_probability / norm + penalties.coverage * penalty

    def pruned(self, row: int, max_length: int, beam_size: int) -> list[int]:
        """Search with lists: after every token the likeliest hypotheses stay, finished ones unchanged."""
        likeliest = Penalties(length_power=0.0, coverage=0.0)
        beam: list[tuple[int, ...]] = [()]
        for _ in range(max_length):
            ended = [tokens for tokens in beam if tokens[-1:] == (EOS,)]
            longer = [(*tokens, word) for tokens in beam if tokens not in ended for word in range(VOCABULARY)]
            beam = sorted(ended + longer, key=lambda tokens: -self.score(row, tokens, likeliest))[:beam_size]
        winner = max(beam, key=lambda tokens: self.score(row, tokens, MLPERF))
        return [token for token in winner if token != EOS]

    def best(self, row: int, max_length: int, penalties: Penalties) -> list[int]:
        others = [token for token in range(VOCABULARY) if token != EOS]
        ended = [(*words, EOS) for n in range(max_length) for words in itertools.product(others, repeat=n)]
        cut_off = list(itertools.product(others, repeat=max_length))
        winner = max(ended + cut_off, key=lambda tokens: self.score(row, tokens, penalties))
        return [token for token in winner if token != EOS]


@pytest.mark.parametrize("penalties", [MLPERF, PLAIN, Penalties(5.0, 1.5, 2.0)], ids=str)
@pytest.mark.parametrize("max_length", [1, 2, 4])
def test_an_unlimited_beam_equals_exhaustive_search(penalties: Penalties, max_length: int) -> None:
    table = Table(num_sentences=12, max_length=max_length)
    everything = sum(4**n for n in range(max_length + 1))
    expected = [table.best(row, max_length, penalties) for row in range(12)]
    assert table.search(max_length, everything + 3, penalties) == expected
    assert max_length == 1 or len({len(tokens) for tokens in expected}) > 1


def test_a_narrow_beam_keeps_the_likeliest_and_penalties_choose_among_them() -> None:
    table = Table(num_sentences=12, max_length=4)
    found = {beam_size: table.search(4, beam_size) for beam_size in (1, 2, 3, 5)}
    for beam_size, sentences in found.items():
        assert sentences == [table.pruned(row, 4, beam_size) for row in range(12)]
    assert found[1] != found[2] != [table.best(row, 4, MLPERF) for row in range(12)]


def test_penalties_change_the_best_hypothesis() -> None:
    """Otherwise the test above would not test them."""
    table = Table(num_sentences=12, max_length=4)
    plain, long, covering = (
        [table.best(row, 4, penalties) for row in range(12)]
        for penalties in (PLAIN, Penalties(5.0, 1.5, 0.0), Penalties(5.0, 0.0, 2.0))
    )
    assert plain != long
    assert plain != covering
    assert sum(map(len, long)) > sum(map(len, plain))


def test_a_beam_of_one_is_greedy() -> None:
    table = Table(num_sentences=8, max_length=6)
    found = table.search(6, 1)
    for row, tokens in enumerate(found):
        expected, before, last = [], 0, BOS
        for position in range(6):
            token = int(table.log_probabilities[row, position, before, last].argmax())
            if token == EOS:
                break
            expected.append(token)
            before, last = last, token
        assert tokens == expected
    assert {len(tokens) for tokens in found} > {6}  # some are cut off, some end


def test_finished_hypotheses_stay_in_the_beam_and_shorter_ones_can_win() -> None:
    """Two beams by hand: EOS at once has 0.4; the other word has 0.6 and then every continuation at most 0.5."""
    first = torch.tensor([0.0, 0.0, 0.0, 0.4, 0.6]).log()
    second = torch.tensor([0.5, 0.0, 0.0, 0.0, 0.5]).log()
    steps = iter((first, second, second))

    def step(tokens: torch.Tensor, state: Tensors, context: Tensors) -> tuple[torch.Tensor, None, Tensors]:
        return next(steps).expand(1, 2, VOCABULARY), None, state

    assert beam_search(step, (torch.zeros(1, 2),), (), max_length=2, beam_size=2, penalties=PLAIN) == [[]]


def test_finished_sentences_leave_the_search() -> None:
    """A sentence that has ended costs no more steps, and the search ends with the last one."""
    sizes = []

    def step(tokens: torch.Tensor, state: Tensors, context: Tensors) -> tuple[torch.Tensor, None, Tensors]:
        sizes.append(len(tokens))
        ends = context[0] == len(sizes)
        logits = torch.full((*tokens.shape, VOCABULARY), -20.0)
        logits[:, :, 4] = 0
        logits[ends, :, EOS] = 20
        return logits.log_softmax(-1), None, state

    context = (torch.tensor([3, 1, 2]),)
    found = beam_search(step, (torch.zeros(3, 1),), context, max_length=50, beam_size=1)
    assert found == [[4, 4], [], [4]]
    assert sizes == [3, 2, 1]


def test_penalties_are_the_formulas() -> None:
    assert length_norm(torch.tensor([1, 7]), 5.0, 0.6).tolist() == pytest.approx([1.0, 2.0**0.6])
    attention = torch.tensor([[0.5, 2.0, 0.0], [1.0, 1.0, 0.25]], dtype=torch.float64)
    assert coverage_penalty(attention).tolist() == pytest.approx([math.log(0.5), math.log(0.25)])
    score = MLPERF.score(torch.tensor([-3.0]), torch.tensor([7]), torch.tensor([[0.5, 2.0]]))
    assert score.item() == pytest.approx(-3 / 2**0.6 + 0.1 * math.log(0.5))
    assert (MLPERF.length_constant, MLPERF.length_power, MLPERF.coverage) == (5.0, 0.6, 0.1)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_nothing_to_search(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"beam_search: (max_length|beam_size) is 0, allowed is 1 or more"):
        Table(1, 5).search(*sizes)
