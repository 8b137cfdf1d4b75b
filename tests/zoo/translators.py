"""Properties of all models that translate."""

import torch
from torch import nn

from pipebench.zoo.beam_search import Translator
from pipebench.zoo.text import BOS, EOS, pad_rows
from tests.zoo.pairs import Pairs


def check_padding_of_the_source(model: nn.Module, *, rtol: float, atol: float) -> None:
    """Check that neither other tokens in the place of padding nor more of it change an output or a gradient.

    The model is in double precision, without dropout, of 13 tokens or more; its gradients are left in it.
    """
    length = torch.tensor([3, 5])
    source, target = torch.tensor([[4, 5, 6, 0, 0], [7, 8, 9, 4, 5]]), torch.tensor([[BOS, 5, 6], [BOS, 7, 12]])
    other, longer = source.clone(), nn.functional.pad(source, (0, 4))
    other[0, 3:] = 10

    def outcome(source: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        logits = model(source, length, target)
        logits.square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert len(gradients) == len(list(model.parameters()))
        return [logits.detach(), *gradients]

    expected = outcome(source)
    for changed in (other, longer):
        for found, wanted in zip(outcome(changed), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def check_what_is_not_padding(model: nn.Module) -> None:
    """Check that the last token of the source reaches the first output, and no output depends on tokens after it."""
    length = torch.tensor([4])
    source, target = torch.tensor([[4, 5, 6, 7]]), torch.tensor([[BOS, 5, 6, 7]])
    plain = model(source, length, target)
    assert not torch.equal(model(torch.tensor([[4, 5, 6, 8]]), length, target)[:, 0], plain[:, 0])
    after = model(source, length, torch.tensor([[BOS, 5, 12, 7]]))
    assert torch.equal(after[:, :2], plain[:, :2])
    assert not torch.equal(after[:, 2], plain[:, 2])


def _greedily(model: nn.Module, source: list[int], max_length: int) -> list[int]:
    """Run the whole forward again for every token."""
    written = [BOS]
    for _ in range(max_length):
        logits = model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([written]))
        written.append(int(logits[0, -1].argmax()))
        if written[-1] == EOS:
            break
    return written[1 : len(written) - (written[-1] == EOS)]


def check_translation(model: Translator) -> None:
    """Check that translation with carried states equals that with the whole forward, and batches single sentences."""
    sentences = [[BOS, *row, EOS] for row in Pairs().tokens("source", "train", range(6))]
    source, lengths = pad_rows(sentences), torch.tensor([len(row) for row in sentences])
    found = model.translate(source, lengths, max_length=7, beam_size=1)
    assert found == [_greedily(model, row, 7) for row in sentences]
    assert len({tuple(row) for row in found}) > 2
    together = model.translate(source, lengths, max_length=7)
    alone = [model.translate(torch.tensor([row]), torch.tensor([len(row)]), max_length=7)[0] for row in sentences]
    assert together == alone
