"""ZeRO: data-parallel ranks share out what each would otherwise hold whole (Rajbhandari et al., arXiv 1910.02054).

The one idea: an all-reduce is a reduce-scatter followed by an all-gather, and between the two every rank holds only
its share.  Stage 1 updates only that share of the weights, so that only that share of the optimizer's state exists;
stage 2 keeps only that share of the gradients; stage 3 only that share of the weights, and gathers a layer when used.

A `Bucket` holds parameters flat, one after the other, padded so that the ranks divide it.  Shares cut right through
parameters: a `Piece` is the part of one parameter that lies in this rank's share, and what the optimizer works on.

Shapes: P numbers of a padded bucket, S = P / R numbers of a share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepseek_lab.parallel import collectives


def shard_range(numel: int, rank: int, n_ranks: int) -> tuple[int, int]:
    """Where the share of `rank` starts and stops in `numel` numbers, padded at the end so that all shares are equal."""
    size = math.ceil(numel / n_ranks)
    return rank * size, (rank + 1) * size


def cut(numels: list[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """Which parts of which parameters lie in a share, when parameters of `numels` numbers lie one after the other.

    Returns:
        (i, first, last) for each parameter i that the share from `start` to `stop` touches: its numbers `first` up to,
        and without, `last`.  Padding belongs to no parameter.
    """
    parts, offset = [], 0
    for i, numel in enumerate(numels):
        first, last = max(start - offset, 0), min(stop - offset, numel)
        if first < last:
            parts.append((i, first, last))
        offset += numel
    return parts


def start_reduction(gradient_P: Tensor, stage: int, group: dist.ProcessGroup | None) -> collectives.Pending:
    """Start adding a bucket's gradients (P,) up over the ranks: the whole sum in stage 0, else my share of it (S,)."""
    if stage == 0:
        return collectives.start_all_reduce(gradient_P, group)
    return collectives.start_reduce_scatter(gradient_P, group)


def gather_weights(weights_P: Tensor, my_weights_S: Tensor, group: dist.ProcessGroup | None) -> collectives.Pending:
    """Start putting every rank's share of the weights, its own updated one included, into `weights_P`, in place."""
    return collectives.start_all_gather(my_weights_S, group, out=weights_P)


def global_grad_norm(gradients: list[Tensor], copies: list[int], groups: list[dist.ProcessGroup | None]) -> Tensor:
    """The norm of the gradient of all parameters, each counted once; the same number on every rank.

    On a grid of 2 x 2 ranks, say, with groups of tp and of dp: of a matrix that both axes cut, every rank holds another
    part (1 copy); of a norm weight that only dp cuts, the two ranks of a tp group hold the same part (2 copies).

    Args:
        gradients: what this rank holds, one tensor or more.
        copies: for each gradient, on how many of all these ranks the same numbers are.
        groups: the axes of the grid along which to add up; none if this rank holds everything.

    Returns:
        A scalar tensor in the dtype of the gradients.
    """
    squares = torch.stack([torch.linalg.vector_norm(gradient) ** 2 for gradient in gradients])
    square = (squares / torch.tensor(copies, dtype=squares.dtype, device=squares.device)).sum()
    for group in groups:
        collectives.all_reduce(square, group)
    return square.sqrt()


class GatheredWeights:
    """The whole weights of a bucket, which exist only while they are used (stage 3).

    The memory behind `weights_P` comes and goes; views of it, such as the parameters, stay valid.  It is there from the
    beginning, so that parameters can be made views of it, until the first `free()`.  `weights_P` and `my_weights_S`
    stay readable under these names.
    """

    def __init__(self, weights_P: Tensor, my_weights_S: Tensor, group: dist.ProcessGroup | None):
        self.weights_P, self.my_weights_S, self.group = weights_P, my_weights_S, group
        self.pending: collectives.Pending | None = None
        self.here = True  # until the first `free`, so that parameters can be made views of it

    def start(self) -> None:
        """Begin to gather, unless the weights are here or on their way."""
        if not self.here and self.pending is None:
            self.weights_P.untyped_storage().resize_(self.weights_P.nbytes)
            self.pending = gather_weights(self.weights_P, self.my_weights_S, self.group)

    def gather(self) -> None:
        """Return once the weights are here."""
        self.start()
        if self.pending is not None:
            self.pending.wait()
        self.pending, self.here = None, True

    def free(self) -> None:
        """Give the memory back."""
        if self.pending is not None:
            self.pending.wait()
        self.pending, self.here = None, False
        self.weights_P.untyped_storage().resize_(0)


