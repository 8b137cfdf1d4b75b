"""AWD-LSTM of Merity, Keskar and Socher (2018), with the six LSTM layers of PipeDream's language model."""

from itertools import pairwise

import torch
from torch import nn

from pipebench.zoo.dropouts import VariationalDropout, WordDropoutEmbedding
from pipebench.zoo.options import at_least, below_one
from pipebench.zoo.recurrent import CarriedLSTM

_INITIAL_RANGE = 0.1


class AwdLm(nn.Module):
    """Embedding, LSTM layers with variational dropout between them, and a linear layer to the vocabulary.

    Every LSTM layer carries its state to the next minibatch, in training and in evaluation: sample i of a minibatch
    must continue sample i of the one before. `reset_state` resets the states to zeros.
    """

    def __init__(self, embedding: WordDropoutEmbedding, layers: nn.Sequential, decoder: nn.Linear) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = layers
        self.decoder = decoder

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of every next token, [samples, bptt, vocabulary] float32; tokens: [samples, bptt] int64."""
        return self.decoder(self.layers(self.embedding(tokens)))  # type: ignore[no-any-return]

    def reset_state(self) -> None:
        """Reset the states of the LSTM layers: the next minibatch begins a text."""
        for module in self.modules():
            if isinstance(module, CarriedLSTM):
                module.reset_state()


def awd_lm(
    vocabulary: int = 10_000,
    embedding_size: int = 400,
    hidden_size: int = 1570,
    num_layers: int = 6,
    tied: bool = False,
    weight_drop: float = 0.5,
    dropout_embedding: float = 0.1,
    dropout_input: float = 0.4,
    dropout_hidden: float = 0.25,
    dropout_output: float = 0.4,
) -> AwdLm:
    """Build the model; with the default options it has the 0.41 GB of parameters of PipeDream (SOSP'19, section 5.2).

    Published: six LSTM layers, 0.41 GB, and Penn Treebank (10,000 words), but no widths. From Merity's Penn Treebank
    model: embedding and last LSTM layer are 400 wide, all other layers have one width, and the dropouts. That width is
    then the multiple of ten that gives 0.41 GB: 1570, for 102,476,400 parameters of 4 bytes, 0.410e9 bytes.
    Not chosen: Merity's own width, 1150, gives 0.24 GB. With a tied embedding, 1600 gives 0.41 GB, but the published
    plan, straight, has embedding and decoder on different workers. With 400 for the embedding only, it would be 1370;
    with one width everywhere, 1270; for 0.41 GiB, 1630.

    Differs: without Merity's activation regularisation (AR, TAR), random lengths of backpropagation and averaged SGD.
    PipeDream names SGD only, and a loss that reads hidden activations would need them on the last stage.

    Args:
        vocabulary: number of words; ids are 0 to `vocabulary` - 1.
        embedding_size: features of a word, and of the last LSTM layer's output.
        hidden_size: width of all LSTM layers but the last.
        num_layers: LSTM layers, at least 1.
        tied: whether the decoder's weight is the embedding's. In modes whose stages don't update together, such as
            pipedream, both are then in one stage.
        weight_drop: probability of dropping a hidden-to-hidden weight of an LSTM, per minibatch.
        dropout_embedding: probability of dropping a word, wherever it occurs in the minibatch.
        dropout_input: probability of dropping a feature of the first LSTM layer's input, at all steps of a sample.
        dropout_hidden: the same between LSTM layers.
        dropout_output: the same after the last LSTM layer.
    """
    sizes = {"vocabulary": vocabulary, "embedding_size": embedding_size, "hidden_size": hidden_size}
    at_least(1, "awd_lm", **sizes, num_layers=num_layers)
    rates = {"weight_drop": weight_drop, "dropout_embedding": dropout_embedding, "dropout_input": dropout_input}
    below_one("awd_lm", **rates, dropout_hidden=dropout_hidden, dropout_output=dropout_output)
    embedding = WordDropoutEmbedding(vocabulary, embedding_size, dropout_embedding)
    widths = [embedding_size, *[hidden_size] * (num_layers - 1), embedding_size]
    layers = nn.Sequential(VariationalDropout(dropout_input))
    for index, (before, after) in enumerate(pairwise(widths)):
        layers.append(CarriedLSTM(before, after, weight_drop))
        layers.append(VariationalDropout(dropout_hidden if index < num_layers - 1 else dropout_output))
    decoder = nn.Linear(embedding_size, vocabulary)
    nn.init.uniform_(embedding.weight, -_INITIAL_RANGE, _INITIAL_RANGE)
    nn.init.uniform_(decoder.weight, -_INITIAL_RANGE, _INITIAL_RANGE)
    nn.init.zeros_(decoder.bias)
    if tied:
        decoder.weight = embedding.weight
    return AwdLm(embedding, layers, decoder)
