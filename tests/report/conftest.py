"""A small valid report on disk, which tests change: two recipes of one training, simulated in a second."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

RECIPE = """\
name: small-dp
model: {name: alexnet, width: 0.125, num_classes: 10, in_channels: 1, image_size: 64}
dataset: {name: mnist5k, image_size: 64}
train:
  minibatch_size: 32
  optimizer: {name: sgd, lr: 0.02, momentum: 0.9}
  target: {metric: top1, value: 0.5}
  max_epochs: 1
cluster: {name: cluster-a}
parallelism: {mode: dp}
"""
STRAIGHT = """\
extends: dp.yaml
name: small-straight
parallelism: {mode: pipedream, plan: straight}
"""
VALID = """\
title: A small table
source: {paper: A paper, where: Table 1}
columns:
  ideal: {title: ideal hardware}
  slow: {title: a slower cluster, clusters: {cluster-a: cluster-c}, set: [cluster.servers=4]}
measures:
  plan: {title: plan, plan_of: straight}
  speedup: {title: epoch time, unit: x, value: dp.epoch_time_s / straight.epoch_time_s, better: higher}
  twice: {unit: x, value: 2 * speedup}
rows:
  - name: first
    runs: {dp: dp.yaml, straight: straight.yaml}
    published: {plan: straight, speedup: 1.5}
    hypothesis: {speedup: the size is taken to be that of the text}
  - name: m$size
    for: {size: [8, 16], published: [1.2, 2]}
    runs: {dp: dp.yaml train.minibatch_size=$size, straight: straight.yaml train.minibatch_size=$size}
    published: {speedup: $published}
claims:
  - {text: Pipelines are no slower, where: Section 1, holds: min(speedup) >= 1}
  - {text: It works on Mars, untestable: nobody is there}
pictures:
  - {kind: bars, measures: [speedup]}
  - {kind: lines, measure: speedup, x: size}
calibration:
  column: slow
  constants:
    ring: {cluster: cluster-c, key: levels.server.bandwidth, from: 0.5 GB/s, to: 12 GB/s}
  fitted_on: {ring: [first.speedup]}
"""

PARSED: dict[str, Any] = yaml.safe_load(VALID)
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a report beside its recipes in a fresh working directory; returns its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Path("dp.yaml").write_text(RECIPE)
    Path("straight.yaml").write_text(STRAIGHT)

    def write_file(content: str | Mapping[str, Any] = VALID, name: str = "small.yaml") -> Path:
        path = Path(name)
        text = content if isinstance(content, str) else yaml.dump(dict(content), Dumper=DUMPER, sort_keys=False)
        path.write_text(text)
        return path

    return write_file


def changed(**keys: Any) -> dict[str, Any]:
    """Return the valid report with other values under dotted keys written with __; None takes a key away."""
    data = copy.deepcopy(PARSED)
    for key, value in keys.items():
        inside: Any = data
        *path, last = key.split("__")
        for part in path:
            inside = inside[int(part) if part.isdigit() else part]
        if value is None:
            del inside[last]
        else:
            inside[int(last) if last.isdigit() else last] = value
    return data
