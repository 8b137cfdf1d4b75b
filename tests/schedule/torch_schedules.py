"""Schedules of torch.distributed.pipelining, made by its own classes."""

import inspect
from pathlib import Path
from typing import Any

import pytest

V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def make(name: str, ranks: int, chunks: int, microbatches: int) -> Any:
    """Return a schedule; skips what this version of torch lacks."""
    # Late: it imports torch's compiler, which takes seconds in every process that collects tests.
    from torch.distributed.pipelining import schedules, stage

    class Unbuilt(stage._PipelineStageBase):
        """A stage of which only the place counts."""

        def __init__(self, index: int, ranks: int, num_stages: int) -> None:
            self.stage_index, self.num_stages = index, num_stages
            self.group_size, self.group_rank, self.group = ranks, 0, None
            self.submod: Any = None
            self.has_backward = False

        def _create_grad_recv_info(self, *_: Any, **__: Any) -> Any:
            """Nothing is received."""

        def _prepare_forward_infra(self, *_: Any, **__: Any) -> Any:
            """Nothing is run."""

        def _prepare_backward_infra(self, *_: Any, **__: Any) -> Any:
            """Nothing is run."""

    if not hasattr(schedules, name):
        pytest.skip(f"this torch has no {name}")
    own = [0, 2 * ranks - 1] if name in V_SHAPED else [ranks * index for index in range(chunks)]
    stages = [Unbuilt(index, ranks, ranks * chunks) for index in own]
    return getattr(schedules, name)(stages, microbatches)


def dump(schedule: Any, path: Path) -> Path:
    """Write a schedule in the form without communication."""
    options = {"format": "compute_only"} if "format" in inspect.signature(schedule._dump_csv).parameters else {}
    schedule._dump_csv(str(path), **options)
    return path
