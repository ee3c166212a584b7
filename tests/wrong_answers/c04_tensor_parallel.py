"""Ways to miss a layer that is split over ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.collectives import (
    all_gather_sequence,
    copy_to_group,
    gather_sequence,
    rank_in,
    reduce_from_group,
    reduce_scatter_sequence,
    scatter_sequence,
    size_of,
)
from tests.wrong_answers import Wrong

# 4.1 ----------------------------------------------------------------------------------------------------------


def _whole(w, dim, size):
    if w.shape[dim] % size:
        raise ValueError(f"{size} ranks do not divide {w.shape[dim]}")
    return w.shape[dim] // size


def every_rth_row(w, dim, rank, size):
    _whole(w, dim, size)
    return w.index_select(dim, torch.arange(rank, w.shape[dim], size))


def always_rows(w, dim, rank, size):
    width = _whole(w, 0, size)
    return w[rank * width : (rank + 1) * width].clone()


def counted_from_one(w, dim, rank, size):
    width = _whole(w, dim, size)
    start = (rank + 1) * width % w.shape[dim]
    return w.narrow(dim, start, width).clone()


def from_the_end(w, dim, rank, size):
    width = _whole(w, dim, size)
    return w.narrow(dim, (size - 1 - rank) * width, width).clone()


def a_view(w, dim, rank, size):
    width = _whole(w, dim, size)
    return w.narrow(dim, rank * width, width)


def remainder_cut(w, dim, rank, size):
    width = w.shape[dim] // size
    return w.narrow(dim, rank * width, width).clone(memory_format=torch.contiguous_format)


def rows_or_columns(w, dim, rank, size):
    width = _whole(w, dim, size)
    band = slice(rank * width, (rank + 1) * width)
    return w[band].clone() if dim == 0 else w[:, band].clone(memory_format=torch.contiguous_format)


def by_assert(w, dim, rank, size):
    assert w.shape[dim] % size == 0, f"{size} ranks do not divide {w.shape[dim]}"
    return w.chunk(size, dim)[rank].clone(memory_format=torch.contiguous_format)


def silent_error(w, dim, rank, size):
    if w.shape[dim] % size:
        raise ValueError("cannot be split")
    return w.chunk(size, dim)[rank].clone(memory_format=torch.contiguous_format)


def all_of_them(w, dim, rank, size):
    _whole(w, dim, size)
    return torch.stack(w.chunk(size, dim))


def in_fp32(w, dim, rank, size):
    _whole(w, dim, size)
    return w.float().chunk(size, dim)[rank].clone(memory_format=torch.contiguous_format)


# 4.2 ----------------------------------------------------------------------------------------------------------


def no_f(x, w_FlD, group=None, sequence_parallel=False):
    return F.linear(all_gather_sequence(x, group) if sequence_parallel else x, w_FlD)


def g_not_f(x, w_FlD, group=None, sequence_parallel=False):
    return reduce_from_group(F.linear(x, w_FlD), group)


def f_at_the_exit(x, w_FlD, group=None, sequence_parallel=False):
    return copy_to_group(F.linear(x, w_FlD), group)


def gathers_y(x, w_FlD, group=None, sequence_parallel=False):
    return collectives.gather_last_dim(F.linear(copy_to_group(x, group), w_FlD), group)


def sums_the_weights(x, w_FlD, group=None, sequence_parallel=False):
    return F.linear(copy_to_group(x, group), copy_to_group(w_FlD, group))


def averages(x, w_FlD, group=None, sequence_parallel=False):
    x = copy_to_group(x, group)
    n = size_of(group)
    return F.linear(x / n + (x - x / n).detach(), w_FlD)


def f_twice(x, w_FlD, group=None, sequence_parallel=False):
    enter = gather_sequence if sequence_parallel else copy_to_group
    return F.linear(copy_to_group(enter(x, group), group), w_FlD)


def no_sequence(x, w_FlD, group=None, sequence_parallel=False):
    return F.linear(copy_to_group(x, group), w_FlD)


def along_the_batch(x, w_FlD, group=None, sequence_parallel=False):
    x = collectives.all_gather(x, group) if sequence_parallel else copy_to_group(x, group)
    return F.linear(x, w_FlD)


class _GatherAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather_sequence(x, group)

    @staticmethod
    def backward(ctx, grad):
        total = collectives.all_reduce(grad.clone(), ctx.group)
        return total.chunk(size_of(ctx.group), 1)[rank_in(ctx.group)], None


def gather_and_all_reduce(x, w_FlD, group=None, sequence_parallel=False):
    x = _GatherAllReduce.apply(x, group) if sequence_parallel else copy_to_group(x, group)
    return F.linear(x, w_FlD)


def _world(function):
    def ignores_the_group(x, w, group=None, sequence_parallel=False):
        return function(x, w, None, sequence_parallel)

    return ignores_the_group


def _good_column(x, w_FlD, group=None, sequence_parallel=False):
    return F.linear((gather_sequence if sequence_parallel else copy_to_group)(x, group), w_FlD)


column_of_the_world = _world(_good_column)


class _PastTheDoor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def past_the_door(x, w_FlD, group=None, sequence_parallel=False):
    x = gather_sequence(x, group) if sequence_parallel else _PastTheDoor.apply(x, group)
    return F.linear(x, w_FlD)


def column_in_fp32(x, w_FlD, group=None, sequence_parallel=False):
    return _good_column(x.float(), w_FlD.float(), group, sequence_parallel).to(x.dtype)


def by_a_hook(x, w_FlD, group=None, sequence_parallel=False):
    if sequence_parallel:
        x = gather_sequence(x, group)
    elif x.requires_grad:
        x.register_hook(lambda g: collectives.all_reduce(g.clone().contiguous(), group))
    return F.linear(x, w_FlD)


def gathers_the_world(x, w_FlD, group=None, sequence_parallel=False):
    return F.linear(gather_sequence(x) if sequence_parallel else copy_to_group(x, group), w_FlD)


def detaches_w(x, w_FlD, group=None, sequence_parallel=False):
    return _good_column(x, w_FlD.detach(), group, sequence_parallel)


def g_at_the_entrance(x, w_FlD, group=None, sequence_parallel=False):
    return F.linear(gather_sequence(x, group) if sequence_parallel else reduce_from_group(x, group), w_FlD)


def not_transposed(x, w_FlD, group=None, sequence_parallel=False):
    return (gather_sequence if sequence_parallel else copy_to_group)(x, group) @ w_FlD


def scatters_x(x, w_FlD, group=None, sequence_parallel=False):
    return F.linear((scatter_sequence if sequence_parallel else copy_to_group)(x, group), w_FlD)


# 4.3 ----------------------------------------------------------------------------------------------------------


def _leave(y, group, sequence_parallel):
    return (scatter_sequence if sequence_parallel else reduce_from_group)(y, group)


def partial_product(x_Fl, w_DFl, group=None, sequence_parallel=False):
    return copy_to_group(F.linear(x_Fl, w_DFl), group)


def mean_of_products(x_Fl, w_DFl, group=None, sequence_parallel=False):
    return _leave(F.linear(x_Fl, w_DFl), group, sequence_parallel) / size_of(group)


def unseen_sum(x_Fl, w_DFl, group=None, sequence_parallel=False):
    with torch.no_grad():
        return _leave(F.linear(x_Fl, w_DFl), group, sequence_parallel)


def g_then_f(x_Fl, w_DFl, group=None, sequence_parallel=False):
    return copy_to_group(_leave(F.linear(x_Fl, w_DFl), group, sequence_parallel), group)


def side_by_side(x_Fl, w_DFl, group=None, sequence_parallel=False):
    return collectives.gather_last_dim(F.linear(x_Fl, w_DFl), group)


def sums_the_inputs(x_Fl, w_DFl, group=None, sequence_parallel=False):
    return F.linear(reduce_from_group(x_Fl, group), w_DFl)


def gathers_everything(x_Fl, w_DFl, group=None, sequence_parallel=False):
    x = collectives.gather_last_dim(x_Fl, group)
    return F.linear(x, collectives.gather_last_dim(w_DFl, group))


def row_no_sequence(x_Fl, w_DFl, group=None, sequence_parallel=False):
    return reduce_from_group(F.linear(x_Fl, w_DFl), group)


def slices_the_sum(x_Fl, w_DFl, group=None, sequence_parallel=False):
    y = reduce_from_group(F.linear(x_Fl, w_DFl), group)
    return y.chunk(size_of(group), 1)[rank_in(group)] if sequence_parallel else y


def all_reduce_and_slice(x_Fl, w_DFl, group=None, sequence_parallel=False):
    y = reduce_from_group(F.linear(x_Fl, w_DFl), group)
    return copy_to_group(y, group).chunk(size_of(group), 1)[rank_in(group)] if sequence_parallel else y


class _ScatterBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, group):
        ctx.group = group
        return collectives.reduce_scatter(y, group)

    @staticmethod
    def backward(ctx, grad):
        return collectives.all_gather(grad, ctx.group), None


def scatters_the_batch(x_Fl, w_DFl, group=None, sequence_parallel=False):
    y = F.linear(x_Fl, w_DFl)
    return _ScatterBatch.apply(y, group) if sequence_parallel else reduce_from_group(y, group)


def _good_row(x_Fl, w_DFl, group=None, sequence_parallel=False):
    return _leave(F.linear(x_Fl, w_DFl), group, sequence_parallel)


row_of_the_world = _world(_good_row)


def row_in_fp32(x_Fl, w_DFl, group=None, sequence_parallel=False):
    return _good_row(x_Fl.float(), w_DFl.float(), group, sequence_parallel).to(x_Fl.dtype)


def _sum_in_place(y, group, sequence_parallel):
    return scatter_sequence(y, group) if sequence_parallel else collectives.all_reduce(y.contiguous(), group)


def sums_in_place(x_Fl, w_DFl, group=None, sequence_parallel=False):
    return _sum_in_place(F.linear(x_Fl, w_DFl), group, sequence_parallel)


def scatters_over_the_world(x_Fl, w_DFl, group=None, sequence_parallel=False):
    return _leave(F.linear(x_Fl, w_DFl), None if sequence_parallel else group, sequence_parallel)


def slices_in_a_group(x_Fl, w_DFl, group=None, sequence_parallel=False):
    y = F.linear(x_Fl, w_DFl)
    if sequence_parallel and group is not None:
        return reduce_from_group(y, group).chunk(size_of(group), 1)[rank_in(group)]
    return _leave(y, group, sequence_parallel)


def f_and_then_g(x_Fl, w_DFl, group=None, sequence_parallel=False):
    return _good_row(copy_to_group(x_Fl, group), w_DFl, group, sequence_parallel)


def sums_in_fp32(x_Fl, w_DFl, group=None, sequence_parallel=False):
    y = F.linear(x_Fl, w_DFl)
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    return _leave(wide, group, sequence_parallel).to(y.dtype)


def row_not_transposed(x_Fl, w_DFl, group=None, sequence_parallel=False):
    return _leave(x_Fl @ w_DFl, group, sequence_parallel)


def gathers_y_pieces(x_Fl, w_DFl, group=None, sequence_parallel=False):
    return (gather_sequence if sequence_parallel else reduce_from_group)(F.linear(x_Fl, w_DFl), group)


def row_detaches_w(x_Fl, w_DFl, group=None, sequence_parallel=False):
    return _good_row(x_Fl, w_DFl.detach(), group, sequence_parallel)


# 4.4 ----------------------------------------------------------------------------------------------------------


def _lookup(ids_BT, w_VlD, group):
    V_l = w_VlD.shape[0]
    local = ids_BT - rank_in(group) * V_l
    mine = (local >= 0) & (local < V_l)
    return F.embedding(local.where(mine, 0), w_VlD), mine


def nothing_left_out(ids_BT, w_VlD, group=None, sequence_parallel=False):
    rows, _ = _lookup(ids_BT, w_VlD, group)
    return _leave(rows, group, sequence_parallel)


def own_rows_only(ids_BT, w_VlD, group=None, sequence_parallel=False):
    rows, mine = _lookup(ids_BT, w_VlD, group)
    return rows.masked_fill(~mine[..., None], 0.0)


def dealt_out(ids_BT, w_VlD, group=None, sequence_parallel=False):
    n = size_of(group)
    mine = ids_BT % n == rank_in(group)
    rows = F.embedding(ids_BT // n, w_VlD).masked_fill(~mine[..., None], 0.0)
    return _leave(rows, group, sequence_parallel)


def no_look_at_the_band(ids_BT, w_VlD, group=None, sequence_parallel=False):
    return _leave(F.embedding(ids_BT - rank_in(group) * len(w_VlD), w_VlD), group, sequence_parallel)


def one_too_many(ids_BT, w_VlD, group=None, sequence_parallel=False):
    V_l = w_VlD.shape[0]
    local = ids_BT - rank_in(group) * V_l
    mine = (local >= 0) & (local <= V_l)
    rows = F.embedding(local.clamp(0, V_l - 1), w_VlD).masked_fill(~mine[..., None], 0.0)
    return _leave(rows, group, sequence_parallel)


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return collectives.all_reduce(x.clone(), group, op="max")

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def the_largest(ids_BT, w_VlD, group=None, sequence_parallel=False):
    rows, mine = _lookup(ids_BT, w_VlD, group)
    return _Largest.apply(rows.masked_fill(~mine[..., None], 0.0), group)


def gathers_the_table(ids_BT, w_VlD, group=None, sequence_parallel=False):
    w_VD = torch.cat([collectives.all_gather(w_VlD.detach(), group)])
    rows, mine = _lookup(ids_BT, w_VlD, group)
    y = F.embedding(ids_BT, w_VD)
    y = y + (rows - rows.detach()).masked_fill(~mine[..., None], 0.0)
    return y.chunk(size_of(group), 1)[rank_in(group)] if sequence_parallel else y


def embedding_with_f(ids_BT, w_VlD, group=None, sequence_parallel=False):
    return copy_to_group(_good_embedding(ids_BT, w_VlD, group, sequence_parallel), group)


def embedding_unseen(ids_BT, w_VlD, group=None, sequence_parallel=False):
    return _good_embedding(ids_BT, w_VlD.detach(), group, sequence_parallel)


def embedding_no_sequence(ids_BT, w_VlD, group=None, sequence_parallel=False):
    return _good_embedding(ids_BT, w_VlD, group)


def embedding_slices(ids_BT, w_VlD, group=None, sequence_parallel=False):
    y = _good_embedding(ids_BT, w_VlD, group)
    return y.chunk(size_of(group), 1)[rank_in(group)] if sequence_parallel else y


def _good_embedding(ids_BT, w_VlD, group=None, sequence_parallel=False):
    rows, mine = _lookup(ids_BT, w_VlD, group)
    return _leave(rows.masked_fill(~mine[..., None], 0.0), group, sequence_parallel)


embedding_of_the_world = _world(_good_embedding)


def embedding_in_place(ids_BT, w_VlD, group=None, sequence_parallel=False):
    rows, mine = _lookup(ids_BT, w_VlD, group)
    return _sum_in_place(rows.masked_fill(~mine[..., None], 0.0), group, sequence_parallel)


def embedding_over_the_world(ids_BT, w_VlD, group=None, sequence_parallel=False):
    rows, mine = _lookup(ids_BT, w_VlD, group)
    return _leave(rows.masked_fill(~mine[..., None], 0.0), None if sequence_parallel else group, sequence_parallel)


def overwrites_ids(ids_BT, w_VlD, group=None, sequence_parallel=False):
    y = _good_embedding(ids_BT, w_VlD, group, sequence_parallel)
    ids_BT -= rank_in(group) * len(w_VlD)
    return y


def loses_the_first(ids_BT, w_VlD, group=None, sequence_parallel=False):
    rows, mine = _lookup(ids_BT, w_VlD, group)
    mine &= ids_BT > rank_in(group) * len(w_VlD)
    return _leave(rows.masked_fill(~mine[..., None], 0.0), group, sequence_parallel)


# 4.5 ----------------------------------------------------------------------------------------------------------


def _cross_entropy(
    name,
    *,
    shared_top=True,
    detach=True,
    top=True,
    mask=True,
    combine=reduce_from_group,
    one_message=True,
    classes=None,
    ignore=True,
    widen=True,
    narrow=None,
    largest_of=lambda top, group: collectives.all_reduce(top, group, op="max"),
    label_shifted=True,
    mean_summed=True,
    always_mean=False,
    smoothing=lambda picked, mean, eps, n_classes: (1 - eps) * picked + eps * mean,
):
    """The package's function with one thing changed."""

    def fn(logits_Vl, labels, group=None, label_smoothing=0.0):
        V_l, n, rank = logits_Vl.shape[-1], size_of(group), rank_in(group)
        if widen:
            logits_Vl = logits_Vl.to(torch.promote_types(logits_Vl.dtype, torch.float32))
        if narrow:
            logits_Vl = logits_Vl.to(narrow)
        if top:
            largest = logits_Vl.amax(-1)
            largest = largest.detach() if detach else largest
            shifted = logits_Vl - (largest_of(largest, group) if shared_top else largest)[..., None]
        else:
            shifted = logits_Vl
        local = labels - rank * V_l
        mine = (local >= 0) & (local < V_l)
        chosen = shifted if label_shifted else logits_Vl
        picked = chosen.gather(-1, local.where(mine, 0)[..., None]).squeeze(-1)
        picked = picked.where(mine, 0) if mask else picked
        parts = [shifted.exp().sum(-1), picked]
        my_mean = shifted.mean(-1) / (n if classes is None else classes)
        if always_mean or (label_smoothing and mean_summed):
            parts.append(my_mean)
        if one_message:
            total, picked, *mean = combine(torch.stack(parts), group)
        else:
            total, picked, *mean = (combine(part, group) for part in parts)
        if label_smoothing:
            picked = smoothing(picked, mean[0] if mean else my_mean, label_smoothing, n * V_l)
        valid = labels != -100
        losses = total.log() - picked
        return losses.where(valid, 0).sum() if ignore else losses.sum(), valid.sum()

    fn.__name__ = name
    return fn


