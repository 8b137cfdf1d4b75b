"""An LSTM layer that carries its state from one minibatch to the next, and drops recurrent weights.

Merity, Keskar and Socher (2018), "Regularizing and Optimizing LSTM Language Models", section 2: DropConnect on the
hidden-to-hidden weights, with one mask per minibatch, so that cuDNN's LSTM can still be used.
"""

import torch
from torch import nn

State = tuple[torch.Tensor, torch.Tensor]


class CarriedLSTM(nn.Module):
    """One LSTM layer in one direction, batch first, that starts from the state in which its previous call ended.

    Order of gates, shapes of parameters and initialisation are those of `torch.nn.LSTM`.

    Attributes:
        carried_state: None (zeros), or hidden and cell state of the last step, each [1, samples, hidden_size]. They are
            detached: backpropagation through time is truncated at the start of a minibatch.
    """

    one_layer = True

    def __init__(self, input_size: int, hidden_size: int, weight_drop: float = 0.0) -> None:
        """Make the layer.

        Args:
            input_size: features of a step's input.
            hidden_size: features of a step's output.
            weight_drop: probability of dropping a hidden-to-hidden weight in training, in [0, 1).
        """
        super().__init__()
        self.input_size, self.hidden_size, self.weight_drop = input_size, hidden_size, weight_drop
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden_size, hidden_size))
        self.bias_ih = nn.Parameter(torch.empty(4 * hidden_size))
        self.bias_hh = nn.Parameter(torch.empty(4 * hidden_size))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden_size**-0.5), hidden_size**-0.5)
        self.carried_state: State | None = None

    def reset_state(self) -> None:
        """Start the next minibatch from zeros."""
        self.carried_state = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return every step's hidden state, [samples, steps, hidden_size]; x: [samples, steps, input_size].

        Raises:
            ValueError: the carried state is of another number of samples.
        """
        state = self.carried_state
        if state is None:
            zeros = x.new_zeros(1, x.shape[0], self.hidden_size)
            state = (zeros, zeros)
        elif state[0].shape[1] != x.shape[0]:
            raise ValueError(
                f"the LSTM carries the state of {state[0].shape[1]} samples, but the input has {x.shape[0]}: "
                f"keep the minibatch size, or call reset_state()"
            )
        weights = self._flat_weights()
        output, hidden, cell = torch._VF.lstm(x, state, weights, True, 1, 0.0, self.training, False, True)
        self.carried_state = (hidden.detach(), cell.detach())
        return output

    def extra_repr(self) -> str:
        """Return the options, for `print(model)`."""
        return f"{self.input_size}, {self.hidden_size}, weight_drop={self.weight_drop}"

    def _flat_weights(self) -> list[torch.Tensor]:
        """Return the weights as views of one buffer, in cuDNN's order.

        The hidden-to-hidden weights after dropout are a new tensor at every call. If the four tensors weren't adjacent
        in memory, PyTorch would warn, and copy them into one buffer again.
        """
        dropped = nn.functional.dropout(self.weight_hh, self.weight_drop, self.training)
        pieces = [self.weight_ih, dropped, self.bias_ih, self.bias_hh]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        views = torch.split(flat, [piece.numel() for piece in pieces])
        return [view.view(piece.shape) for view, piece in zip(views, pieces, strict=True)]
