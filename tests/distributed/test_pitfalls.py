"""Where each known trap of distributed pipelines is tested, or why it can't happen here.

- Gloo and CUDA tensors: what travels by Gloo is in the host's memory: `channel.Link.buffer`, `reducer` host
  copies
- one Work of several kept: a message keeps all its works; no batched sends are used
- a send nobody waits for: every segment ends with `flush`; `Processes` asserts that all processes end cleanly
- NCCL's first use, odd batches: every communicator is used once when it is made, by all in one order:
  `test_groups_that_connect_at_their_first_all_reduce_*`; no batches
- two stages, one stream: a tag per direction and kind: `test_two_processes_*` of `test_equality` exchange
  both ways
- above 64 MB: `test_values_above_64_megabytes_travel_both_ways`
- skip edges: a channel per pair of workers: `test_values_go_straight_to_every_stage_that_reads_them`
- several communicators in flight: `transport`'s docstring argues it; few blocks and a warm-up:
  `test_the_pairs_of_a_worker_leave_room_*`, `test_a_warm_up_*`; `test_random_plans_neither_hang_nor_differ` (Gloo)
- issuing threads, batched hangs: the training thread alone issues; no batches
- buffers reused early: `test_both_ends_agree_on_sizes_in_any_order_of_events` fills what has left with rubbish
- buffers kept too long: `test_a_segment_holds_no_more_buffers_*`, `test_buffers_are_used_again_*`
- `wait` blocks the stream: NCCL's tensors are only read by the device, in stream order:
  `test_tensors_are_received_while_the_gpu_computes`; lengths and numbers come by Gloo
- a buffer as a leaf: `test_a_received_value_is_a_fresh_leaf_each_time`
- receives too early: two are posted, in program order, on a channel of one direction:
  `test_receives_are_posted_*`
- two ranks, one GPU: `nccl.takes`: only where it is new enough and set to (`tests/distributed/test_nccl.py`)
- leaving the groups: `World.close`, once; `Processes` asserts that all processes end cleanly
- fewer microbatches than stages: minibatches with fewer samples than microbatches: `gpipe, recompute`, random
  plans
- DDP: not used: `reducer` takes gradients as autograd gives them; buffers are averaged at drains
- the last backward of a round: `Instruction.reduce` says which: `test_what_the_backward_did_not_reach_*`,
  random plans
- versions overwritten: versions are tensors of their own: `tests/engine/test_staleness.py`
- LSTM weights in one chunk: the same stage code as the virtual engine's; GNMT and AWD-LM in `test_zoo`
- in-place heads, views: `SkipNet`, `ConvNet` and their every cut: `tests/engine`, random plans
- integers, None: `test_structures_come_back_*`; `SkipNet`'s table; edges without a gradient carry none back
- shape probes: there are none: layouts travel with the first message of a shape
- dividing twice: once, by the update's weight: losses and weights equal the virtual engine's
- the norm of all stages: `clipped` cases: squares are added in the virtual engine's order, so the bits are the
  same
- loss scalers: there are none: no mixed precision
"""

import re
from pathlib import Path

_HERE = Path(__file__)


def test_every_trap_has_an_entry() -> None:
    rows = [line for line in _HERE.read_text().split('"""')[1].splitlines() if line.startswith("- ")]
    assert len(rows) == 27


def test_the_tests_it_names_exist() -> None:
    text = _HERE.read_text().split('"""')[1]
    names = set(re.findall(r"test_\w+\*?", text)) - {"test_equality", "test_zoo", "test_nccl", "test_staleness"}
    sources = [path.read_text() for path in _HERE.parents[1].rglob("test_*.py") if path != _HERE]
    missing = [name for name in names if not any(f"def {name.rstrip('*')}" in source for source in sources)]
    assert not missing