@dataclass
class Piece:
    """The part `start` to `stop` of parameter `name`, flattened, as the optimizer sees it; `tensor.grad` is set."""

    name: str
    start: int
    stop: int
    tensor: Tensor

    @property
    def gradient(self) -> Tensor:
        """What the optimizer will read; RuntimeError before the engine has handed it over."""
        if self.tensor.grad is None:
            raise RuntimeError(f"{self.name} has no gradient yet; call finish_backward() first")
        return self.tensor.grad


class Bucket:
    """Parameters whose gradients travel together, and what this rank holds of them.

                           stage 0    stage 1    stage 2    stage 3
        weights_P          whole      whole      whole      only while used
        my_weights_S       = whole    a view     a view     my share
        gradients_P        whole      whole      on the way (one bucket at a time)
        my_gradients_S     = whole    a view     my share   my share

    `master_S` is what the optimizer updates: my share of the weights, or a copy of it in a wider type.
    """

    def __init__(
        self,
        shapes: dict[str, torch.Size],
        stage: int,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        master_dtype: torch.dtype,
        device: torch.device,
    ):
        self.shapes, self.stage, self.group = shapes, stage, group
        self.offsets, numel = {}, 0
        for name, shape in shapes.items():
            self.offsets[name], numel = numel, numel + shape.numel()
        n_shares = collectives.size_of(group) if stage else 1
        start, stop = shard_range(numel, collectives.rank_in(group) if stage else 0, n_shares)
        self.mine = slice(start, stop)
        share, whole = stop - start, n_shares * (stop - start)
        self.weights_P = torch.zeros(whole, dtype=dtype, device=device)
        self.my_weights_S = self.weights_P[self.mine] if stage < 3 else torch.zeros(share, dtype=dtype, device=device)
        self.master_S = self.my_weights_S
        if master_dtype != dtype:
            self.master_S = torch.zeros(share, dtype=master_dtype, device=device)
        self.gradients_P: Tensor | None = None
        if stage < 2:
            self.gradients_P = torch.zeros(whole, dtype=dtype, device=device)
            self.my_gradients_S = self.gradients_P[self.mine]
        else:
            self.my_gradients_S = torch.zeros(share, dtype=dtype, device=device)
        self.gathered = GatheredWeights(self.weights_P, self.my_weights_S, group) if stage == 3 else None
        names, numels = list(shapes), [shape.numel() for shape in shapes.values()]
        self.pieces = [self._piece(names[i], first, last) for i, first, last in cut(numels, start, stop)]

    def view(self, flat_P: Tensor, name: str) -> Tensor:
        """Parameter `name` in a flat tensor laid out like this bucket."""
        shape = self.shapes[name]
        return flat_P.narrow(0, self.offsets[name], shape.numel()).view(shape)

    def my_part(self, flat_S: Tensor, piece: Piece) -> Tensor:
        """A piece in a share laid out like this bucket's."""
        start = self.offsets[piece.name] + piece.start - self.mine.start
        return flat_S[start : start + piece.stop - piece.start]

    def _piece(self, name: str, first: int, last: int) -> Piece:
        start = self.offsets[name] + first - self.mine.start
        return Piece(name, first, last, self.master_S[start : start + last - first])

    # --- gradients ------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        (self.my_gradients_S if self.gradients_P is None else self.gradients_P).zero_()

    def take(self, name: str, parameter: nn.Parameter) -> None:
        """From stage 2 on a gradient stays only until its bucket is full and travels."""
        if self.gradients_P is None:
            self.gradients_P = torch.zeros_like(self.weights_P)
        if parameter.grad is not None:
            self.view(self.gradients_P, name).add_(parameter.grad)  # a pipeline adds passes up before they travel
        parameter.grad = None

    def start(self) -> Reduction:
        """Start adding up; from stage 2 on this pass's gradients, before that all there are."""
        if self.gradients_P is None:  # nobody used these parameters, but other ranks may have
            self.gradients_P = torch.zeros_like(self.weights_P)
        return Reduction(self, start_reduction(self.gradients_P, self.stage, self.group))

    def receive(self, total: Tensor) -> None:
        """Keep what an addition over the ranks gave: `total` is the result of `start_reduction`."""
        if self.stage == 1:
            self.my_gradients_S.copy_(total)
        elif self.stage >= 2:
            self.my_gradients_S += total
            self.gradients_P = None

    def hand_over(self) -> None:
        """Give the optimizer its gradients, in its own type."""
        for piece in self.pieces:
            piece.tensor.grad = self.my_part(self.my_gradients_S, piece).to(piece.tensor.dtype)

    # --- weights --------------------------------------------------------------------------------------------

    def after_step(self) -> collectives.Pending:
        """Start to take what the optimizer wrote into the weights that the model reads."""
        if self.master_S is not self.my_weights_S:
            self.my_weights_S.copy_(self.master_S)
            for piece in self.pieces:
                piece.tensor.grad = None
        if self.stage in (1, 2):
            return gather_weights(self.weights_P, self.my_weights_S.clone(), self.group)
        return collectives.Pending(self.weights_P)

    def whole(self, my_flat_S: Tensor) -> Tensor:
        """All ranks' shares of something laid out like this bucket."""
        return collectives.all_gather(my_flat_S, self.group) if self.stage else my_flat_S


