"""Ways to miss the parts of one rank: norm, positions, loss, schedule, arithmetic, sampling."""

import math

import torch
import torch.nn.functional as F

from deepseek_lab.model.generate import sample_next
from deepseek_lab.model.loss import cross_entropy_sum
from deepseek_lab.model.norm import rms_norm
from deepseek_lab.model.rope import apply_rope
from deepseek_lab.plan.flops import active_matmul_parameters, flops_per_token
from deepseek_lab.train.schedule import warmup_cosine
from tests.wrong_answers import Wrong

# 1.1 rms_norm


def variance(x, weight, eps):
    return weight * x * torch.rsqrt(x.var(dim=-1, keepdim=True, unbiased=False) + eps)


def layer_norm(x, weight, eps):
    return F.layer_norm(x, x.shape[-1:], weight, eps=eps)


def sum_of_squares(x, weight, eps):
    return weight * x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + eps)


def eps_outside(x, weight, eps):
    return weight * x / (x.square().mean(dim=-1, keepdim=True).sqrt() + eps)


def no_eps(x, weight, eps):
    return weight * x / x.square().mean(dim=-1, keepdim=True).sqrt()


def no_weight(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def weight_from_one(x, weight, eps):
    return rms_norm(x, 1 + weight, eps)


def whole_tensor(x, weight, eps):
    return weight * x * torch.rsqrt(x.square().mean() + eps)


def no_root(x, weight, eps):
    return weight * x / (x.square().mean(dim=-1, keepdim=True) + eps)


def norm_in_fp32(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight).to(x.dtype)


def narrow_norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def widened_for_good(x, weight, eps):
    return rms_norm(x.to(torch.promote_types(x.dtype, torch.float32)), weight, eps)


def norm_in_place(x, weight, eps):
    return x.mul_(torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)).mul_(weight)


def constant_scale(x, weight, eps):
    return weight * x * torch.rsqrt(x.detach().square().mean(dim=-1, keepdim=True) + eps)