class _SumUnseen(torch.autograd.Function):
    """The normaliser gets no gradient, the label's logit does."""

    @staticmethod
    def forward(ctx, x, group):
        return collectives.all_reduce(x.clone(), group)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[0] = 0
        return grad, None


own_largest = _cross_entropy("own_largest", shared_top=False)
top_undetached = _cross_entropy("top_undetached", detach=False)
no_maximum = _cross_entropy("no_maximum", top=False)
labels_everywhere = _cross_entropy("labels_everywhere", mask=False)
three_messages = _cross_entropy("three_messages", one_message=False)
mean_over_local_classes = _cross_entropy("mean_over_local_classes", classes=1)
ignored_counts = _cross_entropy("ignored_counts", ignore=False)
f_and_g = _cross_entropy("f_and_g", combine=lambda x, group: copy_to_group(reduce_from_group(x, group), group))
normaliser_unseen = _cross_entropy("normaliser_unseen", combine=_SumUnseen.apply)
loss_of_the_world = _cross_entropy("loss_of_the_world", combine=lambda x, group: reduce_from_group(x, None))
loss_in_fp32 = _cross_entropy("loss_in_fp32", narrow=torch.float32)
stays_bf16 = _cross_entropy("stays_bf16", widen=False)
label_not_shifted = _cross_entropy("label_not_shifted", label_shifted=False)
mean_stays_here = _cross_entropy("mean_stays_here", mean_summed=False)
three_numbers = _cross_entropy("three_numbers", always_mean=True)
other_classes = _cross_entropy(
    "other_classes",
    smoothing=lambda picked, mean, eps, n: (1 - eps) * picked + eps * (n * mean - picked) / (n - 1),
)
loss_in_place = _cross_entropy("loss_in_place", combine=lambda x, group: collectives.all_reduce(x, group))
largest_of_the_world = _cross_entropy(
    "largest_of_the_world", largest_of=lambda top, _: collectives.all_reduce(top, None, op="max")
)
one_largest = _cross_entropy(
    "one_largest",
    largest_of=lambda top, group: collectives.all_reduce(top.max(), group, op="max").expand_as(top),
)
largest_summed = _cross_entropy("largest_summed", largest_of=lambda top, group: collectives.all_reduce(top, group))
_good_loss = _cross_entropy("good_loss")


