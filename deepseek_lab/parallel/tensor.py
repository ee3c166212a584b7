"""Tensor parallelism: every rank holds a slice of each layer, and the ranks of a group work on the same tokens.

The one idea (Megatron-LM, arXiv 1909.08053, section 3): split the first matrix of a pair by its outputs (columns), the
second by its inputs (rows), and what lies between needs no communication.  A block then needs two sums over the ranks
in forward, where its attention and its feed-forward end, and two in backward, where they begin.  Heads are split like
columns, experts each like a feed-forward, the vocabulary like the rows of a table.

The latent projections of MLA, their norms and the router are held whole by all ranks.  They feed work that differs from
rank to rank, so each rank finds only a part of their gradients: `Layout.partial`.  With sequence parallelism (arXiv
2205.05198, section 4.2.2) activations between the layers are split along the sequence: a sum becomes a reduce-scatter
and an all-gather, and the norms there see only a piece of the sequence, so their gradients are partial too.

Shapes: B batch, T tokens (t: this rank's T/R), D width, F inner width or outputs, V vocabulary; `_Fl`, `_Vl` this
rank's slice of a dimension.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepseek_lab.model.loss import IGNORE_INDEX
from deepseek_lab.model.moe import MoE
from deepseek_lab.parallel.config import ParallelConfig, divisors

from . import collectives


def shard(w, dim, rank, size):
    """Slice number `rank` of `size` equal, contiguous slices of `w` along `dim`; a copy, so that `w` can be freed.

    Raises ValueError, naming both numbers, when `size` does not divide that dimension.
    """
    if w.shape[dim] % size:
        raise ValueError(
            f"{size} ranks do not divide dim {dim} of a weight of shape {tuple(w.shape)}; use {divisors(w.shape[dim])}"
        )
    width = w.shape[dim] // size
    return w.narrow(dim, rank * width, width).clone(memory_format=torch.contiguous_format)


def unshard(w_l, dim, group=None):
    """The whole tensor of which every rank of `group` holds its `shard` along `dim`."""
    slices = collectives.all_gather(w_l[None], group)
    return torch.cat(list(slices), dim)


def column_parallel_linear(x, w_FlD, group=None, sequence_parallel=False):
    """This rank's columns of y = x @ w.T: (..., D) to (..., Fl), where `w_FlD` is its band of the rows of w.

    No communication in forward.  In backward every rank finds only its part of the gradient of `x`, and the parts are
    added by one all-reduce.  With `sequence_parallel`, `x` is this rank's piece of the sequence, (B, T/R, D): it is
    gathered first, and the sum in backward is a reduce-scatter.
    """
    enter = collectives.gather_sequence if sequence_parallel else collectives.copy_to_group
    return F.linear(enter(x, group), w_FlD)


def row_parallel_linear(x_Fl, w_DFl, group=None, sequence_parallel=False):
    """y = x @ w.T with the inner dimension F split over `group`: (..., Fl) to (..., D).

    Every rank multiplies its slice, and one all-reduce adds the partial products.  Backward needs no communication:
    the gradient of y is the same on all ranks, and each finds that of its own slice.  With `sequence_parallel` the sum
    is a reduce-scatter, and every rank keeps its piece of the sequence, (B, T/R, D).
    """
    leave = collectives.scatter_sequence if sequence_parallel else collectives.reduce_from_group
    return leave(F.linear(x_Fl, w_DFl), group)


def vocab_parallel_embedding(ids_BT, w_VlD, group=None, sequence_parallel=False):
    """Rows `ids_BT` of a table of which this rank holds a band: (B, T, D), or (B, T/R, D) with `sequence_parallel`.

    Every rank looks up the tokens that it has, puts zeros for the others, and one sum over the ranks completes the
    rows.  The gradient of a row reaches the rank that holds it, and needs no communication.
    """
    V_l = w_VlD.shape[0]
    local_BT = ids_BT - collectives.rank_in(group) * V_l
    mine_BT = (local_BT >= 0) & (local_BT < V_l)
    rows_BTD = F.embedding(local_BT.where(mine_BT, 0), w_VlD)
    rows_BTD = rows_BTD.masked_fill(~mine_BT[..., None], 0.0)
    leave = collectives.scatter_sequence if sequence_parallel else collectives.reduce_from_group
    return leave(rows_BTD, group)


def vocab_parallel_cross_entropy_sum(logits_Vl, labels, group=None, label_smoothing=0.0):
    """`loss.cross_entropy_sum` of logits whose last dimension is split over `group`; the logits never travel.

    For each token the ranks exchange the largest logit, so that no exponential overflows, and then, in one sum, two
    numbers: the normaliser and the label's logit (zero but on the rank that has it); with smoothing the mean logit too.

    Args:
        logits_Vl: (..., Vl); half precisions are widened to fp32.
        labels: (...) int64, numbers of the whole vocabulary; -100 adds nothing.

    Returns:
        loss_sum: scalar, nats, the same on every rank.
        n_valid: scalar int64.
    """
    V_l = logits_Vl.shape[-1]
    logits_Vl = logits_Vl.to(torch.promote_types(logits_Vl.dtype, torch.float32))
    top = collectives.all_reduce(logits_Vl.detach().amax(dim=-1), group, op="max")
    shifted_Vl = logits_Vl - top[..., None]
    local = labels - collectives.rank_in(group) * V_l
    mine = (local >= 0) & (local < V_l)
    picked = shifted_Vl.gather(-1, local.where(mine, 0)[..., None]).squeeze(-1).where(mine, 0)
    parts = [shifted_Vl.exp().sum(dim=-1), picked]
    if label_smoothing:
        parts.append(shifted_Vl.mean(dim=-1) / collectives.size_of(group))
    total, picked, *mean = collectives.reduce_from_group(torch.stack(parts), group)
    if label_smoothing:
        picked = (1 - label_smoothing) * picked + label_smoothing * mean[0]
    valid = labels != IGNORE_INDEX
    return (total.log() - picked).where(valid, 0).sum(), valid.sum()


# --- a whole model --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How one parameter lies on the ranks of a tensor-parallel group.

    `full_shape`: of the serial model's.  `dim`: the dimension that is split, None for a parameter that every rank holds
    whole.  `partial`: it is held whole, but each rank finds a part of its gradient, and the parts must be added.
    `expert`: dimension 0, which numbers the experts, is split too, over the ranks of expert parallelism.
    """

    full_shape: tuple[int, ...]
    dim: int | None = None
    partial: bool = False
    expert: bool = False


