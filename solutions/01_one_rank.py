# %% [markdown]
# # 01 · One rank
#
# Before anything is split over ranks, here is what gets split: a decoder, its loss, its learning rate, its arithmetic.
# You write seven functions, then a small model trains on real text, on your code, in this kernel.

# %%
import copy
import math
import time

import ipywidgets as widgets
import torch

from deepseek_lab.learn import check, exercise, hint, progress
from deepseek_lab.learn.widgets import claims_table, cost_box, show_figure, slider_figure

cost_box(
    minutes=0.7,
    ranks=1,
    memory="about 0.6 GB",
    at_scale="the same functions, unchanged; chapters 03 to 09 split what surrounds them",
    before="chapter 00; some PyTorch",
)

# %% [markdown]
# ## The question
#
# A language model bets on the next token. How good is a bet? Count the bits that an encoder would need if it trusted
# those bets, and divide by the bytes of the text: **bits per byte**. Eight is no knowledge at all. The measure does not
# depend on the tokenizer, and file compressors can be measured with it too.
#
# The package brings ten megabytes of English and Chinese: help pages, a handbook, the Bible, poems. 4% of the
# *documents* are held out. This is how well counting and compressing do on them.
#
# **Predict.** Two layers, one million parameters, some seconds of training on two cores. Which of these will it beat: a
# table of token frequencies (*unigram*), one of pairs of tokens (*bigram*), `gzip`, `xz`, or `xz` that has seen the
# training text first (*primed*), as the two tables and the model have?

# %%
from deepseek_lab.data.baselines import baselines
from deepseek_lab.data.corpus import load_corpus
from deepseek_lab.data.tokenizer import load_tokenizer
from deepseek_lab.data.tokens import prepare

corpus, tokenizer = load_corpus(), load_tokenizer()
tokens = prepare(corpus, tokenizer)  # made once, then found again in a cache
to_beat = baselines(corpus, tokens)  # so are these; the first time takes a while
for name, bits in to_beat.items():
    print(f"{name:13} {bits:.2f} bits per byte")

# %% [markdown]
# ## 1 · Norm
#
# Each block of a decoder adds something to its input: $x \leftarrow x + f(x)$. After dozens of blocks $x$ is large, and
# what a block adds depends on how large. So $f$ reads a normalised $x$. RMS norm divides by the root mean square, and
# unlike layer norm subtracts nothing:
#
# $$y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \varepsilon}} \cdot w$$
#
# ### Exercise 1.1 · `rms_norm`  (warm-up, 10 minutes)
#
# Beware of the type. Half precisions must be widened to fp32 before they are squared (a float16 square overflows above
# 256), and fp64 must stay fp64: the reference that every parallel layout is held against runs in fp64.

# %% exercise: deepseek_lab.model.norm.rms_norm

# %%
check(rms_norm)

# %%
from deepseek_lab.viz import one_rank as draw

D, n_blocks = 128, 24
generator = torch.Generator().manual_seed(0)


def size_through_the_blocks(before_each_block):
    """Root mean square of x after each of 24 random two-layer blocks."""
    x_TD = torch.randn(64, D, generator=generator)
    sizes = [x_TD.square().mean().sqrt().item()]
    for _ in range(n_blocks):
        w_in_DD, w_out_DD = (torch.randn(D, D, generator=generator) * (2 / D) ** 0.5 for _ in range(2))
        x_TD = x_TD + (before_each_block(x_TD) @ w_in_DD).relu() @ w_out_DD
        sizes.append(x_TD.square().mean().sqrt().item())
    return sizes


plain = size_through_the_blocks(lambda x_TD: x_TD)
normed = size_through_the_blocks(lambda x_TD: rms_norm(x_TD, torch.ones(D), 1e-6))
show_figure(draw.draw_depth({"f(x)": plain, "f(rms_norm(x))": normed}))

