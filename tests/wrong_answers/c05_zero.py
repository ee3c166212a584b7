"""Ways to hold too much, too little, or the wrong part."""

import math

import torch
import torch.distributed as dist

from deepseek_lab.parallel import collectives, zero
from tests.wrong_answers import Wrong

# 5.1 ----------------------------------------------------------------------------------------------------------


def _state(stage_of=lambda s: s, share=lambda n, R: math.ceil(n / R)):
    def zero_state_bytes(n_params, n_ranks, stage, param_bytes=2, grad_bytes=2, optim_bytes=12):
        if stage not in (0, 1, 2, 3):
            raise ValueError("no such stage")
        stage, part = stage_of(stage), share(n_params, n_ranks)
        return {
            "parameters": param_bytes * (part if stage >= 3 else n_params),
            "gradients": grad_bytes * (part if stage >= 2 else n_params),
            "optimizer": optim_bytes * (part if stage >= 1 else n_params),
        }

    return zero_state_bytes


def rounds_bytes_up(n_params, n_ranks, stage, param_bytes=2, grad_bytes=2, optim_bytes=12):
    sizes = {"parameters": param_bytes, "gradients": grad_bytes, "optimizer": optim_bytes}
    first = {"parameters": 3, "gradients": 2, "optimizer": 1}
    if stage > 3:
        raise ValueError("no such stage")
    return {k: math.ceil(b * n_params / (n_ranks if stage >= first[k] else 1)) for k, b in sizes.items()}


def takes_any_stage(n_params, n_ranks, stage, param_bytes=2, grad_bytes=2, optim_bytes=12):
    return _state()(n_params, n_ranks, min(stage, 3), param_bytes, grad_bytes, optim_bytes)


def one_kind_only(n_params, n_ranks, stage, param_bytes=2, grad_bytes=2, optim_bytes=12):
    if stage not in (0, 1, 2, 3):
        raise ValueError("no such stage")
    share, sizes = (
        math.ceil(n_params / n_ranks),
        {"parameters": param_bytes, "gradients": grad_bytes, "optimizer": optim_bytes},
    )
    return {
        k: b * (share if {"optimizer": 1, "gradients": 2, "parameters": 3}[k] == stage else n_params)
        for k, b in sizes.items()
    }


def sizes_built_in(n_params, n_ranks, stage, param_bytes=2, grad_bytes=2, optim_bytes=12):
    return _state()(n_params, n_ranks, stage, 2, 2, 12)


# 5.2 ----------------------------------------------------------------------------------------------------------