# Which dimension is split, counted from the last, so that it holds for stacked experts too.
_OUTPUTS = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_INPUTS = ("o_proj", "down_proj")


def layout_of(name: str, shape: tuple[int, ...], sequence_parallel: bool) -> Layout:
    """The layout of the parameter `name` of a DeepSeekModel over more than one rank."""
    owner = name.removesuffix(".weight").rpartition(".")[2]
    if owner in _OUTPUTS or owner in _INPUTS:
        return Layout(shape, dim=len(shape) - (2 if owner in _OUTPUTS else 1))
    inside = ".self_attn." in name or ".mlp." in name
    return Layout(shape, partial=inside or sequence_parallel)


def apply_tensor_parallel(model, group=None, sequence_parallel=False) -> dict[str, Layout]:
    """Split a serial DeepSeekModel over `group`, in place; returns the layout of every parameter.

    Every rank keeps its slices, on the meta device too.  With one rank nothing changes.  In evaluation mode sequence
    parallelism is off: generation has one token at a time.

    Raises:
        ValueError: when the ranks do not divide heads, widths or vocabulary, naming the numbers that do.
    """
    parameters = dict(model.named_parameters())
    n_ranks, rank = collectives.size_of(group), collectives.rank_in(group)
    if n_ranks == 1:
        return {name: Layout(tuple(w.shape)) for name, w in parameters.items()}
    ParallelConfig(tp=n_ranks).check_model(model.config, seq_len=n_ranks)
    layouts = {name: layout_of(name, tuple(w.shape), sequence_parallel) for name, w in parameters.items()}
    for name, layout in layouts.items():
        if layout.dim is not None:
            w = shard(parameters[name].detach(), layout.dim, rank, n_ranks)
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(w))

    how = (group, sequence_parallel)
    table = getattr(model.embed_tokens, "weight", None)  # a pipeline stage may lack either end
    if table is not None:
        model.embed_tokens = VocabParallelEmbedding(table, *how)
    if isinstance(model.lm_head, nn.Linear):
        head_weight: Any = table if model.config.tie_word_embeddings else model.lm_head.weight
        model.lm_head = VocabParallelHead(head_weight, *how)
    for block in model.blocks():
        block.self_attn.o_proj = RowParallelLinear(block.self_attn.o_proj.weight, *how)
        _enter_once(block.self_attn, *how)
        if isinstance(block.mlp, MoE):
            _leave_once(block.mlp, *how)
            block.mlp.gate.aux_share = 1 / n_ranks  # every rank works the router out, and their gradients are added
        else:
            block.mlp.down_proj = RowParallelLinear(block.mlp.down_proj.weight, *how)
        _enter_once(block.mlp, *how)
    return layouts


class _Sharded(nn.Module):
    """Holds this rank's slice of a weight under the serial model's name for it."""

    def __init__(self, weight: nn.Parameter, group, sequence_parallel: bool):
        super().__init__()
        self.weight, self.group, self._sequence_parallel = weight, group, sequence_parallel

    @property
    def sequence_parallel(self) -> bool:
        return self._sequence_parallel and self.training

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)} of one rank"


class RowParallelLinear(_Sharded):
    def forward(self, x_BTF: Tensor) -> Tensor:
        return row_parallel_linear(x_BTF, self.weight, self.group, self.sequence_parallel)


class VocabParallelEmbedding(_Sharded):
    def forward(self, ids_BT: Tensor) -> Tensor:
        return vocab_parallel_embedding(ids_BT, self.weight, self.group, self.sequence_parallel)


class VocabParallelHead(_Sharded):
    def forward(self, x_BTD: Tensor, labels: Tensor | None = None, label_smoothing: float = 0.0):
        """As `transformer.Head`: logits of the whole vocabulary, or with `labels` the loss, for which none travel."""
        logits_BTVl = column_parallel_linear(x_BTD, self.weight, self.group, self.sequence_parallel)
        if labels is None:
            return collectives.gather_last_dim(logits_BTVl, self.group)
        return vocab_parallel_cross_entropy_sum(logits_BTVl, labels, self.group, label_smoothing)


def _enter_once(module: nn.Module, group, sequence_parallel: bool) -> None:
    """One collective in backward for all that reads the input of `module`, instead of one for each column linear."""

    def enter(module, arguments):
        split = sequence_parallel and module.training
        x_BTD = (collectives.gather_sequence if split else collectives.copy_to_group)(arguments[0], group)
        return x_BTD, *arguments[1:]

    module.register_forward_pre_hook(enter)


def _leave_once(module: nn.Module, group, sequence_parallel: bool) -> None:
    """One sum for shared and routed experts together."""

    def leave(module, _, y_BTD):
        split = sequence_parallel and module.training
        return (collectives.scatter_sequence if split else collectives.reduce_from_group)(y_BTD, group)

    module.register_forward_hook(leave)