# %% [markdown]
# Without the norm $x$ grows by a constant *factor* per block, with it by about a constant *amount*. **Depth becomes
# affordable**, and the size of the gradient no longer depends on how deep a block sits.
#
# ## 2 · Position
#
# Attention compares queries with keys, and by itself does not know where they stand. Rotary embedding turns them:
# components 0 and 1 make a pair, 2 and 3 the next, and pair $i$ of the token at position $t$ is turned by the angle
# $t\,\theta^{-2i/d}$. A product of two turned vectors depends on the difference of their angles only, that is, on the
# distance.
#
# ### Exercise 1.2 · `apply_rope`  (core, 15 minutes)
#
# Turn neighbouring pairs. Other models pair component $i$ with $i + d/2$: trained from scratch that works as well, but
# DeepSeek's published weights would then come out as noise.

# %% exercise: deepseek_lab.model.rope.apply_rope

# %%
check(apply_rope)

# %%
from deepseek_lab.model import DeepSeekConfig, DeepSeekModel
from deepseek_lab.model.rope import rope_tables

cos, sin = rope_tables(DeepSeekConfig.preset("tiny"), torch.arange(4096), torch.float64)
turned_TD = apply_rope(torch.ones(4096, 16, dtype=torch.float64), cos, sin)  # one vector at every position
distances = range(0, 128, 3)
scores = {
    position: (distances, [float(turned_TD[position] @ turned_TD[position - d]) for d in distances])
    for position in (200, 1000, 4000)
}
show_figure(draw.draw_scores(scores))

# %% [markdown]
# The three sets of markers lie on each other: whether the query stands at 200 or at 4,000, the same distance gives the
# same product. **Nothing about positions has to be learned**, and the vectors keep their length.
#
# ## 3 · Loss
#
# Cross-entropy is minus the log-probability of the right token, summed over the tokens. *Label smoothing* with
# $\varepsilon$ changes the target: $1-\varepsilon$ goes to the right token and $\varepsilon/V$ to each of the $V$
# tokens.
#
# ### Exercise 1.3 · `cross_entropy_sum`  (core, 20 minutes)
#
# Return the **sum** and the **count**, never the mean: only sums can be added up over ranks (chapter 00). Labels of
# -100 are padding. A batch in which everything is padding must give zero, not NaN.

# %% exercise: deepseek_lab.model.loss.cross_entropy_sum

# %%
check(cross_entropy_sum)

# %%
V = tokenizer.vocab_size
margins = [0.5 * i for i in range(41)]
losses = {
    epsilon: [
        cross_entropy_sum(torch.tensor([[margin] + [0.0] * (V - 1)]), torch.tensor([0]), epsilon)[0].item()
        for margin in margins
    ]
    for epsilon in (0.0, 0.1)
}
show_figure(draw.draw_confidence(margins, losses))

# %% [markdown]
# Plain cross-entropy always asks for more confidence. With $\varepsilon = 0.1$ there is a best lead, about 10.5 (the
# dot), and being surer than that costs.
#
# This course tests the claims of two articles, numbered E1, E2, … and P1, P2, … (chapter 00, section 3, lists them).
# One of the two lists this loss in five lines. Ours below makes the same step: the smoothed target is computed
# from `labels`, but `labels` holds the *numbers* of the classes. **Predict** what happens with 8 tokens and 4,096
# classes, and with 8 tokens and 8 classes.


# %%
def smoothed_by_number(logits, labels, epsilon=0.1):
    target = labels * (1 - epsilon) + epsilon / logits.shape[-1]
    return -(target * logits.log_softmax(dim=-1)).sum(dim=-1).mean()


labels = torch.tensor([3, 1, 7, 0, 2, 5, 6, 4])
try:
    smoothed_by_number(torch.zeros(8, V), labels)
except RuntimeError as error:
    print("8 tokens, 4,096 classes:", error)