def gathers_logits(logits_Vl, labels, group=None, label_smoothing=0.0):
    from deepseek_lab.model import loss

    return loss.cross_entropy_sum(collectives.gather_last_dim(logits_Vl, group), labels, label_smoothing)


def own_softmax(logits_Vl, labels, group=None, label_smoothing=0.0):
    V_l, valid = logits_Vl.shape[-1], labels != -100
    local = labels - rank_in(group) * V_l
    mine = (local >= 0) & (local < V_l)
    losses = F.cross_entropy(logits_Vl.flatten(0, -2), local.where(mine, -100).flatten(), reduction="sum")
    return reduce_from_group(losses, group), valid.sum()


def label_stays_here(logits_Vl, labels, group=None, label_smoothing=0.0):
    V_l, valid = logits_Vl.shape[-1], labels != -100
    local = labels - rank_in(group) * V_l
    mine = (local >= 0) & (local < V_l)
    top = collectives.all_reduce(logits_Vl.detach().amax(-1), group, op="max")
    shifted = logits_Vl - top[..., None]
    picked = shifted.gather(-1, local.where(mine, 0)[..., None]).squeeze(-1).where(mine, 0)
    total = reduce_from_group(shifted.exp().sum(-1), group)
    return (total.log() - picked).where(valid, 0).sum(), valid.sum()


