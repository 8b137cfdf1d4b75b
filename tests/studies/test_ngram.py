"""Kneser-Ney trigrams against a plain implementation of the formulas, and against numbers computed by hand."""

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch

from reports.studies.ngram import Trigram

TEXT = torch.randint(0, 6, (300,), generator=torch.Generator().manual_seed(0)) ** 2 % 7  # ids 0 to 4, unevenly


class Oracle:
    """The formulas with dictionaries: conditional probabilities after any context, word by word."""

    def __init__(self, text: list[int], vocabulary: int) -> None:
        self.vocabulary = vocabulary
        three = Counter(zip(text, text[1:], text[2:], strict=False))
        two = Counter((v, w) for _, v, w in three)
        one = Counter((w,) for _, w in set(pairwise(text)))
        self.tables: dict[int, Counter[tuple[int, ...]]] = {3: Counter(three), 2: Counter(two), 1: Counter(one)}

    def discount(self, order: int, count: int) -> float:
        number = Counter(self.tables[order].values())
        rates = {1: 0.5, 2: 1.0, 3: 1.5}
        if number[1] and number[2] and number[3]:
            y = number[1] / (number[1] + 2 * number[2])
            found = {k: k - (k + 1) * y * number[k + 1] / number[k] for k in (1, 2, 3)}
            if all(0 <= found[k] <= k for k in found):
                rates = found
        return rates[min(count, 3)]

    def probability(self, context: tuple[int, ...], word: int) -> float:
        order = len(context) + 1
        lower = self.probability(context[1:], word) if context else 1 / self.vocabulary
        table = self.tables[order]
        followers = {ngram: count for ngram, count in table.items() if ngram[:-1] == context}
        if not followers:
            return lower
        total = sum(followers.values())
        taken = sum(self.discount(order, count) for count in followers.values())
        count = followers.get((*context, word), 0)
        own = count - self.discount(order, count) if count else 0.0
        return own / total + taken / total * lower


@pytest.mark.parametrize("length", [3, 4, 12, 300])
@pytest.mark.parametrize("vocabulary", [5, 9])
def test_probabilities_equal_the_plain_implementation_s(length: int, vocabulary: int) -> None:
    """Seen and unseen contexts; words that the text lacks; texts too small to estimate discounts."""
    text = TEXT[:length]
    model, oracle = Trigram(text, vocabulary), Oracle(text.tolist(), vocabulary)
    other = torch.randint(0, vocabulary, (40,), generator=torch.Generator().manual_seed(1))
    given = other.tolist()
    expected = [oracle.probability((given[0],), given[1])]
    expected += [oracle.probability((u, v), w) for u, v, w in zip(given, given[1:], given[2:], strict=False)]
    torch.testing.assert_close(model.probabilities(other), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("length", [3, 12, 300])
def test_probabilities_after_any_two_words_sum_to_one(length: int) -> None:
    model, vocabulary = Trigram(TEXT[:length], 6), 6
    for u in range(vocabulary):
        for v in range(vocabulary):
            found = [model.probabilities(torch.tensor([u, v, w])) for w in range(vocabulary)]
            assert sum(pair[1].item() for pair in found) == pytest.approx(1, abs=1e-12)
            assert all(pair[1] > 0 for pair in found)
            after_one = [model.probabilities(torch.tensor([u, w]))[0].item() for w in range(vocabulary)]
            assert sum(after_one) == pytest.approx(1, abs=1e-12)


def test_by_hand() -> None:
    """The text 0 1 0 1 2 has the trigrams 010, 101, 012, each once; so discounts are the fallback's, 0.5 for one.

    Bigrams by words before: 10 (after 0), 01 (after 1), 12 (after 0): one each. Words by words before: 0, 1 and 2
    have one each, of 3 in all.
    """
    model = Trigram(torch.tensor([0, 1, 0, 1, 2]), 4)
    one = 0.5 / 3 + 0.5 * 0.25  # of 0, 1 or 2
    two = 0.5 / 2 + 0.5 * one  # of 2 after 1, which 0 follows too
    three = 0.5 / 2 + 0.5 * two  # of 2 after 01, which 0 follows too
    found = model.probabilities(torch.tensor([0, 1, 2]))
    assert found.tolist() == pytest.approx([0.5 / 1 + 0.5 * one, three], rel=1e-12)  # 1 is all that follows 0
    unseen = model.probabilities(torch.tensor([3, 3, 3]))  # contexts never seen: single words
    assert unseen.tolist() == pytest.approx([0.125, 0.125], rel=1e-12)


def test_perplexity() -> None:
    model = Trigram(TEXT, 5)
    probabilities = model.probabilities(TEXT[:50]).tolist()
    assert model.perplexity(TEXT[:50]) == pytest.approx(math.prod(p ** (-1 / 49) for p in probabilities))
    assert model.perplexity(TEXT[:50]) < 5  # better than guessing


def test_accepted_texts_and_vocabularies() -> None:
    with pytest.raises(ValueError, match=r"^Trigram: the text has 2 tokens, allowed is 3 or more$"):
        Trigram(torch.tensor([0, 1]), 2)
    with pytest.raises(ValueError, match=r"^Trigram: vocabulary is 3000000, allowed is 1 to 2000000$"):
        Trigram(TEXT, 3_000_000)
