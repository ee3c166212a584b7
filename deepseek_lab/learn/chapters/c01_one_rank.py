"""Chapter 01: the parts of a decoder and of its training that one rank can show, each with its grader.

Every grader compares with an independent way to get the same number (complex multiplication, `torch`'s own
cross-entropy, counting weights on the meta device, counting draws), in fp64, and recognises the usual ways to miss it
by the value that they give.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_lab.data.batches import Batch
from deepseek_lab.data.tokens import TokenFile
from deepseek_lab.learn.exercises import Exercise
from deepseek_lab.learn.verdict import Row, Verdict, close, distance, ok, wrong
from deepseek_lab.model.config import DeepSeekConfig
from deepseek_lab.model.transformer import DeepSeekModel

FP64_LOST = "fp64 is lost on the way"
HALF_INSIDE = "half precision inside"


def _draw(*shape: int, seed: int = 0, shift: float = 0.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift


def _recognise(got: Any, known: dict[str, Any], tolerance: float = 1e-6) -> str | None:
    """The first misconception whose value is what came out."""
    return next((name for name, value in known.items() if close(got, value, tolerance)), None)


def _shape_problem(got: Any, like: Tensor) -> Verdict | None:
    if not isinstance(got, Tensor):
        return wrong(f"It must return a tensor; this is {type(got).__name__}.")
    if got.shape != like.shape:
        return wrong("The shape is not that of x.", rows=[("shape", tuple(like.shape), tuple(got.shape))])
    return None


def _precision_problem(got: Tensor, expected: Tensor, tolerance: float = 1e-12) -> Verdict | None:
    if got.dtype != expected.dtype:
        summary = "A result in another dtype makes everything after it slower, or less precise."
        name = FP64_LOST if expected.dtype == torch.float64 else "the dtype changes"
        return wrong(summary, name, [("dtype", str(expected.dtype), str(got.dtype))])
    if tolerance < distance(got, expected) < 1e-6:
        summary = (
            "Right to about seven digits: an fp64 input went through fp32. A reference run in fp64 would not be one."
        )
        return wrong(summary, FP64_LOST, [("relative error", f"below {tolerance:g}", distance(got, expected))])
    return None


def _gradient_problem(
    fn: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: dict[str, Tensor]
) -> Verdict | None:
    """Compare the gradients of every input under one random projection of the output."""
    gradients = []
    for function in (reference, fn):
        leaves = [x.clone().requires_grad_() for x in inputs.values()]
        out = function(*leaves)
        if not out.requires_grad:
            return wrong("The values are right, but nothing flows back to the inputs.", "the gradient is cut")
        gradients.append(torch.autograd.grad(out, leaves, _draw(*out.shape, seed=9), allow_unused=True))
    rows: list[Row] = [
        (f"gradient of {name}", a, "none" if b is None else b)
        for name, a, b in zip(inputs, *gradients, strict=True)
        if b is None or not close(b, a)
    ]
    return wrong("The values are right, the gradients are not.", "the gradient is cut", rows) if rows else None


# 1.1


def grade_rms_norm(fn) -> Verdict:
    """Values, gradients and dtypes of RMS norm, against the formula in fp64."""
    x, weight, eps = _draw(2, 5, 8, shift=1.5), _draw(8, seed=1), 0.05
    kept = x.clone()
    got = fn(x, weight, eps)
    if not torch.equal(x, kept):
        return wrong("Whoever called it still needs x for the residual.", "x is overwritten")
    expected = _rms(x, weight, eps)
    if problem := _shape_problem(got, x) or _precision_problem(got, expected):
        return problem
    if not close(got, expected):
        summary = "These are not the values of x divided by its root mean square, times the weight."
        return wrong(
            summary, _recognise(got, _rms_misconceptions(x, weight, eps)), [("first row", expected[0, 0], got[0, 0])]
        )
    if problem := _gradient_problem(
        lambda a, b: fn(a, b, eps), lambda a, b: _rms(a, b, eps), {"x": x, "weight": weight}
    ):
        return problem
    zeros = fn(torch.zeros(1, 8), torch.ones(8), 1e-6)
    if not close(zeros, torch.zeros(1, 8)):
        return wrong("A vector of zeros must stay zero.", rows=[("norm of zeros", torch.zeros(1, 8), zeros)])
    for dtype in (torch.float16, torch.bfloat16):
        large = (300 * _draw(4, 64, seed=2)).to(dtype)
        half = fn(large, torch.ones(64, dtype=dtype), 1e-6)
        if problem := _precision_problem(half, large, tolerance=math.inf):
            return problem
        error = distance(half, _rms(large.double(), torch.ones(64, dtype=torch.float64), 1e-6))
        if error > 2 * torch.finfo(dtype).eps:
            summary = "With half precisions the squares overflow or lose digits: work in fp32, return the dtype of x."
            rows = [(f"relative error, {dtype}", f"below {2 * torch.finfo(dtype).eps:.2g}", error)]
            return wrong(summary, HALF_INSIDE, rows)
        mixed = fn(large, torch.ones(64), 1e-6)
        if mixed.dtype != dtype:
            summary = "With a weight in fp32 the result is fp32: narrow to the dtype of x last, after the weight."
            name = "the weight's dtype decides, not that of x"
            return wrong(summary, name, [("dtype", str(dtype), str(mixed.dtype))])
    return ok("Values and gradients in fp64, zeros, and large half-precision inputs are all as they should be.")


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x**2).sum(-1, keepdim=True) / x.shape[-1] + eps)


def _rms_misconceptions(x: Tensor, weight: Tensor, eps: float) -> dict[str, Tensor]:
    mean_square = x.square().mean(-1, keepdim=True)
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    sample_variance = x.var(-1, keepdim=True)
    return {
        "the variance, not the mean square": weight * x / (variance + eps).sqrt(),
        "the variance, not the mean square (and over n - 1)": weight * x / (sample_variance + eps).sqrt(),
        "layer norm: the mean is subtracted": weight * centred / (variance + eps).sqrt(),
        "the sum of the squares, not their mean": weight * x / (x.square().sum(-1, keepdim=True) + eps).sqrt(),
        "eps outside the root": weight * x / (mean_square.sqrt() + eps),
        "eps is left out": weight * x / mean_square.sqrt(),
        "the weight is left out": x / (mean_square + eps).sqrt(),
        "one plus the weight": (1 + weight) * x / (mean_square + eps).sqrt(),
        "one norm for the whole tensor": weight * x / (x.square().mean() + eps).sqrt(),
        "the mean square without its root": weight * x / (mean_square + eps),
    }


# 1.2


def grade_apply_rope(fn) -> Verdict:
    """Rotation of neighbouring pairs, against complex multiplication; then what a rotation must keep."""
    T, d = 7, 8
    angles = torch.arange(T, dtype=torch.float64)[:, None] * 10 ** -torch.linspace(0, 2, d // 2, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    x = _draw(2, 3, T, d)
    kept = x.clone()
    got = fn(x, cos, sin)
    if not torch.equal(x, kept):
        return wrong("The keys of the cache would be turned again at every step.", "x is overwritten")
    expected = _rotate(x, cos, sin)
    if problem := _shape_problem(got, x) or _precision_problem(got, expected):
        return problem
    if not close(got, expected):
        summary, rows = _what_a_rotation_keeps(got, x)
        name = _recognise(got, _rope_misconceptions(x, cos, sin))
        return wrong(summary, name, [("position 1, first head", expected[0, 0, 1], got[0, 0, 1]), *rows])
    if problem := _gradient_problem(lambda a: fn(a, cos, sin), lambda a: _rotate(a, cos, sin), {"x": x}):
        return problem
    alone = fn(x[0, 0], cos, sin)
    if not close(alone, expected[0, 0]):
        return wrong("x may have any number of dimensions before (T, d): here it had none.")
    return _half_rope_problem(fn, x, cos.float(), sin.float()) or ok(
        "Pairs are turned by their position: lengths are kept, position 0 is untouched, gradients turn back."
    )


def _half_rope_problem(fn, x: Tensor, cos: Tensor, sin: Tensor) -> Verdict | None:
    """Rotated in fp32 and narrowed once, no component is further off than half a unit in its last place."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = x.to(dtype)
        got = fn(narrow, cos, sin)
        if problem := _precision_problem(got, narrow, tolerance=math.inf):
            return problem
        exact = _rotate(narrow.double(), cos.double(), sin.double())
        half_unit = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5  # and what fp32 itself may lose
        if ((got - exact).abs() > half_unit).any():
            summary = (
                "Half precisions are rotated in fp32, and narrowed once, at the end: here they were rounded before."
            )
            best = distance(exact.to(dtype), exact)
            return wrong(summary, HALF_INSIDE, [(f"relative error, {dtype}", best, distance(got, exact))])
    return None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
    return torch.view_as_real(turned).flatten(-2)