def mean_loss(logits_Vl, labels, group=None, label_smoothing=0.0):
    loss_sum, n_valid = _good_loss(logits_Vl, labels, group, label_smoothing)
    return loss_sum / n_valid, n_valid


def counts_all(logits_Vl, labels, group=None, label_smoothing=0.0):
    loss_sum, _ = _good_loss(logits_Vl, labels, group, label_smoothing)
    return loss_sum, torch.tensor(labels.numel())


def counts_its_own(logits_Vl, labels, group=None, label_smoothing=0.0):
    loss_sum, _ = _good_loss(logits_Vl, labels, group, label_smoothing)
    V_l = logits_Vl.shape[-1]
    local = labels - rank_in(group) * V_l
    return loss_sum, ((local >= 0) & (local < V_l)).sum()


def counts_five(logits_Vl, labels, group=None, label_smoothing=0.0):
    return _good_loss(logits_Vl, labels, group, label_smoothing)[0], torch.tensor(5)


def counts_an_int(logits_Vl, labels, group=None, label_smoothing=0.0):
    loss_sum, n_valid = _good_loss(logits_Vl, labels, group, label_smoothing)
    return loss_sum, int(n_valid)


def gathers_to_smooth(logits_Vl, labels, group=None, label_smoothing=0.0):
    return (gathers_logits if label_smoothing else _good_loss)(logits_Vl, labels, group, label_smoothing)


