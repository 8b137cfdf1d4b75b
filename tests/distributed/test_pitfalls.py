"""Where each known trap of distributed pipelines (P1 to P34) is tested, or why it can't happen here.

- P1, P2 (Gloo and CUDA tensors): what travels by Gloo is in the host's memory: `channel.Link.buffer`, `reducer` host
  copies
- P3 (one Work of several kept): a message keeps all its works; no batched sends are used
- P4 (a send nobody waits for): every segment ends with `flush`; `Processes` asserts that all processes end cleanly
- P5, P7 (NCCL's first use, odd batches): every communicator is used once when it is made, by all in one order:
  `test_groups_that_connect_at_their_first_all_reduce_*`; no batches
- P6, P10 (two stages, one stream): a tag per direction and kind: `test_two_processes_*` of `test_equality` exchange
  both ways
- P8 (above 64 MB): `test_values_above_64_megabytes_travel_both_ways`
- P9 (skip edges): a channel per pair of workers: `test_values_go_straight_to_every_stage_that_reads_them`
- P11 (several communicators in flight): `transport`'s docstring argues it; few blocks and a rehearsal:
  `test_the_pairs_of_a_worker_leave_room_*`, `test_a_rehearsal_*`; `test_random_plans_neither_hang_nor_differ` (Gloo)
- P12, P13 (issuing threads, batched hangs): the training thread alone issues; no batches
- P14 (buffers reused early): `test_both_ends_agree_on_sizes_in_any_order_of_events` fills what has left with rubbish
- P15 (buffers kept too long): `test_a_segment_holds_no_more_buffers_*`, `test_buffers_are_used_again_*`
- P16 (`wait` blocks the stream): NCCL's tensors are only read by the device, in stream order:
  `test_tensors_come_in_while_the_gpu_computes`; lengths and numbers come by Gloo
- P17 (a buffer as a leaf): `test_a_received_value_is_a_fresh_leaf_each_time`
- P18 (receives too early): two are posted, in program order, on a channel of one direction:
  `test_receives_stand_ready_*`
- P19 (two ranks, one GPU): `nccl.takes`: only where it is new enough and told to (`tests/distributed/test_nccl.py`)
- P20 (leaving the groups): `World.close`, once; `Processes` asserts that all processes end cleanly
- P21 (fewer microbatches than stages): minibatches with fewer samples than microbatches: `gpipe, recompute`, random
  plans
- P22, P23, P25 (DDP): not used: `reducer` takes gradients as autograd gives them; buffers are averaged at drains
- P24 (the last backward of a round): `Instruction.reduce` says which: `test_what_the_backward_did_not_reach_*`,
  random plans
- P26 (versions overwritten): versions are tensors of their own: `tests/engine/test_staleness.py`
- P27 (LSTM weights in one chunk): the same stage code as the virtual engine's; GNMT and AWD-LM in `test_zoo`
- P28, P29 (in-place heads, views): `SkipNet`, `ConvNet` and their every cut: `tests/engine`, random plans
- P30 (integers, None): `test_structures_come_back_*`; `SkipNet`'s table; edges without a gradient carry none back
- P31 (shape probes): there are none: layouts travel with the first message of a shape
- P32 (dividing twice): once, by the update's weight: losses and weights equal the virtual engine's
- P33 (the norm of all stages): `clipped` cases: squares are added in the virtual engine's order, so the bits are the
  same
- P34 (loss scalers): there are none: no mixed precision
"""

import re
from pathlib import Path

_HERE = Path(__file__)


def test_every_trap_is_met() -> None:
    text = _HERE.read_text().split('"""')[1]
    rows = [row.split("(")[0] for row in text.splitlines() if row.startswith("- P")]
    named = sorted(int(number) for row in rows for number in re.findall(r"P(\d+)", row))
    assert named == list(range(1, 35))


def test_the_tests_it_names_are_there() -> None:
    text = _HERE.read_text().split('"""')[1]
    names = set(re.findall(r"test_\w+\*?", text)) - {"test_equality", "test_zoo", "test_nccl", "test_staleness"}
    sources = [path.read_text() for path in _HERE.parents[1].rglob("test_*.py") if path != _HERE]
    missing = [name for name in names if not any(f"def {name.rstrip('*')}" in source for source in sources)]
    assert not missing
