"""What it costs to split a backward in two, as ratios within one run: `python benchmarks/split_backward.py`.

The same forward and backward of two blocks of the `small` model, three ways in turn: whole; as this package splits it
(the graph is walked once, linear layers leave their weight parts for later); and by calling autograd twice, once for
the gradient of the input and once for those of the weights, which walks most of the graph a second time.
"""

from __future__ import annotations

import statistics
import time

import torch

from deepseek_lab.model import DeepSeekConfig, DeepSeekModel, split_backward

ROUNDS = 15
CONFIG = DeepSeekConfig.preset("small", num_hidden_layers=2, vocab_size=64)


def forward(model: DeepSeekModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A stage in the middle of a pipeline: its input, and a number that depends on its output."""
    x_BTD = model.embed_tokens(ids).detach().requires_grad_()
    return x_BTD, model.run_blocks(range(2), x_BTD, ids).square().sum()


def whole(model: DeepSeekModel, ids: torch.Tensor) -> None:
    forward(model, ids)[1].backward()


def split(model: DeepSeekModel, ids: torch.Tensor) -> None:
    parts = split_backward.WeightParts()
    with split_backward.deferrable():
        _, y = forward(model, ids)
    with split_backward.deferring(parts):
        y.backward()
    parts.run()


def twice(model: DeepSeekModel, ids: torch.Tensor) -> None:
    x_BTD, y = forward(model, ids)
    torch.autograd.grad(y, x_BTD, retain_graph=True)
    weights = [w for w in model.layers.parameters()]
    for weight, gradient in zip(weights, torch.autograd.grad(y, weights), strict=True):
        weight.grad = gradient


def seconds(way, model: DeepSeekModel, ids: torch.Tensor) -> float:
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    way(model, ids)
    return time.perf_counter() - start


def main() -> None:
    model = DeepSeekModel(CONFIG).train()
    ids = torch.randint(64, (4, 256), generator=torch.Generator().manual_seed(0))
    ways = [whole, split, twice]
    for way in ways:
        seconds(way, model, ids)
    rounds = []
    for n in range(ROUNDS):
        order = ways[n % 3 :] + ways[: n % 3]
        rounds.append({way: seconds(way, model, ids) for way in order})
    for way in (split, twice):
        ratios = sorted(took[way] / took[whole] for took in rounds)
        print(
            f"forward and backward, {way.__name__:6} / whole: {statistics.median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f}, {ROUNDS} rounds)"
        )


if __name__ == "__main__":
    main()
