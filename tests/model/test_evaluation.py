"""A model whose forward differs in evaluation is evaluated by that forward, wherever it is cut."""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipebench.errors import PlanError
from pipebench.model.evaluation import plan_evaluation
from pipebench.model.graph import as_one_layer, trace
from pipebench.model.plan import make_plan
from pipebench.model.stage import cut_stage
from tests.classifiers import check
from tests.evaluations import MODES, Images, assert_scores_are_the_weights, mode_setup, trained
from tests.support import Blobs


class Noisy(nn.Module):
    """Adds noise while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        x = torch.relu(self.a(x))
        if self.training:
            x = x + torch.randn_like(x)
        x = torch.tanh(self.b(x))
        x = x * x.new_empty(x.shape).uniform_(0.5, 1.5) if self.training else x * 1.25
        return self.c(x)


class Attention(nn.Module):
    """Drops attention while it trains, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(2, 12), nn.Linear(4, 4), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        x = x.view(x.size(0), 3, 2)
        query, key, value = self.qkv(x).split(4, dim=2)
        x = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=0.4 if self.training else 0.0, is_causal=True
        )
        return self.head(torch.relu(self.out(x)).flatten(1))


class Auxiliary(nn.Module):
    """Returns what a second head says, from the middle, while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.side = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        """Map [n, 6] to [n, 4], or twice that."""
        x = torch.relu(self.a(x))
        side = self.side(torch.tanh(x)) if self.training else None
        x = self.c(torch.relu(self.b(x)))
        return (x, side) if self.training else x


class OwnNorm(nn.Module):
    """Keeps running statistics of its own: changed in training, read in evaluation."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x - self.mean
        mean = x.mean(0)
        self.mean.mul_(0.5).add_(0.5 * mean.detach())
        self.count.add_(1)
        return x - mean


class Normed(nn.Module):
    """Two of them, and one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.one, self.b = nn.Linear(6, 8), OwnNorm(8), nn.Linear(8, 8)
        self.two, self.norm, self.c = OwnNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        return self.c(self.norm(self.two(torch.tanh(self.b(self.one(self.a(x)))))))


class Frozen(nn.Module):
    """Keeps a part of itself in evaluation mode, whatever mode the rest is in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.c = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)

    def train(self, mode: bool = True) -> "Frozen":
        """Set the mode of all but the norm."""
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        return self.c(self.drop(self.norm(self.a(x))))