class Reduction:
    """A bucket's gradients on their way; `wait()`, any number of times, until the bucket has received them."""

    def __init__(self, bucket: Bucket, pending: collectives.Pending):
        self.bucket, self.pending = bucket, pending
        self.received = False

    def wait(self) -> None:
        """Return once the bucket has its sums."""
        if not self.received:
            self.bucket.receive(self.pending.wait())
            self.received = True
            del self.pending  # and what it holds


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of memory behind `tensors`, every storage once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors) if s.nbytes()}.values())


class GatheredTogether:
    """Several buckets' `GatheredWeights` as one: experts, which other ranks share, or a table that two stages use."""

    def __init__(self, members: list[GatheredWeights]):
        self.members = members

    def start(self) -> None:
        """Begin to gather what is not here."""
        for member in self.members:
            member.start()

    def gather(self) -> None:
        """Return once all are here."""
        self.start()
        for member in self.members:
            member.gather()

    def free(self) -> None:
        """Give the memory back."""
        for member in self.members:
            member.free()


@dataclass
class Unit:
    """Modules, called one after the other, whose weights are gathered together (stage 3)."""

    modules: list[nn.Module]
    weights: GatheredWeights | GatheredTogether
    used_in_backward: bool = True


def gather_when_used(units: list[Unit]) -> None:
    """Hook every unit: its weights are gathered before it runs, and freed after it, forward and backward.

    While one unit runs, the weights of the next are already on their way.  `units` are in the order in which they
    begin.  The one that ends last in forward is the first in backward, and keeps its weights in between.
    """
    tied = len(units[0].modules) > 1  # the unit that begins the pass also ends it
    ends = [*units[1:], units[0]] if tied else units
    for unit, after_it in zip(units, [*units[1:], None], strict=True):
        unit.modules[0].register_forward_pre_hook(_before_forward(unit, after_it))
    for unit, before_it in zip(ends, [None, *ends[:-1]], strict=True):
        unit.modules[-1].register_forward_hook(_after_forward(unit, before_it, keep=unit is ends[-1]))


def _before_forward(unit: Unit, following: Unit | None):
    def hook(module: nn.Module, args: object) -> None:
        unit.weights.gather()
        if following is not None:
            following.weights.start()

    return hook


def _after_forward(unit: Unit, preceding: Unit | None, keep: bool):
    def backward_begins(gradient: Tensor) -> None:
        unit.weights.gather()
        if preceding is not None and preceding.used_in_backward:
            preceding.weights.start()

    def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        first = output if isinstance(output, Tensor) else output[0]
        if first.requires_grad and unit.used_in_backward:
            first.register_hook(backward_begins)
        if not (keep and first.requires_grad):
            unit.weights.free()

    return hook
