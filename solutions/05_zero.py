# %% [markdown]
# # 05 · ZeRO
#
# Data parallelism makes copies: of the weights, of the gradients, of the optimizer's state. On 128 GPUs there are 128
# of each. ZeRO keeps one of each, in 128 parts, and a rank asks for the rest when it needs it. Here you build all three
# stages, count what every rank holds, to the byte, and watch weights come and go.

# %%
from deepseek_lab.learn import Link, check, exercise, hint, progress, record, run_ranks
from deepseek_lab.learn.widgets import claims_table, cost_box, show_figure, slider_figure
from deepseek_lab.viz import theme
from deepseek_lab.viz import zero as draw

cost_box(
    minutes=0.5,
    ranks=4,
    memory="about 0.5 GB; ranks share the memory that they were forked with",
    at_scale="the same code over NCCL; bytes as the formula says",
    before="chapter 02; chapter 03 helps",
)

# %% [markdown]
# ## The question
#
# A model of 7.5 billion parameters in bf16 is 15 GB. Training it with Adam does not fit on an 80 GB GPU, and a second
# GPU does not help: data parallelism gives it the same 120 GB.
#
# **Predict.** Where do 120 GB come from, if the weights are 15? And how much would a rank have to hold if 64 ranks
# shared everything out? How many more bytes would they have to send for that? Write the three answers down.
#
# ## 1 · What a rank holds

# %% [markdown]
# For each parameter, mixed precision with Adam keeps 2 bytes of weight and 2 of gradient in bf16, and 12 of optimizer
# state in fp32: a master copy of the weight and two moments. That makes 16. ZeRO (Rajbhandari et al., 2019) shares
# them out over the R data-parallel ranks, in three stages:
#
# | | weights | gradients | optimizer | bytes per parameter |
# |---|---|---|---|---|
# | stage 0, plain data parallelism | whole | whole | whole | 16 |
# | stage 1 | whole | whole | a share | 4 + 12/R |
# | stage 2 | whole | a share | a share | 2 + 14/R |
# | stage 3 | a share | a share | a share | 16/R |
#
# ### Exercise 5.1 · `zero_state_bytes`  (warm-up, 10 minutes)
#
# A share is a whole number of parameters, the same on all ranks. So it is rounded up, and padding fills the last one.

# %% exercise: deepseek_lab.plan.memory.zero_state_bytes

# %%
check(zero_state_bytes)

# %% [markdown]
# The paper's own table, in GB (a billion bytes). It prints 120, then 31.4, 16.6 and 1.9 for 64 ranks:

# %% tags=["nbval-check-output"]
print("ranks   stage 0   stage 1   stage 2   stage 3")
for n_ranks in (1, 4, 16, 64, 256, 1024):
    sizes = [sum(zero_state_bytes(7_500_000_000, n_ranks, stage, 2, 2, 12).values()) / 1e9 for stage in range(4)]
    print(f"{n_ranks:5}" + "".join(f"{size:10.1f}" for size in sizes))

# %% [markdown]
# Three quarters of the 120 GB is optimizer state, which is why stage 1 alone does so much. And if the model were
# larger, or the ranks fewer?

# %%
import ipywidgets as widgets

slider_figure(
    draw.draw_memory,
    figsize=(7, 2.8),
    parameters_b=widgets.SelectionSlider(
        options=[1, 7.5, 16, 70, 236, 671], value=7.5, description="billion parameters"
    ),
    gpus=widgets.SelectionSlider(options=[1, 2, 8, 16, 64, 128, 512, 2048], value=64, description="GPUs"),
    precision=widgets.ToggleButtons(options=["mixed", "fp32"], value="mixed", description="precision"),
)

# %% [markdown]
# ## 2 · Shares that cut through parameters
#
# Who holds what? Whole parameters cannot be dealt out evenly: an embedding is a hundred times as large as a norm. So
# parameters are laid one after the other into a flat *bucket*, and the bucket is cut into R equal pieces, wherever that
# may be.

# %%
with theme.figure(figsize=(7, 1.8)) as (figure, axes):
    draw.draw_cuts(axes, [3, 1, 20, 6, 4], 4)
show_figure(figure)

# %% [markdown]
# ### Exercise 5.2 · `shard_range`  (warm-up, 5 minutes)

