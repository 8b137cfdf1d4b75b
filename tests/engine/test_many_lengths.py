"""Minibatches that a user's collate function pads to their longest sample."""

import pytest
import torch
from torch.nn import functional

from pipebench.model.graph import trace
from pipebench.model.sampling import Sampler
from tests.evaluations import mode_setup, trained
from tests.lengths import Reader, texts
from tests.oracles import sequential
from tests.support import parameters_of

UPDATES = 5
CUTS = range(1, len(trace(Reader()).layers), 3)


@pytest.mark.parametrize(
    ("mode", "starts"), [("dp", []), *((mode, [start]) for mode in ("model", "gpipe") for start in CUTS)]
)
def test_they_train_as_samples_without_padding_do(mode: str, starts: list[int]) -> None:
    data, sampler, model = texts(), Sampler(46, 4, 0), Reader()
    per_update = 2 if mode == "dp" else 1

    def sample(index: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        fields = data.fetch("train", [index], ["input", "target"])
        assert (fields["input"] > 0).all()
        return (fields["input"],), fields["target"]

    sequential.train(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        [
            [sample(index) for k in range(per_update) for index in sampler.indices(update * per_update + k)]
            for update in range(UPDATES)
        ],
        lambda output, target: functional.cross_entropy(output, target, reduction="sum"),
        lambda target: float(len(target)),
    )
    engine = trained(mode_setup(Reader(), mode, starts, dataset=data, sizes=(1, 2, 4)), UPDATES * per_update)
    for name, parameter in parameters_of(engine).items():
        torch.testing.assert_close(parameter, dict(model.named_parameters())[name].detach(), rtol=1e-9, atol=1e-11)