def weight_last(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


# 1.2 apply_rope


def halves(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def backwards(x, cos, sin):
    return apply_rope(x, cos, -sin)


def sorted_pairs(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def shear(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos + b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def reflection(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin - b * cos), dim=-1).flatten(-2)


def reads_what_it_wrote(x, cos, sin):
    y = x.clone()
    y[..., 0::2] = y[..., 0::2] * cos - y[..., 1::2] * sin
    y[..., 1::2] = y[..., 0::2] * sin + y[..., 1::2] * cos
    return y


def exchanged(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * sin - b * cos, a * cos + b * sin), dim=-1).flatten(-2)


def one_angle(x, cos, sin):
    return apply_rope(x, cos[:, :1].expand_as(cos), sin[:, :1].expand_as(sin))


def from_one(x, cos, sin):
    turn = torch.complex(cos, sin) * torch.complex(cos[1], sin[1])
    return apply_rope(x, turn.real, turn.imag)


def rope_in_fp32(x, cos, sin):
    return apply_rope(x.float(), cos.float(), sin.float()).to(x.dtype)


def rope_in_half(x, cos, sin):
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def rope_in_place(x, cos, sin):
    x.copy_(apply_rope(x, cos, sin))
    return x


def rope_widened_for_good(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def four_dimensions_only(x, cos, sin):
    _, heads, _, _ = x.shape
    return torch.cat([apply_rope(x[:, h : h + 1], cos, sin) for h in range(heads)], dim=1)


# 1.3 cross_entropy_sum


def mean_loss(logits, labels, label_smoothing=0.0, ignore_index=-100):
    loss_sum, n_valid = cross_entropy_sum(logits, labels, label_smoothing, ignore_index)
    return loss_sum / n_valid, n_valid


def counts_padding(logits, labels, label_smoothing=0.0, ignore_index=-100):
    loss_sum, _ = cross_entropy_sum(logits, labels, label_smoothing, ignore_index)
    return loss_sum, torch.tensor(labels.numel())


def padding_becomes_class_0(logits, labels, label_smoothing=0.0, ignore_index=-100):
    loss_sum, _ = cross_entropy_sum(logits, labels.clamp(min=0), label_smoothing)
    return loss_sum, (labels != ignore_index).sum()


def padding_is_smoothed(logits, labels, label_smoothing=0.0, ignore_index=-100):
    loss_sum, n_valid = cross_entropy_sum(logits, labels, label_smoothing, ignore_index)
    return loss_sum - label_smoothing * logits.log_softmax(-1).mean(-1)[labels == ignore_index].sum(), n_valid


def likelihood(logits, labels, label_smoothing=0.0, ignore_index=-100):
    loss_sum, n_valid = cross_entropy_sum(logits, labels, label_smoothing, ignore_index)
    return -loss_sum, n_valid


def label_as_number(logits, labels, label_smoothing=0.0, ignore_index=-100):
    valid = labels != ignore_index
    target = (1 - label_smoothing) * labels[..., None] + label_smoothing / logits.shape[-1]
    return -(target * logits.log_softmax(-1)).sum(-1)[valid].sum(), valid.sum()


def smoothed(target_of):
    """A loss that differs in its target: `target_of(one_hot, epsilon, V)`."""

    def loss(logits, labels, label_smoothing=0.0, ignore_index=-100):
        valid = labels != ignore_index
        V = logits.shape[-1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        target = target_of(F.one_hot(labels.where(valid, 0), V).to(wide.dtype), label_smoothing, V)
        return -(target * wide.log_softmax(-1)).sum(-1).where(valid, 0).sum(), valid.sum()

    return loss


def bits(logits, labels, label_smoothing=0.0, ignore_index=-100):
    loss_sum, n_valid = cross_entropy_sum(logits, labels, label_smoothing, ignore_index)
    return loss_sum / math.log(2), n_valid


def always_minus_100(logits, labels, label_smoothing=0.0, ignore_index=-100):
    return cross_entropy_sum(logits, labels, label_smoothing)


def log_of_softmax(logits, labels, label_smoothing=0.0, ignore_index=-100):
    valid = labels != ignore_index
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1).log()
    picked = log_p.gather(-1, labels.where(valid, 0)[..., None]).squeeze(-1)
    if label_smoothing:
        picked = (1 - label_smoothing) * picked + label_smoothing * log_p.mean(-1)
    return -picked.where(valid, 0).sum(), valid.sum()


def loss_in_fp32(logits, labels, label_smoothing=0.0, ignore_index=-100):
    loss_sum, n_valid = cross_entropy_sum(logits.float(), labels, label_smoothing, ignore_index)
    return loss_sum.to(logits.dtype), n_valid


def loss_in_half(logits, labels, label_smoothing=0.0, ignore_index=-100):
    valid = labels != ignore_index
    log_p = logits.log_softmax(-1)
    picked = log_p.gather(-1, labels.where(valid, 0)[..., None]).squeeze(-1)
    if label_smoothing:
        picked = (1 - label_smoothing) * picked + label_smoothing * log_p.mean(-1)
    return -picked.where(valid, 0).sum(), valid.sum()


def python_number(logits, labels, label_smoothing=0.0, ignore_index=-100):
    loss_sum, n_valid = cross_entropy_sum(logits, labels, label_smoothing, ignore_index)
    return loss_sum.item(), n_valid


def nan_when_all_is_padding(logits, labels, label_smoothing=0.0, ignore_index=-100):
    valid = labels != ignore_index
    mean = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), label_smoothing=label_smoothing, ignore_index=ignore_index
    )
    return mean * valid.sum(), valid.sum()


def count_as_int(logits, labels, label_smoothing=0.0, ignore_index=-100):
    loss_sum, n_valid = cross_entropy_sum(logits, labels, label_smoothing, ignore_index)
    return loss_sum, int(n_valid)


def count_as_float(logits, labels, label_smoothing=0.0, ignore_index=-100):
    loss_sum, _ = cross_entropy_sum(logits, labels, label_smoothing, ignore_index)
    return loss_sum, (labels != ignore_index).float().sum()


def loss_only(logits, labels, label_smoothing=0.0, ignore_index=-100):
    return cross_entropy_sum(logits, labels, label_smoothing, ignore_index)[0]


# 1.4 warmup_cosine


def cold_start(step, *, peak, floor, warmup_steps, total_steps):
    if step < warmup_steps:
        return peak * step / warmup_steps
    return warmup_cosine(step, peak=peak, floor=floor, warmup_steps=warmup_steps, total_steps=total_steps)


def from_the_floor(step, *, peak, floor, warmup_steps, total_steps):
    if step < warmup_steps:
        return floor + (peak - floor) * (step + 1) / warmup_steps
    return warmup_cosine(step, peak=peak, floor=floor, warmup_steps=warmup_steps, total_steps=total_steps)


def after_warmup(decay):
    """The right warm-up, then `decay(step, peak, floor, warmup_steps, total_steps)`."""

    def schedule(step, *, peak, floor, warmup_steps, total_steps):
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        return decay(step, peak, floor, warmup_steps, total_steps)

    return schedule


def half_cosine(progress):
    return 0.5 * (1 + math.cos(math.pi * progress))


def progress_of(step, warmup_steps, total_steps):
    return min((step - warmup_steps + 1) / max(total_steps - warmup_steps, 1), 1.0)


jump = after_warmup(lambda s, peak, floor, w, n: floor + (peak - floor) * half_cosine(min((s + 1) / n, 1)))
plain_cosine = after_warmup(lambda s, peak, floor, w, n: peak * math.cos(math.pi * s / max(n - w, 1)))
below_zero = after_warmup(
    lambda s, peak, floor, w, n: floor + (peak - floor) * math.cos(math.pi * progress_of(s, w, n))
)
quarter = after_warmup(
    lambda s, peak, floor, w, n: floor + (peak - floor) * math.cos(math.pi / 2 * progress_of(s, w, n))
)
held = after_warmup(
    lambda s, peak, floor, w, n: floor + (peak - floor) * half_cosine(min((s - w) / max(n - w - 1, 1), 1))
)
divides = after_warmup(lambda s, peak, floor, w, n: floor + (peak - floor) * half_cosine(min((s - w + 1) / (n - w), 1)))
late = after_warmup(lambda s, peak, floor, w, n: floor + (peak - floor) * half_cosine(min((s - w) / max(n - w, 1), 1)))
early = after_warmup(
    lambda s, peak, floor, w, n: floor + (peak - floor) * half_cosine(min((s - w + 2) / max(n - w, 1), 1))
)
stretched = after_warmup(lambda s, peak, floor, w, n: floor + (peak - floor) * half_cosine(min((s - w + 1) / n, 1)))
rises_again = after_warmup(
    lambda s, peak, floor, w, n: floor + (peak - floor) * half_cosine((s - w + 1) / max(n - w, 1))
)
cut_off = after_warmup(lambda s, peak, floor, w, n: max(floor, peak * half_cosine(progress_of(s, w, n))))
no_floor = after_warmup(lambda s, peak, floor, w, n: peak * half_cosine(progress_of(s, w, n)))
floor_on_top = after_warmup(lambda s, peak, floor, w, n: floor + peak * half_cosine(progress_of(s, w, n)))
straight = after_warmup(lambda s, peak, floor, w, n: floor + (peak - floor) * (1 - progress_of(s, w, n)))


# 1.5 flops_per_token


def attention_flops(config, seq_len):
    return flops_per_token(config, seq_len) - 6 * active_matmul_parameters(config)


def all_experts(config, seq_len):
    everything = {**config.to_dict(), "num_experts_per_tok": config.n_routed_experts, "topk_method": "greedy"}
    return flops_per_token(type(config)(**everything), seq_len)


def six_n(config, seq_len):
    embedding = 6 * config.vocab_size * config.hidden_size
    return all_experts(config, seq_len) + embedding


def with_embedding(config, seq_len):
    return flops_per_token(config, seq_len) + 6 * config.vocab_size * config.hidden_size


def forward_only(config, seq_len):
    return flops_per_token(config, seq_len) / 3


def backward_once(config, seq_len):
    return flops_per_token(config, seq_len) * 2 / 3


def multiply_adds(config, seq_len):
    return flops_per_token(config, seq_len) / 2


def recomputed(config, seq_len):
    return flops_per_token(config, seq_len) * 4 / 3


def weights_only(config, seq_len):
    return 6 * active_matmul_parameters(config)


def full_attention(config, seq_len):
    return flops_per_token(config, seq_len) + attention_flops(config, seq_len)


def one_layer(config, seq_len):
    return 6 * active_matmul_parameters(config) + attention_flops(config, seq_len) / config.num_hidden_layers


def no_rotary_part(config, seq_len):
    rotary = config.num_hidden_layers * config.num_attention_heads * config.qk_rope_head_dim
    return flops_per_token(config, seq_len) - 6 * rotary * seq_len / 2


def no_head(config, seq_len):
    return flops_per_token(config, seq_len) - 6 * config.vocab_size * config.hidden_size


def no_shared(config, seq_len):
    layers = max(config.num_hidden_layers - config.first_k_dense_replace, 0)
    shared = 3 * config.hidden_size * config.moe_intermediate_size * config.n_shared_experts
    return flops_per_token(config, seq_len) - 6 * layers * shared


def no_router(config, seq_len):
    layers = max(config.num_hidden_layers - config.first_k_dense_replace, 0)
    return flops_per_token(config, seq_len) - 6 * layers * config.hidden_size * config.n_routed_experts


def whole_sequence(config, seq_len):
    return flops_per_token(config, seq_len) * seq_len


# 1.6 mfu


def checked(value):
    def mfu(tokens_per_s, flops_per_token, peak_flops_per_s):
        if peak_flops_per_s <= 0:
            raise ValueError("no peak")
        return value(tokens_per_s * flops_per_token / peak_flops_per_s)

    return mfu


def unchecked(tokens_per_s, flops_per_token, peak_flops_per_s):
    return tokens_per_s * flops_per_token / peak_flops_per_s


# 1.7 sample_next


def rank_of_token(logits_V, *, temperature, top_k=0, top_p=1.0, generator=None):
    if temperature == 0:
        return int(logits_V.argmax())
    scaled, _ = (logits_V / temperature).sort(descending=True)
    probabilities = scaled[: top_k or None].softmax(-1)
    probabilities = probabilities.where(probabilities.cumsum(-1) - probabilities < top_p, 0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def sampler(change):
    """The right sampler under other arguments: `change(logits, temperature, top_k, top_p)` returns them."""

    def sample(logits_V, *, temperature, top_k=0, top_p=1.0, generator=None):
        if temperature == 0:
            return int(logits_V.argmax())
        logits, temperature, top_k, top_p = change(logits_V, temperature, top_k, top_p)
        return sample_next(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)

    return sample


def nucleus(keep):
    """A sampler with another rule for top-p: `keep(probabilities, cumulative, p)` is a mask over the sorted tokens."""

    def sample(logits_V, *, temperature, top_k=0, top_p=1.0, generator=None):
        if temperature == 0:
            return int(logits_V.argmax())
        scaled, tokens = (logits_V / temperature).sort(descending=True)
        scaled, tokens = scaled[: top_k or None], tokens[: top_k or None]
        probabilities = scaled.softmax(-1)
        probabilities = probabilities.where(keep(probabilities, probabilities.cumsum(-1), top_p), 0)
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])

    return sample


