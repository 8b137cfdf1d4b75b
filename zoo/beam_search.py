"""Beam search with GNMT's penalties, for any decoder that computes one token at a time.

Wu et al. (2016), "Google's neural machine translation system", section 7, with the constants of MLPerf's GNMT.
Sentences are searched side by side, and leave the batch as soon as they are done. The decoder's state is carried from
step to step, so that every step computes one token and never the prefix again.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from pipebench.zoo.options import at_least
from pipebench.zoo.text import BOS, EOS

Tensors = tuple[torch.Tensor, ...]
# Maps (tokens [n, beam] int64, state, context) to (log-probabilities [n, beam, vocabulary], attention [n, beam, source]
# or None, state). Tensors of the state are [n, beam, ...]; those of the context, one per sentence, [n, ...].
Step = Callable[[torch.Tensor, Tensors, Tensors], tuple[torch.Tensor, torch.Tensor | None, Tensors]]


@dataclass(frozen=True)
class Penalties:
    """The penalties in a hypothesis' score; the defaults are MLPerf's."""

    length_constant: float = 5.0  # tokens added to every length, so that short hypotheses differ less
    length_power: float = 0.6  # 0: no normalisation by length; 1: almost the mean log-probability
    coverage: float = 0.1  # weight of the penalty for source words with little attention

    def score(
        self, log_probability: torch.Tensor, num_tokens: torch.Tensor, attention: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the scores of hypotheses; the highest is the best.

        Args:
            log_probability: of the whole hypothesis: [...] float.
            num_tokens: its tokens, BOS and EOS included: [...] int64.
            attention: summed over the tokens: [..., source] float; None: no penalty for coverage.
        """
        score = log_probability / length_norm(num_tokens, self.length_constant, self.length_power)
        return score if attention is None else score + self.coverage * coverage_penalty(attention)


MLPERF = Penalties()


def length_norm(num_tokens: torch.Tensor, constant: float, power: float) -> torch.Tensor:
    """Return ((constant + tokens) / (constant + 1)) ** power, by which log-probabilities are divided.

    MLPerf counts BOS and EOS as tokens; the paper doesn't say.
    """
    ratio: torch.Tensor = (constant + num_tokens) / (constant + 1)
    return ratio**power


def coverage_penalty(attention: torch.Tensor) -> torch.Tensor:
    """Return the sum over the source of log(min(attention, 1)), at most 0, of [..., source] summed over the tokens.

    Words without any attention don't count, as in MLPerf: they are padding.
    """
    reached = torch.where(attention > 0, attention, 1.0)
    return reached.clamp(max=1).log().sum(-1)


@dataclass
class _Beams:
    """Hypotheses of the sentences that aren't done, best first."""

    rows: torch.Tensor  # index of the sentence: [n]
    tokens: torch.Tensor  # generated so far: [n, beam, steps]
    log_probability: torch.Tensor  # [n, beam]; minus infinity for a hypothesis that doesn't exist
    finished: torch.Tensor  # ends with EOS: [n, beam]
    num_tokens: torch.Tensor  # BOS and EOS included: [n, beam]
    attention: torch.Tensor | None  # summed over the tokens: [n, beam, source], or None
    state: Tensors  # the decoder's, each [n, beam, ...]
    context: Tensors  # the decoder's, each [n, ...]

    def extend(self, step: Step) -> None:
        """Extend all hypotheses by a token; each sentence keeps its most probable ones."""
        beam_size = self.finished.shape[1]
        last = self.tokens[:, :, -1] if self.tokens.shape[2] else torch.full_like(self.num_tokens, BOS)
        log_probabilities, attention, state = step(last, self.state, self.context)
        vocabulary = log_probabilities.shape[2]
        ended = torch.full_like(log_probabilities[0, 0], -torch.inf)
        ended[EOS] = 0  # a finished hypothesis has one continuation, which is itself
        log_probabilities = torch.where(self.finished.unsqueeze(2), ended, log_probabilities)
        sums = (self.log_probability.unsqueeze(2) + log_probabilities).flatten(1)
        self.log_probability, index = sums.topk(beam_size, dim=1)
        origin, token = index // vocabulary, index % vocabulary
        if attention is not None:
            attention = attention.masked_fill(self.finished.unsqueeze(2), 0)
            self.attention = attention if self.attention is None else self.attention + attention
        self.num_tokens = self.num_tokens + ~self.finished
        self.state = state
        self._reorder(origin)
        self.tokens = torch.cat((self.tokens, token.unsqueeze(2)), 2)
        self.finished = self.finished | (token == EOS)

    def _reorder(self, origin: torch.Tensor) -> None:
        row = torch.arange(len(origin), device=origin.device).unsqueeze(1)
        self.tokens, self.finished = self.tokens[row, origin], self.finished[row, origin]
        self.num_tokens = self.num_tokens[row, origin]
        self.attention = None if self.attention is None else self.attention[row, origin]
        self.state = tuple(tensor[row, origin] for tensor in self.state)

    def done(self) -> torch.Tensor:
        """Return whether all hypotheses of a sentence are finished: [n]."""
        return (self.finished | self.log_probability.isneginf()).all(1)

    def take(self, which: torch.Tensor) -> "_Beams":
        """Return some of the sentences; which: [n] bool."""
        return _Beams(**tree_map_only(torch.Tensor, lambda tensor: tensor[which], vars(self)))

    def best(self, penalties: Penalties) -> dict[int, list[int]]:
        """Return every sentence's best hypothesis without EOS, by row."""
        scores = penalties.score(self.log_probability, self.num_tokens, self.attention)
        winner = scores.argmax(1)
        row = torch.arange(len(winner), device=winner.device)
        tokens = self.tokens[row, winner].tolist()
        return {i: _before_end(ids) for i, ids in zip(self.rows.tolist(), tokens, strict=True)}


