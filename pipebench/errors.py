"""Every error that pipebench raises on purpose.

A `UserError` is the user's mistake: the command line prints one sentence and exits with 2. Of all others it prints the
traceback and exits with 3.
"""

import difflib
import errno
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

_SHORTEST_SECRET = 4  # characters; shorter values are parts of too many words
_SHORTEST_CUT = 40  # characters that are left of a hidden value that was cut without `...`
_MOST_SHOWN = 60  # characters of a value in a message
_LARGEST_SHOWN = 2**63  # Python refuses to print numbers of thousands of digits
_hidden: dict[str, str] = {}  # value to expression
# Least similarity, from 0 to 1, to an allowed name and to a key of another section.
_CLOSE, _CLOSE_ELSEWHERE = 0.55, 0.8
# Words of other frameworks, in letters and digits, and pipebench's names for them in order of preference.
_FOREIGN = (
    ("learningrate baselr", "train.optimizer.lr lr"),
    ("batchsize batch bs", "train.minibatch_size minibatch_size"),
    ("microbatchsize nummicrobatches nmicrobatches", "parallelism.microbatches microbatches"),
    ("gradientaccumulationsteps gradaccum gradaccumsteps", "parallelism.accumulate accumulate"),
    ("epochs numepochs numtrainepochs", "train.max_epochs max_epochs"),
    ("dtype amp fp16 bf16 mixedprecision", "train.precision precision"),
    ("maxgradnorm gradclip gradientclipping", "train.optimizer.clip_norm clip_norm"),
    ("gradientcheckpointing activationcheckpointing", "parallelism.recompute recompute"),
    ("stages numstages pp ppsize pipelineparallelsize", "parallelism.plan plan"),
    ("gpus ngpus devices numnodes nnodes worldsize", "cluster.servers servers"),
    ("strategy parallelismmode", "parallelism.mode mode"),
    ("tp tpsize tensorparallel tensorparallelsize", "parallelism.tensor tensor"),
    ("scheduler lrscheduler", "train.schedule schedule"),
    ("backend", "engine.kind kind"),
    ("nccl gloo mpi torchrun", "distributed"),
    ("data", "dataset"),
    ("ddp dataparallel distributeddataparallel", "dp parallelism.mode"),
    ("fsdp fsdp2 fullyshard zero3", "fsdp parallelism.mode"),
    ("zero zero1 distributedoptimizer", "zero1 parallelism.mode"),
    ("zero2 deepspeed", "zero2 parallelism.mode"),
    ("1f1b schedule1f1b dapple megatron", "pipedream-flush parallelism.mode"),
    ("interleaved1f1b scheduleinterleaved1f1b", "interleaved"),
    ("zb zbh1 zerobubble", "zero-bubble"),
    ("naive modelparallel", "model"),
    ("2bw pipedream2bw", "pipedream-2bw"),
    ("none serial", "single"),
)
_OURS = {word: ours.split() for words, ours in _FOREIGN for word in words.split()}
_SLICES = "parallelism.tensor=2 slices layers, in every mode"
# Kinds of parallelism that are no mode, and what to say of them.
_NO_MODES = {
    **dict.fromkeys(("tp", "tensor", "tensorparallel"), _SLICES),
    **dict.fromkeys(("sp", "cp", "ep"), f"pipebench has no such parallelism: {_SLICES}"),
}


class PipebenchError(Exception):
    """Base of all pipebench errors."""


class UserError(PipebenchError):
    """A mistake in what the user gave; the message says where, what was given and what is allowed."""


class FileName(str):
    """A file's name for messages, which may find the lines of its keys."""

    __slots__ = ()

    def line_of(self, key: str) -> int | None:
        """Return the line of a full key, or of the innermost key that contains it; None if unknown."""
        return None


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a recipe."""

    file: str  # or `command line`; with a `FileName`, messages have the line
    key: str  # full dotted key, or "" for the file as a whole
    problem: str  # what is wrong, what was given and what is allowed, as the end of a sentence

    def __post_init__(self) -> None:
        for name in ("file", "problem"):
            given = getattr(self, name)
            shown = without_hidden(given)
            object.__setattr__(self, name, given if shown == given else shown)

    def __str__(self) -> str:
        line = self.file.line_of(self.key) if isinstance(self.file, FileName) else None
        where = self.file if line is None else f"{self.file}:{line}"
        return printable(f"{where}: {self.key}: {self.problem}" if self.key else f"{where}: {self.problem}")


class RecipeError(UserError, ValueError):
    """A recipe that can't be run; `faults` has everything wrong with it, one sentence each."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class PlanError(UserError, ValueError):
    """A plan that is invalid for this model, mode or cluster."""


class GraphError(UserError, ValueError):
    """A model that can't be turned into a layer graph; names the module and the reason."""


