"""A few sentence pairs as a translation data set, for tests."""

from collections.abc import Sequence

from pipebench.zoo.translation import Translation, TranslationOptions


class Pairs(Translation):
    """Sentence pairs of different lengths that mean nothing."""

    def __init__(
        self,
        columns: tuple[int | None, int | None] = (None, None),
        typical: tuple[int, int] = (9, 8),
        num_train: int = 6,
    ) -> None:
        options = TranslationOptions(
            "pairs",
            num_train,
            2,
            13,
            *columns,
            typical_columns=typical,
            max_written=8,
            label_smoothing=0.1,
            num_scored=0,
        )
        super().__init__(options)

    def tokens(self, side: str, split: str, indices: Sequence[int]) -> list[list[int]]:
        """Return 1 to 6 tokens; the sides differ."""
        vocabulary, shift = (11, 1) if side == "source" else (13, 4)
        return [[4 + (3 * i + j) % (vocabulary - 4) for j in range(1 + (i + shift) % 6)] for i in indices]

    def held_out(self, side: str, indices: Sequence[int]) -> list[str]:
        return [self.text(row) for row in self.tokens(side, "eval", indices)]

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))