def _what_a_rotation_keeps(got: Tensor, x: Tensor) -> tuple[str, list[Row]]:
    lengths, before = torch.linalg.vector_norm(got[0, 0], dim=-1), torch.linalg.vector_norm(x[0, 0], dim=-1)
    if not close(lengths, before):
        return "A rotation keeps lengths; these change.", [
            ("length at position 1", float(before[1]), float(lengths[1]))
        ]
    return "Lengths are kept, but these are not the pairs and angles that were asked for.", []


def _rope_misconceptions(x: Tensor, cos: Tensor, sin: Tensor) -> dict[str, Tensor]:
    a, b = x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)

    def woven(real: Tensor, imaginary: Tensor) -> Tensor:
        return torch.stack((real, imaginary), dim=-1).flatten(-2)

    real, imaginary = a * cos - b * sin, a * sin + b * cos
    return {
        "pairs from the two halves, not neighbours": torch.cat(
            (first * cos - second * sin, first * sin + second * cos), dim=-1
        ),
        "turned the other way": woven(a * cos + b * sin, b * cos - a * sin),
        "the pairs come back sorted into halves": torch.cat((real, imaginary), dim=-1),
        "a sign is wrong: not a rotation": woven(a * cos + b * sin, imaginary),
        "a sign is wrong: not a rotation, but a reflection": woven(real, a * sin - b * cos),
        "the second component is made from the first one's new value": woven(real, real * sin + b * cos),
        "cosine and sine are exchanged": woven(a * sin - b * cos, a * cos + b * sin),
        "every pair turns by the first pair's angle": _rotate(x, cos[:, :1].expand_as(cos), sin[:, :1].expand_as(sin)),
        "positions are counted from one": _rotate(x, *_one_later(cos, sin)),
    }