class TracingError(GraphError):
    """A model that torch.fx can't trace, so that it can't be cut; names the line, the reason and the way out."""


class ProfileError(UserError, ValueError):
    """A profile that can't be read or made; `layer` is the layer that couldn't be run, if that is why."""

    def __init__(self, problem: str, layer: str | None = None) -> None:
        self.layer = layer
        super().__init__(problem)


class DeviceError(ProfileError):
    """A cluster's device that isn't in the catalogue, from which its times would be computed."""


class UserCodeError(UserError, RuntimeError):
    """A recipe's `target` raised (`__cause__`) or returned something else than it must.

    `key` is the full key of the target, "" if unknown.
    """

    def __init__(self, problem: str, key: str = "") -> None:
        self.problem, self.key = problem, key
        super().__init__(f"{key}: {problem}" if key else problem)


class ScheduleError(PipebenchError, RuntimeError):
    """A schedule that can't run: workers wait for each other in a circle, or a pass is missing or there twice."""


class DivergedError(PipebenchError, ArithmeticError):
    """A training loss that isn't finite: the end of a run, and its result."""


class WorkersFailedError(PipebenchError):
    """Processes ended without a result; the launcher has printed why. `exit_code` is the command's."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(f"the run's processes ended with exit code {exit_code}")


# What is raised without memory by torch's allocators, CUDA (pinned memory, contexts), cuBLAS, cuDNN and NCCL; by the
# system; and by its loader of libraries under `ulimit -v`.
_NO_MEMORY = re.compile(
    r"out of memory|ALLOC_FAILED|can(?:'t|not) allocate memory|failed to map segment from shared object$",
    re.IGNORECASE | re.MULTILINE,
)
# Sentences on limits of a process, its user or its control group, by error number, and by the system's own words.
_LIMITS = {
    errno.EMFILE: "this process may open no more files: raise `ulimit -n`, the number that it may have open",
    errno.ENFILE: "the system may open no more files",
    errno.EFBIG: "this process may not write a file as large: raise `ulimit -f`",
    errno.EAGAIN: "no more threads or processes can be started: raise `ulimit -u`, or pids.max of the job's control "
    "group",
}
_OF_SYSTEM = {os.strerror(number): sentence for number, sentence in _LIMITS.items()}
_OF_SYSTEM["can't start new thread"] = _LIMITS[errno.EAGAIN]
# Functions by which Python's libraries start a process.
_STARTERS = {"fork", "forkpty", "fork_exec", "_fork_exec", "posix_spawn", "posix_spawnp"}


class OutOfMemoryError(PipebenchError, MemoryError):
    """A device ran out of memory in training; names the stage or instruction, and what the device held."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or its host ran out of memory, which most libraries' errors say by their text alone."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError | ImportError) and _NO_MEMORY.search(str(error)) is not None


def memory_text(error: BaseException) -> str:
    """Return one sentence of an error for which `is_out_of_memory` is true."""
    if isinstance(error, OutOfMemoryError):
        return str(error)
    lines = [each for each in str(error).splitlines() if each.strip()] or [type(error).__name__]
    telling = next(filter(_NO_MEMORY.search, lines), lines[0])  # numpy's loader lists other causes, too
    return f"out of memory before or between a worker's instructions: {telling}"


def limit_text(error: BaseException) -> str | None:
    """Return a sentence on the system's limit that caused an error; None for other errors.

    >>> limit_text(RuntimeError("can't start new thread"))
    "no more threads or processes can be started: raise `ulimit -u`, or pids.max of the job's control group"
    """
    if not isinstance(error, RuntimeError | OSError):
        return None
    if isinstance(error, BlockingIOError) and not _is_of_starting_a_process(error):
        return None
    return _OF_SYSTEM.get(getattr(error, "strerror", None) or str(error))  # errors of C++ have the words alone


