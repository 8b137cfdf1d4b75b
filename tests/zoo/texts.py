"""A little text as a language-modelling data set, for tests."""

import torch

from pipebench.zoo.language import Text

LETTERS = " abcdefghijklmnopqrstuvwxyz"
PANGRAM = "the quick brown fox jumps over the lazy dog "


class Letters(Text):
    """Letters as tokens, ids 0 to 26; both splits are the same text."""

    def __init__(self, text: str = PANGRAM * 3, bptt: int = 5) -> None:
        super().__init__("letters", bptt, {"train": len(text), "eval": len(text)}, len(LETTERS))
        self._ids = torch.tensor([LETTERS.index(letter) for letter in text])

    def text(self, split: str) -> torch.Tensor:
        return self._ids