class Branching(nn.Module):
    """Decides by the data: it can't be traced, and runs as one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.c = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        x = self.drop(self.a(x))
        return self.c(x if x.sum() > 0 else -x)


MODELS: list[Any] = [Noisy, Attention, Auxiliary, Normed, Frozen]


def made(model: Any) -> nn.Module:
    torch.default_generator.manual_seed(5)
    return model().double()


def allowed_cuts(model: Any) -> list[int]:
    """Return where a model may be cut: not between layers that share a buffer."""
    graph, found = trace(made(model)), []
    for start in range(1, len(graph.layers)):
        with contextlib.suppress(PlanError):
            make_plan(graph, [start], [1, 1])
            found.append(start)
    assert len(found) > len(graph.layers) // 2
    return found


class Several(Images):
    """`Blobs`, for models that return several outputs."""

    def __init__(self) -> None:
        Blobs.__init__(self, num_train=16)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_scores_are_those_of_the_weights_in_plain_torch(model: Any, mode: str) -> None:
    cuts = allowed_cuts(model)
    for starts in ([cuts[len(cuts) // 2]], [cuts[0], cuts[len(cuts) // 3], cuts[-1]]):
        setup = mode_setup(made(model), mode, sorted({*starts}), dataset=Several())
        assert_scores_are_the_weights(trained(setup), made(model))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", MODELS)
def test_every_cut(model: Any) -> None:
    for start in allowed_cuts(model):
        setup = mode_setup(made(model), "pipedream", [start], dataset=Several())
        assert_scores_are_the_weights(trained(setup, 2), made(model))


def test_random_numbers_in_training_depend_on_neither_cut_nor_engine() -> None:
    losses = []
    for starts in ([], [2], [1, 3, 6], [4, 5]):
        for recompute in (False, True):
            setup = mode_setup(made(Noisy), "model", starts, recompute=recompute)
            losses.append(trained(setup).evaluate()["eval_loss"])
    assert len({round(loss, 12) for loss in losses}) == 1
    other = mode_setup(made(Noisy), "model", [2], seed=1)
    assert abs(trained(other).evaluate()["eval_loss"] - losses[0]) > 1e-6


def test_recomputation_changes_no_statistics_twice() -> None:
    found = []
    for recompute in (False, True):
        engine = trained(mode_setup(made(Normed), "pipedream", [allowed_cuts(Normed)[2]], recompute=recompute))
        found.append({name: t.clone() for replica in engine.replicas for name, t in replica.tensors().items()})
    assert int(found[0]["one.count"]) == 3
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor)


def test_a_stage_without_layers_in_evaluation() -> None:
    graph = trace(made(Noisy))
    kinds = [layer.kind for layer in graph.layers]
    noise = kinds.index("randn_like")
    plan = make_plan(graph, [noise, noise + 1], [1, 1, 1])
    planned = plan_evaluation(graph, plan)
    assert planned.layers[1] == ()
    assert list(planned.crossings) == [(0, 2)]
    assert list(plan.crossings) == [(0, 1), (0, 2), (1, 2)]
    plan = make_plan(graph, [noise, noise + 2], [1, 1, 1])  # here, what training adds noise to isn't read by stage 2
    assert list(plan.crossings) == [(0, 1), (1, 2)]
    assert list(plan_evaluation(graph, plan).crossings) == [(0, 2)]
    setup = mode_setup(made(Noisy), "pipedream", [noise, noise + 2])
    assert_scores_are_the_weights(trained(setup), made(Noisy))


def test_both_forms_of_a_stage_have_the_same_modules_and_parameters() -> None:
    graph = trace(made(Normed))
    stage = cut_stage(graph, make_plan(graph, [allowed_cuts(Normed)[1]], [1, 1]), 1)
    assert stage.evaluation is not None
    ours, theirs = (dict(part.module.named_parameters()) for part in (stage, stage.evaluation))
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in ours)


def test_layers_that_share_a_buffer_stay_together() -> None:
    graph = trace(made(Normed))
    users = [layer.index for layer in graph.layers if "one.mean" in layer.buffers]
    assert [graph.layers[index].kind for index in users] == ["mul_", "add_"]
    with pytest.raises(PlanError, match=r"buffer one.mean is tied: layers mul_, add_ share it"):
        make_plan(graph, [users[1]], [1, 1])


class Constant(nn.Module):
    """Makes a tensor in forward, which torch.fx names anew each time it traces."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        return self.c(self.a(x) * torch.arange(6, dtype=torch.float64))


def test_tensors_made_in_forward_do_not_count_as_a_difference() -> None:
    model = made(Constant)
    assert trace(model).evaluated.evaluation_map == (0, 1, 2)
    assert not [name for name in model.__dict__ if name.startswith("_tensor_constant")]
    assert_scores_are_the_weights(trained(mode_setup(made(Constant), "pipedream", [1])), made(Constant))