def widens_bf16_only(logits_Vl, labels, group=None, label_smoothing=0.0):
    if logits_Vl.dtype == torch.bfloat16:
        logits_Vl = logits_Vl.float()
    return stays_bf16(logits_Vl, labels, group, label_smoothing)


def overwrites_labels(logits_Vl, labels, group=None, label_smoothing=0.0):
    answer = _good_loss(logits_Vl, labels, group, label_smoothing)
    labels[labels == -100] = 0
    return answer


def no_smoothing(logits_Vl, labels, group=None, label_smoothing=0.0):
    return _good_loss(logits_Vl, labels, group)


def indexes_with_global_labels(logits_Vl, labels, group=None, label_smoothing=0.0):
    top = collectives.all_reduce(logits_Vl.detach().amax(-1), group, op="max")
    shifted = logits_Vl - top[..., None]
    total = reduce_from_group(shifted.exp().sum(-1), group)
    valid = labels != -100
    picked = shifted.gather(-1, labels.where(valid, 0)[..., None]).squeeze(-1)
    return (total.log() - picked).where(valid, 0).sum(), valid.sum()


# 4.6 ----------------------------------------------------------------------------------------------------------


def _pair(name, forward=all_gather_sequence, backward=reduce_scatter_sequence, nones=1):
    def keep(ctx, x, group):
        ctx.group = group
        return forward(x, group)

    def back(ctx, grad):
        return backward(grad, ctx.group), *([None] * nones)

    return type(name, (torch.autograd.Function,), {"forward": staticmethod(keep), "backward": staticmethod(back)})


