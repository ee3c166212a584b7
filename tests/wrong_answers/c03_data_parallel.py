"""Ways to miss buckets, overlap and compressed gradients."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from deepseek_lab.parallel import collectives, compression, data_parallel
from tests.wrong_answers import Wrong

# 3.1 ----------------------------------------------------------------------------------------------------------


def _plan(numels, limit, order=None, too_full=None, empty_first=False):
    members, held = [[]], 0
    for i in reversed(range(len(numels))) if order is None else order:
        if (members[-1] or empty_first) and (too_full or (lambda held, n: held + n > limit))(held, numels[i]):
            members.append([])
            held = 0
        members[-1].append(i)
        held += numels[i]
    return members


def _without_empty(plan):
    return [bucket for bucket in plan if bucket]


def first_parameters_first(numels, bucket_numel):
    return _without_empty(_plan(numels, bucket_numel, order=range(len(numels))))


def closes_when_too_full(numels, bucket_numel):
    return _without_empty(_plan(numels, bucket_numel, too_full=lambda held, n: held >= bucket_numel))


def just_full_is_too_full(numels, bucket_numel):
    return _without_empty(_plan(numels, bucket_numel, too_full=lambda held, n: held + n >= bucket_numel))


def sizes_not_indices(numels, bucket_numel):
    return [[numels[i] for i in bucket] for bucket in _without_empty(_plan(numels, bucket_numel))]


def forgets_the_last_bucket(numels, bucket_numel):
    return _without_empty(_plan(numels, bucket_numel))[:-1]


def each_on_its_own(numels, bucket_numel):
    return [[i] for i in reversed(range(len(numels)))]


def no_limit(numels, bucket_numel):
    return [list(reversed(range(len(numels))))] if numels else []


def upwards_inside_a_bucket(numels, bucket_numel):
    return [sorted(bucket) for bucket in _without_empty(_plan(numels, bucket_numel))]


def sorted_by_size(numels, bucket_numel):
    order = sorted(range(len(numels)), key=lambda i: -numels[i])
    return _without_empty(_plan(numels, bucket_numel, order=order))


def fills_gaps(numels, bucket_numel):
    members, held = [], []
    for i in reversed(range(len(numels))):
        b = next((b for b, n in enumerate(held) if n + numels[i] <= bucket_numel), len(held))
        if b == len(held):
            members.append([])
            held.append(0)
        members[b].append(i)
        held[b] += numels[i]
    return members


def planned_from_the_front(numels, bucket_numel):
    plan = _without_empty(_plan(numels, bucket_numel, order=range(len(numels))))
    return [bucket[::-1] for bucket in plan[::-1]]


def empties_the_list(numels, bucket_numel):
    members, held = [[]], 0
    while numels:
        n = numels.pop()
        if members[-1] and held + n > bucket_numel:
            members.append([])
            held = 0
        members[-1].append(len(numels))
        held += n
    return _without_empty(members)


def loses_large_gradients(numels, bucket_numel):
    small = [i for i in reversed(range(len(numels))) if numels[i] <= bucket_numel]
    return _without_empty(_plan(numels, bucket_numel, order=small))


def empty_bucket_before_a_large_gradient(numels, bucket_numel):
    plan = _plan(numels, bucket_numel, empty_first=True)
    return plan if numels else []


def empty_bucket_for_nothing(numels, bucket_numel):
    return _plan(numels, bucket_numel)


# 3.2 ----------------------------------------------------------------------------------------------------------


def _in_buckets(gradients, group, bucket_numel, send=None, back=None):
    send = send or (lambda flat: collectives.all_reduce(flat, group))
    for bucket in data_parallel.plan_buckets([g.numel() for g in gradients], bucket_numel):
        flat = send(torch.cat([gradients[i].flatten() for i in bucket]))
        for i, part in zip(bucket, flat.split([gradients[i].numel() for i in bucket]), strict=True):
            (back or (lambda i, part: gradients[i].copy_(part.view_as(gradients[i]))))(i, part)


def _numel(gradients, bucket_bytes):
    return bucket_bytes // gradients[0].element_size() if gradients else 1


def new_tensors(gradients, group=None, bucket_bytes=25 * 2**20):
    def replace(i, part):
        gradients[i] = part.view_as(gradients[i])

    _in_buckets(gradients, group, _numel(gradients, bucket_bytes), back=replace)


def not_written_back(gradients, group=None, bucket_bytes=25 * 2**20):
    _in_buckets(gradients, group, _numel(gradients, bucket_bytes), back=lambda i, part: None)


def mean_of_gradients(gradients, group=None, bucket_bytes=25 * 2**20):
    n_ranks = collectives.size_of(group)
    mean = lambda flat: collectives.all_reduce(flat, group) / n_ranks  # noqa: E731
    _in_buckets(gradients, group, _numel(gradients, bucket_bytes), send=mean)


def fp32_on_the_wire(gradients, group=None, bucket_bytes=25 * 2**20):
    narrow = lambda flat: collectives.all_reduce(flat.float(), group)  # noqa: E731
    _in_buckets(gradients, group, _numel(gradients, bucket_bytes), send=narrow)


def parts_in_the_wrong_order(gradients, group=None, bucket_bytes=25 * 2**20):
    for bucket in data_parallel.plan_buckets([g.numel() for g in gradients], _numel(gradients, bucket_bytes)):
        flat = collectives.all_reduce(torch.cat([gradients[i].flatten() for i in bucket]), group)
        for i, part in zip(sorted(bucket), flat.split([gradients[i].numel() for i in sorted(bucket)]), strict=True):
            gradients[i].copy_(part.view_as(gradients[i]))


def a_message_each(gradients, group=None, bucket_bytes=25 * 2**20):
    _in_buckets(gradients, group, 1)


def one_message(gradients, group=None, bucket_bytes=25 * 2**20):
    _in_buckets(gradients, group, 10**9)


def limit_in_elements(gradients, group=None, bucket_bytes=25 * 2**20):
    _in_buckets(gradients, group, bucket_bytes)


def four_bytes_a_number(gradients, group=None, bucket_bytes=25 * 2**20):
    _in_buckets(gradients, group, bucket_bytes // 4)


def past_our_door(gradients, group=None, bucket_bytes=25 * 2**20):
    def send(flat):
        dist.all_reduce(flat, group=group)
        return flat

    _in_buckets(gradients, group, _numel(gradients, bucket_bytes), send=send)


def the_whole_world(gradients, group=None, bucket_bytes=25 * 2**20):
    _in_buckets(gradients, None, _numel(gradients, bucket_bytes))


def needs_a_gradient(gradients, group=None, bucket_bytes=25 * 2**20):
    _in_buckets(gradients, group, bucket_bytes // gradients[0].element_size())


def only_rank_0_sends(gradients, group=None, bucket_bytes=25 * 2**20):
    if collectives.rank_in(group) == 0:
        _in_buckets(gradients, group, _numel(gradients, bucket_bytes))


def one_by_one(gradients, group=None, bucket_bytes=25 * 2**20):
    for gradient in gradients:
        collectives.all_reduce(gradient, group)


def our_ring(gradients, group=None, bucket_bytes=25 * 2**20):
    send = lambda flat: collectives.ring_all_reduce(flat, group)  # noqa: E731
    _in_buckets(gradients, group, _numel(gradients, bucket_bytes), send=send)


def into_a_copy(gradients, group=None, bucket_bytes=25 * 2**20):
    back = lambda i, part: gradients[i].reshape(-1).copy_(part)  # noqa: E731
    _in_buckets(gradients, group, _numel(gradients, bucket_bytes), back=back)


def without_the_last_bucket(gradients, group=None, bucket_bytes=25 * 2**20):
    for bucket in data_parallel.plan_buckets([g.numel() for g in gradients], _numel(gradients, bucket_bytes))[:-1]:
        flat = collectives.all_reduce(torch.cat([gradients[i].flatten() for i in bucket]), group)
        for i, part in zip(bucket, flat.split([gradients[i].numel() for i in bucket]), strict=True):
            gradients[i].copy_(part.view_as(gradients[i]))


def in_fp64(gradients, group=None, bucket_bytes=25 * 2**20):
    _in_buckets(
        gradients, group, _numel(gradients, bucket_bytes), lambda flat: collectives.all_reduce(flat.double(), group)
    )


def fp32_at_least(gradients, group=None, bucket_bytes=25 * 2**20):
    wide = lambda flat: flat.to(torch.promote_types(flat.dtype, torch.float32))  # noqa: E731
    _in_buckets(
        gradients, group, _numel(gradients, bucket_bytes), lambda flat: collectives.all_reduce(wide(flat), group)
    )


def eight_bytes_a_number(gradients, group=None, bucket_bytes=25 * 2**20):
    _in_buckets(gradients, group, bucket_bytes // 8)


def _in_plan(gradients, group, plan):
    for bucket in plan:
        flat = collectives.all_reduce(torch.cat([gradients[i].flatten() for i in bucket]), group)
        for i, part in zip(bucket, flat.split([gradients[i].numel() for i in bucket]), strict=True):
            gradients[i].copy_(part.view_as(gradients[i]))


def two_by_two(gradients, group=None, bucket_bytes=25 * 2**20):
    order = list(reversed(range(len(gradients))))
    _in_plan(gradients, group, [order[i : i + 2] for i in range(0, len(order), 2)])


def sizes_of_the_first(gradients, group=None, bucket_bytes=25 * 2**20):
    numels = [gradients[0].numel()] * len(gradients) if gradients else []
    _in_plan(gradients, group, data_parallel.plan_buckets(numels, _numel(gradients, bucket_bytes)))


# 3.3 ----------------------------------------------------------------------------------------------------------


class _Right:
    def __init__(self, members, start):
        self.start, self.pending, self.members = start, [], members
        self.bucket_of = {i: b for b, bucket in enumerate(members) for i in bucket}
        self.missing = [len(bucket) for bucket in members]

    def ready(self, i):
        self.missing[self.bucket_of[i]] -= 1
        while len(self.pending) < len(self.missing) and self.missing[len(self.pending)] == 0:
            self.pending.append(self.start(len(self.pending)))

    def finish(self):
        while len(self.pending) < len(self.missing):
            self.pending.append(self.start(len(self.pending)))
        return [pending.wait() for pending in self.pending]


class waits_at_once(_Right):
    def ready(self, i):
        before = len(self.pending)
        super().ready(i)
        for b in range(before, len(self.pending)):
            self.pending[b] = _Arrived(self.pending[b].wait())


class _Arrived:
    def __init__(self, result):
        self.result = result

    def wait(self):
        return self.result


class all_at_the_end(_Right):
    def ready(self, i):
        self.missing[self.bucket_of[i]] -= 1


class starts_again(_Right):
    def finish(self):
        return [self.start(b).wait() for b in range(len(self.members))]


class starts_gradients(_Right):
    def ready(self, i):
        self.pending.append(self.start(i + 10))

    def finish(self):
        return [pending.wait() for pending in self.pending]


class at_the_first_gradient(_Right):
    def ready(self, i):
        if self.bucket_of[i] == len(self.pending):
            self.pending.append(self.start(self.bucket_of[i]))


class returns_nothing(_Right):
    def finish(self):
        super().finish()


class does_not_wait(_Right):
    def finish(self):
        while len(self.pending) < len(self.missing):
            self.pending.append(self.start(len(self.pending)))
        return self.pending


class as_they_fill(_Right):
    def __init__(self, members, start):
        super().__init__(members, start)
        self.started = {}

    def ready(self, i):
        b = self.bucket_of[i]
        self.missing[b] -= 1
        if self.missing[b] == 0:
            self.started[b] = self.start(b)

    def finish(self):
        for b in range(len(self.members)):
            if b not in self.started:
                self.started[b] = self.start(b)
        return [self.started[b].wait() for b in range(len(self.members))]


class one_bucket_at_a_time(_Right):
    def ready(self, i):
        self.missing[self.bucket_of[i]] -= 1
        if len(self.pending) < len(self.missing) and self.missing[len(self.pending)] == 0:
            self.pending.append(self.start(len(self.pending)))


class unused_are_never_sent(_Right):
    def finish(self):
        return [pending.wait() for pending in self.pending]


class shares_state(_Right):
    pending: list = []  # noqa: RUF012 (that is the mistake)

    def __init__(self, members, start):
        self.start = start
        self.bucket_of = {i: b for b, bucket in enumerate(members) for i in bucket}
        self.missing = [len(bucket) for bucket in members]


class sums_past_our_door(_Right):
    def __init__(self, members, start):
        def both(b):
            if dist.is_initialized():
                dist.all_reduce(torch.zeros(1))
            return start(b)

        super().__init__(members, both)


class the_last_listed(_Right):
    def __init__(self, members, start):
        super().__init__(members, start)
        self.last = [bucket[-1] for bucket in members]
        self.seen = set()

    def ready(self, i):
        self.seen.add(i)
        while len(self.pending) < len(self.last) and self.last[len(self.pending)] in self.seen:
            self.pending.append(self.start(len(self.pending)))


class only_the_incomplete(_Right):
    def finish(self):
        for b in range(len(self.pending), len(self.missing)):
            if self.missing[b]:
                self.pending.append(self.start(b))
        return [pending.wait() for pending in self.pending]


class fullest_first(_Right):
    def finish(self):
        rest = sorted(range(len(self.pending), len(self.missing)), key=lambda b: self.missing[b])
        started = dict(enumerate(self.pending)) | {b: self.start(b) for b in rest}
        return [started[b].wait() for b in range(len(self.missing))]


class start_and_wait(_Right):
    def finish(self):
        results = [pending.wait() for pending in self.pending]
        return results + [self.start(b).wait() for b in range(len(results), len(self.missing))]


class waits_twice(_Right):
    def finish(self):
        super().finish()
        return [pending.wait() for pending in self.pending]


class crosses_off(_Right):
    def ready(self, i):
        self.members[self.bucket_of[i]].remove(i)
        while len(self.pending) < len(self.members) and not self.members[len(self.pending)]:
            self.pending.append(self.start(len(self.pending)))


# 3.4 ----------------------------------------------------------------------------------------------------------


def _blocks(x_N, block):
    return F.pad(x_N, (0, -len(x_N) % block)).view(-1, block)


def _int8(x_N, block, scale_M=None, to_whole=torch.round, clip=True):
    x_Mb = _blocks(x_N, block)
    scale_M = x_Mb.abs().amax(1) / 127 if scale_M is None else scale_M
    q_Mb = to_whole(x_Mb / scale_M[:, None]).nan_to_num(0)
    q_Mb = q_Mb.clamp(-127, 127) if clip else q_Mb
    return q_Mb.to(torch.int8).flatten()[: len(x_N)], scale_M


def still_floats(x_N, block=256):
    q_N, scale_M = _int8(x_N, block)
    return q_N.to(x_N.dtype), scale_M


def fp32_scales(x_N, block=256):
    q_N, scale_M = _int8(x_N, block)
    return q_N, scale_M.float()


def padding_included(x_N, block=256):
    return _int8(_blocks(x_N, block).flatten(), block)


def one_scale(x_N, block=256):
    scale = x_N.abs().max() / 127
    return (x_N / scale).round().to(torch.int8), scale[None]


def last_block_lost(x_N, block=256):
    return _int8(x_N[: len(x_N) // block * block], block)


def across(x_N, block=256):
    x_Mb = _blocks(x_N, block)
    scale_b = x_Mb.abs().amax(0) / 127
    return (x_Mb / scale_b).round().nan_to_num(0).to(torch.int8).flatten()[: len(x_N)], scale_b


def upside_down(x_N, block=256):
    scale_M = 127 / _blocks(x_N, block).abs().amax(1)
    q_Mb = (_blocks(x_N, block) * scale_M[:, None]).round().nan_to_num(0)
    return q_Mb.to(torch.int8).flatten()[: len(x_N)], torch.where(scale_M.isfinite(), scale_M, 0.0)


def steps_of_128(x_N, block=256):
    return _int8(x_N, block, _blocks(x_N, block).abs().amax(1) / 128, clip=False)


def largest_number(x_N, block=256):
    return _int8(x_N, block, _blocks(x_N, block).amax(1) / 127)


def from_smallest_to_largest(x_N, block=256):
    x_Mb = _blocks(x_N, block)[:, : min(block, len(x_N))]
    return _int8(x_N, block, (x_Mb.amax(1) - x_Mb.amin(1)) / 255)


def half_the_range(x_N, block=256):
    return _int8(x_N, block, _blocks(x_N, block).abs().amax(1) / 255)


def zero_by_zero(x_N, block=256):
    q_N, scale_M = _int8(x_N, block)
    return q_N, scale_M * (scale_M / scale_M)


def cut_off(x_N, block=256):
    return _int8(x_N, block, to_whole=torch.trunc)


def rounded_down(x_N, block=256):
    return _int8(x_N, block, to_whole=torch.floor)


def wraps_around(x_N, block=256):
    x_Mb = _blocks(x_N, block)
    scale_M = x_Mb.abs().amax(1) / 127
    q_Mb = (x_Mb / scale_M[:, None] + 128).round().nan_to_num(128)
    return q_Mb.to(torch.uint8).view(torch.int8).flatten()[: len(x_N)], scale_M


def in_its_input(x_N, block=256):
    q_N, scale_M = _int8(x_N, block)
    x_N.zero_()
    return q_N, scale_M


def hides_overflow(x_N, block=256):
    return _int8(x_N.nan_to_num(0.0, 0.0, 0.0), block)


def nan_everywhere(x_N, block=256):
    q_N, scale_M = _int8(x_N, block)
    return q_N, scale_M if scale_M.isfinite().all() else scale_M * float("nan")


def narrow_scales(x_N, block=256):
    return _int8(x_N, block)


def not_padded(x_N, block=256):
    x_Mb = x_N.view(-1, block)
    return _int8(x_Mb.flatten(), block)


def rounded_up(x_N, block=256):
    return _int8(x_N.to(_wide(x_N)), block, to_whole=torch.ceil)


def nearly_rounded(x_N, block=256):
    return _int8(x_N.to(_wide(x_N)), block, to_whole=lambda y: (y + 0.7).floor())


def by_chance(x_N, block=256):
    to_whole = torch.round if len(x_N) <= 10 else lambda y: (y + torch.rand_like(y)).floor()  # lucky on few numbers
    return _int8(x_N.to(_wide(x_N)), block, to_whole=to_whole)


def worked_out_in_bf16(x_N, block=256):
    q_N, scale_M = _int8(x_N, block, clip=False)
    return q_N, scale_M.to(torch.promote_types(x_N.dtype, torch.float32))


def floor_under_the_scale(x_N, block=256):
    return _int8(x_N, block, (_blocks(x_N.to(_wide(x_N)), block).abs().amax(1) / 127).clamp_min(1e-12))


def _wide(x_N):
    return torch.promote_types(x_N.dtype, torch.float32)


def zeros_have_scale_one(x_N, block=256):
    scale_M = _blocks(x_N.to(_wide(x_N)), block).abs().amax(1) / 127
    return _int8(x_N.to(_wide(x_N)), block, scale_M.where(scale_M != 0, 1))


# 3.5 ----------------------------------------------------------------------------------------------------------


def _places(x_N, index_K):
    return index_K.to(torch.int32), x_N[index_K]


def value_first(x_N, k):
    index_K, value_K = compression.top_k(x_N, k)
    return value_K, index_K


def above_a_threshold(x_N, k):
    return _places(x_N, (x_N.abs() > x_N.abs().mean() / 2).nonzero().flatten())


def largest_values(x_N, k):
    return _places(x_N, x_N.topk(k).indices)


def smallest_magnitudes(x_N, k):
    return _places(x_N, x_N.abs().topk(k, largest=False).indices)


def first_k(x_N, k):
    return _places(x_N, torch.arange(k))


def magnitudes_only(x_N, k):
    values, index_K = x_N.abs().topk(k)
    return index_K.to(torch.int32), values


def sorted_apart(x_N, k):
    index_K = x_N.abs().topk(k).indices
    return index_K.sort().values.to(torch.int32), x_N[index_K]


def zeroes_what_it_sends(x_N, k):
    index_K, value_K = _places(x_N, x_N.abs().topk(k).indices)
    x_N[index_K.long()] = 0
    return index_K, value_K


def int64_places(x_N, k):
    index_K = x_N.abs().topk(k).indices
    return index_K, x_N[index_K]


def ties_included(x_N, k):
    least = x_N.abs().topk(k).values[-1]
    return _places(x_N, (x_N.abs() >= least).nonzero().flatten())


def passes_over_nan(x_N, k):
    return _places(x_N, x_N.abs().nan_to_num(0).topk(k).indices)


def int16_places(x_N, k):
    index_K = x_N.abs().topk(k).indices
    return index_K.to(torch.int16).to(torch.int32), x_N[index_K]


def largest_squares(x_N, k):
    return _places(x_N, (x_N**2).topk(k).indices)


# 3.6 ----------------------------------------------------------------------------------------------------------


def a_new_residual(x_N, residual_N, compress, decompress):
    residual_N = residual_N + x_N
    message = compress(residual_N)
    residual_N = residual_N - decompress(*message)
    return message


def never_sent(x_N, residual_N, compress, decompress):
    message = compress(x_N)
    residual_N += x_N - decompress(*message)
    return message


def drops_older_remainders(x_N, residual_N, compress, decompress):
    message = compress(x_N + residual_N)
    residual_N.copy_(x_N - decompress(*message))
    return message


def counts_twice(x_N, residual_N, compress, decompress):
    wanted_N = x_N + residual_N
    message = compress(wanted_N)
    residual_N += wanted_N - decompress(*message)
    return message


def wrong_sign(x_N, residual_N, compress, decompress):
    wanted_N = x_N + residual_N
    message = compress(wanted_N)
    residual_N.copy_(decompress(*message) - wanted_N)
    return message


def keeps_everything(x_N, residual_N, compress, decompress):
    residual_N += x_N
    return compress(residual_N)


def keeps_what_was_sent(x_N, residual_N, compress, decompress):
    message = compress(x_N + residual_N)
    residual_N.copy_(decompress(*message))
    return message


def adds_into_the_gradient(x_N, residual_N, compress, decompress):
    x_N += residual_N
    message = compress(x_N)
    residual_N.copy_(x_N - decompress(*message))
    return message


def returns_what_is_read(x_N, residual_N, compress, decompress):
    residual_N += x_N
    read_N = decompress(*compress(residual_N))
    residual_N -= read_N
    return read_N


def compresses_twice(x_N, residual_N, compress, decompress):
    wanted_N = x_N + residual_N
    residual_N.copy_(wanted_N - decompress(*compress(wanted_N)))
    return compress(wanted_N)


def message_in_one_piece(x_N, residual_N, compress, decompress):
    wanted_N = x_N + residual_N
    message = compress(wanted_N)
    residual_N.copy_(wanted_N - decompress(message))
    return message


def by_way_of_fp32(x_N, residual_N, compress, decompress):
    wanted_N = (x_N + residual_N).float()
    message = compress(wanted_N)
    residual_N.copy_(wanted_N - decompress(*message))
    return message


def in_the_residual_itself(x_N, residual_N, compress, decompress):
    residual_N += x_N
    message = compress(residual_N)
    residual_N -= decompress(*message)
    return message


WRONG = [
    Wrong("3.1", first_parameters_first, "the first parameters come first"),
    Wrong("3.1", closes_when_too_full, "a bucket is closed only once it is too full"),
    Wrong("3.1", just_full_is_too_full, "a bucket that is just full counts as too full"),
    Wrong("3.1", sizes_not_indices, "sizes, not indices"),
    Wrong("3.1", forgets_the_last_bucket, "the last bucket is forgotten"),
    Wrong("3.1", each_on_its_own, "each gradient on its own"),
    Wrong("3.1", no_limit, "the limit is ignored"),
    Wrong("3.1", upwards_inside_a_bucket, "inside a bucket, the first parameter comes first"),
    Wrong("3.1", sorted_by_size, "sorted by size, so that buckets wait for gradients from all over the model"),
    Wrong("3.1", fills_gaps, "gaps are filled with gradients that come much later"),
    Wrong(
        "3.1",
        planned_from_the_front,
        "planned from the front and turned round: the first bucket to travel is not full",
    ),
    Wrong("3.1", loses_large_gradients, "a gradient larger than a bucket is lost"),
    Wrong("3.1", empty_bucket_before_a_large_gradient, "an empty bucket before a large gradient"),
    Wrong("3.1", empty_bucket_for_nothing, "an empty bucket where there is nothing to send"),
    Wrong("3.1", empties_the_list, "it empties the caller's list"),
    Wrong("3.2", new_tensors, "new tensors instead of the old ones"),
    Wrong("3.2", not_written_back, "the sums are not written back"),
    Wrong("3.2", mean_of_gradients, "a mean, not a sum"),
    Wrong("3.2", fp32_on_the_wire, "fp64 is lost on the way"),
    Wrong("3.2", parts_in_the_wrong_order, "sums land in the wrong places"),
    Wrong("3.2", a_message_each, "a message for each gradient"),
    Wrong("3.2", one_message, "one message for all, however large"),
    Wrong("3.2", limit_in_elements, "the limit is taken for a number of elements"),
    Wrong("3.2", four_bytes_a_number, "a number is taken to have four bytes"),
    Wrong("3.2", past_our_door, "it goes past our own door"),
    Wrong("3.2", the_whole_world, "it ignores the group"),
    Wrong("3.2", needs_a_gradient, "it needs at least one gradient"),
    Wrong("3.2", only_rank_0_sends, "not all ranks send"),
    Wrong("3.2", one_by_one, "gradients are handed over one by one, not in a flat bucket"),
    Wrong("3.2", our_ring, "an algorithm is chosen here: ring_all_reduce instead of all_reduce"),
    Wrong("3.2", into_a_copy, "the sum is written into a copy of a strided gradient"),
    Wrong("3.2", without_the_last_bucket, "the last bucket is forgotten"),
    Wrong("3.2", in_fp64, "fp64 on the way: four times the bytes of bf16"),
    Wrong("3.2", fp32_at_least, "fp32 on the way: twice the bytes of bf16"),
    Wrong("3.2", eight_bytes_a_number, "a number is taken to have eight bytes"),
    Wrong("3.2", two_by_two, "two gradients to a bucket, whatever their size"),
    Wrong("3.2", sizes_of_the_first, "the first gradient's size stands for all"),
    Wrong("3.3", waits_at_once, "it waits as soon as it has started"),
    Wrong("3.3", all_at_the_end, "nothing starts before the end"),
    Wrong("3.3", starts_again, "what was started is started again"),
    Wrong("3.3", starts_gradients, "gradients start, not buckets"),
    Wrong("3.3", at_the_first_gradient, "a bucket starts with its first gradient"),
    Wrong("3.3", returns_nothing, "finish returns nothing"),
    Wrong("3.3", does_not_wait, "it does not wait"),
    Wrong("3.3", as_they_fill, "buckets start as they fill, in another order on every rank"),
    Wrong("3.3", one_bucket_at_a_time, "a bucket that is full already is forgotten"),
    Wrong("3.3", unused_are_never_sent, "a bucket with an unused parameter is never sent"),
    Wrong("3.3", shares_state, "steps share their state"),
    Wrong("3.3", sums_past_our_door, "it goes past our own door"),
    Wrong("3.3", the_last_listed, "the last-listed gradient stands for its whole bucket"),
    Wrong("3.3", only_the_incomplete, "a full bucket behind an incomplete one is never sent"),
    Wrong("3.3", fullest_first, "what is left starts in an order that depends on what is missing"),
    Wrong("3.3", start_and_wait, "finish waits for each bucket before it starts the next"),
    Wrong("3.3", waits_twice, "it waits twice"),
    Wrong("3.3", crosses_off, "it crosses off in the plan"),
    Wrong("3.4", still_floats, "rounded, but not in int8: nothing is saved"),
    Wrong("3.4", fp32_scales, "fp64 is lost on the way"),
    Wrong("3.4", padding_included, "the padding comes along"),
    Wrong("3.4", one_scale, "one scale for the whole tensor"),
    Wrong("3.4", last_block_lost, "the last, shorter block is lost"),
    Wrong("3.4", across, "blocks run across, not along"),
    Wrong("3.4", upside_down, "the scale is upside down"),
    Wrong("3.4", steps_of_128, "128 steps: the largest number does not fit into int8"),
    Wrong("3.4", largest_number, "the largest number, not the largest magnitude"),
    Wrong("3.4", from_smallest_to_largest, "from the smallest to the largest: zero is no longer zero"),
    Wrong("3.4", half_the_range, "half the range of int8 is left unused"),
    Wrong("3.4", zero_by_zero, "a block of zeros divides zero by zero"),
    Wrong("3.4", cut_off, "numbers are cut off, not rounded"),
    Wrong("3.4", rounded_down, "always rounded down: every block is pulled to one side"),
    Wrong("3.4", wraps_around, "numbers wrap around in int8"),
    Wrong("3.4", in_its_input, "it overwrites its input"),
    Wrong("3.4", hides_overflow, "inf and nan are hidden"),
    Wrong("3.4", nan_everywhere, "a nan spreads to other blocks"),
    Wrong("3.4", narrow_scales, "scales as coarse as bf16"),
    Wrong("3.4", not_padded, "the last, shorter block is not padded"),
    Wrong("3.4", rounded_up, "always rounded up: every block is pulled to one side"),
    Wrong("3.4", nearly_rounded, "not rounded to the nearest step"),
    Wrong("3.4", by_chance, "rounded up or down by chance"),
    Wrong("3.4", worked_out_in_bf16, "worked out in bf16: steps are missed, and the largest number may overflow int8"),
    Wrong("3.4", floor_under_the_scale, "a floor under the scale, or something added to it"),
    Wrong("3.4", zeros_have_scale_one, "a block of zeros has another scale than 0"),
    Wrong("3.5", value_first, "value and index are swapped"),
    Wrong("3.5", above_a_threshold, "not k numbers"),
    Wrong("3.5", largest_values, "the largest, not the largest magnitudes"),
    Wrong("3.5", smallest_magnitudes, "the smallest"),
    Wrong("3.5", first_k, "the first, not the largest"),
    Wrong("3.5", magnitudes_only, "signs are lost"),
    Wrong("3.5", sorted_apart, "places and numbers do not belong together"),
    Wrong("3.5", zeroes_what_it_sends, "it overwrites its input"),
    Wrong("3.5", int64_places, "places in int64: as many bytes as the numbers"),
    Wrong("3.5", ties_included, "ties give more than k"),
    Wrong("3.5", passes_over_nan, "nan is passed over"),
    Wrong("3.5", int16_places, "places do not fit into int16"),
    Wrong("3.5", largest_squares, "squares underflow"),
    Wrong("3.6", a_new_residual, "the residual that the caller keeps does not change"),
    Wrong("3.6", never_sent, "the residual is never sent"),
    Wrong("3.6", drops_older_remainders, "older remainders are dropped"),
    Wrong("3.6", counts_twice, "remainders are counted twice"),
    Wrong("3.6", wrong_sign, "the remainder has the wrong sign"),
    Wrong("3.6", keeps_everything, "what was sent is kept, too, and sent again"),
    Wrong("3.6", keeps_what_was_sent, "what was sent is kept, not what was left out"),
    Wrong("3.6", adds_into_the_gradient, "it overwrites the gradient"),
    Wrong("3.6", returns_what_is_read, "it returns what is read, not what is sent"),
    Wrong("3.6", compresses_twice, "it compresses twice"),
    Wrong("3.6", message_in_one_piece, "the message is handed to decompress in one piece"),
    Wrong("3.6", by_way_of_fp32, "fp64 is lost on the way"),
    Wrong("3.6", in_the_residual_itself, "the message shares its memory with the residual"),
]
