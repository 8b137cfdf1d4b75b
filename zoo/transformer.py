"""The Transformer for translation, base and big.

Vaswani et al. (2017), "Attention is all you need", with the dropouts and the initialisation of the authors' code
(tensor2tensor), which the paper leaves out. Every operator is a layer: 20 in a block of the encoder, 33 in one of the
decoder. All blocks of the decoder read the encoder's output, so it crosses every cut in the decoder.
"""

import torch
from torch import nn
from torch.nn import functional

from pipebench.zoo.beam_search import Tensors, Translator
from pipebench.zoo.multi_head import AddNorm, HideFuture, HidePadding, MultiHeadAttention
from pipebench.zoo.options import at_least, below_one, one_size
from pipebench.zoo.text import NUM_SPECIAL
from pipebench.zoo.wmt16 import VOCABULARY

_LONGEST_WAVE = 10_000.0  # the paper's: the longest wavelength in tokens, over 2 pi


class AddPositions(nn.Module):
    """Adds sines and cosines of the position to the features, from short waves to long ones (section 3.5)."""

    one_layer = True

    def forward(self, x: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return x, [samples, tokens, width], plus the encodings of its positions, the first of which is `start`."""
        num_tokens, width = x.shape[1:]
        position = torch.arange(start, start + num_tokens, dtype=x.dtype, device=x.device).unsqueeze(1)
        even = torch.arange(0, width, 2, dtype=x.dtype, device=x.device)
        angle = position * _LONGEST_WAVE ** (-even / width)
        return x + torch.stack((angle.sin(), angle.cos()), 2).flatten(1)


class Embedding(nn.Module):
    """Vectors of token ids, scaled, plus encodings of positions."""

    def __init__(self, table: nn.Embedding, dropout: float) -> None:
        super().__init__()
        self.table, self.positions, self.dropout = table, AddPositions(), nn.Dropout(dropout)
        self.scale = table.embedding_dim**0.5

    def forward(self, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Map [samples, tokens] int64 to [samples, tokens, width]; the first token is at position `start`."""
        embedded: torch.Tensor = self.dropout(self.positions(self.table(tokens) * self.scale, start))
        return embedded


class FeedForward(nn.Module):
    """Two linear layers, the same at every position (section 3.3)."""

    def __init__(self, width: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.wide = nn.Linear(width, feed_forward)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout)
        self.narrow = nn.Linear(feed_forward, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens, width] to the same shape."""
        y: torch.Tensor = self.narrow(self.dropout(self.relu(self.wide(x))))
        return y


class EncoderBlock(nn.Module):
    """Self-attention, then two linear layers."""

    def __init__(self, width: int, feed_forward: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, num_heads, dropout, HidePadding())
        self.after_attention = AddNorm(width, dropout)
        self.feed_forward = FeedForward(width, feed_forward, dropout)
        self.after_feed_forward = AddNorm(width, dropout)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens, width] to the same shape; lengths: tokens that aren't padding, [samples] int64."""
        x = self.after_attention(x, self.attention(x, x, lengths))
        y: torch.Tensor = self.after_feed_forward(x, self.feed_forward(x))
        return y


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the source, then two linear layers."""

    def __init__(self, width: int, feed_forward: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, num_heads, dropout, HideFuture())
        self.after_attention = AddNorm(width, dropout)
        self.source_attention = MultiHeadAttention(width, num_heads, dropout, HidePadding())
        self.after_source_attention = AddNorm(width, dropout)
        self.feed_forward = FeedForward(width, feed_forward, dropout)
        self.after_feed_forward = AddNorm(width, dropout)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Map [samples, target tokens, width] to the same shape.

        Args:
            x: the target so far; no position depends on a later one.
            memory: the encoder's output: [samples, source tokens, width].
            lengths: source tokens that aren't padding: [samples] int64.
        """
        x = self.after_attention(x, self.attention(x, x))
        x = self.after_source_attention(x, self.source_attention(x, memory, lengths))
        y: torch.Tensor = self.after_feed_forward(x, self.feed_forward(x))
        return y

    def step(self, x: torch.Tensor, before: Tensors, source: Tensors) -> tuple[torch.Tensor, Tensors]:
        """Compute one token of every row, given the keys and values of the tokens before.

        Args:
            x: [rows, 1, width].
            before: keys and values of the tokens before.
            source: keys and values of the source, and its lengths.

        Returns:
            [rows, 1, width], and keys and values of all tokens so far.
        """
        keys = torch.cat((before[0], self.attention.key(x)), 3)
        values = torch.cat((before[1], self.attention.value(x)), 2)
        x = self.after_attention(x, self.attention.attend(self.attention.query(x), keys, values))
        x = self.after_source_attention(x, self.source_attention.attend(self.source_attention.query(x), *source))
        x = self.after_feed_forward(x, self.feed_forward(x))
        return x, (keys, values)


class Transformer(Translator):
    """The translator; see `transformer` for its options. `name` is the model's, for errors.

    Inputs are `source` [samples, source tokens] int64, `source_length` [samples] int64, and `target_in` [samples,
    target tokens] int64, which starts with BOS. Padding, on the right, has no influence.
    """

    beam_size = 4  # the paper's

    def __init__(
        self,
        name: str,
        num_layers: int,
        width: int,
        feed_forward: int,
        num_heads: int,
        source_vocabulary: int,
        target_vocabulary: int,
        dropout: float,
        share_embeddings: bool,
    ) -> None:
        super().__init__()
        vocabularies = {"source_vocabulary": source_vocabulary, "target_vocabulary": target_vocabulary}
        at_least(1, name, num_layers=num_layers, width=width, feed_forward=feed_forward, num_heads=num_heads)
        at_least(NUM_SPECIAL, name, **vocabularies)
        if width % num_heads or width % 2:
            raise ValueError(f"{name}: width is {width}, allowed is an even multiple of num_heads, {num_heads}")
        below_one(name, dropout=dropout)
        if share_embeddings:
            one_size(name, because="share_embeddings", **vocabularies)
        sizes = (width, feed_forward, num_heads, dropout)
        source = nn.Embedding(source_vocabulary, width)
        target = source if share_embeddings else nn.Embedding(target_vocabulary, width)
        self.source_embedding = Embedding(source, dropout)
        self.encoder = nn.ModuleList(EncoderBlock(*sizes) for _ in range(num_layers))
        self.target_embedding = Embedding(target, dropout)
        self.decoder = nn.ModuleList(DecoderBlock(*sizes) for _ in range(num_layers))
        self.classifier = nn.Linear(width, target_vocabulary, bias=False)
        if share_embeddings:
            self.classifier.weight = target.weight
        self._initialise()

    def forward(self, source: torch.Tensor, source_length: torch.Tensor, target_in: torch.Tensor) -> torch.Tensor:
        """Return the logits of every next token: [samples, target tokens, target vocabulary] float."""
        memory = self._encode(source, source_length)
        x = self.target_embedding(target_in)
        for block in self.decoder:
            x = block(x, memory, source_length)
        logits: torch.Tensor = self.classifier(x)
        return logits

    def _begin(self, source: torch.Tensor, source_length: torch.Tensor, beam_size: int) -> tuple[Tensors, Tensors]:
        memory = self._encode(source, source_length)
        attentions = [block.source_attention for block in self._decoder()]
        keys = torch.stack([attention.key(memory) for attention in attentions], 1)
        values = torch.stack([attention.value(memory) for attention in attentions], 1)
        num_samples, num_layers, num_heads, num_features = keys.shape[:4]
        before = (num_samples, beam_size, num_layers, num_heads)
        state = (keys.new_empty(*before, num_features, 0), keys.new_empty(*before, 0, num_features))
        return state, (keys, values, source_length)

    def _initialise(self) -> None:
        """Draw weights as tensor2tensor does: matrices by Glorot and Bengio, embeddings from N(0, 1 / width)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():  # last, since a classifier may share an embedding's matrix
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, 0, module.embedding_dim**-0.5)

    def _decoder(self) -> list[DecoderBlock]:
        return [block for block in self.decoder if isinstance(block, DecoderBlock)]

    def _encode(self, source: torch.Tensor, source_length: torch.Tensor) -> torch.Tensor:
        """Return the memory: [samples, source tokens, width]."""
        x: torch.Tensor = self.source_embedding(source)
        for block in self.encoder:
            x = block(x, source_length)
        return x

    def _step(self, tokens: torch.Tensor, state: Tensors, context: Tensors) -> tuple[torch.Tensor, None, Tensors]:
        beam_size = tokens.shape[1]
        keys, values = (each.flatten(0, 1).unbind(1) for each in state)
        source_keys, source_values, lengths = (each.repeat_interleave(beam_size, 0) for each in context)
        x = self.target_embedding(tokens.reshape(-1, 1), state[0].shape[-1])
        after: list[Tensors] = []
        for index, block in enumerate(self._decoder()):
            source = (source_keys[:, index], source_values[:, index], lengths)
            x, seen = block.step(x, (keys[index], values[index]), source)
            after.append(seen)
        logits = self.classifier(x[:, 0]).view(*tokens.shape, -1)
        stacked = (torch.stack(each, 1) for each in zip(*after, strict=True))
        state = tuple(each.view(*tokens.shape, *each.shape[1:]) for each in stacked)
        return functional.log_softmax(logits, -1), None, state


def transformer(
    num_layers: int = 6,
    width: int = 512,
    feed_forward: int = 2048,
    num_heads: int = 8,
    source_vocabulary: int = VOCABULARY,
    target_vocabulary: int = VOCABULARY,
    dropout: float = 0.1,
    share_embeddings: bool = False,
) -> Transformer:
    """Build the Transformer, by default the paper's base model (table 3).

    Args:
        num_layers: blocks of the encoder, and of the decoder; vPipe's model for 16 GPUs has twice as many as for 8.
        width: features of a token.
        feed_forward: features between the two linear layers of a block.
        num_heads: of every attention; divides `width`.
        source_vocabulary: number of token ids of the source's language, at least 4.
        target_vocabulary: number of token ids of the target's language, at least 4.
        dropout: probability of dropping a feature or an attention weight, in [0, 1).
        share_embeddings: whether both embeddings and the matrix before the softmax are one, as in the paper; needs
            equal vocabularies. In modes whose stages don't update together, such as pipedream, all layers that use the
            matrix are then in one stage.
    """
    return Transformer(
        "transformer", num_layers, width, feed_forward, num_heads, source_vocabulary, target_vocabulary, dropout,
        share_embeddings,
    )  # fmt: skip


def transformer_big(
    num_layers: int = 6,
    width: int = 1024,
    feed_forward: int = 4096,
    num_heads: int = 16,
    source_vocabulary: int = VOCABULARY,
    target_vocabulary: int = VOCABULARY,
    dropout: float = 0.3,
    share_embeddings: bool = False,
) -> Transformer:
    """Build the Transformer, by default the paper's big model (table 3); options as for `transformer`."""
    return Transformer(
        "transformer_big", num_layers, width, feed_forward, num_heads, source_vocabulary, target_vocabulary, dropout,
        share_embeddings,
    )  # fmt: skip
