"""A small valid recipe on disk, which tests change."""

from collections.abc import Callable
from pathlib import Path

import pytest

VALID = """\
name: small
model: {name: vgg16, width: 0.125, batch_norm: true, num_classes: 10, in_channels: 1, image_size: 32}
dataset: {name: mnist5k}
train:
  minibatch_size: 32
  optimizer: {name: sgd, lr: 0.02, momentum: 0.9}
  target: {metric: top1, value: 0.95}
  max_epochs: 10
cluster: {name: cluster-a}
parallelism: {mode: pipedream, plan: 2-1-1}
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a file into a fresh working directory and returns its relative path."""
    monkeypatch.chdir(tmp_path)

    def write_file(content: str | bytes = VALID, name: str = "r.yaml") -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file
