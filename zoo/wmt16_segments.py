"""BERT's pre-training on the English side of WMT16 English-German, as in vPipe (TPDS'21)."""

from __future__ import annotations

from collections.abc import Sequence

from pipebench.zoo.segments import SegmentOptions, Segments
from pipebench.zoo.wmt16 import MAX_LENGTH, NUM_EVAL, NUM_TRAIN, TOKENS, TYPICAL_LENGTH, VOCABULARY, Wmt16, wmt16


class Wmt16Segments(Segments):
    """Segments of sentences in the order of the files, in the byte pairs of `wmt16`."""

    def __init__(self, options: SegmentOptions, source: Wmt16) -> None:
        super().__init__(options)
        self._source, self.loader_processes = source, source.loader_processes

    def check(self) -> None:
        """Raise OSError, ImportError or ValueError unless the files are there and of the declared sizes."""
        self._source.check_tokens(TOKENS, {"train": "train_sentences", "eval": "eval_sentences"}, spare=1)

    def sentences(self, split: str, indices: Sequence[int]) -> list[list[int]]:
        """Return the token ids of sentences."""
        return self._source.tokens("source", split, indices)


def wmt16_segments(
    root: str = "",
    columns: int = 128,
    sentences: int = 2,
    num_eval: int = 0,
    loader_processes: int = 0,
    train_sentences: int = NUM_TRAIN,
    eval_sentences: int = NUM_EVAL,
    vocabulary: int = VOCABULARY,
    max_length: int = MAX_LENGTH,
) -> Wmt16Segments:
    """Build the data set; reads nothing.

    Args:
        root: folder of the files; empty: `wmt16` in the folder that PIPEBENCH_DATA names.
        columns: width of a sample; BERT was trained with 128 for 90% of its updates, and with 512 for the rest.
        sentences: of a segment; two sentences of about 28 byte pairs fill half of 128 columns.
        num_eval: held-out samples, of newstest2014, the first ones; 0: all.
        loader_processes: processes in which an engine reads sentences ahead; 0: in its own.
        train_sentences: training pairs of `wmt16` within `max_length`.
        eval_sentences: sentences of newstest2014.
        vocabulary: number of token ids, special ones and the mask included, rounded up to a multiple of 8. The mask is
            the last id: MLPerf's 32,317 tokens leave three.
        max_length: see `wmt16`.
    """
    num_sentences = {"train": train_sentences, "eval": eval_sentences}
    options = SegmentOptions("wmt16_segments", num_sentences, vocabulary, vocabulary - 1, columns, sentences, num_eval)
    typical_length = min(TYPICAL_LENGTH, max_length)  # of translations: unused here
    source = wmt16(
        root, train_sentences, eval_sentences, vocabulary, max_length, typical_length, loader_processes=loader_processes
    )
    return Wmt16Segments(options, source)