knows_nothing = torch.zeros(8, 8)
knows_all = 10 * torch.nn.functional.one_hot(labels, 8).float()
for name, logits in (("knows nothing", knows_nothing), ("knows all", knows_all)):
    right = cross_entropy_sum(logits, labels, 0.1)[0] / 8
    listed = smoothed_by_number(logits, labels)
    print(f"8 tokens, 8 classes, a model that {name:13}: as listed {listed:6.1f}, right {right:.2f}")

# %% [markdown]
# Usually it raises. When there happen to be as many tokens as classes, or when somebody "fixes" the shape with
# `labels[:, None]`, it runs: label 7 then weighs seven times as much as label 1 whatever the model says, and a model
# that knows every answer is **worse** off than one that knows none. The target has to be a distribution: one-hot first,
# or, as in your function, without ever building it.
#
# ## 4 · Learning rate
#
# The first steps of Adam rest on averages over very few gradients, so the rate warms up; later, smaller steps settle
# into a minimum that large ones jump over. Linear warm-up, then half a cosine.
#
# ### Exercise 1.4 · `warmup_cosine`  (warm-up, 10 minutes)
#
# Steps count from 0. The docstring fixes both ends: the first step already learns, the last of the warm-up runs at the
# peak, and the last step of the run at the floor.

# %% exercise: deepseek_lab.train.schedule.warmup_cosine

# %%
check(warmup_cosine)

# %% [markdown]
# The other article gives an example: a million steps, 100,000 of them warm-up to $3\cdot10^{-4}$, then decay "by
# $\cos(\pi\cdot\mathrm{step}/900000)$". Read literally, where does that start at step 100,000, and where does it end?

# %%
PEAK, TOTAL = 3e-4, 1_000_000


def literal(step):
    return PEAK * (step + 1) / 100_000 if step < 100_000 else PEAK * math.cos(math.pi * step / 900_000)


def draw_schedules(axes, warmup_percent, floor_percent):
    def ours(step):
        warmup_steps, floor = TOTAL * warmup_percent // 100, PEAK * floor_percent / 100
        return warmup_cosine(step, peak=PEAK, floor=floor, warmup_steps=warmup_steps, total_steps=TOTAL)

    draw.draw_schedules(axes, {"warmup_cosine": ours, "as written": literal}, TOTAL)


slider_figure(
    draw_schedules,
    warmup_percent=widgets.IntSlider(10, min=0, max=50, description="warm-up, % of the steps"),
    floor_percent=widgets.IntSlider(1, min=0, max=50, description="floor, % of the peak"),
)

# %% tags=["nbval-check-output"]
for step in (99_999, 100_000, 449_999, 450_001, 999_999):
    ours = warmup_cosine(step, peak=PEAK, floor=0.0, warmup_steps=100_000, total_steps=TOTAL)
    print(f"step {step:>7,}: as written {literal(step) / PEAK:+.3f} of the peak, half a cosine {ours / PEAK:+.3f}")

# %% [markdown]
# A jump of 6% where the warm-up ends; then zero at step 450,000, and for the rest of the run a *negative* rate, which
# climbs the loss. The formula lacks two things: it must count from the end of the warm-up, and it must be the half of
# $1 + \cos$. Section 8 lets a negative rate loose on your model.
#
# ## 5 · Arithmetic
#
# How long will it take? A weight of a matrix costs one multiplication and one addition per token forward, and twice
# that backward: **6 FLOPs**. What counts are the weights that a token *meets*. In a mixture of experts these are few:
# DeepSeek-V3 has 671 billion parameters, and a token meets 37 billion of them.
#
# ### Exercise 1.5 · `flops_per_token`  (core, 15 minutes)
#
# Weights come from `active_matmul_parameters`. Attention itself has no weights, but multiplies all the same: queries
# with keys (`qk_head_dim` numbers each) and probabilities with values (`v_head_dim`), in each of `num_attention_heads`
# heads of each of `num_hidden_layers` layers. These are fields of `config`.

# %% exercise: deepseek_lab.plan.flops.flops_per_token

# %%
check(flops_per_token)