def _is_of_starting_a_process(error: BaseException) -> bool:
    """Return whether the function that an error was raised in starts processes.

    A lock that another process has, and a pipe that is full, fail by EAGAIN as well.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and not _STARTERS.isdisjoint(trace.tb_frame.f_code.co_names)


def printable(text: str) -> str:
    r"""Return text on one line, characters that could move a terminal's cursor escaped as in Python.

    >>> print(printable("a\x1b[2Jb\n"))
    a\x1b[2Jb\n
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def print_notice(sentence: str) -> None:
    """Print a sentence that the user should see beside what a command prints, on the standard error."""
    print(f"pipebench: {printable(sentence)}", file=sys.stderr, flush=True)


def printable_lines(text: str) -> list[str]:
    """Return a message's printable lines, without hidden values.

    Every message is printed by this function or by `printable`.
    """
    return [printable(line) for line in without_hidden(text).rstrip("\n").split("\n")]


def hide(value: object, expression: str) -> None:
    """Replace a value, perhaps a secret token, by its expression such as `${oc.env:TOKEN}` in all further messages."""
    if isinstance(value, str | int | float) and not isinstance(value, bool) and re.search(r"\w", str(value)):
        text = str(value)
        for form in {text, repr(text)[1:-1], ascii(text)[1:-1], " ".join(text.split())}:
            _hidden[form] = expression


def without_hidden(text: str) -> str:
    """Return a message with hidden values, also if cut short, replaced by their expressions.

    >>> hide("hunter2-hunter3", "${oc.env:TOKEN}")
    >>> without_hidden("got 'hunter2-hunter3', no folder /hunter2-hunter3/data, near hunter2-hu...")
    "got '${oc.env:TOKEN}', no folder /${oc.env:TOKEN}/data, near ${oc.env:TOKEN}..."
    """
    for form in sorted(_hidden, key=len, reverse=True):  # one may be a prefix of another
        text = _without_cut(re.sub(_pattern(form), lambda match: _hidden[match[0]], text), form)
    return text


def _pattern(form: str) -> str:
    """Return a pattern of a hidden value as a word; of a short value only where quoted or assigned."""
    before = r"(?<!\w)" if len(form) >= _SHORTEST_SECRET else r"(?:(?<=')|(?<=got ))"
    return rf"{before}{re.escape(form)}(?!\w)"


def _without_cut(text: str, form: str) -> str:
    """Replace the beginning of a hidden value that a message has cut short."""
    start = 0
    while len(form) > _SHORTEST_SECRET and (start := text.find(form[:_SHORTEST_SECRET], start)) >= 0:
        length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(form, text[start:], strict=False)))
        after = text[start + length :]
        if not after or after.startswith("...") or (length >= _SHORTEST_CUT and not after[:1].isalnum()):
            text = f"{text[:start]}{_hidden[form]}{after}"
        start += 1
    return text


def nearest(given: object, allowed: Iterable[str], keys: Iterable[str] = ()) -> str:
    """Return `; did you mean X?` for the closest allowed name, or "" if nothing is close.

    Case, dashes and the like don't count, and names that other frameworks use are known. `keys` are full keys of other
    sections, found by their last part.

    >>> nearest("clusterA", ["cluster-a", "cluster-b"]), nearest("seed", ["train"], ["train.seed"])
    ("; did you mean 'cluster-a'?", "; did you mean 'train.seed'?")
    """
    names = sorted(allowed, key=lambda name: difflib.SequenceMatcher(None, name, str(given)).ratio(), reverse=True)
    others, word = list(keys), _folded(given)
    by_name = {_folded(name): name for name in reversed(names)}
    by_last_part = {_folded(key.rpartition(".")[2]): key for key in reversed(others)}
    ours = next((name for name in _OURS.get(word, ()) if name in names or name in others), None)
    found = ours or by_name.get(word) or by_last_part.get(word)
    if found is None and word in _NO_MODES and (others or "dp" in names):
        return f"; {_NO_MODES[word]}"
    found = found or _closest(word, by_name, _CLOSE) or _closest(word, by_last_part, _CLOSE_ELSEWHERE)
    return f"; did you mean {found!r}?" if found else ""


def _closest(word: str, names: Mapping[str, str], least: float) -> str | None:
    """Return the name whose folded form is most similar to a word; None if none has the least similarity."""
    close = difflib.get_close_matches(word, names, n=1, cutoff=least)
    return names[close[0]] if close else None


def _folded(name: object) -> str:
    """Return a name's letters and digits in lower case; all of it if it has none."""
    return re.sub(r"[\W_]+", "", str(name)).lower() or str(name)


def shown(value: object) -> str:
    """Return a value as a recipe has it, cut at 60 characters; of a mapping and a huge number the kind alone.

    >>> shown("a"), shown([True, 1]), shown(None), shown({"a": 1})
    ("'a'", '[true, 1]', 'null', 'a mapping')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, int) and abs(value) > _LARGEST_SHOWN:
        return "a huge number"
    text = f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def choice(given: object, allowed: Iterable[str]) -> str:
    """Return the standard end of a sentence about a value that isn't among the allowed names.

    >>> choice("V10", ["V100", "K80"]), choice({"name": "V100"}, ["V100", "K80"])
    ("got 'V10', allowed are V100, K80; did you mean 'V100'?", 'got a mapping, allowed are V100, K80')
    """
    names = list(allowed)
    allowed_text = f"allowed are {', '.join(names)}" if names else "but there is none"
    if not isinstance(given, str):
        return f"got {shown(given)}, {allowed_text}"
    start = given if len(given) <= _MOST_SHOWN else f"{given[: _MOST_SHOWN - 3]}..."
    return f"got {start!r}, {allowed_text}{nearest(start, names)}"