def cuts_the_crossing_token(probabilities, cumulative, p):
    keep = cumulative - 1e-9 <= p
    keep[0] = True
    return keep


def cuts_at_one(probabilities, cumulative, p):
    return cumulative + 1e-7 <= p  # what rounding does in fp32, made certain


def keeps_one_at_a_tie(probabilities, cumulative, p):
    return cumulative - probabilities <= p


def keeps_one_more(probabilities, cumulative, p):
    before = cumulative - probabilities
    return torch.cat((before.new_zeros(1), before[:-1])) < p


def top_p_first(logits_V, *, temperature, top_k=0, top_p=1.0, generator=None):
    if temperature == 0:
        return int(logits_V.argmax())
    scaled, tokens = (logits_V / temperature).sort(descending=True)
    probabilities = scaled.softmax(-1)
    probabilities = probabilities.where(probabilities.cumsum(-1) - probabilities < top_p, 0)[: top_k or None]
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def top_p_before_temperature(logits_V, *, temperature, top_k=0, top_p=1.0, generator=None):
    if temperature == 0:
        return int(logits_V.argmax())
    sorted_logits, tokens = logits_V.sort(descending=True)
    probabilities = sorted_logits[: top_k or None].softmax(-1)
    kept = probabilities.cumsum(-1) - probabilities < top_p
    tempered = (sorted_logits[: top_k or None] / temperature).softmax(-1).where(kept, 0)
    return int(tokens[torch.multinomial(tempered, 1, generator=generator)])


