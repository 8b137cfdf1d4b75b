"""Training while layers move between stages, as a loop over minibatches and layers; shares no code with the engine.

Paper: vPipe (TPDS'21) equation 4, for a pipeline without a flush. The forward and the backward of minibatch k use, at a
layer, version max(0, k - d_s + 1), where s is the stage that runs the layer's forward of k, and d_s = (number of
stages) - s. All versions of a layer are kept in a list.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.func import functional_call

Tensors = dict[str, torch.Tensor]
Cuts = Sequence[int]  # first layer of every stage but the first


def train(
    model: nn.Module,
    layer_of: Mapping[str, int],
    cuts_of: Callable[[int], Cuts],
    loss_of: Callable[[Callable[[torch.Tensor], torch.Tensor], int], torch.Tensor],
    make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    num_minibatches: int,
) -> list[Tensors]:
    """Return the newest parameters and the buffers after the updates of every minibatch.

    Args:
        model: with the initial weights, which stay as they are.
        layer_of: the layer of every parameter.
        cuts_of: the cuts under which a minibatch runs forward.
        loss_of: the mean loss of (the model with some weights, minibatch).
        make_optimizer: makes the optimizer of one layer.
        num_minibatches: to train on.
    """
    newest = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    versions = {name: [p.clone()] for name, p in newest.items()}
    layers = sorted(set(layer_of.values()))
    optimizers = [make_optimizer([p for name, p in newest.items() if layer_of[name] == layer]) for layer in layers]
    after = []
    for k in range(num_minibatches):
        cuts = cuts_of(k)
        stage_of = {layer: sum(cut <= layer for cut in cuts) for layer in layers}
        depth_of = {layer: len(cuts) + 1 - stage for layer, stage in stage_of.items()}
        read = {name: max(0, k - depth_of[layer_of[name]] + 1) for name in newest}
        mixed = {name: versions[name][read[name]].clone().requires_grad_() for name in newest}

        def run(x: torch.Tensor, weights: Tensors = mixed) -> torch.Tensor:
            return functional_call(model, {**weights, **buffers}, (x,))

        loss = loss_of(run, k)
        for name, gradient in zip(mixed, torch.autograd.grad(loss, list(mixed.values())), strict=True):
            newest[name].grad = gradient
        for optimizer in optimizers:
            optimizer.step()
        for name, p in newest.items():
            p.grad = None
            versions[name].append(p.clone())
        after.append({name: t.clone() for name, t in {**newest, **buffers}.items()})
    return after
