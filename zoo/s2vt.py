"""S2VT: two stacked LSTMs that read a video's frames and then write its caption.

Venugopalan et al. (2015), "Sequence to Sequence - Video to Text". Each LSTM runs over all frames and words in one fused
call, so that the model is a few large layers, and one tensor crosses every cut.
"""

import torch
from torch import nn

from pipebench.zoo.options import at_least, below_one, more_than
from pipebench.zoo.text import BOS, EOS, NUM_SPECIAL, content

State = tuple[torch.Tensor, torch.Tensor]


class LSTMLayer(nn.LSTM):
    """An LSTM that returns its outputs without its states, so that only these cross a cut."""

    one_layer = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # one tensor in, one out
        """Map [n, steps, input] to [n, steps, hidden]; the state starts from zeros."""
        return self.go_on(x, None)[0]

    def go_on(self, x: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State]:
        """Return the outputs and the state after them; `state` is that before them, None for zeros."""
        output, after = super().forward(x, state)
        return output, after


class S2VT(nn.Module):
    """Two stacked LSTMs over frames and then words.

    The first `frames` steps read frames, and the `words` steps after them write the caption. The first LSTM reads
    embedded frames and then zeros. The second reads the first one's output, concatenated with zeros and then with
    embedded words.
    """

    def __init__(
        self, num_features: int, embedding: int, hidden: int, vocabulary: int, frames: int, words: int, dropout: float
    ) -> None:
        super().__init__()
        self.frames = frames
        self.words = words
        self.frame_embedding = nn.Linear(num_features, embedding)
        self.frame_dropout = nn.Dropout(dropout)
        self.video_lstm = LSTMLayer(embedding, hidden, batch_first=True)
        self.word_embedding = nn.Embedding(vocabulary, embedding)
        self.word_dropout = nn.Dropout(dropout)
        self.language_lstm = LSTMLayer(hidden + embedding, hidden, batch_first=True)
        self.output_dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden, vocabulary)

    def forward(self, features: torch.Tensor, caption_in: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next words.

        Args:
            features: [n, frames, num_features] float.
            caption_in: [n, words] int64, BOS first.

        Returns:
            [n, words, vocabulary] float.
        """
        frames = self.frame_dropout(self.frame_embedding(features))
        video = self.video_lstm(nn.functional.pad(frames, (0, 0, 0, self.words)))
        words = self.word_dropout(self.word_embedding(caption_in))
        language = torch.cat([video, nn.functional.pad(words, (0, 0, self.frames, 0))], 2)
        written = self.language_lstm(language)[:, self.frames :]
        return self.classifier(self.output_dropout(written))  # type: ignore[no-any-return]

    @torch.no_grad()
    def describe(self, features: torch.Tensor, *, max_length: int) -> list[list[int]]:
        """Write captions greedily, each time the likeliest word (paper, section 3.2), without dropout.

        The states of both LSTMs are carried from word to word.

        Args:
            features: [n, any number of frames, num_features] float, on the model's device.
            max_length: most words of a caption, at least 0.

        Returns:
            For every video the ids of the words, without BOS and EOS.
        """
        video, state = self.video_lstm.go_on(self.frame_embedding(features), None)
        # The first LSTM doesn't read words, so its outputs during the words are computed at once.
        zeros = video.new_zeros(len(video), max(1, max_length), self.frame_embedding.out_features)
        ahead, _ = self.video_lstm.go_on(zeros, state)
        blank = video.new_zeros(*video.shape[:2], self.word_embedding.embedding_dim)
        _, state = self.language_lstm.go_on(torch.cat([video, blank], 2), None)
        word = torch.full((len(video), 1), BOS, device=video.device)
        written: list[torch.Tensor] = []
        ended = torch.zeros_like(word, dtype=torch.bool)
        for step in range(max_length):
            read = torch.cat([ahead[:, step : step + 1], self.word_embedding(word)], 2)
            output, state = self.language_lstm.go_on(read, state)
            word = self.classifier(output).argmax(2)
            written.append(word)
            ended |= word == EOS
            if bool(ended.all()):
                break
        rows = torch.cat(written, 1).tolist() if written else [[] for _ in range(len(video))]
        return [content(row) for row in rows]


def s2vt(
    num_features: int = 4096,
    embedding: int = 500,
    hidden: int = 1000,
    vocabulary: int = 46_168,
    frames: int = 60,
    words: int = 20,
    dropout: float = 0.5,
    init_range: float = 0.08,
) -> S2VT:
    """Build S2VT; the default options are the paper's RGB network as its authors released it.

    Published (sections 3 and 4): 4096 features (VGG-16's fc7), embeddings of 500, LSTMs of 1000, and 80 steps for
    frames and words together. The paper counts 12,594 words in MSVD's captions, with which this model would have
    36,968,094 parameters, 147.9 MB. The authors' release also has the words of three other corpora, and weights of
    349,436,137 bytes: a vocabulary of 46,168 gives 87,362,668 parameters here, 349.5 MB, the nearest to that file.

    Assumed: 60 of the 80 steps are for frames and 20 for words, since the release cuts captions to 20 words if they
    don't fit. Dropout and the initialisation aren't in the paper.

    Differs: in the paper, the words follow a video of fewer frames at once, and padding comes at the end. Here words
    begin at a fixed step, and padding comes before the frames: in a fused call, they begin at one step for all samples.

    Args:
        num_features: numbers per frame.
        embedding: features of an embedded frame, and of an embedded word.
        hidden: features of the output of either LSTM.
        vocabulary: number of logits, the four special tokens of `zoo.text` included.
        frames: steps that read frames.
        words: steps that write words, the one that writes EOS included.
        dropout: probability of dropping a feature of the embeddings, or of the second LSTM's output.
        init_range: weights are drawn from U(-init_range, init_range), biases are 0.
    """
    at_least(1, "s2vt", num_features=num_features, embedding=embedding, hidden=hidden, frames=frames, words=words)
    more_than(NUM_SPECIAL, "s2vt", "the special tokens", vocabulary=vocabulary)
    below_one("s2vt", dropout=dropout)
    more_than(0, "s2vt", init_range=init_range)
    model = S2VT(num_features, embedding, hidden, vocabulary, frames, words, dropout)
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.zeros_(parameter)
        else:
            nn.init.uniform_(parameter, -init_range, init_range)
    return model