# %% exercise: deepseek_lab.parallel.zero.shard_range

# %%
check(shard_range)

# %% [markdown]
# ### Exercise 5.3 · `cut`  (core, 15 minutes)
#
# The optimizer must know which numbers it has: weight decay applies to matrices and not to norms, and a checkpoint
# must say whose weights these are. So: which parts of which parameters lie between `start` and `stop`? In the picture,
# rank 1 holds numbers 5 to 13 of parameter 2, and nothing else.

# %% exercise: deepseek_lab.parallel.zero.cut

# %%
check(cut)

# %% tags=["nbval-check-output"]
numels = [3, 1, 20, 6, 4]
for rank in range(4):
    print(f"rank {rank}:", cut(numels, *shard_range(sum(numels), rank, 4)))

# %% [markdown]
# ## 3 · Stages 1 and 2
#
# An all-reduce is a reduce-scatter and an all-gather (chapter 02). Between the two, every rank holds its own share of
# the summed gradient, and that is all it needs to update its own share of the weights. So put the optimizer in between:
#
# ```
# reduce-scatter the gradients  →  update my share  →  all-gather the weights
# ```
#
# The same bytes travel as before, and nobody has moments for anything but its share. That is stage 1. Stage 2 does the
# reduce-scatter bucket by bucket during backward, and forgets a bucket's whole gradient as soon as it has left.
#
# ### Exercise 5.4 · `start_reduction`  (core, 5 minutes)
#
# Which collective does each stage need? It must only be *started*: backward goes on meanwhile (chapter 03).

# %% exercise: deepseek_lab.parallel.zero.start_reduction

# %%
check(start_reduction)

# %% [markdown]
# Does a rank really hold less? Here is a real model on four ranks: one pass, one step of Adam, one more pass; then the
# bytes of everything a rank has kept are added up, each piece of memory once. Your functions run inside.

# %%
import torch

from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.engine import parallelize
from deepseek_lab.parallel.mesh import build_mesh

CONFIG = DeepSeekConfig.preset("tiny", num_hidden_layers=4)
ZERO = "deepseek_lab.parallel.zero"
MINE = {f"{ZERO}.shard_range": shard_range, f"{ZERO}.cut": cut, f"{ZERO}.start_reduction": start_reduction}


def one_pass(engine):
    ids = torch.randint(CONFIG.vocab_size, (2, 65), generator=torch.Generator().manual_seed(collectives.rank_in()))
    with engine.micro_batch(last=True):
        loss_sum, n_tokens = engine.model.loss_sum(ids[:, :-1], ids[:, 1:])
        (loss_sum / (n_tokens * collectives.size_of())).backward()


def hold(stage):
    parallel = ParallelConfig(zero_stage=stage, bucket_mb=2)
    engine = parallelize(CONFIG, build_mesh(parallel, "cpu"), parallel)
    matrices, vectors = engine.optimizer_tensors()
    optimizer = torch.optim.AdamW([*matrices, *vectors])
    with record() as trace:
        one_pass(engine)
        engine.finish_backward()
        optimizer.step()
        engine.after_step()
    engine.zero_grad()
    one_pass(engine)
    numel_P = sum(len(bucket.weights_P) for bucket in engine.buckets)
    return engine.state_bytes(optimizer), [(event.op, event.payload_bytes) for event in trace.events], numel_P


held = {stage: run_ranks(hold, 4, stage, overrides=MINE)[0] for stage in range(4)}
print("stage   weights   gradients   optimizer        sum     the formula    off by")
for stage, (measured, _, numel_P) in held.items():
    formula = sum(zero_state_bytes(numel_P, 4, stage, 4, 4, 8).values())
    columns = "".join(f"{measured[kind]:12,}" for kind in ("parameters", "gradients", "optimizer"))
    print(f"{stage}   {columns} {sum(measured.values()):12,} {formula:13,} {sum(measured.values()) - formula:7}")

# %%
with theme.figure(figsize=(7, 3.2)) as (figure, axes):
    names = {stage: f"stage {stage}" for stage in held}
    formula = {names[s]: zero_state_bytes(numel_P, 4, s, 4, 4, 8) for s, (_, _, numel_P) in held.items()}
    draw.draw_state(axes, {names[s]: measured for s, (measured, *_) in held.items()}, formula)
show_figure(figure)