def floor_share(numel, rank, n_ranks):
    return rank * (numel // n_ranks), (rank + 1) * (numel // n_ranks)


def short_last(numel, rank, n_ranks):
    size = math.ceil(numel / n_ranks)
    return min(rank * size, numel), min((rank + 1) * size, numel)


def balanced(numel, rank, n_ranks):
    return numel * rank // n_ranks, numel * (rank + 1) // n_ranks


def everything(numel, rank, n_ranks):
    return 0, numel


def start_and_length(numel, rank, n_ranks):
    size = math.ceil(numel / n_ranks)
    return rank * size, size


def inclusive(numel, rank, n_ranks):
    size = math.ceil(numel / n_ranks)
    return rank * size, (rank + 1) * size - 1


def always_pads(numel, rank, n_ranks):
    size = numel // n_ranks + 1
    return rank * size, (rank + 1) * size


def last_takes_the_rest(numel, rank, n_ranks):
    return rank * (numel // n_ranks), numel if rank == n_ranks - 1 else (rank + 1) * (numel // n_ranks)


def like_array_split(numel, rank, n_ranks):
    size, more = divmod(numel, n_ranks)
    return rank * size + min(rank, more), (rank + 1) * size + min(rank + 1, more)


def as_floats(numel, rank, n_ranks):
    start, stop = zero.shard_range(numel, rank, n_ranks)
    return float(start), float(stop)


# 5.3 ----------------------------------------------------------------------------------------------------------


def _cut(keep):
    def cut(numels, start, stop):
        parts, offset = [], 0
        for i, numel in enumerate(numels):
            part = keep(i, numel, offset, start, stop)
            if part is not None:
                parts.append(part)
            offset += numel
        return parts

    return cut


def _bounds(numel, offset, start, stop):
    return max(start - offset, 0), min(stop - offset, numel)


@_cut
def whole_parameters(i, numel, offset, start, stop):
    return (i, 0, numel) if start <= offset < stop else None


@_cut
def places_in_the_bucket(i, numel, offset, start, stop):
    first, last = _bounds(numel, offset, start, stop)
    return (i, first + offset, last + offset) if first < last else None


@_cut
def places_in_the_share(i, numel, offset, start, stop):
    first, last = _bounds(numel, offset, start, stop)
    return (i, first + offset - start, last + offset - start) if first < last else None


@_cut
def last_included(i, numel, offset, start, stop):
    first, last = _bounds(numel, offset, start, stop)
    return (i, first, last - 1) if first < last else None


@_cut
def lengths(i, numel, offset, start, stop):
    first, last = _bounds(numel, offset, start, stop)
    return (i, first, last - first) if first < last else None


@_cut
def empty_parts(i, numel, offset, start, stop):
    first, last = _bounds(numel, offset, start, stop)
    return (i, first, last) if first < last else (i, 0, 0)


@_cut
def misses_what_lies_across(i, numel, offset, start, stop):
    first, last = _bounds(numel, offset, start, stop)
    return (i, first, last) if first < last and (first == 0 or last == numel) else None


@_cut
def touching(i, numel, offset, start, stop):
    first, last = _bounds(numel, offset, start, stop)
    return (i, first, last) if first <= last else None


def uses_up_its_input(numels, start, stop):
    parts = zero.cut(list(numels), start, stop)
    numels.clear()
    return parts


@_cut
def only_beginnings(i, numel, offset, start, stop):
    first, last = _bounds(numel, offset, start, stop)
    return (i, first, last) if first < last and first == 0 else None


# 5.4 ----------------------------------------------------------------------------------------------------------


def always_all_reduce(gradient_P, stage, group):
    return collectives.start_all_reduce(gradient_P, group)


def always_reduce_scatter(gradient_P, stage, group):
    return collectives.start_reduce_scatter(gradient_P, group)


def all_reduce_and_slice(gradient_P, stage, group):
    pending = collectives.start_all_reduce(gradient_P, group)
    if stage == 0:
        return pending
    rank, n_ranks = collectives.rank_in(group), collectives.size_of(group)
    start, stop = zero.shard_range(len(gradient_P), rank, n_ranks)

    class Slice:
        def wait(self):
            return pending.wait()[start:stop]

    return Slice()


def waits(gradient_P, stage, group):
    start = collectives.start_reduce_scatter if stage else collectives.start_all_reduce
    return collectives.Pending(start(gradient_P, group).wait())


def returns_the_tensor(gradient_P, stage, group):
    return (collectives.reduce_scatter if stage else collectives.all_reduce)(gradient_P, group)


def lazy(gradient_P, stage, group):
    class Later:
        def wait(self):
            return (collectives.reduce_scatter if stage else collectives.all_reduce)(gradient_P, group)

    return Later()


def widened(gradient_P, stage, group):
    start = collectives.start_reduce_scatter if stage else collectives.start_all_reduce
    return start(gradient_P.double(), group)


def into_the_gradient(gradient_P, stage, group):
    if stage == 0:
        return collectives.start_all_reduce(gradient_P, group)
    pending = collectives.start_reduce_scatter(gradient_P, group)
    start, stop = zero.shard_range(len(gradient_P), collectives.rank_in(group), collectives.size_of(group))

    class Within:
        def wait(self):
            return gradient_P[start:stop].copy_(pending.wait())

    return Within()


def averages(gradient_P, stage, group):
    start = collectives.start_reduce_scatter if stage else collectives.start_all_reduce
    return start(gradient_P / collectives.size_of(group), group)


def adds_nothing(gradient_P, stage, group):
    start, stop = zero.shard_range(len(gradient_P), 0, collectives.size_of(group) if stage else 1)
    return collectives.Pending(gradient_P[start:stop])


def everywhere(gradient_P, stage, group):
    return (collectives.start_reduce_scatter if stage else collectives.start_all_reduce)(gradient_P, None)


def past_the_door(gradient_P, stage, group):
    if stage == 0:
        return collectives.Pending(gradient_P, dist.all_reduce(gradient_P, group=group, async_op=True).wait)
    return collectives.start_reduce_scatter(gradient_P, group)


# 5.5 ----------------------------------------------------------------------------------------------------------


class KeepsTheMemory(zero.GatheredWeights):
    def free(self):
        if self.pending is not None:
            self.pending.wait()
        self.pending, self.here = None, False


class NewMemory(zero.GatheredWeights):
    def start(self):
        if not self.here and self.pending is None:
            self.weights_P = torch.empty(len(self.my_weights_S) * collectives.size_of(self.group), dtype=torch.float64)
            self.pending = zero.gather_weights(self.weights_P, self.my_weights_S, self.group)

    def free(self):
        super().free()
        self.weights_P = torch.empty(0)


class GathersAgain(zero.GatheredWeights):
    def gather(self):
        self.here = False
        super().gather()


class StartsAgain(zero.GatheredWeights):
    def start(self):
        if not self.here:
            self.weights_P.untyped_storage().resize_(self.weights_P.nbytes)
            if self.pending is not None:
                self.pending.wait()
            self.pending = zero.gather_weights(self.weights_P, self.my_weights_S, self.group)

    def gather(self):
        if self.pending is None:
            self.start()
        super_pending, self.pending = self.pending, None
        if super_pending is not None:
            super_pending.wait()
        self.here = True


class StartWaits(zero.GatheredWeights):
    def start(self):
        super().start()
        if self.pending is not None:
            self.pending.wait()
        self.pending, self.here = None, True


class IgnoresWhatWasStarted(zero.GatheredWeights):
    def gather(self):
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        super().gather()


class KeepsAnOldCopy(zero.GatheredWeights):
    old = None

    def gather(self):
        super().gather()
        if self.old is not None:
            self.weights_P.copy_(self.old)
        self.old = self.weights_P.clone()


class FreesUnderWay(zero.GatheredWeights):
    def free(self):
        self.pending, self.here = None, False
        self.weights_P.untyped_storage().resize_(0)


class FreesAtOnce(zero.GatheredWeights):
    def __init__(self, weights_P, my_weights_S, group):
        super().__init__(weights_P, my_weights_S, group)
        self.free()


class IgnoresTheGroup(zero.GatheredWeights):
    def __init__(self, weights_P, my_weights_S, group):
        super().__init__(weights_P, my_weights_S, None)

    def start(self):
        if not self.here and self.pending is None:
            self.weights_P.untyped_storage().resize_(self.weights_P.nbytes)
            whole = torch.empty(len(self.my_weights_S) * collectives.size_of(), dtype=torch.float64)
            self.pending = collectives.start_all_gather(self.my_weights_S, None, out=whole)

    def gather(self):
        self.start()
        if self.pending is not None:
            self.weights_P.copy_(self.pending.wait()[: len(self.weights_P)])
        self.pending, self.here = None, True


class KeepsACopy(zero.GatheredWeights):
    def gather(self):
        super().gather()
        self.kept = self.weights_P.clone()


class WritesBack(zero.GatheredWeights):
    def free(self):
        if self.here and self.weights_P.untyped_storage().nbytes() and hasattr(self, "used"):
            start = collectives.rank_in(self.group) * len(self.my_weights_S)
            self.my_weights_S.copy_(self.weights_P[start : start + len(self.my_weights_S)])
        self.used = True
        super().free()


class NeverFreesWhatWasStarted(zero.GatheredWeights):
    def free(self):
        if self.pending is not None:
            self.pending.wait()
            self.pending, self.here = None, True
            return
        super().free()


class WaitsAgain(zero.GatheredWeights):
    last = None

    def gather(self):
        self.start()
        self.last = self.pending or self.last
        if self.last is not None:
            self.last.wait()
        self.pending, self.here = None, True


class Renamed(zero.GatheredWeights):
    def __init__(self, weights_P, my_weights_S, group):
        self.whole = weights_P


class CountsNumbers(zero.GatheredWeights):
    def start(self):
        if not self.here and self.pending is None:
            self.weights_P.untyped_storage().resize_(self.weights_P.numel())
            self.pending = zero.gather_weights(self.weights_P, self.my_weights_S, self.group)


class AllReducesInstead(zero.GatheredWeights):
    def start(self):
        if not self.here and self.pending is None:
            self.weights_P.untyped_storage().resize_(self.weights_P.nbytes)
            rank, size = collectives.rank_in(self.group), len(self.my_weights_S)
            self.weights_P.zero_()
            self.weights_P[rank * size : (rank + 1) * size] = self.my_weights_S
            self.pending = collectives.start_all_reduce(self.weights_P, self.group)


# 5.6 ----------------------------------------------------------------------------------------------------------


def _norm(square_of=lambda square, copies: square / copies, reduce=True, finish=torch.sqrt, which=slice(None)):
    def global_grad_norm(gradients, copies, groups):
        square = sum(square_of(torch.linalg.vector_norm(g) ** 2, c) for g, c in zip(gradients, copies, strict=True))
        for group in groups[which] if reduce else []:
            collectives.all_reduce(square, group)
        return finish(square)

    return global_grad_norm


def adds_norms(gradients, copies, groups):
    norm = _norm(reduce=False)(gradients, copies, groups)
    for group in groups:
        collectives.all_reduce(norm, group)
    return norm


def adds_norms_of_single_gradients(gradients, copies, groups):
    norm = sum(torch.linalg.vector_norm(g) / c for g, c in zip(gradients, copies, strict=True))
    for group in groups:
        collectives.all_reduce(norm, group)
    return norm


def largest(gradients, copies, groups):
    square = _norm(reduce=False, finish=lambda s: s)(gradients, copies, groups)
    for group in groups:
        collectives.all_reduce(square, group, op="max")
    return square.sqrt()


def as_a_float(gradients, copies, groups):
    return _norm()(gradients, copies, groups).item()


def a_message_each(gradients, copies, groups):
    total = 0.0
    for gradient, c in zip(gradients, copies, strict=True):
        square = torch.linalg.vector_norm(gradient) ** 2 / c
        for group in groups:
            collectives.all_reduce(square, group)
        total = total + square
    return total.sqrt()


def means(gradients, copies, groups):
    square = _norm(reduce=False)(gradients, copies, groups) ** 2
    for group in groups:
        collectives.all_reduce(square, group, op="avg")
    return square.sqrt()


def in_fp32(gradients, copies, groups):
    return _norm()([g.float() for g in gradients], copies, groups).double()


def overwrites(gradients, copies, groups):
    for gradient in gradients:
        gradient.square_()
    square = sum(g.sum() / c for g, c in zip(gradients, copies, strict=True))
    for group in groups:
        collectives.all_reduce(square, group)
    return square.sqrt()


def gathers_first(gradients, copies, groups):
    squares = 0.0
    for gradient, c in zip(gradients, copies, strict=True):
        whole = gradient.flatten()
        for group in groups:
            whole = collectives.all_gather(whole, group)
        squares = squares + whole.square().sum() / c
    return squares.sqrt()


def whole_world(gradients, copies, groups):
    square = _norm(reduce=False, finish=lambda s: s)(gradients, copies, groups)
    return collectives.all_reduce(square).sqrt()


WRONG = [
    Wrong("5.1", _state(lambda s: 2 if s == 1 else s), "stage 1 shards what stage 2 does"),
    Wrong("5.1", _state(lambda s: 1 if s == 2 else s), "gradients wait for stage 3"),
    Wrong("5.1", _state(lambda s: 3 if s == 2 else s), "parameters are sharded from stage 2 on"),
    Wrong("5.1", _state(lambda s: max(s - 1, 0)), "stages are counted from zero: stage 1 shards nothing"),
    Wrong("5.1", _state(lambda s: 3 if s else 0), "every stage divides everything"),
    Wrong("5.1", _state(share=lambda n, R: n // R), "the padding is forgotten: shares are rounded down"),
    Wrong("5.1", _state(share=lambda n, R: n / R), "shares are not rounded to whole numbers"),
    Wrong("5.1", rounds_bytes_up, "bytes are rounded up, not numbers"),
    Wrong("5.1", one_kind_only, "each stage shards one kind only"),
    Wrong("5.1", sizes_built_in, "2 + 2 + 12 bytes are built in"),
    Wrong("5.1", takes_any_stage, "a stage that does not exist is accepted"),
    Wrong("5.2", floor_share, "rounded down: the last numbers belong to nobody"),
    Wrong("5.2", short_last, "the last share is shorter: collectives need equal ones"),
    Wrong("5.2", balanced, "shares differ by one: collectives need equal ones"),
    Wrong("5.2", last_takes_the_rest, "the last rank takes the rest: collectives need equal shares"),
    Wrong("5.2", like_array_split, "the first ranks take one more: collectives need equal shares"),
    Wrong("5.2", as_floats, "floats, not integers"),
    Wrong("5.2", everything, "every rank gets everything"),
    Wrong("5.2", start_and_length, "it returns start and length"),
    Wrong("5.2", inclusive, "the end is one too early: ranges stop before `stop`"),
    Wrong("5.2", always_pads, "one number of padding too many where the ranks divide the size"),
    Wrong("5.3", whole_parameters, "parameters are kept whole, with the rank that has their first number"),
    Wrong("5.3", places_in_the_bucket, "places are counted from the start of the bucket, not of the parameter"),
    Wrong("5.3", places_in_the_share, "places are counted from the start of the share, not of the parameter"),
    Wrong("5.3", last_included, "the last number is named, not the one after it"),
    Wrong("5.3", lengths, "start and length, not start and end"),
    Wrong("5.3", empty_parts, "parameters outside the share come as empty parts"),
    Wrong("5.3", misses_what_lies_across, "a parameter that lies across the whole share is missed"),
    Wrong("5.3", touching, "parameters that only touch the share come as empty parts"),
    Wrong("5.3", uses_up_its_input, "it uses up its input"),
    Wrong("5.3", only_beginnings, "only parameters that begin in the share are seen"),
    Wrong("5.4", always_all_reduce, "stage 1 gets the whole sum on every rank: nothing is shared out"),
    Wrong("5.4", always_reduce_scatter, "a share in stage 0, where every rank needs the whole sum"),
    Wrong("5.4", all_reduce_and_slice, "an all-reduce and a slice: right numbers, twice the traffic"),
    Wrong("5.4", waits, "it waits: nothing can overlap with backward"),
    Wrong("5.4", returns_the_tensor, "it does not return a Pending"),
    Wrong("5.4", lazy, "nothing is started"),
    Wrong("5.4", widened, "more bytes than needed"),
    Wrong("5.4", into_the_gradient, "a view of the whole gradient"),
    Wrong("5.4", averages, "a mean, not a sum: the loss was divided by the tokens of all ranks already"),
    Wrong("5.4", adds_nothing, "nothing was added up"),
    Wrong("5.4", everywhere, "it ignores the group"),
    Wrong("5.4", past_the_door, "it goes past our own door"),
    Wrong("5.5", KeepsTheMemory, "free() keeps the memory"),
    Wrong("5.5", NewMemory, "new memory each time: parameters still look at the old"),
    Wrong("5.5", GathersAgain, "it gathers again what is here"),
    Wrong("5.5", StartsAgain, "it starts again what is on its way"),
    Wrong("5.5", StartWaits, "start() waits: nothing can overlap"),
    Wrong("5.5", IgnoresWhatWasStarted, "gather() does not use what start() began"),
    Wrong("5.5", KeepsAnOldCopy, "an old copy is kept"),
    Wrong("5.5", FreesUnderWay, "memory is taken away under a running collective"),
    Wrong("5.5", FreesAtOnce, "memory is freed before anybody asks"),
    Wrong("5.5", IgnoresTheGroup),
    Wrong("5.5", KeepsACopy, "a hidden copy is kept"),
    Wrong("5.5", WritesBack, "free() writes old weights back over the share"),
    Wrong("5.5", NeverFreesWhatWasStarted, "what was only started is never freed"),
    Wrong("5.5", WaitsAgain, "a Pending is waited for once"),
    Wrong("5.5", Renamed, "`weights_P` was renamed"),
    Wrong("5.5", CountsNumbers, "memory is counted in numbers, not in bytes"),
    Wrong("5.5", AllReducesInstead, "more traffic than one all-gather"),
    Wrong("5.6", _norm(lambda square, copies: square), "copies are counted once per rank"),
    Wrong("5.6", _norm(lambda square, copies: square, reduce=False), "every rank has a norm of its own"),
    Wrong("5.6", _norm(reduce=False), "every rank has a norm of its own, copies divided"),
    Wrong("5.6", adds_norms_of_single_gradients, "norms of single gradients are added, not squares"),
    Wrong("5.6", largest, "the largest of the ranks, not their sum"),
    Wrong("5.6", as_a_float),
    Wrong("5.6", a_message_each, "one message for every gradient"),
    Wrong("5.6", adds_norms, "norms are added, not squares"),
    Wrong("5.6", _norm(finish=lambda square: square), "the root is missing"),
    Wrong("5.6", _norm(lambda square, copies: square / copies**2), "the norm is divided by the copies, not the square"),
    Wrong("5.6", means, "a mean over the ranks"),
    Wrong("5.6", _norm(which=slice(1, None)), "only the last group is summed over"),
    Wrong("5.6", in_fp32, "fp64 is lost on the way"),
    Wrong("5.6", overwrites, "it overwrites the gradients"),
    Wrong("5.6", gathers_first, "gradients are gathered first"),
    Wrong("5.6", whole_world, "it ignores `groups`"),
]
