"""Special tokens and padding."""

import pytest
import torch

from pipebench.zoo.text import BOS, EOS, NUM_SPECIAL, PAD, SPECIAL_TOKENS, UNK, content, pad_rows, round_up


def test_special_ids_equal_mlperf_s() -> None:
    assert (PAD, UNK, BOS, EOS) == (0, 1, 2, 3)
    assert len(SPECIAL_TOKENS) == len(set(SPECIAL_TOKENS)) == NUM_SPECIAL == 4


def test_rows_are_padded_on_the_right_to_the_longest() -> None:
    padded = pad_rows([[5, 6, 7], [8], []])
    assert padded.tolist() == [[5, 6, 7], [8, PAD, PAD], [PAD, PAD, PAD]]
    assert padded.dtype == torch.int64


def test_rows_are_padded_to_a_given_length() -> None:
    assert pad_rows([[5], [6, 7]], 3).tolist() == [[5, PAD, PAD], [6, 7, PAD]]


def test_no_rows_and_empty_rows_have_a_shape() -> None:
    assert pad_rows([], 4).shape == (0, 4)
    assert pad_rows([[]]).tolist() == [[PAD]]


def test_too_long_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^pad_rows: a sentence has 3 tokens, allowed are 2 or fewer$"):
        pad_rows([[4, 5, 6]], 2)


def test_content_stops_at_the_first_end() -> None:
    assert content([BOS, 7, PAD, UNK, EOS, 9]) == [7, UNK]
    assert content(torch.tensor([7, 8])) == [7, 8]


@pytest.mark.parametrize(("count", "multiple", "expected"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (32317, 8, 32320)])
def test_round_up(count: int, multiple: int, expected: int) -> None:
    assert round_up(count, multiple) == expected