# %%
from deepseek_lab.plan.flops import PEAK_FLOPS_PER_S, active_matmul_parameters

lengths = [2**n for n in range(8, 18)]
shares = {}
for preset in ("tiny", "deepseek_v2_lite", "deepseek_v3"):
    config = DeepSeekConfig.preset(preset)
    weights_only = 6 * active_matmul_parameters(config)
    shares[preset] = [1 - weights_only / flops_per_token(config, length) for length in lengths]
show_figure(draw.draw_context_cost(lengths, shares))

# %% [markdown]
# What decides is how much attention a model has beside its weights: the narrow *tiny* spends most of its FLOPs there
# from 2k on, the other two only from about 32k. At the 4,096 tokens of its pretraining, attention is 12% of
# DeepSeek-V3's bill; at 128k it is 82%, which is what chapter 10 is about.
#
# ### Exercise 1.6 · `mfu`  (warm-up, 5 minutes)
#
# *Model FLOPs utilization*: what the model itself needed per second, over what the hardware could do at most. Work that
# was repeated, padded or waited for does not count.

# %% exercise: deepseek_lab.plan.flops.mfu

# %%
check(mfu)

# %% [markdown]
# Two things are reported about DeepSeek-V3 that must give the same MFU: 2,048 GPUs process 272.8 billion tokens a day
# (arXiv 2505.09343, table 4), and a trillion tokens take 180,000 GPU hours (arXiv 2412.19437, section 1). The peak is
# that of dense bf16. Marketing likes the one "with sparsity", twice as high, which no dense matrix reaches.

# %% tags=["nbval-check-output"]
v3 = flops_per_token(DeepSeekConfig.preset("deepseek_v3"), 4096)
peaks = PEAK_FLOPS_PER_S["H800"]
print(f"DeepSeek-V3: {v3 / 1e9:.0f} GFLOPs per token")
print(f"from tokens per day:  {mfu(272.8e9 / 86_400, v3, 2048 * peaks['bf16']):.1%}")
print(f"from GPU hours:       {mfu(1e12 / (180_000 * 3600), v3, peaks['bf16']):.1%}")
print(f"of the fp8 peak:      {mfu(272.8e9 / 86_400, v3, 2048 * peaks['fp8']):.1%}")

# %% [markdown]
# Both give 39%, which is what its authors publish for causal attention. Most of its matrices were multiplied in FP8,
# at twice that peak: **an MFU means nothing without the peak it refers to.**
#
# ## 6 · Train
#
# Everything is in place. `slots.load_mine()` returns your functions that passed their checks, and `slots.fill` puts
# them where the package's own were: from here on the model runs on them.

# %%
from deepseek_lab import slots
from deepseek_lab.data.batches import train_batch, val_batches
from deepseek_lab.train.metrics import peak_flops_per_s

slots.fill(slots.load_mine())
print("yours:", ", ".join(path.rpartition(".")[2] for path in slots.filled_paths()) or "none yet")

SEQ_LEN, BATCH, STEPS = 128, 8, 180
two_dense_layers = dict(num_hidden_layers=2, first_k_dense_replace=2, q_lora_rank=None)
small = dict(**two_dense_layers, tie_word_embeddings=True, initializer_range=0.06)  # which suits so short a run
config = DeepSeekConfig.preset("tiny", **small)


def batch_of(step):
    return train_batch(tokens["train"], seed=0, step=step, global_batch_size=BATCH, seq_len=SEQ_LEN)


