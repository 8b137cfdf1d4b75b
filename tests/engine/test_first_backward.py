"""The first backward of a replica frees activations as it goes, as later ones do."""

from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipebench.engine.replica import Replica, UnitInput
from pipebench.model.graph import trace
from pipebench.model.plan import make_plan
from pipebench.model.stage import cut_stage

MARK = 1_000_003  # bytes of no other tensor


def test_activations_of_the_first_forward_were_held_until_its_backward_ended() -> None:
    """0.1.0: hooks that recorded the saved tensors of the first forward held them; torch's nodes hold their hooks."""
    graph = trace(nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.ReLU())]))
    replica = Replica(
        cut_stage(graph, make_plan(graph, [], [1]), 0),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        device=torch.device("cpu"),
        seed=0,
    )
    held = []
    for unit in range(2):
        x, marks = torch.zeros(4096, 8), list[torch.Tensor]()

        def mark(index: int, gradient: torch.Tensor, marks: list[torch.Tensor] = marks) -> None:
            if index == 2:  # of the second linear layer, so that the first one's nodes are still to come
                marks.append(torch.empty(MARK, dtype=torch.uint8))

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
            replica.forward(UnitInput(unit, (unit, 0), [x], {}, 0, loss=lambda output: output.square().sum()))
            replica.backward(unit, {}, mark)
        profiler: Any = found.profiler
        events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
        sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        held.append(sum(sizes[: sizes.index(MARK)]))
    assert max(held) < 4 * x.nbytes, "of 16 that the forward saves"