class Translator(nn.Module, ABC):
    """A model that translates by beam search; subclasses compute one token at a time."""

    beam_size: int  # hypotheses per sentence, unless `translate` is given another number

    @torch.no_grad()
    def translate(
        self, source: torch.Tensor, source_length: torch.Tensor, *, max_length: int, beam_size: int | None = None
    ) -> list[list[int]]:
        """Return the translations of sentences, by beam search with GNMT's penalties.

        Args:
            source: padded on the right: [samples, source tokens] int64.
            source_length: [samples] int64.
            max_length: most tokens to generate, EOS included.
            beam_size: hypotheses per sentence; None: the model's own number.

        Returns:
            Target ids without BOS and EOS.

        Raises:
            ValueError: max_length or beam_size is less than 1.
        """
        beam_size = self.beam_size if beam_size is None else beam_size
        state, context = self._begin(source, source_length, beam_size)
        return beam_search(self._step, state, context, max_length=max_length, beam_size=beam_size)

    @abstractmethod
    def _begin(self, source: torch.Tensor, source_length: torch.Tensor, beam_size: int) -> tuple[Tensors, Tensors]:
        """Return the state and the context of sentences before the first token; see `beam_search`."""

    @abstractmethod
    def _step(
        self, tokens: torch.Tensor, state: Tensors, context: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor | None, Tensors]:
        """Compute one token of every hypothesis, as `forward` does after the encoder; see `Step`."""


def beam_search(
    step: Step, state: Tensors, context: Tensors, *, max_length: int, beam_size: int = 5, penalties: Penalties = MLPERF
) -> list[list[int]]:
    """Return the best sentence found for each context.

    Hypotheses, finished ones included, compete by log-probability until all of a sentence's are finished. Only then do
    scores with penalties choose one. Differs: in MLPerf, the attention summed for coverage stays in its place when
    hypotheses change places; here it belongs to the hypothesis. And hypotheses that `max_length` ends have scores
    without penalties there, and with them here.

    Args:
        step: computes one token of every hypothesis.
        state: carried by `step` from token to token; here at the start: at least one tensor, each [n, beam_size, ...].
        context: shared by all hypotheses of a sentence: each [n, ...].
        max_length: most tokens to generate, EOS included.
        beam_size: hypotheses per sentence.
        penalties: how the winner is chosen.

    Returns:
        Token ids of n sentences, without BOS and EOS.

    Raises:
        ValueError: max_length or beam_size is less than 1.
    """
    at_least(1, "beam_search", max_length=max_length, beam_size=beam_size)
    beams = _start(state, context, beam_size)
    found: dict[int, list[int]] = {}
    for _ in range(max_length):
        if not len(beams.rows):
            break
        beams.extend(step)
        done = beams.done()
        if done.any():
            found |= beams.take(done).best(penalties)
            beams = beams.take(~done)
    found |= beams.best(penalties)
    return [found[row] for row in range(len(found))]


def _start(state: Tensors, context: Tensors, beam_size: int) -> _Beams:
    """Return beams with one hypothesis per sentence, BOS; the others don't exist yet."""
    num_sentences, device = len(state[0]), state[0].device
    shape = (num_sentences, beam_size)
    log_probability = torch.full(shape, -torch.inf, dtype=state[0].dtype, device=device)
    log_probability[:, 0] = 0
    return _Beams(
        rows=torch.arange(num_sentences, device=device),
        tokens=torch.empty(*shape, 0, dtype=torch.int64, device=device),
        log_probability=log_probability,
        finished=torch.zeros(shape, dtype=torch.bool, device=device),
        num_tokens=torch.ones(shape, dtype=torch.int64, device=device),
        attention=None,
        state=state,
        context=context,
    )


def _before_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(EOS)] if EOS in ids else ids
