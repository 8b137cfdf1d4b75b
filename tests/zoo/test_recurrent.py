"""The LSTM layer against torch's and against a loop of cells; weight drop, carried state."""

import copy

import pytest
import torch
from torch import nn

from pipebench.zoo.recurrent import CarriedLSTM

SAMPLES, STEPS, INPUTS, HIDDEN = 3, 5, 4, 6


def make(weight_drop: float = 0.0) -> CarriedLSTM:
    torch.manual_seed(0)
    return CarriedLSTM(INPUTS, HIDDEN, weight_drop).double()


def inputs(seed: int = 1, steps: int = STEPS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, steps, INPUTS, generator=generator, dtype=torch.float64)


def loop_of_cells(lstm: CarriedLSTM, x: torch.Tensor, recurrent: torch.Tensor) -> torch.Tensor:
    """Compute the layer step by step from zeros, with the recurrent weights given: the textbook's equations."""
    hidden = cell = x.new_zeros(len(x), HIDDEN)
    outputs = []
    for step in x.unbind(1):
        gates = step @ lstm.weight_ih.T + lstm.bias_ih + hidden @ recurrent.T + lstm.bias_hh
        into, forget, candidate, out = gates.chunk(4, dim=1)
        cell = forget.sigmoid() * cell + into.sigmoid() * candidate.tanh()
        hidden = out.sigmoid() * cell.tanh()
        outputs.append(hidden)
    return torch.stack(outputs, dim=1)


def gradients(lstm: CarriedLSTM, output: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*lstm.named_parameters(), strict=True)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    found = torch.autograd.grad((output * weights).sum(), parameters)
    return dict(zip(names, found, strict=True))


def test_the_layer_equals_torch_s_lstm() -> None:
    ours, theirs = make(), nn.LSTM(INPUTS, HIDDEN, batch_first=True).double()
    theirs.load_state_dict({f"{name}_l0": value for name, value in ours.state_dict().items()})
    assert torch.equal(ours(inputs()), theirs(inputs())[0])


def test_initial_weights_equal_torch_s() -> None:
    torch.manual_seed(5)
    ours = CarriedLSTM(INPUTS, HIDDEN)
    torch.manual_seed(5)
    theirs = nn.LSTM(INPUTS, HIDDEN, batch_first=True)
    expected = theirs.state_dict()
    assert {f"{name}_l0" for name in ours.state_dict()} == set(expected)
    assert all(torch.equal(value, expected[f"{name}_l0"]) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("weight_drop", [0.0, 0.5])
def test_outputs_and_gradients_equal_a_loop_of_cells(weight_drop: float) -> None:
    """With weight drop, the loop reads the weight times the mask, and the weight must get the gradient."""
    lstm, x = make(weight_drop), inputs()
    torch.manual_seed(7)
    output = lstm(x)
    torch.manual_seed(7)
    mask = nn.functional.dropout(torch.ones_like(lstm.weight_hh), weight_drop)
    expected = loop_of_cells(lstm, x, lstm.weight_hh * mask)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    found = gradients(lstm, output)
    for name, gradient in gradients(lstm, expected).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
    assert bool((found["weight_hh"] == 0).any()) == bool(weight_drop)


def test_gradient_check() -> None:
    lstm = make()
    x = inputs(steps=2).requires_grad_()

    def run(*_: torch.Tensor) -> torch.Tensor:
        lstm.reset_state()
        return lstm(x)

    assert torch.autograd.gradcheck(run, (x, *lstm.parameters()))


def test_weight_drop_is_one_mask_per_call_while_training() -> None:
    lstm = make(0.5)
    lstm.weight_hh.data.fill_(1.0)
    recurrent = lstm._flat_weights()[1]
    assert sorted(set(recurrent.flatten().tolist())) == [0, 2]
    assert 0.3 < (recurrent == 0).double().mean().item() < 0.7
    assert not torch.equal(recurrent, lstm._flat_weights()[1])
    lstm.eval()
    assert torch.equal(lstm._flat_weights()[1], lstm.weight_hh)
    assert torch.equal(lstm.weight_hh, torch.ones_like(lstm.weight_hh))  # the raw weight stays as it is


def test_weights_are_one_buffer_in_cudnn_s_order() -> None:
    """Input weights, recurrent weights and biases without gaps, which cuDNN takes without copying."""
    lstm = make(0.5)
    views = lstm._flat_weights()
    assert [view.shape for view in views] == [parameter.shape for parameter in lstm.parameters()]
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    offset = 0
    for view in views:
        assert view.is_contiguous()
        assert view.storage_offset() == offset
        offset += view.numel()
    assert views[0].untyped_storage().nbytes() == offset * views[0].element_size()


def test_state_is_carried_on() -> None:
    """Two halves, one after the other, give the results of the whole; after a reset they don't."""
    lstm, x = make(), inputs(steps=6)
    whole = lstm(x)
    lstm.reset_state()
    halves = [lstm(half) for half in (x[:, :3], x[:, 3:])]
    torch.testing.assert_close(torch.cat(halves, dim=1), whole, rtol=1e-12, atol=1e-12)
    lstm.reset_state()
    assert torch.equal(lstm(x[:, :3]), halves[0])
    lstm.reset_state()
    assert not torch.allclose(lstm(x[:, 3:]), halves[1])


def test_state_is_that_of_the_last_step_detached() -> None:
    lstm = make()
    assert [lstm.carried_state] == [None]
    output = lstm(inputs())
    assert lstm.carried_state is not None
    hidden, cell = lstm.carried_state
    assert torch.equal(hidden[0], output[:, -1])
    assert hidden.shape == cell.shape == (1, SAMPLES, HIDDEN)
    assert not hidden.requires_grad
    assert not cell.requires_grad
    assert "carried_state" not in lstm.state_dict()


def test_a_state_can_be_restored() -> None:
    """As an engine does to store one state per stream; evaluation carries it, too."""
    lstm = make().eval()
    lstm(inputs(1))
    kept = lstm.carried_state
    expected = lstm(inputs(2))
    lstm(inputs(3))
    lstm.carried_state = kept
    assert torch.equal(lstm(inputs(2)), expected)


def test_a_state_of_other_samples_is_refused() -> None:
    lstm = make()
    lstm(inputs())
    with pytest.raises(ValueError, match=r"carries the state of 3 samples, but the input has 2: .*reset_state\(\)"):
        lstm(inputs()[:2])
    lstm.reset_state()
    assert lstm(inputs()[:2]).shape == (2, STEPS, HIDDEN)


def test_copies_share_no_tensors() -> None:
    lstm = make()
    lstm(inputs())
    copied = copy.deepcopy(lstm)
    lstm.reset_state()
    assert copied.carried_state is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("weight_drop", [0.0, 0.5])
def test_cudnn_uses_the_weights_without_copying(weight_drop: float, recwarn: pytest.WarningsRecorder) -> None:
    """It would warn of weights that aren't in one buffer; and its results are the CPU's."""
    lstm = make(weight_drop).float()
    x = inputs().float()
    lstm.eval()
    expected = lstm(x)
    lstm = lstm.cuda()
    lstm.reset_state()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        torch.testing.assert_close(lstm(x.cuda()).cpu(), expected, rtol=1e-4, atol=1e-5)
    lstm.train()
    lstm(x.cuda()).sum().backward()
    assert all(parameter.grad is not None for parameter in lstm.parameters())
    assert not recwarn.list