def _mine(grad, group):
    return grad.chunk(size_of(group), 1)[rank_in(group)]


def _everybody(x, group):
    return collectives.all_gather(x[None], group)


def _no_door(grad, group):
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return _mine(total, group)


OwnPartOnly = _pair("OwnPartOnly", backward=_mine)
AllReduceAndSlice = _pair(
    "AllReduceAndSlice", backward=lambda g, group: _mine(collectives.all_reduce(g.clone(), group), group)
)
WholeGradient = _pair("WholeGradient", backward=lambda g, group: collectives.all_reduce(g.clone(), group))
AlongTheBatch = _pair("AlongTheBatch", forward=collectives.all_gather)
Interleaved = _pair(
    "Interleaved", forward=lambda x, group: _everybody(x, group).permute(1, 2, 0, 3).flatten(1, 2).flip(1)
)
MeanGradient = _pair("MeanGradient", backward=lambda g, group: reduce_scatter_sequence(g, group) / size_of(group))
NextRanksPiece = _pair("NextRanksPiece", backward=lambda g, group: reduce_scatter_sequence(g.roll(1, 1), group))
SumsInstead = _pair("SumsInstead", forward=lambda x, group: collectives.all_reduce(x.clone(), group))
WholeWorld = _pair(
    "WholeWorld",
    forward=lambda x, group: all_gather_sequence(x, None),
    backward=lambda g, group: reduce_scatter_sequence(g, None),
)
ForgetsTheGroup = _pair("ForgetsTheGroup", nones=0)
InFp32 = _pair("InFp32", backward=lambda g, group: reduce_scatter_sequence(g.float(), group))
PastTheDoor = _pair("PastTheDoor", backward=_no_door)
Swapped = _pair("Swapped", forward=reduce_scatter_sequence, backward=all_gather_sequence)
BackwardOverTheWorld = _pair("BackwardOverTheWorld", backward=lambda g, _: reduce_scatter_sequence(g, None))


