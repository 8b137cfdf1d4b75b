"""`nox -s gpu-bench`: compares with a plain loop and torch's classes on this machine's GPUs; writes `reports/gpu.md`.

The comparisons are those of `nox -s bench`, on another device. If there is only one GPU, two processes share it: NCCL
then treats each as a host of its own, and messages go through sockets.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pipebench.model.cores import usable_cores
from reports.studies import markdown
from tests.bench.processes import machine
from tests.bench.processes.main import NUM_PAIRS
from tests.bench.processes.rows import HEAD, SHORT_ON_GPU, SINGLE_ON_GPU, TORCHS_ON_GPU, Row, distances, rows_of
from tests.bench.processes.sides import Given, settings_of
from tests.bench.processes.subject import SETTINGS, Subject, cut_at

PAGE = Path("reports", "gpu.md")
_SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}  # environment of processes that share a GPU
_MEANINGS = {
    "tf32": "`engine.tf32`",
    "bf16": "`train.precision: bf16`, in the plain loop autocast",
    "free": "`engine.deterministic: false`, with cuDNN's benchmark",
    "untried": "the same without the benchmark",
    "compile": "`engine.compile`, in the plain loop `torch.compile`",
    "channels_last": "`engine.channels_last`",
    "unfused": "the optimizer not fused",
}
assert _MEANINGS.keys() == SETTINGS.keys()


def main() -> None:
    """Measure, and write the page; ends with exit code 1 and one sentence where there is no GPU."""
    options = _options()
    if not torch.cuda.is_available():
        sys.exit("gpu-bench: torch sees no CUDA device here, so there is nothing to measure")
    subject = Subject(1.0, options.minibatch_size, image_size=224, device="cuda")
    rows = (SHORT_ON_GPU if options.short else SINGLE_ON_GPU), TORCHS_ON_GPU
    environment = _SHARED if torch.cuda.device_count() == 1 else {}
    command = " ".join(("nox -s gpu-bench", *(["--", *sys.argv[1:]] if sys.argv[1:] else [])))
    part = options.out.with_suffix(".part")  # has the lines so far if the bench is interrupted
    with part.open("w", buffering=1) as page:
        for line in measured(subject, options.pairs, environment, command, rows):
            print(line, flush=True)
            print(line, file=page)
    part.replace(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure pipebench on this machine's GPUs.")
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS, help="of every comparison")
    parser.add_argument("--short", action="store_true", help="leave out most comparisons of one process")
    parser.add_argument("--minibatch-size", type=int, default=64)
    parser.add_argument("--out", type=Path, default=PAGE)
    return parser.parse_args()


def measured(
    subject: Subject,
    pairs: int,
    environment: Mapping[str, str],
    command: str,
    rows: tuple[Sequence[Row], Sequence[Row]] = (SINGLE_ON_GPU, TORCHS_ON_GPU),
) -> Iterator[str]:
    """Compare one process, then two; yield the lines of the page as they are measured.

    Args:
        subject: the model and its data.
        pairs: interleaved pairs of measurements per comparison.
        environment: variables of every process.
        command: that the page names.
        rows: comparisons of one process, and of two.
    """
    alone, two = rows
    yield from _heading(subject, pairs, command)
    yield from ("## One process", "", *_head(), *_alone(subject, alone, pairs, environment), "")
    yield "Settings: " + "; ".join(f"`{name}`: {what}" for name, what in _MEANINGS.items()) + "."
    yield from ("", "## Two processes", "", *_two(subject, two, pairs, environment))


def _heading(subject: Subject, pairs: int, command: str) -> Iterator[str]:
    on_gpu = subject.device == "cuda"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if on_gpu else ["CPU"]
    devices = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if on_gpu:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        versions += f", CUDA {torch.version.cuda}, cuDNN {cudnn}, NCCL {nccl}"
    yield from ("# Against plain PyTorch on a GPU", "")
    yield f"Written by `{command}` on {time.strftime('%Y-%m-%d')}: {devices}, {usable_cores():g} cores. {versions}."
    yield f"{subject}. Each ratio is the speed of ours over theirs: median and range of {pairs} interleaved pairs in"
    yield "the same processes. Predictions are from a profile taken first; error: measured over predicted seconds, less"
    yield "one."
    if len(names) == 1:
        yield "Two processes share the device; their messages go through sockets."
    yield from (f"Load average of the minute before: {os.getloadavg()[0]:.1f}.", "")


def _head() -> list[str]:
    return markdown.table(HEAD, ()).splitlines()


def _alone(subject: Subject, rows: Sequence[Row], pairs: int, environment: Mapping[str, str]) -> Iterator[str]:
    """Compare in one process; rows with a target are predicted, each from a profile measured with its settings."""
    known: dict[Subject, machine.Machine] = {}
    for row in rows:
        tuned = subject.with_settings(*settings_of(row.ours)) if row.target else subject
        if tuned not in known:
            known[tuned] = machine.measure(tuned, 1, dict(environment))
        found = known[tuned]
        given = Given(tuned, 1, found.profile, found.cluster)
        yield from map(markdown.row, rows_of(given, found, [row], pairs, environment))


def _two(subject: Subject, rows: Sequence[Row], pairs: int, environment: Mapping[str, str]) -> Iterator[str]:
    """Compare two processes without deterministic kernels; then check, on digits, that sides do a plain loop's work."""
    tuned = subject.with_settings("free")
    found = machine.measure(tuned, 2, dict(environment))
    given = Given(tuned, cut_at(found.profile, tuned.minibatch_size), found.profile, found.cluster, found.host)
    yield from (*_head(), *map(markdown.row, rows_of(given, found, rows, pairs, environment)))
    small = replace(given, subject=replace(tuned, width=tuned.width / 8, image_size=Subject.image_size))
    sides = [name for row in rows if row.target for name in (row.theirs.split("+")[0], row.ours.split("+")[0])]
    yield from ("", *(f"- {sentence}" for sentence in distances(small, sides, environment)))


if __name__ == "__main__":
    main()
