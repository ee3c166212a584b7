"""Backward in two parts: the input part, for which the layer before waits, and the weight part, for which nobody does.

A pipeline fills its bubbles with weight parts (zero bubble, arXiv 2401.10241, section 2).  The one idea: a linear layer
y = x wᵀ has dx = dy w and dw = dyᵀ x, and dw needs only x and dy.  So in a backward under `deferring(parts)` a linear
layer works out dx, and leaves dw as a function to call later.  All that is small (norms, embeddings, a router's bias)
is done at once; the graph is walked once, so that nothing is recomputed or communicated a second time.

`deferrable()` is for the forward: inside it every `F.linear`, whoever calls it, is one that can be split.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WeightParts:
    """The weight parts of one backward, put off until `run()`."""

    def __init__(self) -> None:
        self._parts: list[tuple[Sequence[Tensor], Callable[[], Sequence[Tensor]]]] = []

    def put(self, weights: Sequence[Tensor], work_out: Callable[[], Sequence[Tensor]]) -> None:
        """Later, `work_out()` gives a gradient for each of `weights`, which are parameters."""
        self._parts.append((weights, work_out))

    @property
    def weights(self) -> set[int]:
        """The `id`s of the parameters whose gradients are not complete yet."""
        return {id(weight) for weights, _ in self._parts for weight in weights}

    @torch.no_grad()  # else gradients that exist would be replaced instead of added to
    def run(self) -> None:
        """Work all of them out; gradients arrive as from any backward: added up, hooks called once a parameter."""
        uses = Counter(id(weight) for weights, _ in self._parts for weight in weights)
        sums: dict[int, Tensor] = {}
        for weights, work_out in self._parts:
            for weight, gradient in zip(weights, work_out(), strict=True):
                uses[id(weight)] -= 1
                total = sums.pop(id(weight), None)
                total = gradient if total is None else total + gradient
                if uses[id(weight)]:
                    sums[id(weight)] = total
                else:
                    accumulate: Any = torch.autograd.graph.get_gradient_edge(weight).node
                    accumulate(total)
        self._parts.clear()


_parts: WeightParts | None = None


@contextlib.contextmanager
def deferring(parts: WeightParts) -> Iterator[None]:
    """Around a backward: weight parts go into `parts` instead of being worked out."""
    global _parts
    before, _parts = _parts, parts
    try:
        yield
    finally:
        _parts = before


def deferred(*weights: Tensor) -> WeightParts | None:
    """For a layer's backward: where to `put` the weight part of `weights`; None if the layer does it itself."""
    return _parts if all(weight.is_leaf for weight in weights) else None


class DeferrableLinear(torch.autograd.Function):
    """y = x wᵀ, whose backward can leave the gradient of w for later.

    x is (…, D) with any number of dimensions before the last, w_FD (F, D), y (…, F); dw is a sum over all rows.  What
    needs no gradient gets no work, and a w that needs none is not put off either: see `ctx.needs_input_grad`.
    Backward reads x from `ctx.saved_tensors`.  Nothing but x and w is kept, neither as a copy nor beside them; only
    w may be an attribute of ctx as well, for the gradient must go to the parameter itself.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w_FD: Tensor) -> Tensor:
        ctx.save_for_backward(x, w_FD)
        ctx.weight = w_FD  # itself: recomputation gives back a detached twin
        return F.linear(x, w_FD)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, w_FD = ctx.saved_tensors

        def weight_part() -> tuple[Tensor]:
            dw_FD = dy.flatten(0, -2).T @ x.to(dy.dtype).flatten(0, -2)
            return (dw_FD.to(w_FD.dtype),)

        dx = (dy @ w_FD.to(dy.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None
        if parts := deferred(ctx.weight):
            parts.put([ctx.weight], weight_part)
            return dx, None
        return dx, *weight_part()


class _Deferrable(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.linear and not kwargs and (len(args) == 2 or args[2] is None):
            return DeferrableLinear.apply(*args[:2])
        return function(*args, **kwargs)


_deferrable = False


@contextlib.contextmanager
def deferrable(wanted: bool = True) -> Iterator[None]:
    """Around a forward: its linear layers can be split in backward; with `wanted` False nothing changes."""
    global _deferrable
    before, _deferrable = _deferrable, wanted or _deferrable
    try:
        with _Deferrable() if wanted and not before else contextlib.nullcontext():
            yield
    finally:
        _deferrable = before


def is_deferrable() -> bool:
    """Whether this runs inside `deferrable()`."""
    return _deferrable