class EvaluatesBackwards(nn.Module):
    """Runs its layers in another order when it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        return self.head(self.b(self.a(x)) if self.training else self.a(self.b(x)))


def test_a_different_order_in_evaluation_is_refused() -> None:
    graph = trace(made(EvaluatesBackwards))
    assert_scores_are_the_weights(trained(mode_setup(made(EvaluatesBackwards), "dp", [])), made(EvaluatesBackwards))
    assert_scores_are_the_weights(
        trained(mode_setup(made(EvaluatesBackwards), "pipedream", [2])), made(EvaluatesBackwards)
    )
    with pytest.raises(PlanError, match=r"layer b of the evaluation belongs to stages \[1\] .* read in stage 0; move"):
        plan_evaluation(graph, make_plan(graph, [1], [1, 1]))


def test_a_model_as_one_layer_is_evaluated_whole() -> None:
    graph = as_one_layer(made(Branching), 1)
    assert [layer.kind for layer in graph.layers] == ["Branching"]
    for mode in ("single", "dp"):
        engine = trained(mode_setup(made(Branching), mode, [], graph=as_one_layer(made(Branching), 1)))
        assert_scores_are_the_weights(engine, made(Branching))


class Block(nn.Module):
    """A block of a decoder as nanoGPT has it: its own mask, or torch's attention."""

    mask: torch.Tensor

    def __init__(self, width: int, heads: int, length: int, *, flash: bool) -> None:
        super().__init__()
        self.heads, self.flash, self.p = heads, flash, 0.2
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.2))
        self.drop_attention, self.drop = nn.Dropout(0.2), nn.Dropout(0.2)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, length, width] to the same."""
        n, length, width = x.size()
        query, key, value = self.qkv(self.before(x)).split(width, dim=2)
        query = query.view(n, length, self.heads, width // self.heads).transpose(1, 2)
        key = key.view(n, length, self.heads, width // self.heads).transpose(1, 2)
        value = value.view(n, length, self.heads, width // self.heads).transpose(1, 2)
        if self.flash:
            p = self.p if self.training else 0.0
            y = functional.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
            scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
            y = self.drop_attention(functional.softmax(scores, dim=-1)) @ value
        x = x + self.drop(self.out(y.transpose(1, 2).contiguous().view(n, length, width)))
        return x + self.mlp(self.after(x))


class Decoder(nn.Module):
    """A decoder in the manner of nanoGPT: embeddings and head share one weight; it says only the last token."""

    def __init__(self, *, flash: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(12, 8), nn.Embedding(6, 8)
        self.drop = nn.Dropout(0.2)
        self.blocks = nn.ModuleList(Block(8, 2, 6, flash=flash) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12, bias=False)
        if tied:
            self.table.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] float64 to [n, 12] scores."""
        ids = (x.abs() * 4).long().clamp(max=11)
        _, length = ids.size()
        assert length <= self.place.num_embeddings, f"can't read {length} tokens"
        x = self.drop(self.table(ids) + self.place(torch.arange(0, length, device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))[:, -1, :]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flash", [False, True])
def test_a_decoder_with_dropout_in_its_attention(mode: str, flash: bool) -> None:
    def decoder() -> nn.Module:
        return Decoder(flash=flash)

    num_layers = len(trace(made(decoder)).layers)
    assert num_layers > 60  # blocks are cut inside
    starts = [num_layers // 7, num_layers // 3, num_layers // 2, num_layers - 4]
    assert_scores_are_the_weights(trained(mode_setup(made(decoder), mode, starts)), made(decoder))


def test_a_decoder_whose_embedding_is_its_head() -> None:
    def decoder() -> nn.Module:
        return Decoder(tied=True)

    assert_scores_are_the_weights(trained(mode_setup(made(decoder), "dp", [])), made(decoder))
    with pytest.raises(PlanError, match=r"table.weight is tied"):
        make_plan(trace(made(decoder)), [20], [1, 1])


OF_TORCHVISION = (
    "squeezenet1_1", "mobilenet_v3_small", "regnet_y_400mf", "swin_t", "shufflenet_v2_x0_5", "efficientnet_b0",
    "googlenet", "mnasnet0_5", "resnet18",
)  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "mode"), [*zip(OF_TORCHVISION, itertools.cycle(MODES), strict=False)])
def test_a_classifier_of_most_families_of_torchvision(name: str, mode: str) -> None:
    check(name, mode, num_minibatches=1)