def train(model, batch_of, *, steps, peak, label_smoothing=0.0, after_step=None):
    """Train, and return one record per step: how many tokens, and their mean loss."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    records = []
    for step in range(steps):
        batch = batch_of(step)
        loss_sum, n_valid = model.loss_sum(batch.input_ids, batch.labels, label_smoothing=label_smoothing)
        optimizer.zero_grad()
        (loss_sum / n_valid).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(step, peak=peak, floor=peak / 100, warmup_steps=steps // 10, total_steps=steps)
        optimizer.step()
        records.append({"tokens": int(n_valid), "loss": float(loss_sum.detach() / n_valid)})
        if after_step:
            after_step(step)
    return records


def as_bits_per_byte(nats_per_token, text="val"):
    return nats_per_token / math.log(2) * tokens[text].n_tokens / tokens[text].n_bytes


@torch.no_grad()
def bits_per_byte(model):
    """On every fourth batch of the validation text."""
    batches = list(val_batches(tokens["val"], seq_len=SEQ_LEN, batch_size=8))[::4]
    sums = [torch.stack(model.loss_sum(batch.input_ids, batch.labels)) for batch in batches]
    loss_sum, n_valid = sum(sums).tolist()
    return as_bits_per_byte(loss_sum / n_valid)


model = DeepSeekModel(config)
peak = peak_flops_per_s(torch.device("cpu"), "fp32")
started = time.perf_counter()
records = train(model, batch_of, steps=STEPS, peak=6e-3)
seconds = time.perf_counter() - started
records[-1] |= {"val_loss": None, "val_bits_per_byte": bits_per_byte(model)}
print(f"{model.num_parameters() / 1e6:.1f} million parameters, {STEPS * BATCH * SEQ_LEN:,} tokens, {seconds:.0f} s")
print(f"validation text: {records[-1]['val_bits_per_byte']:.2f} bits per byte")

# %%
from deepseek_lab.viz.loss import draw_loss

show_figure(draw_loss(records, tokens["val"], to_beat))

# %% [markdown]
# In some seconds, and 6% of the training text, the model has passed the unigram table and `gzip`, and comes close to
# `xz`, which can look back at the whole validation text. The bigram table, counted over *all* of the training
# text, is far ahead: counting is hard to beat with so little training. `make train` gets further in three minutes, and
# `make train-long` passes it.
#
# How busy were the cores? The peak of a CPU is measured: the rate of large matrix products over a fixed time, before
# training or now, whichever is higher.

# %%
peak = max(peak, peak_flops_per_s(torch.device("cpu"), "fp32"))
speed = STEPS * BATCH * SEQ_LEN / seconds
utilization = mfu(speed, flops_per_token(config, SEQ_LEN), peak)
print(f"{speed:,.0f} tokens/s × {flops_per_token(config, SEQ_LEN) / 1e6:.0f} MFLOPs, peak {peak / 1e9:.0f} GFLOP/s")
print(f"MFU {utilization:.0%}")

# %% [markdown]
# ### Find the bug
#
# A colleague has written batches of his own, and is delighted. Same kind of model, smaller and with less training.

# %%
from deepseek_lab.learn.chapters.c01_one_rank import suspect_batch

suspect = DeepSeekModel(DeepSeekConfig.preset("tiny", hidden_size=64, **small))
suspect_records = train(suspect, lambda step: suspect_batch(tokens["train"], step), steps=40, peak=1e-2)
show_figure(draw_loss(suspect_records, tokens["val"], to_beat))

# %%
from deepseek_lab.model.generate import stream


def continue_text(model, prompt, n=40, **how):
    new = stream(model, tokenizer.encode(prompt), max_new_tokens=n, seed=1, **how)
    return prompt + "▸" + tokenizer.decode(list(new))


print(continue_text(suspect, "In the beginning"))

# %% [markdown]
# The loss falls below every line, `xz` with the training text included, within seconds. The text is useless. What is
# wrong? Look for yourself **before** you open the hint.

# %%
hint("1-bug")

# %% [markdown]
# ## 7 · Sample
#
# A model gives a probability for every token; what comes out depends on how one draws. *Temperature* below 1 sharpens;
# *top-k* keeps the $k$ likeliest; *top-p* keeps as few of the likeliest as together reach probability $p$.
#
# ### Exercise 1.7 · `sample_next`  (core, 20 minutes)
#
# The order matters: temperature, then top-k, then top-p over what is left. The token that crosses $p$ stays in.

# %% exercise: deepseek_lab.model.generate.sample_next

# %%
check(sample_next)

# %%
with torch.no_grad():
    logits_V = model(torch.tensor([tokenizer.encode("The king of")]))[0, -1]
probabilities, likeliest = logits_V.softmax(-1).topk(16)
names = [text if (text := tokenizer.decode([int(token)])).isascii() else "(zh)" for token in likeliest]


def draw_sampler(axes, temperature, top_k, top_p):
    how = dict(temperature=temperature, top_k=top_k, top_p=top_p, generator=torch.Generator().manual_seed(0))
    drawn = [sample_next(logits_V, **how) for _ in range(400)]
    frequencies = torch.bincount(torch.tensor(drawn), minlength=V)[likeliest] / 400
    draw.draw_next_token(axes, [repr(name) for name in names], probabilities.tolist(), frequencies.tolist())


slider_figure(
    draw_sampler,
    temperature=widgets.FloatSlider(0.8, min=0.1, max=2.0, step=0.1, description="temperature"),
    top_k=widgets.IntSlider(0, min=0, max=16, description="top-k (0: all)"),
    top_p=widgets.FloatSlider(0.7, min=0.05, max=1.0, step=0.05, description="top-p"),
)

# %%
slots.fill(slots.load_mine())
for prompt in ("In the beginning", "If you want to", "如果您要", "选择"):
    print(continue_text(model, prompt, temperature=0.7, top_p=0.9), "\n")

# %% [markdown]
# After some seconds there are words of both languages, headings, and the odd phrase; there are no sentences yet.
#
# ## 8 · What the articles say
#
# **A negative rate (E11).** The literal schedule spends the last 55% of the run below zero. Twelve such steps, on a
# copy of your model:

# %%
victim, climbing = copy.deepcopy(model), []
optimizer = torch.optim.AdamW(victim.parameters(), betas=(0.9, 0.95))
for step in range(12):
    loss_sum, n_valid = victim.loss_sum(batch_of(STEPS + step).input_ids, batch_of(STEPS + step).labels)
    optimizer.zero_grad()
    (loss_sum / n_valid).backward()
    optimizer.param_groups[0]["lr"] = 6e-3 * math.cos(math.pi * 1_000_000 / 900_000)  # the last step's
    optimizer.step()
    climbing.append(float(loss_sum.detach() / n_valid))
rate = optimizer.param_groups[0]["lr"]
print(f"at a rate of {rate:+.1e} the loss goes from {climbing[0]:.1f} to {climbing[-1]:.1f} nats per token")

# %% [markdown]
# **Label smoothing against overfitting (P12).** A small model sees the same 1,024 tokens again and again, with and
# without smoothing. Both are measured *without* it, on those tokens and on validation text.

# %%
few = [train_batch(tokens["train"], seed=0, step=step, global_batch_size=8, seq_len=64) for step in range(2)]
held_out = train_batch(tokens["val"], seed=0, step=0, global_batch_size=32, seq_len=64)


def overfit(epsilon):
    pupil, curves = DeepSeekModel(DeepSeekConfig.preset("tiny", hidden_size=64, **small)), ([], [])

    @torch.no_grad()
    def measure(step):
        if step % 5 == 4:
            for curve, text, batch in zip(curves, ("train", "val"), (few[0], held_out), strict=True):
                loss_sum, n_valid = pupil.loss_sum(batch.input_ids, batch.labels)
                curve.append(as_bits_per_byte(float(loss_sum / n_valid), text))

    train(pupil, lambda step: few[step % 2], steps=80, peak=5e-3, label_smoothing=epsilon, after_step=measure)
    return curves


curves = {}
for epsilon in (0.0, 0.1):
    seen, unseen = overfit(epsilon)
    curves[f"unseen, smoothing {epsilon:g}"], curves[f"seen, smoothing {epsilon:g}"] = unseen, seen
    print(f"smoothing {epsilon:g}: gap at the end {unseen[-1] - seen[-1]:.2f}, best on unseen text {min(unseen):.2f}")
show_figure(draw.draw_curves(curves, 5, "bits per byte", "With smoothing or without: stop in time"))

# %% [markdown]
# Here the two gaps differ little, and so does what one would really use, the *best* point on unseen text. A longer
# experiment with three seeds (`python benchmarks/label_smoothing.py`) tells them apart: smoothing narrows the gap at
# the end from 4.45 to 3.48 bits per byte, while the best point hardly moves, 2.88 against 2.86 with a spread of 0.04
# between seeds. A pretraining run sees most of its text once or twice, and has no such gap: DeepSeek's reports mention
# no label smoothing.
#
# **Cosine from $10^{-4}$ to $10^{-6}$ (P13).** A peak and a floor of 1% of it: the schedule that the model above was
# trained with, up to the scale.

# %% tags=["nbval-check-output"]
rates = [warmup_cosine(step, peak=1e-4, floor=1e-6, warmup_steps=0, total_steps=1000) for step in range(1000)]
print(f"first {rates[0]:.3e}, last {rates[-1]:.3e}, mean {sum(rates) / 1000:.3e}")

# %% [markdown]
# **An MFU of 50% (P16).** Published runs, each against the dense bf16 peak of its hardware:

# %%
published = {
    "GPT-3 175B, V100 (2204.02311)": 0.213,
    "Gopher 280B, TPU v3 (2204.02311)": 0.325,
    "DeepSeek-V3 671B, 2,048 H800 (2505.09343)": 0.389,
    "Llama 3 405B, 16,384 H100 (2407.21783)": 0.41,
    "Llama 3 405B, 8,192 H100 (2407.21783)": 0.43,
    "PaLM 540B, 6,144 TPU v4 (2204.02311)": 0.462,
    "MegaScale 175B, 12,288 A100 (2402.15627)": 0.552,
    "Megatron 1T, 512 A100, a benchmark (2205.05198)": 0.563,
    "this notebook, fp32, this CPU": utilization,
}
show_figure(draw.draw_utilization(published, target=0.5))

# %% [markdown]
# Two of them pass 50%: dense models on A100, one of them not a full training run. Llama 3 and DeepSeek-V3 do not, on
# faster chips whose matrix units outgrew the memory and the network that feed them, and V3 with experts that have to
# travel. **50% is an ambitious target, not a norm; a MoE that reached it would be ahead of DeepSeek's own.**

# %%
claims_table("01")

# %% [markdown]
# ## 9 · At scale
#
# None of the seven functions changes on 2,000 GPUs. What changes is who holds the tensors they read: `rms_norm` under
# sequence parallelism sees a slice of the tokens (chapter 04), `cross_entropy_sum` a slice of the vocabulary, and the
# count must be that of all ranks. By the arithmetic above, DeepSeek-V3's 14.8 trillion tokens are:

# %% tags=["nbval-check-output"]
total = 14.8e12 * v3
days = total / (2048 * peaks["bf16"] * 0.39) / 86_400
print(f"{total:.2e} FLOPs: {days:.0f} days on 2,048 H800 at 39%")

# %% [markdown]
# They report 2.66 million GPU hours for it, 54 days. To read the real thing: torchtitan's `models/common` for norm and
# positions, DeepSeek's own `inference/model.py`, and Megatron-LM's `training.py` for the FLOPs of a step.
#
# ## 10 · Your trainer now
#
# ```
# accelerate launch --config_file configs/accelerate/cpu.yaml -m deepseek_lab.train \
#     --config configs/tiny.yaml --mine --out runs/mine
# ```
#
# trains a DeepSeek-style model with experts on four ranks, on your norm, rotation, loss, schedule and arithmetic;
# `python -m deepseek_lab generate --run runs/mine --prompt "In the beginning"` samples from it with your sampler.

# %%
progress()

# %% [markdown]
# Next: `02_collectives`, what ranks can say to each other, and what it costs.