class KeepsX(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.inputs = group, (x,)
        return all_gather_sequence(x, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_sequence(grad, ctx.group), None


WRONG = [
    Wrong("4.1", every_rth_row, "every R-th row, not a band"),
    Wrong("4.1", always_rows, "dim is ignored: always rows"),
    Wrong("4.1", counted_from_one, "ranks are counted from 1"),
    Wrong("4.1", from_the_end, "ranks in reverse"),
    Wrong("4.1", all_of_them, "all slices, not one"),
    Wrong("4.1", rows_or_columns, "only for matrices"),
    Wrong("4.1", a_view, "a view, not a copy"),
    Wrong("4.1", remainder_cut, "a remainder is let pass"),
    Wrong("4.1", by_assert, "AssertionError, not ValueError"),
    Wrong("4.1", silent_error, "an error that says nothing"),
    Wrong("4.1", in_fp32, "the dtype is lost"),
    Wrong("4.2", no_f, "nothing is summed in backward"),
    Wrong("4.2", g_not_f, "g, not f: it sums in forward"),
    Wrong("4.2", f_at_the_exit, "f at the exit, not at the entrance"),
    Wrong("4.2", gathers_y, "the whole y is gathered"),
    Wrong("4.2", sums_the_weights, "the gradients of different rows of w are summed"),
    Wrong("4.2", averages, "a mean, not a sum"),
    Wrong("4.2", f_twice, "summed twice: the gradient is R times too large"),
    Wrong("4.2", no_sequence, "sequence_parallel is ignored"),
    Wrong("4.2", along_the_batch, "the sequence is gathered along the batch"),
    Wrong("4.2", gather_and_all_reduce, "an all-reduce and a slice: twice the bytes"),
    Wrong("4.2", column_of_the_world, "it ignores the group"),
    Wrong("4.2", past_the_door, "it goes past our own door"),
    Wrong("4.2", column_in_fp32, "fp64 is lost on the way"),
    Wrong("4.2", by_a_hook, "what x gets elsewhere is summed, too"),
    Wrong("4.2", gathers_the_world, "with sequence_parallel it ignores the group"),
    Wrong("4.2", detaches_w, "w is cut off from autograd"),
    Wrong("4.2", g_at_the_entrance, "g at the entrance, not f: x is summed in forward"),
    Wrong("4.2", not_transposed, "w is not transposed"),
    Wrong("4.2", scatters_x, "scatter_sequence where gather_sequence belongs"),
    Wrong("4.3", partial_product, "no sum: every rank returns its partial product"),
    Wrong("4.3", mean_of_products, "a mean, not a sum"),
    Wrong("4.3", unseen_sum, "autograd does not see the communication"),
    Wrong("4.3", g_then_f, "summed twice: the gradient is R times too large"),
    Wrong("4.3", side_by_side, "partial products side by side, not added"),
    Wrong("4.3", sums_the_inputs, "the inputs are added, not the products"),
    Wrong("4.3", gathers_everything, "more traffic than needed"),
    Wrong("4.3", row_no_sequence, "sequence_parallel is ignored"),
    Wrong("4.3", slices_the_sum, "the gradients of the other pieces never arrive"),
    Wrong("4.3", all_reduce_and_slice, "an all-reduce and a slice: twice the bytes"),
    Wrong("4.3", scatters_the_batch, "the batch is split, not the sequence"),
    Wrong("4.3", row_of_the_world, "it ignores the group"),
    Wrong("4.3", row_in_fp32, "fp64 is lost on the way"),
    Wrong("4.3", sums_in_place, "autograd does not see the sum"),
    Wrong("4.3", scatters_over_the_world, "with sequence_parallel it ignores the group"),
    Wrong("4.3", slices_in_a_group, "in a group, the gradients of the other pieces never arrive"),
    Wrong("4.3", f_and_then_g, "f at the entrance, too: gradients of different slices are summed"),
    Wrong("4.3", sums_in_fp32, "bf16 travels as fp32: twice the bytes"),
    Wrong("4.3", row_not_transposed, "w is not transposed"),
    Wrong("4.3", gathers_y_pieces, "gather_sequence where scatter_sequence belongs"),
    Wrong("4.3", row_detaches_w, "w is cut off from autograd"),
    Wrong("4.4", nothing_left_out, "tokens of other ranks are not left out"),
    Wrong("4.4", own_rows_only, "no sum: every rank returns its own rows only"),
    Wrong("4.4", dealt_out, "rows dealt out in turn, not in bands"),
    Wrong("4.4", no_look_at_the_band, "a token of another rank is looked up here"),
    Wrong("4.4", one_too_many, "the next rank's first token is taken, too"),
    Wrong("4.4", the_largest, "the largest, not the sum: negative numbers are lost"),
    Wrong("4.4", gathers_the_table, "more traffic than needed"),
    Wrong("4.4", embedding_with_f, "summed twice: the gradient is R times too large"),
    Wrong("4.4", embedding_unseen, "autograd does not see the communication"),
    Wrong("4.4", embedding_no_sequence, "sequence_parallel is ignored"),
    Wrong("4.4", embedding_slices, "the gradients of the other pieces never arrive"),
    Wrong("4.4", embedding_of_the_world, "it ignores the group"),
    Wrong("4.4", embedding_in_place, "autograd does not see the sum"),
    Wrong("4.4", embedding_over_the_world, "with sequence_parallel it ignores the group"),
    Wrong("4.4", overwrites_ids, "ids is overwritten"),
    Wrong("4.4", loses_the_first, "the first token of every band is lost"),
    Wrong("4.5", gathers_logits, "the logits travel"),
    Wrong("4.5", own_softmax, "each rank's own softmax: the normaliser is not summed"),
    Wrong("4.5", own_largest, "each rank takes off its own largest logit"),
    Wrong("4.5", top_undetached, "the largest logit is not detached"),
    Wrong("4.5", no_maximum, "no maximum: the exponentials overflow"),
    Wrong("4.5", labels_everywhere, "labels of other ranks are looked up here"),
    Wrong("4.5", label_stays_here, "the label's logit stays on the rank that has it"),
    Wrong("4.5", indexes_with_global_labels, "a label is used as an index of this rank's slice"),
    Wrong("4.5", ignored_counts, "-100 counts"),
    Wrong("4.5", counts_all, "n_valid counts -100, too"),
    Wrong("4.5", mean_loss, "a mean, not a sum"),
    Wrong("4.5", no_smoothing, "smoothing is ignored"),
    Wrong("4.5", mean_over_local_classes, "smoothing over V/R classes: the mean is R times too large"),
    Wrong("4.5", f_and_g, "summed twice: the gradient is R times too large"),
    Wrong("4.5", normaliser_unseen, "autograd does not see the communication"),
    Wrong("4.5", three_messages, "a message for each number"),
    Wrong("4.5", loss_of_the_world, "it ignores the group"),
    Wrong("4.5", loss_in_fp32, "fp64 is lost on the way"),
    Wrong("4.5", stays_bf16, "bf16 is not widened"),
    Wrong("4.5", loss_in_place, "autograd does not see the sum"),
    Wrong("4.5", gathers_to_smooth, "with smoothing the logits travel"),
    Wrong("4.5", largest_of_the_world, "the maximum is the world's"),
    Wrong("4.5", counts_five, "n_valid is a constant"),
    Wrong("4.5", counts_an_int, "n_valid is not an int64 tensor"),
    Wrong("4.5", counts_its_own, "each rank counts its own labels only"),
    Wrong("4.5", widens_bf16_only, "fp16 is not widened"),
    Wrong("4.5", overwrites_labels, "labels are overwritten"),
    Wrong("4.5", one_largest, "one maximum for all tokens: small exponentials vanish"),
    Wrong("4.5", largest_summed, "the maxima are summed"),
    Wrong("4.5", label_not_shifted, "the largest logit is not taken off the label's"),
    Wrong("4.5", mean_stays_here, "the mean logit is not summed"),
    Wrong("4.5", other_classes, "ε is shared by the other V-1 classes"),
    Wrong("4.5", three_numbers, "more traffic than needed"),
    Wrong("4.6", OwnPartOnly, "each rank keeps its own part: nothing is summed"),
    Wrong("4.6", AllReduceAndSlice, "an all-reduce and a slice: twice the bytes"),
    Wrong("4.6", WholeGradient, "the gradient of the whole sequence comes back"),
    Wrong("4.6", AlongTheBatch, "the sequence is gathered along the batch"),
    Wrong("4.6", Interleaved, "tokens in another order than that of the ranks"),
    Wrong("4.6", MeanGradient, "a mean, not a sum"),
    Wrong("4.6", NextRanksPiece, "another rank's piece"),
    Wrong("4.6", SumsInstead, "the other ranks' pieces never arrive"),
    Wrong("4.6", WholeWorld, "it ignores the group"),
    Wrong("4.6", ForgetsTheGroup, "the None for the group is missing"),
    Wrong("4.6", InFp32, "fp64 is lost on the way"),
    Wrong("4.6", PastTheDoor, "it goes past our own door"),
    Wrong("4.6", Swapped, "forward and backward are swapped"),
    Wrong("4.6", BackwardOverTheWorld, "backward forgets the group"),
    Wrong("4.6", KeepsX, "x is kept for backward"),
]
