"""Made-up results of runs, which tests print, compare and record."""

from dataclasses import replace

from pipebench.train.result import REACHED, RunResult

DP = RunResult(
    name="quickstart-dp",
    mode="dp",
    plan="4",
    engine="virtual",
    clock="virtual",
    timing="roofline of V100",
    seed=0,
    outcome=REACHED,
    sentence="reached top1 0.95 (top1 0.957) after 3 epochs",
    metrics={
        "time_to_accuracy_s": 6.0,
        "time_to_accuracy_without_evaluation_s": 5.5,
        "time_to_accuracy_checkpoint_s": 0.1,
        "training_time_s": 5.5,
        "evaluation_time_s": 0.4,
        "start_time_s": 3.0,
        "epochs_to_target": 3.0,
        "epoch_time_s": 1.8,
        "throughput_samples_per_s": 2222.0,
        "samples_per_update": 128,
        "comm_bytes_total": 3e9,
        "comm_bytes_all_reduce": 2e9,
        "comm_bytes_activation": 1e9,
        "comm_bytes_buffers": 1e3,
        "comm_bytes_per_sample": 3e5,
        "comm_bytes_per_sample_all_reduce": 2e5,
        "comm_bytes_per_sample_activation": 1e5,
        "bubble_fraction": 0.141,
        "comm_stall_fraction": 0.12,
        "peak_memory_bytes_max": 3e6,
        "weight_versions_max": 1,
        "wall_time_s": 12.0,
        "best_top1": 0.957,
    },
    stages=({"index": 0, "num_layers": 53, "replicas": 4, "depth": 1, "forward_s": 7e-4, "weight_versions_max": 1},),
)
PIPEDREAM = replace(
    DP,
    name="quickstart-pipedream",
    mode="pipedream",
    plan="straight",
    metrics={**DP.metrics, "time_to_accuracy_s": 2.0},
    stages=({**DP.stages[0], "replicas": 1},),
)
