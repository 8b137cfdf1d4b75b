"""BERT, base and large, with both heads of its pre-training.

Devlin et al. (2018), "BERT: Pre-training of deep bidirectional transformers for language understanding". Every operator
is a layer, 19 in a block. Only the hidden words reach the product with the vocabulary.
"""

import torch
from torch import nn

from pipebench.zoo.multi_head import AddLearntPositions, AddNorm, HidePadding, MultiHeadAttention, check_heads
from pipebench.zoo.options import at_least, below_one
from pipebench.zoo.text import NUM_SPECIAL

VOCABULARY = 30_522  # WordPieces of the released uncased models; the paper says 30,000
NUM_SEGMENTS = 2
_EPSILON = 1e-12  # of LayerNorm; this and the next are from the authors' code
_INIT_STD = 0.02


class Embedding(nn.Module):
    """The sum of the vectors of words, segments and positions, normalised."""

    def __init__(self, vocabulary: int, width: int, max_tokens: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.segments = nn.Embedding(NUM_SEGMENTS, width)
        self.positions = AddLearntPositions(max_tokens, width)
        self.norm = nn.LayerNorm(width, _EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """Map two [samples, tokens] int64 to [samples, tokens, width]."""
        embedded: torch.Tensor = self.dropout(self.norm(self.positions(self.words(tokens) + self.segments(segments))))
        return embedded


class Block(nn.Module):
    """Self-attention, then two linear layers at every position."""

    def __init__(self, width: int, feed_forward: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, num_heads, dropout, HidePadding(), bias=True)
        self.after_attention = AddNorm(width, dropout, _EPSILON)
        self.wide = nn.Linear(width, feed_forward)
        self.gelu = nn.GELU()
        self.narrow = nn.Linear(feed_forward, width)
        self.after_narrow = AddNorm(width, dropout, _EPSILON)

    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens, width] to the same shape; length: tokens that aren't padding, [samples] int64."""
        x = self.after_attention(x, self.attention(x, x, length))
        y: torch.Tensor = self.after_narrow(x, self.narrow(self.gelu(self.wide(x))))
        return y


class AtPositions(nn.Module):
    """Selects some positions of each sample."""

    one_layer = True

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens, width] and [samples, positions] int64 to [samples, positions, width]."""
        return x.gather(1, positions.unsqueeze(2).expand(-1, -1, x.shape[2]))


class HiddenWords(nn.Module):
    """The head that predicts the hidden words."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.at_positions = AtPositions()
        self.transform = nn.Linear(width, width)
        self.gelu = nn.GELU()
        self.norm = nn.LayerNorm(width, _EPSILON)
        self.classifier = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens, width] to logits [samples, positions, vocabulary]."""
        logits: torch.Tensor = self.classifier(self.norm(self.gelu(self.transform(self.at_positions(x, positions)))))
        return logits


class NextSentence(nn.Module):
    """The pooler, which reads the first token, and the head that predicts whether the second segment follows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pooler = nn.Linear(width, width)
        self.tanh = nn.Tanh()
        self.classifier = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens, width] to logits [samples, 2]; the second is for yes."""
        logits: torch.Tensor = self.classifier(self.tanh(self.pooler(x[:, 0])))
        return logits


class BERT(nn.Module):
    """The encoder with its two heads; see `bert_base` for its options. `name` is the model's, for errors.

    Inputs are `tokens` and `segments` [samples, tokens] int64, `length` [samples] int64, and `positions` [samples,
    hidden words] int64, those of the words that were hidden. Padding, on the right, has no influence.
    """

    def __init__(
        self,
        name: str,
        num_layers: int,
        width: int,
        feed_forward: int,
        num_heads: int,
        vocabulary: int,
        max_tokens: int,
        dropout: float,
        share_embedding: bool,
    ) -> None:
        super().__init__()
        at_least(1, name, num_layers=num_layers, width=width, feed_forward=feed_forward)
        at_least(1, name, num_heads=num_heads, max_tokens=max_tokens)
        at_least(NUM_SPECIAL, name, vocabulary=vocabulary)
        check_heads(name, width, num_heads)
        below_one(name, dropout=dropout)
        self.embedding = Embedding(vocabulary, width, max_tokens, dropout)
        self.encoder = nn.ModuleList(Block(width, feed_forward, num_heads, dropout) for _ in range(num_layers))
        self.hidden_words = HiddenWords(width, vocabulary)
        self.next_sentence = NextSentence(width)
        if share_embedding:
            self.hidden_words.classifier.weight = self.embedding.words.weight
        for module in self.modules():  # as the authors' code: normal distributions truncated at two sigma
            if isinstance(module, nn.Linear | nn.Embedding | AddLearntPositions):
                nn.init.trunc_normal_(module.weight, 0, _INIT_STD, -2 * _INIT_STD, 2 * _INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self, tokens: torch.Tensor, segments: torch.Tensor, length: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of the hidden words, [samples, positions, vocabulary], and of what follows, [samples, 2]."""
        x = self.embedding(tokens, segments)
        for block in self.encoder:
            x = block(x, length)
        return self.hidden_words(x, positions), self.next_sentence(x)


def bert_base(
    num_layers: int = 12,
    width: int = 768,
    feed_forward: int = 3072,
    num_heads: int = 12,
    vocabulary: int = VOCABULARY,
    max_tokens: int = 512,
    dropout: float = 0.1,
    share_embedding: bool = False,
) -> BERT:
    """Build BERT, by default the paper's base model (section 3).

    Args:
        num_layers: blocks.
        width: features of a token.
        feed_forward: features between the two linear layers of a block.
        num_heads: of every attention; divides `width`.
        vocabulary: number of token ids, at least 4.
        max_tokens: length of the longest text, in tokens.
        dropout: probability of dropping a feature or an attention weight, in [0, 1).
        share_embedding: whether the words' vectors are the matrix before the softmax, too, as in the paper. In modes
            whose stages don't update together, such as pipedream, both are then in one stage.
    """
    return BERT(
        "bert_base", num_layers, width, feed_forward, num_heads, vocabulary, max_tokens, dropout, share_embedding
    )


def bert_large(
    num_layers: int = 24,
    width: int = 1024,
    feed_forward: int = 4096,
    num_heads: int = 16,
    vocabulary: int = VOCABULARY,
    max_tokens: int = 512,
    dropout: float = 0.1,
    share_embedding: bool = False,
) -> BERT:
    """Build BERT, by default the paper's large model (section 3); options as for `bert_base`."""
    return BERT(
        "bert_large", num_layers, width, feed_forward, num_heads, vocabulary, max_tokens, dropout, share_embedding
    )
