"""A trigram language model, whose perplexity is a baseline: interpolated, modified Kneser-Ney smoothing.

Chen and Goodman (1999), "An empirical study of smoothing techniques for language modeling", section 3 and appendix A.
"""

import math

import torch

# Discounts of counts 1, 2 and 3 or more where a text is too small to estimate them.
_FALLBACK = (0.5, 1.0, 1.5)
_LARGEST_VOCABULARY = 2_000_000  # three ids make one int64


class Trigram:
    """Probabilities of a word given the two before it, estimated from the counts of one text.

    The distribution of an order is its discounted counts, normalised. The discounted mass goes to the next lower order,
    and from unigrams to a uniform distribution over the vocabulary. Lower orders count the different words that precede
    an n-gram instead of its occurrences.
    """

    def __init__(self, tokens: torch.Tensor, vocabulary: int) -> None:
        """Count the n-grams of a text.

        Args:
            tokens: [tokens] int64, ids from 0 to vocabulary - 1.
            vocabulary: number of different ids.

        Raises:
            ValueError: fewer than three tokens, or a vocabulary whose trigrams aren't numbered by 64 bits.
        """
        if len(tokens) < 3:
            raise ValueError(f"Trigram: the text has {len(tokens)} tokens, allowed is 3 or more")
        if not 1 <= vocabulary <= _LARGEST_VOCABULARY:
            raise ValueError(f"Trigram: vocabulary is {vocabulary}, allowed is 1 to {_LARGEST_VOCABULARY}")
        self.vocabulary = vocabulary
        pairs = tokens[:-1] * vocabulary + tokens[1:]
        triples = pairs[:-1] * vocabulary + tokens[2:]
        self._three = _Order(triples, vocabulary)
        self._two = _Order(torch.unique(triples) % vocabulary**2, vocabulary)
        self._one = _Order(torch.unique(pairs) % vocabulary, vocabulary)

    def probabilities(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the probability of every token but the first given the two before it: [tokens - 1] float64.

        The second token has one token before it, so its probability is that of the bigram.
        """
        pairs = tokens[:-1] * self.vocabulary + tokens[1:]
        triples = pairs[:-1] * self.vocabulary + tokens[2:]
        uniform = torch.full((len(pairs),), 1 / self.vocabulary, dtype=torch.float64)
        after_none = self._one.interpolate(tokens[1:], uniform)
        after_one = self._two.interpolate(pairs, after_none)
        return torch.cat([after_one[:1], self._three.interpolate(triples, after_one[1:])])

    def perplexity(self, tokens: torch.Tensor) -> float:
        """Return exp(-mean(log p)) over `probabilities` p."""
        return math.exp(-self.probabilities(tokens).log().mean().item())


class _Order:
    """The n-grams of one length n, numbered so that a number divided by the vocabulary is its first n - 1 words'."""

    def __init__(self, occurrences: torch.Tensor, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.numbers, counts = torch.unique(occurrences, return_counts=True)
        discounts = _discounts(counts)[counts.clamp(max=3)]
        self.contexts, context = torch.unique(self.numbers // vocabulary, return_inverse=True)
        totals = torch.zeros(len(self.contexts), dtype=torch.float64).index_add(0, context, counts.double())
        self.probabilities = (counts - discounts) / totals[context]
        # The discounted mass of every context: the weight of the lower order.
        self.lower_weights = torch.zeros_like(totals).index_add(0, context, discounts) / totals

    def interpolate(self, numbers: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
        """Return the n-grams' probabilities, given the lower order's; after an unseen context, they are the lower's."""
        own = _look_up(self.numbers, self.probabilities, numbers, 0.0)
        return own + _look_up(self.contexts, self.lower_weights, numbers // self.vocabulary, 1.0) * lower


def _look_up(keys: torch.Tensor, values: torch.Tensor, wanted: torch.Tensor, default: float) -> torch.Tensor:
    """Return the values of the wanted keys, or the default; `keys` ascend."""
    indices = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    return values[indices].where(keys[indices] == wanted, default)


def _discounts(counts: torch.Tensor) -> torch.Tensor:
    """Return the discounts of counts 0, 1, 2 and 3 or more, [4] float64: Chen and Goodman's equation 26."""
    ones, twos, threes, fours = (int((counts == count).sum()) for count in (1, 2, 3, 4))
    found = _FALLBACK
    if ones and twos and threes:
        scale = ones / (ones + 2 * twos)
        found = (1 - 2 * scale * twos / ones, 2 - 3 * scale * threes / twos, 3 - 4 * scale * fours / threes)
    if not all(0 <= discount <= count for count, discount in enumerate(found, start=1)):
        found = _FALLBACK
    return torch.tensor([0.0, *found], dtype=torch.float64)