# %% [markdown]
# To the byte. (fp32 here: 4 + 4 + 8 bytes per parameter.) And the price? What a ring would send for the collectives
# that were recorded, as a multiple of the model's own size. This is modelled from the recorded payloads, since torch
# carries the collectives out:


# %% tags=["nbval-check-output"]
RING = {"all_reduce": 2 * 3 / 4, "reduce_scatter": 3 / 4, "all_gather": 3}  # of the payload, on four ranks

for stage, (_, events, numel_P) in held.items():
    sent = sum(RING[op] * payload for op, payload in events)
    ops = {op: sum(o == op for o, _ in events) for op in sorted({op for op, _ in events})}
    print(f"stage {stage}: {sent / (4 * numel_P):.2f} models sent by each rank in a step; {ops}")

# %% [markdown]
# With one pass a step, stages 1 and 2 cost nothing: 1.5 models, as in plain data parallelism. (With several, stage 2
# must send in each: it has no room to keep whole gradients until the last.) Stage 3 gathers weights for forward and
# again for backward: half as much traffic again, says the paper. Here it is a quarter, because half of this small model
# is embedding and head, gathered once: the gradient of a lookup does not depend on the table, and the head stays.
#
# ### Find the bug
#
# A colleague writes an AdamW of stage 1, and compares it with one that is right. Same losses, same traffic:

# %%
from deepseek_lab.learn.chapters.c05_zero import ShardedOptimizer, SuspectOptimizer, train_flat

for optimizer_class in (ShardedOptimizer, SuspectOptimizer):
    seen = run_ranks(train_flat, 4, optimizer_class)
    first, *_, last = seen[0]["losses"]
    print(f"{optimizer_class.__name__:16} loss {first:.4f} to {last:.4f}; a step sends {seen[0]['a step sends']}")

# %% [markdown]
# Here is the suspect. What is wrong with it, and what would you have to measure to see it? `train_flat` returns one
# more figure; look at it **before** you open the hint.

# %%
import inspect

print(inspect.getsource(SuspectOptimizer))

# %%
hint("5-bug")

# %% [markdown]
# ## 4 · Stage 3: weights that come and go
#
# Weights are needed whole, but only while their layer runs. So each rank keeps its share; just before a layer runs, an
# all-gather makes the layer whole, and right after it the memory is given back. In backward the same again. To hide the
# all-gather, the *next* layer's weights start on their way while this one computes.
#
# `gather_weights` starts the all-gather. One trick makes the rest work: parameters are *views* of the bucket's memory.
# `x.untyped_storage().resize_(0)` takes the memory away from under them, and `resize_(n)` brings it back, while all
# views stay what they are.
#
# ### Exercise 5.5 · `GatheredWeights`  (stretch, 25 minutes)

# %% exercise: deepseek_lab.parallel.zero.GatheredWeights

# %%
check(GatheredWeights)

# %% [markdown]
# One pass on a link on which it can be seen: 20 ms, 1 GB/s. The picture is drawn from what rank 0 recorded.

# %%
from deepseek_lab.learn.chapters.c05_zero import watch_weights


def watched():
    parallel = ParallelConfig(zero_stage=3)
    engine = parallelize(CONFIG, build_mesh(parallel, "cpu"), parallel)
    return watch_weights(engine, one_pass)


spans, forward_ends_s, most_bytes, all_bytes = run_ranks(
    watched, 4, link=Link(20e-3, 1e9), overrides={**MINE, f"{ZERO}.GatheredWeights": GatheredWeights}
)[0]
with theme.figure(figsize=(7.5, 3)) as (figure, axes):
    draw.draw_whole_weights(axes, spans, forward_ends_s)
show_figure(figure)
print(f"whole or on their way at once: at most {most_bytes / 2**20:.1f} of {all_bytes / 2**20:.1f} MiB of weights")

# %% [markdown]
# While one layer is whole, the next is on its way. The head, the last in forward, is the first in backward, so it
# stays. On this slow link an all-gather takes three steps of 20 ms, and the layers are too small to hide 60 ms behind.
# On NVLink a layer of DeepSeek's size computes far longer than its weights travel.
#
# ## 5 · One norm for all
#
# Clipping needs the norm of the *whole* gradient. Every rank has a share. Some numbers exist several times: under
# tensor parallelism, norm weights are the same on all ranks of a tp group. If each rank clips by a norm of its own,
# shares are scaled differently, and the model that results is nobody's.
#
# ### Exercise 5.6 · `global_grad_norm`  (core, 15 minutes)

