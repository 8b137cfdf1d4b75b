"""A trigram language model to set perplexities beside: modified Kneser-Ney smoothing, interpolated.

Chen and Goodman (1999), "An empirical study of smoothing techniques for language modeling", section 3 and appendix A.
"""

import math

import torch

# Discounts of counts 1, 2 and 3 or more where a text is too small to estimate them.
_FALLBACK = (0.5, 1.0, 1.5)
_LARGEST_VOCABULARY = 2_000_000  # three ids make one int64


class Trigram:
    """Probabilities of a word after two others, from the counts of one text.

    An order's distribution is its discounted counts over their sum; what was discounted goes to the next lower order,
    and from single words to all words of the vocabulary alike. Lower orders count how many different words stand
    before, not how often they do.
    """

    def __init__(self, tokens: torch.Tensor, vocabulary: int) -> None:
        """Count a text of `tokens`: [tokens] int64, ids 0 to vocabulary - 1.

        Raises:
            ValueError: for fewer than three tokens, or a vocabulary whose trigrams don't have a 64-bit number each.
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
        """Return the probability of every token but the first after the two before it, [tokens - 1] float64.

        The second has only one token before it, and the probability of a word after one other.
        """
        pairs = tokens[:-1] * self.vocabulary + tokens[1:]
        triples = pairs[:-1] * self.vocabulary + tokens[2:]
        uniform = torch.full((len(pairs),), 1 / self.vocabulary, dtype=torch.float64)
        after_none = self._one.interpolate(tokens[1:], uniform)
        after_one = self._two.interpolate(pairs, after_none)
        return torch.cat([after_one[:1], self._three.interpolate(triples, after_one[1:])])

    def perplexity(self, tokens: torch.Tensor) -> float:
        """Return e to the mean of minus the logarithm of `probabilities`."""
        return math.exp(-self.probabilities(tokens).log().mean().item())


class _Order:
    """N-grams of one length; an n-gram's number divided by the vocabulary is that of its first n - 1 words."""

    def __init__(self, occurrences: torch.Tensor, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.numbers, counts = torch.unique(occurrences, return_counts=True)
        taken = _discounts(counts)[counts.clamp(max=3)]
        self.contexts, context = torch.unique(self.numbers // vocabulary, return_inverse=True)
        totals = torch.zeros(len(self.contexts), dtype=torch.float64).index_add(0, context, counts.double())
        self.kept = (counts - taken) / totals[context]
        self.handed_down = torch.zeros_like(totals).index_add(0, context, taken) / totals

    def interpolate(self, numbers: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
        """Return the n-grams' probabilities, given those of the lower order; after an unseen context, the latter."""
        own = _look_up(self.numbers, self.kept, numbers, 0.0)
        return own + _look_up(self.contexts, self.handed_down, numbers // self.vocabulary, 1.0) * lower


def _look_up(keys: torch.Tensor, values: torch.Tensor, wanted: torch.Tensor, otherwise: float) -> torch.Tensor:
    """Return the values of the wanted keys; keys ascend."""
    places = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    return values[places].where(keys[places] == wanted, otherwise)


def _discounts(counts: torch.Tensor) -> torch.Tensor:
    """Return what is taken from counts 0, 1, 2 and 3 or more, [4] float64: Chen and Goodman's equation 26."""
    ones, twos, threes, fours = (int((counts == count).sum()) for count in (1, 2, 3, 4))
    found = _FALLBACK
    if ones and twos and threes:
        scale = ones / (ones + 2 * twos)
        found = (1 - 2 * scale * twos / ones, 2 - 3 * scale * threes / twos, 3 - 4 * scale * fours / threes)
    if not all(0 <= discount <= count for count, discount in enumerate(found, start=1)):
        found = _FALLBACK
    return torch.tensor([0.0, *found], dtype=torch.float64)