def _one_later(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    step = torch.complex(cos, sin) * torch.complex(cos[1], sin[1])
    return step.real, step.imag


# 1.3


def grade_cross_entropy_sum(fn) -> Verdict:
    """Sum and count against `torch`'s own cross-entropy: smoothing, ignored labels, gradients, extremes."""
    V, ignore = 6, -100
    logits = 2 * _draw(3, 4, V)
    labels = torch.tensor([[0, 5, 2, ignore], [1, ignore, 4, 3], [2, 2, 1, ignore]])
    for epsilon in (0.0, 0.1):
        loss_sum, n_valid = _two(fn(logits, labels, label_smoothing=epsilon))
        expected = _torch_loss(logits, labels, epsilon)
        if problem := _count_problem(n_valid):
            return problem
        if int(n_valid) != 9:
            name = "ignored labels are counted" if int(n_valid) == 12 else None
            return wrong("Nine labels of twelve count here.", name, [("n_valid", 9, int(n_valid))])
        if problem := _scalar_problem(loss_sum, expected):
            return problem
        if not close(loss_sum, expected):
            name = _recognise(loss_sum, _loss_misconceptions(logits, labels, epsilon))
            return wrong(f"The sum is not right at smoothing {epsilon:g}.", name, [("loss_sum", expected, loss_sum)])
        if problem := _gradient_problem(
            lambda x, e=epsilon: fn(x, labels, label_smoothing=e)[0],
            lambda x, e=epsilon: _torch_loss(x, labels, e),
            {"logits": logits},
        ):
            return problem
    return _loss_extremes(fn) or ok("Sums, counts and gradients agree with torch's, also with padding and huge logits.")


def _loss_extremes(fn) -> Verdict | None:
    logits, labels = _draw(4, 6), torch.tensor([0, 0, 3, 5])
    loss_sum, n_valid = _two(fn(logits, labels, 0.1, 0))
    if int(n_valid) != 2 or not close(loss_sum, _torch_loss(logits, labels, 0.1, 0)):
        summary = "With ignore_index=0 two labels count here. It is an argument, not always -100."
        return wrong(summary, "ignore_index is not used", [("n_valid", 2, int(n_valid))])
    padding = torch.full((4,), -100)
    leaf = logits.clone().requires_grad_()
    loss_sum, n_valid = _two(fn(leaf, padding, 0.1))
    if problem := _count_problem(n_valid):
        return problem
    (gradient,) = torch.autograd.grad(loss_sum, leaf, allow_unused=True)
    zeros: list[Row] = [("loss_sum", 0.0, loss_sum), ("n_valid", 0, int(n_valid))]
    if gradient is not None:
        zeros.append(("largest gradient", 0.0, gradient.abs().max()))
    if rows := [row for row in zeros if not close(row[2], 0.0, 0.0)]:
        summary = "When every label is padding, the loss and its gradient are zero: other ranks may still have tokens."
        return wrong(summary, rows=rows)
    huge = torch.tensor([[1e4, 0.0, -1e4]], dtype=torch.float64)
    loss_sum, _ = _two(fn(huge, torch.tensor([2])))
    if not close(loss_sum, 2e4):
        summary = "A logit of 10,000 must not overflow. Take the logarithm of the softmax in one operation."
        return wrong(summary, "softmax first, logarithm after", [("loss_sum", 2e4, loss_sum)])
    half = (3 * _draw(64, 500, seed=3)).bfloat16()
    labels = torch.arange(64)
    loss_sum, _ = _two(fn(half, labels))
    expected = _torch_loss(half.double(), labels, 0.0)
    if not close(loss_sum, expected, 1e-5):
        summary = "bfloat16 has three digits: widen the logits to fp32 before the softmax and the sum."
        return wrong(summary, HALF_INSIDE, [("loss_sum", expected, loss_sum)])
    return None


def _two(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError("it must return two values: loss_sum, n_valid")
    return result


def _count_problem(n_valid: Any) -> Verdict | None:
    if not isinstance(n_valid, Tensor):
        summary = "n_valid must be a scalar int64 tensor: it is stacked with others, and added up over ranks."
        return wrong(summary, "the count is a Python number", [("n_valid", "a tensor", type(n_valid).__name__)])
    if n_valid.dtype != torch.int64 or n_valid.shape != ():
        kind = f"{n_valid.dtype}, shape {tuple(n_valid.shape)}"
        summary = "n_valid must be a scalar int64 tensor: a float stops counting exactly, in fp32 at 16 million."
        return wrong(summary, "the count is no int64 scalar", [("n_valid", "torch.int64, shape ()", kind)])
    return None


def _scalar_problem(loss_sum: Any, expected: Tensor) -> Verdict | None:
    if not isinstance(loss_sum, Tensor):
        return wrong("loss_sum must be a tensor: nothing flows back through a Python number.", "the gradient is cut")
    if loss_sum.shape != ():
        return wrong("loss_sum must be one number.", rows=[("shape", (), tuple(loss_sum.shape))])
    return _precision_problem(loss_sum, expected)


def _torch_loss(logits: Tensor, labels: Tensor, epsilon: float, ignore: int = -100) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction="sum", label_smoothing=epsilon, ignore_index=ignore
    )


def _loss_misconceptions(logits: Tensor, labels: Tensor, epsilon: float) -> dict[str, Tensor]:
    V = logits.shape[-1]
    valid = labels != -100
    log_p = logits.log_softmax(-1)
    on_label = log_p.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    uniform = log_p.mean(-1)
    right = -((1 - epsilon) * on_label + epsilon * uniform)
    as_numbers = -(((1 - epsilon) * labels[..., None] + epsilon / V) * log_p).sum(-1)
    others = -((1 - epsilon) * on_label + epsilon / (V - 1) * (log_p.sum(-1) - on_label))
    return {
        "a mean, not a sum": right[valid].mean(),
        "a mean over all positions, ignored ones too": right.where(valid, 0).mean(),
        "ignored labels add to the loss": right.sum(),
        "ignored labels add their share of the smoothing": right[valid].sum() - epsilon * uniform[~valid].sum(),
        "the sign: log-likelihood, not loss": -right[valid].sum(),
        "the label's number is used as its probability": as_numbers[valid].sum(),
        "the label gets no share of epsilon": others[valid].sum(),
        "epsilon for each class, not for all together": -((1 - epsilon) * on_label + epsilon * log_p.sum(-1))[
            valid
        ].sum(),
        "epsilon is added without taking it from the label": -(on_label + epsilon * uniform)[valid].sum(),
        "smoothing is left out": -on_label[valid].sum(),
        "bits, not nats": right[valid].sum() / math.log(2),
    }


# 1.4


def grade_warmup_cosine(fn) -> Verdict:
    """Every step of several runs, against the two formulas; the corners have names."""
    runs = [
        dict(peak=3e-4, floor=3e-5, warmup_steps=10, total_steps=100),
        dict(peak=1e-4, floor=1e-6, warmup_steps=0, total_steps=50),
        dict(peak=1.0, floor=0.0, warmup_steps=1, total_steps=7),
        dict(peak=1.0, floor=0.1, warmup_steps=5, total_steps=5),
    ]
    for run in runs:
        total, warmup = run["total_steps"], run["warmup_steps"]
        steps = range(int(total) + 3)
        settings = ", ".join(f"{key}={value:g}" for key, value in run.items())
        try:
            got = [fn(step, **run) for step in steps]
        except ZeroDivisionError:
            return wrong(f"With {settings} it divides by zero.", "a division by a number of steps that may be zero")
        expected = [_learning_rate(step, **run) for step in steps]
        if not close(got, expected, 1e-12):
            corners = {int(total) + 2: "past the end", int(warmup): "the first of the cosine"}
            corners |= {
                int(total) - 1: "the last step",
                int(warmup) - 1: "the last of the warm-up",
                0: "the first step",
            }
            rows = [(f"{name} ({i})", expected[i], got[i]) for i, name in sorted(corners.items()) if i >= 0]
            name = _recognise(got, {k: [f(i, **run) for i in steps] for k, f in _SCHEDULES.items()}, 1e-9)
            return wrong(f"With {settings} it gives other rates.", name, [row for row in rows if not close(*row[1:])])
    return ok("It warms up, meets the peak without a jump, reaches the floor on the last step and stays there.")


def _learning_rate(step: int, *, peak: float, floor: float, warmup_steps: float, total_steps: float) -> float:
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    left = max(total_steps - 1 - step, 0) / max(total_steps - warmup_steps, 1)  # 0 at the end
    return floor + (peak - floor) * math.sin(math.pi / 2 * left) ** 2


def _variant(
    progress: Callable[..., float] = lambda s, w, n: (s - w + 1) / max(n - w, 1),
    decay: Callable[[float], float] = lambda p: 0.5 * (1 + math.cos(math.pi * p)),
    warm: Callable[..., float] = lambda s, w, peak, floor: peak * (s + 1) / w,
    join: Callable[..., float] = lambda peak, floor, c: floor + (peak - floor) * c,
    clamp: bool = True,
) -> Callable[..., float]:
    """A schedule that differs from the right one in a single decision."""

    def schedule(step: int, *, peak: float, floor: float, warmup_steps: int, total_steps: int) -> float:
        if step < warmup_steps:
            return warm(step, warmup_steps, peak, floor)
        p = progress(step, warmup_steps, total_steps)
        return join(peak, floor, decay(min(p, 1.0) if clamp else p))

    return schedule


_SCHEDULES = {
    "the first step has a learning rate of zero": _variant(warm=lambda s, w, peak, floor: peak * s / w),
    "warm-up starts from the floor": _variant(warm=lambda s, w, peak, floor: floor + (peak - floor) * (s + 1) / w),
    "the cosine starts at step 0, so it jumps where the warm-up ends": _variant(lambda s, w, n: (s + 1) / n),
    "the same, and it ends one step late": _variant(lambda s, w, n: s / n),
    "a plain cosine of the step, which jumps and goes negative": _variant(
        lambda s, w, n: s / max(n - w, 1),
        lambda p: math.cos(math.pi * p),
        join=lambda peak, floor, c: peak * c,
        clamp=False,
    ),
    "a whole half-turn of the cosine: it ends below zero": _variant(decay=lambda p: math.cos(math.pi * p)),
    "a quarter turn of the cosine": _variant(decay=lambda p: math.cos(math.pi / 2 * p)),
    "the peak is held for two steps": _variant(lambda s, w, n: (s - w) / max(n - 1 - w, 1)),
    "it reaches the floor one step late": _variant(lambda s, w, n: (s - w) / max(n - w, 1)),
    "it reaches the floor one step early": _variant(lambda s, w, n: (s - w + 2) / max(n - w, 1)),
    "the decay is stretched over all steps, warm-up included": _variant(lambda s, w, n: (s - w + 1) / n),
    "past the end it rises again": _variant(clamp=False),
    "the floor cuts the curve off": _variant(join=lambda peak, floor, c: max(floor, peak * c)),
    "the floor is left out": _variant(join=lambda peak, floor, c: peak * c),
    "the floor is added on top": _variant(join=lambda peak, floor, c: floor + peak * c),
    "a straight line, not a cosine": _variant(decay=lambda p: 1 - p),
}


# 1.5


def grade_flops_per_token(fn) -> Verdict:
    """Against weights counted one by one on the meta device, and against DeepSeek's own figure for V3."""
    for name, config, seq_len, parts in _flops_cases():
        expected = sum(parts.values()) - parts["idle experts"] - parts["embedding"]
        got = fn(config, seq_len)
        if not close(got, expected):
            counted = f"{got:,.0f}" if isinstance(got, int | float) else got
            rows: list[Row] = [("FLOPs a token", f"{expected:,.0f}", counted)]
            misread = _recognise(got, _flops_misconceptions(parts, expected, config, seq_len), 1e-9)
            return wrong(f"For the config {name!r} at {seq_len} tokens the count differs.", misread, rows)
    v3 = fn(DeepSeekConfig.preset("deepseek_v3"), 4096)
    return ok(f"DeepSeek-V3 at 4,096 tokens: {v3 / 1e9:.1f} GFLOPs a token; its authors publish 250.")


@functools.cache
def _flops_cases() -> list[tuple[str, DeepSeekConfig, int, dict[str, float]]]:
    cases = [
        ("tiny", DeepSeekConfig.preset("tiny"), 256),
        ("dense", DeepSeekConfig.preset("tiny", first_k_dense_replace=8, q_lora_rank=None, v_head_dim=24), 100),
        ("deepseek_v2_lite of 3 layers", DeepSeekConfig.preset("deepseek_v2_lite", num_hidden_layers=3), 4096),
    ]
    return [(name, config, seq_len, _count_flops(config, seq_len)) for name, config, seq_len in cases]


def _count_flops(config: DeepSeekConfig, seq_len: int) -> dict[str, float]:
    """Six for each weight of a matrix, by what it belongs to; attention proper by its loops."""
    with torch.device("meta"):
        model = DeepSeekModel(config)
    parts = dict.fromkeys(["embedding", "head", "router", "shared", "chosen experts", "idle experts", "the rest"], 0.0)
    share = config.num_experts_per_tok / config.n_routed_experts
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        flops = 6.0 * parameter.numel()
        if ".mlp.experts" in name:
            parts["chosen experts"] += share * flops
            parts["idle experts"] += (1 - share) * flops
        else:
            kinds = {"embed_tokens": "embedding", "lm_head": "head", ".mlp.gate.": "router", "shared_experts": "shared"}
            parts[next((kind for key, kind in kinds.items() if key in name), "the rest")] += flops
    dims = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    parts["attention"] = 6.0 * config.num_hidden_layers * dims * seq_len / 2
    return parts


def _flops_misconceptions(
    parts: dict[str, float], right: float, config: DeepSeekConfig, seq_len: int
) -> dict[str, float]:
    dims = config.qk_head_dim + config.v_head_dim
    return {
        "all experts are counted, not the chosen ones": right + parts["idle experts"],
        "all parameters are counted, idle experts and embedding too": right
        + parts["idle experts"]
        + parts["embedding"],
        "the embedding is counted: it is a look-up": right + parts["embedding"],
        "forward only": right / 3,
        "backward counted once, not twice": right * 2 / 3,
        "a multiply-add counted as one": right / 2,
        "recomputation is counted: that is hardware utilization": right * 4 / 3,
        "attention itself is left out": right - parts["attention"],
        "attention is counted in one layer, not in all": right
        - parts["attention"] * (1 - 1 / config.num_hidden_layers),
        "attention without the rotary part of queries and keys": right
        - parts["attention"] * config.qk_rope_head_dim / dims,
        "attention over the whole sequence, not half of it": right + parts["attention"],
        "the output head is left out": right - parts["head"],
        "the shared experts are left out": right - parts["shared"],
        "the router is left out": right - parts["router"],
        "the whole sequence, not one token": right * seq_len,
    }


# 1.6


def grade_mfu(fn) -> Verdict:
    """Two published runs, one impossible value, one impossible peak."""
    v3 = (272.8e9 / 86400, 249.5e9, 2048 * 989e12)
    cases = [
        ("DeepSeek-V3 on 2,048 H800", v3),
        ("a small CPU", (3000.0, 2e7, 3e11)),
        ("a wrong peak", (1e4, 1e9, 1e12)),
    ]
    for name, (speed, flops, peak) in cases:
        got, expected = fn(speed, flops, peak), speed * flops / peak
        if not close(got, expected):
            known = {
                "per cent, not a fraction": 100 * expected,
                "upside down": 1 / expected,
                "the peak with sparsity, which dense matrices never reach": expected / 2,
                "backward counted again: flops_per_token holds it already": 3 * expected,
                "six counted again: flops_per_token holds it already": 6 * expected,
                "impossible values are hidden: a wrong peak should be seen": min(expected, 1.0),
            }
            return wrong(
                f"For {name} this is not the share of the peak.", _recognise(got, known), [("MFU", expected, got)]
            )
    for peak in (0.0, -1.0):
        try:
            fn(1.0, 1.0, peak)
        except ValueError:
            continue
        except ZeroDivisionError:
            return wrong(
                "A peak of 0 ends in ZeroDivisionError: raise ValueError, and say what to do.", "no check of the peak"
            )
        return wrong(f"A peak of {peak:g} is accepted: raise ValueError.", "no check of the peak")
    return ok(
        "DeepSeek-V3's published speed comes out as 39% of the dense bf16 peak.", [("V3", 0.389, round(fn(*v3), 3))]
    )


# 1.7

_PROBABILITIES = torch.tensor([0.06, 0.30, 0.04, 0.24, 0.16, 0.20], dtype=torch.float64)  # in no order
_DRAWS = 800


def grade_sample_next(fn) -> Verdict:
    """Count what is drawn: 800 draws a setting, within five standard deviations of the distribution asked for."""
    logits = _PROBABILITIES.log() + 3
    drawn = fn(logits, temperature=1.0, generator=torch.Generator().manual_seed(0))
    try:
        greedy = fn(logits, temperature=0)
    except (RuntimeError, ZeroDivisionError) as error:
        return wrong(f"With temperature=0 it raises: {error}", "temperature 0 has no branch of its own")
    for temperature, token in ((1, drawn), (0, greedy)):
        if not isinstance(token, int):
            summary = "The token must come out as a Python int, at any temperature."
            return wrong(summary, "no Python int comes out", [(f"temperature {temperature}", "an int", repr(token))])
    if greedy != 1:
        return wrong("At temperature 0 the likeliest token comes out.", rows=[("temperature 0", 1, greedy)])
    settings: list[dict[str, Any]] = [
        dict(temperature=1.0),
        dict(temperature=0.5),
        dict(temperature=1.0, top_k=3),
        dict(temperature=1.0, top_p=0.6),
        dict(temperature=0.5, top_p=0.6),
        dict(temperature=1.0, top_k=2, top_p=0.55),
        dict(temperature=1.0, top_p=1e-6),
    ]
    for setting in settings:
        counts = _count_draws(fn, logits, setting)
        expected = _asked_for(**setting)
        allowed = 5 * (expected * (1 - expected) / _DRAWS).sqrt() + 1e-9
        if ((counts - expected).abs() > allowed).any():
            known = {
                name: pmf for name, pmf in _sampling_misconceptions(**setting).items() if not close(pmf, expected, 0.1)
            }
            nearest = min(known, key=lambda name: distance(counts, known[name]), default=None)
            if nearest is not None and distance(counts, known[nearest]) > 0.15:
                nearest = None
            asked = sorted((i for i in range(6) if expected[i]), key=expected.__getitem__)
            if "top_p" not in setting and [i for i in asked if not counts[i]] == asked[:1] != asked:
                nearest = "top-p cuts the last token at p = 1, where rounding takes the sum past it"
            called = ", ".join(f"{key}={value:g}" for key, value in setting.items())
            rows: list[Row] = [
                (f"token {i}", round(float(expected[i]), 3), round(float(counts[i]), 3)) for i in range(6)
            ]
            return wrong(f"With {called}, {_DRAWS} draws give other frequencies.", nearest, rows)
    return (
        _tie_problem(fn)
        or _generator_problem(fn, logits)
        or ok(f"{len(settings)} settings, {_DRAWS} draws each: the right frequencies.")
    )


def _tie_problem(fn) -> Verdict | None:
    kept = int((_count_draws(fn, torch.zeros(4), dict(temperature=1.0, top_p=0.5)) > 0).sum())
    if kept != 2:
        summary = "Of four equal tokens, two reach p = 0.5 exactly: the smallest set that reaches p has no third."
        return wrong(summary, "the sum of those before may equal p", [("tokens that come out", 2, kept)])
    return None


def _generator_problem(fn, logits: Tensor) -> Verdict | None:
    before = torch.get_rng_state()
    runs = [_count_draws(fn, logits, dict(temperature=1.0), draws=20, listed=True) for _ in range(2)]
    if not torch.equal(before, torch.get_rng_state()) or not torch.equal(*runs):
        summary = "The same generator must give the same tokens, and the global random state must stay as it was."
        return wrong(summary, "the generator is not used")
    return None


def _count_draws(fn, logits: Tensor, setting: dict, draws: int = _DRAWS, listed: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([fn(logits, generator=generator, **setting) for _ in range(draws)])
    return tokens if listed else torch.bincount(tokens, minlength=6).double() / draws


def _asked_for(temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The distribution over six tokens, by hand: tempered, cut to k, then cut where the sum first reaches p."""
    tempered = _PROBABILITIES ** (1 / temperature)
    order = sorted(range(6), key=lambda i: -tempered[i])[: top_k or 6]
    tempered = tempered / tempered[order].sum()
    kept, total = [], 0.0
    for i in order:
        if total < top_p:
            kept.append(i)
            total += float(tempered[i])
    return _only(tempered, kept)


def _only(weights: Tensor, kept: list[int]) -> Tensor:
    cut = torch.zeros(6, dtype=torch.float64)
    cut[kept] = weights[kept]
    return cut / cut.sum()


def _sampling_misconceptions(temperature: float, top_k: int = 0, top_p: float = 1.0) -> dict[str, Tensor]:
    right = _asked_for(temperature, top_k, top_p)
    order = sorted(range(6), key=lambda i: -_PROBABILITIES[i])
    tempered = _PROBABILITIES ** (1 / temperature)
    kept = [i for i in order if right[i] > 0]
    before_k = _asked_for(temperature, 0, top_p)
    untempered = _asked_for(1.0, top_k, top_p)
    known = {
        "the rank among the sorted tokens, not the token": right[order],
        "the temperature multiplies the logits": _asked_for(1 / temperature, top_k, top_p),
        "the temperature has no effect": untempered,
        "always the likeliest token": _only(tempered, order[:1]),
        "top_k is not used": before_k,
        "top_p is not used": _asked_for(temperature, top_k),
        "top-p counts over all tokens, not those that top-k kept": _only(
            tempered, [i for i in order[: top_k or 6] if before_k[i] > 0]
        ),
        "top-p is counted before the temperature": _only(tempered, [i for i in order if untempered[i] > 0]),
        "top-p keeps one token too many": _only(tempered, order[: min(len(kept) + 1, top_k or 6)]),
    }
    if len(kept) > 1:
        known["top-p cuts the token that crosses p"] = _only(tempered, kept[:-1])
    return known


# The puzzle of the chapter: batches of somebody's own


def suspect_batch(tokens: TokenFile, step: int) -> Batch:
    """Rows of the text, begun at random places, with the token after each token as its label."""
    rng = torch.Generator().manual_seed(step)
    starts = torch.randint(tokens.n_tokens - 65, (8,), generator=rng).tolist()
    rows = torch.stack([torch.from_numpy(tokens.ids[start : start + 65].astype("int64")) for start in starts])
    following = rows.roll(-1, dims=1)[:, :-1]
    return Batch(input_ids=following, labels=rows[:, 1:], doc_ids=torch.zeros(8, 64, dtype=torch.int32))


EXERCISES = (
    Exercise(
        number="1.1",
        path="deepseek_lab.model.norm.rms_norm",
        title="Root-mean-square norm",
        grade=grade_rms_norm,
        level="warm-up",
        minutes=10,
        hints=(
            "Read the name backwards: the root of the mean of the squares, over the last dimension only. Nothing is "
            "subtracted.",
            "`mean(dim=-1, keepdim=True)` keeps a dimension of one, so that the division lines up again. `eps` goes "
            "under the root, with the mean square.",
            "A float16 square overflows above 256. `torch.promote_types(x.dtype, torch.float32)` is float32 for half "
            "precisions and leaves float64 alone; `.float()` would not.",
        ),
    ),
    Exercise(
        number="1.2",
        path="deepseek_lab.model.rope.apply_rope",
        title="Rotary positions",
        grade=grade_apply_rope,
        minutes=15,
        hints=(
            "Take the pairs apart first: `x[..., 0::2]` holds the first of each pair, `x[..., 1::2]` the second. Both "
            "have the shape that `cos` and `sin` line up with.",
            "Both new components use both old ones. If you write into `x` or into a slice of it, the second will "
            "already see the first one's new value.",
            "To weave them back: `torch.stack((first, second), dim=-1).flatten(-2)`. `torch.cat` would sort them.",
            "Or let complex numbers do it: `torch.view_as_complex` of `x.unflatten(-1, (-1, 2))`, times "
            "`torch.complex(cos, sin)`. Half precisions have to be widened to fp32 first, and narrowed again last.",
        ),
    ),
    Exercise(
        number="1.3",
        path="deepseek_lab.model.loss.cross_entropy_sum",
        title="Cross-entropy, as a sum and a count",
        grade=grade_cross_entropy_sum,
        minutes=20,
        hints=(
            "Without smoothing: `log_softmax`, pick the label's entry with `gather`, add up, change the sign. Padding "
            "cannot be gathered (-100 is no index): give it any label for the moment, and zero it afterwards.",
            "The smoothed target puts 1 - ε on the label and ε/V on every class. The second part, summed over the "
            "classes, is ε times the *mean* of the log-probabilities: no one-hot tensor is needed.",
            "Zero what is ignored with `x.where(valid, 0)` before the sum; return `valid.sum()` beside it. Dividing is "
            "the caller's business: only the caller knows all ranks.",
        ),
    ),
    Exercise(
        number="1.4",
        path="deepseek_lab.train.schedule.warmup_cosine",
        title="Warm-up, then half a cosine",
        grade=grade_warmup_cosine,
        level="warm-up",
        minutes=10,
        hints=(
            "Steps count from 0. The first of w warm-up steps gets peak/w and the last gets the peak, so step i gets "
            "(i + 1)/w of it.",
            "Let progress be 1 at step `total_steps - 1` and one step's share at step `warmup_steps`. How many steps "
            "lie between? Let it never exceed 1.",
            "cos(π · progress) goes from 1 to -1. Half of (1 + that) goes from 1 to 0: the share of (peak - floor) "
            "that is left above the floor.",
        ),
    ),
    Exercise(
        number="1.5",
        path="deepseek_lab.plan.flops.flops_per_token",
        title="FLOPs per token",
        grade=grade_flops_per_token,
        minutes=15,
        hints=(
            "A weight of a matrix costs one multiplication and one addition in forward, and twice that in backward "
            "(for the inputs' gradient and for its own). `active_matmul_parameters(config)` counts the weights.",
            "Attention multiplies numbers that are no weights: for each token looked at, a query with a key "
            "(`qk_head_dim`) and a probability with a value (`v_head_dim`), in every head of every layer.",
            "A token at position t looks at t + 1 tokens. On average over the sequence that is half of it. The factor "
            "6 applies to attention as well.",
        ),
    ),
    Exercise(
        number="1.6",
        path="deepseek_lab.plan.flops.mfu",
        title="Model FLOPs utilization",
        grade=grade_mfu,
        level="warm-up",
        minutes=5,
        hints=(
            "Units decide it: tokens/s times FLOPs/token is FLOP/s. The result is a fraction, not per cent.",
            "A peak of zero means that nobody measured it. Raise `ValueError` and say what to do; do not return 0 or "
            "infinity. A result above 1 is worth seeing: it means that the peak is wrong.",
        ),
    ),
    Exercise(
        number="1.7",
        path="deepseek_lab.model.generate.sample_next",
        title="Sampling the next token",
        grade=grade_sample_next,
        minutes=20,
        hints=(
            "Temperature 0 first, on its own: `argmax`, and return. Otherwise divide the logits, sort them in "
            "descending order, and remember which token each of them is: `sort` returns both.",
            "top-k cuts the sorted list. The probabilities that top-p looks at are the softmax of what is left.",
            "Keep a token if the probability *before* it has not reached p yet: the cumulative sum less its own. The "
            "likeliest one is always kept, because nothing comes before it.",
            "`torch.multinomial(probabilities, 1, generator=generator)` draws a place in the sorted list, and needs no "
            "normalised weights. Look the token up, and return an `int`.",
        ),
    ),
)

HINTS = {
    "1-bug": (
        "A loss that beats every baseline by far within seconds is not good news. What would a model have to know at a "
        "position to bet that well, and how could it have come by it?",
        "Look at what it repeats when it writes. Then look at the data, not at the model: "
        "`batch = suspect_batch(tokens['train'], 0)`, and print the first row of both of its parts, decoded.",
        "`rows.roll(-1)` moves every row one token to the left, and so does `rows[:, 1:]`. The labels are the inputs: "
        "the model learned to copy. Such a batch has the right shapes, so that no test of shapes finds it. A label "
        "must stand one place further on than its input: shifted once, not twice, not never.",
    ),
}