# %% exercise: deepseek_lab.parallel.zero.global_grad_norm

# %%
check(global_grad_norm)


# %%
def norms(stage):
    parallel = ParallelConfig(zero_stage=stage)
    engine = parallelize(CONFIG, build_mesh(parallel, "cpu"), parallel)
    one_pass(engine)
    engine.finish_backward()
    mine = torch.cat([piece.gradient.double() for bucket in engine.buckets for piece in bucket.pieces]).norm()
    return engine.grad_norm().item(), mine.item()


for stage in (0, 3):
    every = run_ranks(norms, 4, stage, overrides={**MINE, f"{ZERO}.global_grad_norm": global_grad_norm})
    whole, mine = zip(*every, strict=True)
    print(f"stage {stage}: on ranks 0 to 3, global norm", *(f"{norm:.4f}" for norm in whole), end="; ")
    print("of what the rank holds", *(f"{norm:.4f}" for norm in mine))

# %% [markdown]
# ## 6 · What the articles say

# %%
claims_table("05")

# %% [markdown]
# The claim: ZeRO-3 on 128 GPUs cuts the memory of parameters by 98%. What is *held* falls by more:

# %% tags=["nbval-check-output"]
n = 7_500_000_000
for n_ranks in (4, 50, 128):
    saved = 1 - zero_state_bytes(n, n_ranks, 3, 2, 2, 12)["parameters"] / (2 * n)
    print(f"{n_ranks:3} GPUs: {saved:.2%} less")
for n_whole in (1, 2):
    print(f"128 GPUs, while {n_whole} of 128 layers are whole: {1 - 1 / 128 - n_whole / 128:.2%} less")

# %% [markdown]
# 99.2% between passes, and the measured 75.0% on our four ranks is the same formula. 98% is what you get *at the peak*,
# for a model of 128 layers (which the articles speak of, too), with one or two layers whole. What the claim leaves out:
# parameters are an eighth of the state. Without sharding the rest, these 99.2% would be 12.4% of all.
#
# ## 7 · At scale
#
# DeepSeek-V3 was trained with ZeRO-1 only. Its pipeline has 16 stages and its experts are spread over 64 ranks, so that
# a GPU holds a small part of the model anyway. Why not more? Because a pipeline takes many micro-batches to a step.
# Stage 2 would add up the gradients of each, and stage 3 gather the weights for each, twice:

# %% tags=["nbval-check-output"]
n_params, n_ranks, micro_batches = 671e9 / 16, 128, 60  # one of 16 pipeline stages
for stage, passes in ((1, 1), (2, micro_batches), (3, micro_batches)):
    reduce_scatter, all_gather = passes, 1 if stage < 3 else 2 * passes
    sent = (reduce_scatter + all_gather) * 2 * n_params * (n_ranks - 1) / n_ranks
    print(f"stage {stage}: {sent / 1e9:8,.0f} GB sent by each GPU in a step, {sent / 50e9:6.1f} s at 50 GB/s")

# %% [markdown]
# (A bound: dense, without expert parallelism, nothing hidden.) Stages 2 and 3 were made for plain data parallelism with
# few micro-batches. The real thing to read: `fully_shard` in PyTorch (`torch/distributed/fsdp/_fully_shard`), which
# shards each parameter by its first dimension instead of cutting a flat bucket, and DeepSpeed's `stage_1_and_2.py` and
# `stage3.py`, where the flat buckets come from.
#
# ## 8 · Your trainer now
#
# Every run of the trainer uses `shard_range`, `cut`, `start_reduction` and `global_grad_norm`; with stage 3 it uses
# `GatheredWeights` too. On your own code:
#
# ```
# accelerate launch --config_file configs/accelerate/cpu.yaml -m deepseek_lab.train \
#     --config configs/tiny.yaml --parallel.zero_stage 3 --mine --out runs/zero
# ```
#
# The loss must be that of stage 0, to rounding; `summary.json` holds the bytes of each rank as `state_bytes`.

# %%
progress()

# %% [markdown]
# Next: `06_pipeline`, where a model is cut into stages, and time is what has to be shared out.
