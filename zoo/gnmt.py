"""GNMT for translation, as MLPerf and PipeDream train it: eight LSTM layers or sixteen, and one attention.

Wu et al. (2016), in the form of MLPerf v0.5 and of the PipeDream artifact: half of the LSTM layers are in the encoder,
1024 wide, with 32,320 token ids, MLPerf's 32,317 padded to a multiple of 8. Attention is computed once, from the first
decoder layer, and read by all other decoder layers, so it crosses every cut in the decoder.

Inside, time comes first: [tokens, samples, features].
"""

import torch
from torch import nn
from torch.nn import functional

from pipebench.zoo.attention import BahdanauAttention
from pipebench.zoo.beam_search import Tensors, Translator
from pipebench.zoo.options import at_least, below_one, more_than, one_size
from pipebench.zoo.text import NUM_SPECIAL, PAD

VOCABULARY = 32320


class WordEmbedding(nn.Embedding):
    """An embedding that puts time first: maps [samples, tokens] int64 to [tokens, samples, hidden]."""

    one_layer = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens' vectors."""
        return super().forward(tokens.transpose(0, 1))


class LSTMLayer(nn.LSTM):
    """An LSTM in one direction that returns its outputs without its states, so that only these cross a cut."""

    one_layer = True
    weight_ih_l0: nn.Parameter
    weight_hh_l0: nn.Parameter
    bias_ih_l0: nn.Parameter
    bias_hh_l0: nn.Parameter

    def reset_parameters(self) -> None:
        """Do nothing: `GNMT` initialises all parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # one tensor in, one out
        """Map [tokens, samples, input] to [tokens, samples, hidden]; the state starts from zeros."""
        output: torch.Tensor = super().forward(x)[0]
        return output

    def step(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one token; x: [rows, input], state: [rows, 2, hidden] (output, cell). Return output and state."""
        weights = (self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0)
        state = torch.stack(torch.lstm_cell(x, state.unbind(1), *weights), 1)
        return state[:, 0], state