def own_generator(logits_V, *, temperature, top_k=0, top_p=1.0, generator=None):
    return sample_next(logits_V, temperature=temperature, top_k=top_k, top_p=top_p)


def one_token_tensor(logits_V, *, temperature, top_k=0, top_p=1.0, generator=None):
    token = sample_next(logits_V, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    return token if temperature == 0 else torch.tensor([token])


def divides_by_zero(logits_V, *, temperature, top_k=0, top_p=1.0, generator=None):
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))


WRONG = [
    Wrong("1.1", variance, "the variance, not the mean square"),
    Wrong("1.1", layer_norm, "layer norm: the mean is subtracted"),
    Wrong("1.1", sum_of_squares, "the sum of the squares, not their mean"),
    Wrong("1.1", eps_outside, "eps outside the root"),
    Wrong("1.1", no_eps, "eps is left out"),
    Wrong("1.1", no_weight, "the weight is left out"),
    Wrong("1.1", weight_from_one, "one plus the weight"),
    Wrong("1.1", whole_tensor, "one norm for the whole tensor"),
    Wrong("1.1", no_root, "the mean square without its root"),
    Wrong("1.1", norm_in_fp32, "fp64 is lost on the way"),
    Wrong("1.1", narrow_norm, "half precision inside"),
    Wrong("1.1", widened_for_good, "the dtype changes"),
    Wrong("1.1", weight_last, "the weight's dtype decides, not that of x"),
    Wrong("1.1", norm_in_place, "x is overwritten"),
    Wrong("1.1", constant_scale, "the gradient is cut"),
    Wrong("1.2", halves, "pairs from the two halves, not neighbours"),
    Wrong("1.2", backwards, "turned the other way"),
    Wrong("1.2", sorted_pairs, "the pairs come back sorted into halves"),
    Wrong("1.2", shear, "a sign is wrong: not a rotation"),
    Wrong("1.2", reflection, "a sign is wrong: not a rotation, but a reflection"),
    Wrong("1.2", reads_what_it_wrote, "the second component is made from the first one's new value"),
    Wrong("1.2", exchanged, "cosine and sine are exchanged"),
    Wrong("1.2", one_angle, "every pair turns by the first pair's angle"),
    Wrong("1.2", from_one, "positions are counted from one"),
    Wrong("1.2", rope_in_fp32, "fp64 is lost on the way"),
    Wrong("1.2", rope_in_half, "half precision inside"),
    Wrong("1.2", rope_in_place, "x is overwritten"),
    Wrong("1.2", rope_widened_for_good, "the dtype changes"),
    Wrong("1.2", four_dimensions_only),
    Wrong("1.3", mean_loss, "a mean, not a sum"),
    Wrong("1.3", counts_padding, "ignored labels are counted"),
    Wrong("1.3", padding_becomes_class_0, "ignored labels add to the loss"),
    Wrong("1.3", padding_is_smoothed, "ignored labels add their share of the smoothing"),
    Wrong("1.3", likelihood, "the sign: log-likelihood, not loss"),
    Wrong("1.3", label_as_number, "the label's number is used as its probability"),
    Wrong("1.3", smoothed(lambda y, e, V: (1 - e) * y + e / (V - 1) * (1 - y)), "the label gets no share of epsilon"),
    Wrong("1.3", smoothed(lambda y, e, V: (1 - e) * y + e), "epsilon for each class, not for all together"),
    Wrong("1.3", smoothed(lambda y, e, V: y + e / V), "epsilon is added without taking it from the label"),
    Wrong("1.3", smoothed(lambda y, e, V: y), "smoothing is left out"),
    Wrong("1.3", bits, "bits, not nats"),
    Wrong("1.3", always_minus_100, "ignore_index is not used"),
    Wrong("1.3", log_of_softmax, "softmax first, logarithm after"),
    Wrong("1.3", loss_in_fp32, "fp64 is lost on the way"),
    Wrong("1.3", loss_in_half, "half precision inside"),
    Wrong("1.3", python_number, "the gradient is cut"),
    Wrong("1.3", nan_when_all_is_padding),
    Wrong("1.3", count_as_int, "the count is a Python number"),
    Wrong("1.3", count_as_float, "the count is no int64 scalar"),
    Wrong("1.3", loss_only),
    Wrong("1.4", cold_start, "the first step has a learning rate of zero"),
    Wrong("1.4", from_the_floor, "warm-up starts from the floor"),
    Wrong("1.4", jump, "the cosine starts at step 0, so it jumps where the warm-up ends"),
    Wrong("1.4", plain_cosine, "a plain cosine of the step, which jumps and goes negative"),
    Wrong("1.4", below_zero, "a whole half-turn of the cosine: it ends below zero"),
    Wrong("1.4", quarter, "a quarter turn of the cosine"),
    Wrong("1.4", held, "the peak is held for two steps"),
    Wrong("1.4", divides, "a division by a number of steps that may be zero"),
    Wrong("1.4", late, "it reaches the floor one step late"),
    Wrong("1.4", early, "it reaches the floor one step early"),
    Wrong("1.4", stretched, "the decay is stretched over all steps, warm-up included"),
    Wrong("1.4", rises_again, "past the end it rises again"),
    Wrong("1.4", cut_off, "the floor cuts the curve off"),
    Wrong("1.4", no_floor, "the floor is left out"),
    Wrong("1.4", floor_on_top, "the floor is added on top"),
    Wrong("1.4", straight, "a straight line, not a cosine"),
    Wrong("1.5", all_experts, "all experts are counted, not the chosen ones"),
    Wrong("1.5", six_n, "all parameters are counted, idle experts and embedding too"),
    Wrong("1.5", with_embedding, "the embedding is counted: it is a look-up"),
    Wrong("1.5", forward_only, "forward only"),
    Wrong("1.5", backward_once, "backward counted once, not twice"),
    Wrong("1.5", multiply_adds, "a multiply-add counted as one"),
    Wrong("1.5", recomputed, "recomputation is counted: that is hardware utilization"),
    Wrong("1.5", weights_only, "attention itself is left out"),
    Wrong("1.5", full_attention, "attention over the whole sequence, not half of it"),
    Wrong("1.5", one_layer, "attention is counted in one layer, not in all"),
    Wrong("1.5", no_rotary_part, "attention without the rotary part of queries and keys"),
    Wrong("1.5", no_head, "the output head is left out"),
    Wrong("1.5", no_shared, "the shared experts are left out"),
    Wrong("1.5", no_router, "the router is left out"),
    Wrong("1.5", whole_sequence, "the whole sequence, not one token"),
    Wrong("1.6", checked(lambda x: 100 * x), "per cent, not a fraction"),
    Wrong("1.6", checked(lambda x: 1 / x), "upside down"),
    Wrong("1.6", checked(lambda x: x / 2), "the peak with sparsity, which dense matrices never reach"),
    Wrong("1.6", checked(lambda x: 3 * x), "backward counted again: flops_per_token holds it already"),
    Wrong("1.6", checked(lambda x: 6 * x), "six counted again: flops_per_token holds it already"),
    Wrong("1.6", checked(lambda x: min(x, 1.0)), "impossible values are hidden: a wrong peak should be seen"),
    Wrong("1.6", unchecked, "no check of the peak"),
    Wrong("1.7", rank_of_token, "the rank among the sorted tokens, not the token"),
    Wrong("1.7", sampler(lambda x, t, k, p: (x, 1 / t, k, p)), "the temperature multiplies the logits"),
    Wrong("1.7", sampler(lambda x, t, k, p: (x, 1.0, k, p)), "the temperature has no effect"),
    Wrong("1.7", sampler(lambda x, t, k, p: (x, 1e-6, k, p)), "always the likeliest token"),
    Wrong("1.7", sampler(lambda x, t, k, p: (x, t, 0, p)), "top_k is not used"),
    Wrong("1.7", sampler(lambda x, t, k, p: (x, t, k, 1.0)), "top_p is not used"),
    Wrong("1.7", nucleus(cuts_the_crossing_token), "top-p cuts the token that crosses p"),
    Wrong("1.7", nucleus(cuts_at_one), "top-p cuts the last token at p = 1, where rounding takes the sum past it"),
    Wrong("1.7", nucleus(keeps_one_at_a_tie), "the sum of those before may equal p"),
    Wrong("1.7", nucleus(keeps_one_more), "top-p keeps one token too many"),
    Wrong("1.7", top_p_first, "top-p counts over all tokens, not those that top-k kept"),
    Wrong("1.7", top_p_before_temperature, "top-p is counted before the temperature"),
    Wrong("1.7", own_generator, "the generator is not used"),
    Wrong("1.7", one_token_tensor, "no Python int comes out"),
    Wrong("1.7", divides_by_zero, "temperature 0 has no branch of its own"),
]

for made in WRONG:  # functions made by another function are told apart by what is wrong with them
    if "<locals>" in made.fn.__qualname__:
        made.fn.__name__ = (made.misconception or made.fn.__name__).replace(" ", "_")
