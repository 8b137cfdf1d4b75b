"""The base of captioning data sets: fields, loss, accuracy of words, and METEOR of generated captions."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pipebench.zoo import meteor, metrics
from pipebench.zoo.late import torch
from pipebench.zoo.registry import Dataset
from pipebench.zoo.text import BOS, EOS, NUM_SPECIAL, PAD, SPECIAL_TOKENS, UNK, pad_rows

_CLIPS_AT_ONCE = 100  # described together: more need more memory for features, fewer take longer


class Vocabulary:
    """Words and their ids: first the special tokens of `zoo.text`, then `words`, all different, in this order."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = (*SPECIAL_TOKENS, *words)
        self._ids = {word: index for index, word in enumerate(words, NUM_SPECIAL)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the words' ids; UNK for words that aren't in the vocabulary."""
        return [self._ids.get(word, UNK) for word in words]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the ids' words; ids after the last word, which larger models may write, are unknown, too."""
        return [self.words[index] if index < len(self.words) else SPECIAL_TOKENS[UNK] for index in ids]


class Captions(Dataset):
    """Videos as features of frames, with captions.

    A training sample is a clip with one of its captions; a held-out sample is a clip with all of its captions. Fields:
    `features` [samples, frames, num_features] float32; `caption_in` [samples, words] int64: BOS, words, padding; and
    `caption_out` [samples, words] int64: words, EOS, padding.
    """

    inputs: Sequence[str] = ("features", "caption_in")
    targets: Sequence[str] = ("caption_out",)
    metrics: Mapping[str, str] = {"meteor": "max", "token_accuracy": "max"}
    generates_with: str | None = "describe"
    frames: int  # frames of every clip
    num_features: int  # numbers per frame
    words: int  # most words of a caption, its end included; longer ones are cut

    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """Return the words that captions are written in."""

    @abstractmethod
    def features(self, split: str, indices: Sequence[int]) -> torch.Tensor:
        """Return the frames of the samples: [samples, frames, num_features] float32."""

    @abstractmethod
    def captions(self, split: str, indices: Sequence[int]) -> list[list[str]]:
        """Return the words of a caption of every sample; a held-out clip's is its first."""

    @abstractmethod
    def references(self, indices: Sequence[int]) -> list[list[list[str]]]:
        """Return the words of all captions of held-out clips."""

    def check(self) -> None:
        """Raise ImportError, with one readable sentence, if METEOR can't be computed."""
        meteor.require()

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return every field for `num_samples` samples on the meta device."""
        caption = torch.empty(num_samples, self.words, dtype=torch.int64, device="meta")
        features = torch.empty(num_samples, self.frames, self.num_features, device="meta")
        return {"features": features, "caption_in": caption, "caption_out": torch.empty_like(caption)}

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return fields of samples; features or captions that no field needs aren't read."""
        found: dict[str, torch.Tensor] = {}
        if "features" in fields:
            found["features"] = self.features(split, indices)
        if "caption_in" in fields or "caption_out" in fields:
            rows = self._rows(split, indices)
            found["caption_in"] = pad_rows([[BOS, *row] for row in rows], self.words)
            found["caption_out"] = pad_rows([[*row, EOS] for row in rows], self.words)
        return {field: found[field] for field in fields}

    def weight(self, split: str, indices: Sequence[int]) -> float:
        """Return the number of words to predict, EOS included."""
        return float(sum(len(row) + 1 for row in self._rows(split, indices)))

    def loss(self, output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the cross-entropy summed over the words; output: [samples, words, vocabulary]."""
        self.check_logits(output, "caption_out")
        return metrics.token_cross_entropy(output, targets["caption_out"], PAD)

    def score(self, output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return `token_accuracy`: the number of words predicted correctly, given the words before them."""
        expected = targets["caption_out"]
        return {"token_accuracy": ((output.argmax(2) == expected) & (expected != PAD)).sum()}

    def whole_model_metrics(self, model: torch.nn.Module) -> dict[str, float]:
        """Return `meteor` of the captions that the model writes for all held-out clips."""
        device = next(model.parameters()).device
        written: list[list[str]] = []
        for start in range(0, self.num_eval, _CLIPS_AT_ONCE):
            clips = range(start, min(start + _CLIPS_AT_ONCE, self.num_eval))
            features = self.features("eval", clips).to(device)
            captions = model.describe(features, max_length=self.words)  # type: ignore[operator]
            written += [self.vocabulary().decode(caption) for caption in captions]
        return {"meteor": meteor.meteor(written, self.references(range(self.num_eval)))}

    def majority_baseline(self) -> float:
        """Return METEOR on the held-out clips if all get the most frequent training caption."""
        counts = Counter(map(tuple, self.captions("train", range(self.num_train))))
        commonest = min(counts, key=lambda caption: (-counts[caption], caption))
        return meteor.meteor([commonest] * self.num_eval, self.references(range(self.num_eval)))

    def notes(self) -> dict[str, str]:
        """Return how METEOR is computed."""
        return {"meteor": meteor.SIGNATURE}

    def _rows(self, split: str, indices: Sequence[int]) -> list[list[int]]:
        """Return the ids of a caption of every sample, cut so that EOS fits after it."""
        vocabulary = self.vocabulary()
        return [vocabulary.encode(words[: self.words - 1]) for words in self.captions(split, indices)]