class BidirectionalLSTM(nn.Module):
    """Two LSTMs, one of which reads every sentence from its last token; padding has no influence on either."""

    one_layer = True

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.there, self.back = LSTMLayer(hidden_size, hidden_size), LSTMLayer(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Map [tokens, samples, hidden] to [tokens, samples, 2 hidden]; at padding, the first half is zeros.

        Args:
            x: padded on the right.
            lengths: tokens of every sample: [samples] int64.
        """
        position = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
        is_token = position < lengths
        reversed_position = torch.where(is_token, lengths - 1 - position, position).unsqueeze(2).expand_as(x)
        there = self.there(x) * is_token.unsqueeze(2).to(x.dtype)
        back = self.back(x.gather(0, reversed_position))
        return torch.cat((there, back.gather(0, reversed_position)), 2)


class RecurrentAttention(nn.Module):
    """The first decoder layer: an LSTM, and the attention of its outputs to the source."""

    one_layer = True

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.rnn = LSTMLayer(hidden_size, hidden_size)
        self.attention = BahdanauAttention(hidden_size)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the LSTM's outputs and their attention's, both [target tokens, samples, hidden].

        Args:
            x: [target tokens, samples, hidden].
            memory: the encoder's outputs: [source tokens, samples, hidden].
            lengths: source tokens of every sample: [samples] int64.
        """
        x = self.rnn(x)
        memory = memory.transpose(0, 1)
        attended, _ = self.attention(x.transpose(0, 1), memory, self.attention.linear_k(memory), lengths)
        return x, attended.transpose(0, 1)


class Classifier(nn.Linear):
    """The product with the target's vocabulary, which puts samples first again."""

    one_layer = True
    tensor_role = (None, "features")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [tokens, samples, hidden] to logits [samples, tokens, vocabulary]."""
        return super().forward(x.transpose(0, 1).contiguous())


class GNMT(Translator):
    """The translator; see `gnmt8` for its options. `name` is the model's, for errors.

    Inputs are `source` [samples, source tokens] int64, `source_length` [samples] int64, and `target_in` [samples,
    target tokens] int64, which starts with BOS. Padding, on the right, has no influence.
    """

    beam_size = 5  # MLPerf's

    def __init__(
        self,
        name: str,
        num_layers: int,
        hidden_size: int,
        source_vocabulary: int,
        target_vocabulary: int,
        dropout: float,
        input_dropout: float,
        share_embedding: bool,
        init_range: float,
    ) -> None:
        super().__init__()
        vocabularies = {"source_vocabulary": source_vocabulary, "target_vocabulary": target_vocabulary}
        at_least(1, name, hidden_size=hidden_size)
        at_least(NUM_SPECIAL, name, **vocabularies)
        below_one(name, dropout=dropout, input_dropout=input_dropout)
        more_than(0, name, init_range=init_range)
        if share_embedding:
            one_size(name, because="share_embedding", **vocabularies)
        half = num_layers // 2
        self.source_embedder = WordEmbedding(source_vocabulary, hidden_size, padding_idx=PAD)
        self.bidirectional = BidirectionalLSTM(hidden_size)
        self.encoder = nn.ModuleList(LSTMLayer((1 + (i == 0)) * hidden_size, hidden_size) for i in range(half - 1))
        self.target_embedder = (
            self.source_embedder if share_embedding else WordEmbedding(target_vocabulary, hidden_size, padding_idx=PAD)
        )
        self.attention = RecurrentAttention(hidden_size)
        self.decoder = nn.ModuleList(LSTMLayer(2 * hidden_size, hidden_size) for _ in range(half - 1))
        self.classifier = Classifier(hidden_size, target_vocabulary)
        self.dropout = nn.Dropout(dropout)
        self.input_dropout = nn.Dropout(input_dropout) if input_dropout else None
        self._initialise(init_range)

    def forward(self, source: torch.Tensor, source_length: torch.Tensor, target_in: torch.Tensor) -> torch.Tensor:
        """Return the logits of every next token: [samples, target tokens, target vocabulary] float."""
        memory = self._encode(source, source_length)
        y, attended = self.attention(self._embed(self.target_embedder, target_in), memory, source_length)
        y = self.decoder[0](torch.cat((self.dropout(y), attended), 2))
        for lstm in list(self.decoder)[1:]:  # residual from the third layer on, as in the encoder
            y = lstm(torch.cat((self.dropout(y), attended), 2)) + y
        logits: torch.Tensor = self.classifier(y)
        return logits

    def _begin(self, source: torch.Tensor, source_length: torch.Tensor, beam_size: int) -> tuple[Tensors, Tensors]:
        memory = self._encode(source, source_length).transpose(0, 1)
        keys = self.attention.attention.linear_k(memory)
        num_layers, hidden_size = 1 + len(self.decoder), self.classifier.in_features
        states = memory.new_zeros(len(source), beam_size, num_layers, 2, hidden_size)
        return (states,), (memory, keys, source_length)

    def _initialise(self, init_range: float) -> None:
        """Draw all parameters as MLPerf does."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -init_range, init_range)
        for module in self.modules():
            if isinstance(module, LSTMLayer):
                nn.init.zeros_(module.bias_hh_l0)  # it is added to the other bias: one of the two is enough
        nn.init.constant_(self.attention.attention.normalize_scalar, self.classifier.in_features**-0.5)
        nn.init.zeros_(self.attention.attention.normalize_bias)

    def _encode(self, source: torch.Tensor, source_length: torch.Tensor) -> torch.Tensor:
        """Return the memory: [source tokens, samples, hidden]."""
        x = self.bidirectional(self._embed(self.source_embedder, source), source_length)
        x = self.encoder[0](self.dropout(x))
        for lstm in list(self.encoder)[1:]:
            x = lstm(self.dropout(x)) + x
        memory: torch.Tensor = x
        return memory

    def _embed(self, embedder: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = embedder(tokens)
        return vectors if self.input_dropout is None else self.input_dropout(vectors)

    def _step(
        self, tokens: torch.Tensor, state: Tensors, context: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        memory, keys, lengths = context
        before = state[0].flatten(0, 1).unbind(1)
        y, after = self.attention.rnn.step(self.target_embedder(tokens.reshape(-1, 1))[0], before[0])
        attended, weights = self.attention.attention(y.view(*tokens.shape, -1), memory, keys, lengths)
        attended, states = attended.flatten(0, 1), [after]
        for index, lstm in enumerate(self.decoder):
            assert isinstance(lstm, LSTMLayer)
            x, after = lstm.step(torch.cat((y, attended), 1), before[index + 1])
            y = x + y if index else x
            states.append(after)
        logits = self.classifier(y.unsqueeze(0)).view(*tokens.shape, -1)
        return functional.log_softmax(logits, -1), weights, (torch.stack(states, 1).view_as(state[0]),)


def gnmt8(
    hidden_size: int = 1024,
    source_vocabulary: int = VOCABULARY,
    target_vocabulary: int = VOCABULARY,
    dropout: float = 0.2,
    input_dropout: float = 0.0,
    share_embedding: bool = False,
    init_range: float = 0.1,
) -> GNMT:
    """Build GNMT with four encoder and four decoder layers (PipeDream, Table 1: GNMT-8).

    Args:
        hidden_size: width of embeddings and LSTM layers, at least 1.
        source_vocabulary: number of token ids of the source's language, at least 4.
        target_vocabulary: number of token ids of the target's language, at least 4.
        dropout: probability of dropping a feature before every LSTM layer but the two that read embeddings, in [0, 1).
        input_dropout: the same before those two. The PipeDream artifact has none there; MLPerf v0.6 has 0.2.
        share_embedding: whether both languages have one embedding, as in MLPerf; needs equal vocabularies. PipeDream's
            artifact has two, as by default: in PipeDream's mode stages don't update together, so a shared embedding
            would put all layers from the encoder's start to the decoder's into one stage.
        init_range: parameters are drawn from U(-init_range, init_range); more than 0.
    """
    return GNMT(
        "gnmt8", 8, hidden_size, source_vocabulary, target_vocabulary, dropout, input_dropout, share_embedding,
        init_range,
    )  # fmt: skip


def gnmt16(
    hidden_size: int = 1024,
    source_vocabulary: int = VOCABULARY,
    target_vocabulary: int = VOCABULARY,
    dropout: float = 0.2,
    input_dropout: float = 0.0,
    share_embedding: bool = False,
    init_range: float = 0.1,
) -> GNMT:
    """Build GNMT with eight encoder and eight decoder layers (PipeDream, Table 1: GNMT-16); options as for `gnmt8`."""
    return GNMT(
        "gnmt16", 16, hidden_size, source_vocabulary, target_vocabulary, dropout, input_dropout, share_embedding,
        init_range,
    )  # fmt: skip
