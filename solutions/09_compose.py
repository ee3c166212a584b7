# %% [markdown]
# # 09 · All of it composed
#
# Data, tensor, pipeline and expert parallelism, ZeRO, recomputation: each was right by itself. Together they share the
# same ranks, and most mistakes that trainers have made lie in between: a gradient added up over the wrong group, a
# number counted twice. Here you lay out the grid of ranks, say for every parameter who must add up with whom, compare a
# composed run with one process, number by number, and read what your trainer spends its time on. Solve the exercises
# in order: the cells after each run on your function.

# %%
import torch

from deepseek_lab.learn import check, exercise, hint, progress, run_ranks
from deepseek_lab.learn.chapters import c09_compose as lab
from deepseek_lab.learn.widgets import claims_table, cost_box, show_figure, slider_figure
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.viz import mesh as draw
from deepseek_lab.viz import theme

cost_box(
    minutes=0.6,
    ranks=8,
    memory="about 0.6 GB",
    at_scale="the same code over NCCL, one rank a GPU",
    before="chapters 03 to 08",
)

# %% [markdown]
# ## The question
#
# Eight ranks: two pipeline stages, in each two data-parallel ranks, each of them two tensor-parallel ones. Experts are
# spread over the two data-parallel ranks. ZeRO-1 shares out the optimizer's state. Under sequence parallelism each
# tensor-parallel rank works norms out for its part of the sequence.
#
# **Predict.** Rank 5 has just found its gradient for (a) the norm weight of a block, (b) a column of an expert, (c) the
# table of the embedding, which the head uses as well. With which ranks must it add up each of them? And when the global
# norm of all gradients is worked out, on how many of the eight ranks are its numbers? Write the six answers down;
# section 4 prints them.
#
# ## 1 · The grid
#
# Some axes talk all the time, some once a step. Neighbouring ranks share the fast links, so the rank's number counts
# along tp first, then along data parallelism, then along the pipeline. Here are the eight ranks, if they were two nodes
# of four. Ranks of one colour form a group:

# %%
sizes = {"pp": 2, "edp": 1, "ep": 2, "tp": 2}
with theme.figure(figsize=(8.5, 1.7), ncols=3) as (figure, panels):
    for axes, axis in zip(panels, ("tp", "dp", "pp"), strict=True):
        draw.draw_groups(axes, sizes, axis, node=4)
show_figure(figure)

# %% [markdown]
# Data parallelism is a grid of its own: the ranks of one *ep* group hold different experts, those of one *edp* group
# the same. For everything but experts the two are one axis: dp = edp x ep. Above, edp is 1: the ep groups are the dp
# groups, and each expert is there once a stage. Without tp, the same eight ranks hold each expert twice a stage:

# %%
with theme.figure(figsize=(8.5, 1.7), ncols=3) as (figure, panels):
    for axes, axis in zip(panels, ("ep", "edp", "dp"), strict=True):
        draw.draw_groups(axes, {"pp": 2, "edp": 2, "ep": 2, "tp": 1}, axis, node=4)
show_figure(figure)

# %% [markdown]
# ### Exercise 9.1 · `coordinates`  (warm-up, 10 minutes)

# %% exercise: deepseek_lab.plan.grid.coordinates

# %%
check(coordinates)

# %% tags=["nbval-check-output"]
for rank in range(8):
    print(f"rank {rank}:", ", ".join(f"{axis} {n}" for axis, n in coordinates(rank, sizes).items()))

# %% [markdown]
# And on 32 ranks, four nodes of eight? Look at tp 8, then at tp 16, and find what crosses between nodes. (With
# more groups than colours, only the group of rank 0 has one.)

# %%
import ipywidgets as widgets

slider_figure(
    draw.draw_choice,
    figsize=(6, 2.6),
    tp=widgets.SelectionSlider(options=[1, 2, 4, 8, 16], value=4, description="tp"),
    pp=widgets.SelectionSlider(options=[1, 2, 4, 8], value=4, description="pp"),
    ep=widgets.SelectionSlider(options=[1, 2, 4], value=2, description="ep"),
    axis=widgets.ToggleButtons(options=["tp", "dp", "ep", "pp"], value="dp", description="groups along"),
)

# %% [markdown]
# ## 2 · What a rank holds
#
# Before anything is started, one can say what fits. The pipeline and tp decide which parameters a rank has; ZeRO, over
# how many ranks they are shared out.
#
# ### Exercise 9.2 · `state_of_a_rank`  (core, 15 minutes)
#
# `units_of_a_rank` counts a rank's parameters, block by block: all but routed experts, and routed experts. It has
# taken tp, ep and the pipeline into account; ZeRO is left. Add the blocks up first: a share is rounded up once, not
# once a block. `zero_state_bytes` is your exercise 5.1. Of `world_size` ranks, tp x pp work on one part of the batch;
# the quotient is dp.

# %% exercise: deepseek_lab.plan.memory.state_of_a_rank

# %%
check(state_of_a_rank)

# %% [markdown]
# One of the articles lists a layout: dp 16, tp 8, pp 8, for 128 layers of width 8,192. That is 1,024 GPUs, and, dense,
# 85 billion parameters. What would a GPU hold, in bf16 with fp32 master weights and Adam? And if the 16 went to tp, or
# to the pipeline? Write down first which of the three needs least, and whether it fits into 80 GB.

# %% tags=["nbval-check-output"]
config, MIXED = lab.dense_config(), (2, 2, 12)
print("weights, gradients, optimizer state of the fullest GPU, in GB")
for dp, tp, pp in ((16, 8, 8), (8, 16, 8), (8, 8, 16)):
    for stage in (0, 1):
        parallel = ParallelConfig(dp=dp, tp=tp, pp=pp, zero_stage=stage)
        states = [state_of_a_rank(config, parallel, rank, 1024, MIXED) for rank in range(pp)]
        fullest = max(states, key=lambda state: sum(state.values()))
        held = ", ".join(f"{size / 1e9:5.2f}" for size in fullest.values())
        print(f"dp {dp:2}, tp {tp:2}, pp {pp:2}, ZeRO-{stage}:   {held}   {sum(fullest.values()) / 1e9:6.2f}")

# %% [markdown]
# A third of an 80 GB GPU, or less. But a pipeline also keeps activations, of as many micro-batches as it has stages
# (chapter 06). With 64 micro-batches of 4,096 tokens, and sequence parallelism:

# %% tags=["nbval-check-output"]
from deepseek_lab.plan.memory import estimate


def gigabytes(**settings):
    """Of the fullest GPU of the listed layout: state and activations."""
    parallel = ParallelConfig(dp=16, tp=8, pp=8, sequence_parallel=True, **settings)
    sizes = {"micro_batch_size": 1, "seq_len": 4096, "micro_batches": 64}
    need = estimate(config, parallel, precision="mixed", world_size=1024, **sizes)
    state = sum(need[kind] for kind in ("parameters", "gradients", "optimizer"))
    return state / 1e9, (sum(need.values()) - state) / 1e9


for name, settings in (("as listed", {}), ("ZeRO-1", {"zero_stage": 1}), ("recomputation", {"recompute": "full"})):
    state, activations = gigabytes(**settings)
    print(f"{name:14} state {state:5.1f} GB, activations {activations:5.1f} GB, together {state + activations:5.1f} GB")

# %% [markdown]
# It fits, with ten gigabytes to spare, and activations take more than the state. So details decide: if the norms left
# their backward to autograd, they would keep two fp32 copies of what they read, 13 GB more, and as listed it would not
# fit. Neither would micro-batches of 8,192 tokens. Then ZeRO-1 or recomputation makes room.
#
# So why not tp 16, whose GPUs hold the least? tp adds up activations four times a layer: after attention and after the
# feed-forward, in forward and in backward. Work waits for these sums, and nodes have eight GPUs. A layer of width D has
# about 12 D² parameters (4 in attention, 8 in the feed-forward), each of which takes 6 operations a token: 2 in
# forward, 4 in backward. Per layer and micro-batch, at 400 GB/s inside a node and 50 GB/s between nodes, over one link
# or over one for each GPU (then eight parts of a sum cross at once):

# %% tags=["nbval-check-output"]
from deepseek_lab.plan.network import ring_all_reduce_seconds

sum_bytes = 2 * 4096 * 8192  # one sum: 4,096 tokens, bf16
inside = ring_all_reduce_seconds(sum_bytes, 8, 0, 400e9)
waits = {
    "tp 8, inside a node": (8, inside),
    "tp 16, a link for each GPU": (16, inside + ring_all_reduce_seconds(sum_bytes / 8, 2, 0, 50e9)),
    "tp 16, one link": (16, ring_all_reduce_seconds(sum_bytes, 16, 0, 50e9)),
}
for name, (tp, seconds) in waits.items():
    work = 6 * 4096 * (12 * 8192**2) / tp / 400e12  # operations a token and parameter, tokens, parameters
    print(f"{name:27} {4 * seconds * 1e3:5.2f} ms of messages beside {work * 1e3:4.2f} ms of work (at 400 TFLOP/s)")

# %% [markdown]
# Inside a node the messages add a fifth to the work. Between nodes they add more than half with eight links, and with
# one they take three times as long as the work. The 16 belongs to an axis that talks less.
#
# ## 3 · With whom to add up
#
# Backward leaves a gradient on every rank. Is it whole? Ask for each axis: do its ranks hold the same parameter, and
# has each seen only a part of what the loss depends on?
#
# ### Exercise 9.3 · `gradient_axes`  (core, 15 minutes)
#
# `layout` says how a parameter lies on the ranks: `dim`, the dimension that tp splits, or None; `partial`, held whole,
# but each tp rank finds a part of the gradient (chapter 04); `expert`, spread over ep. The axes have the names "dp",
# "edp", "tp", and "ends" for the first stage and the last.

# %% exercise: deepseek_lab.parallel.engine.gradient_axes

# %%
check(gradient_axes)

# %% [markdown]
# Now the whole: your function inside an engine on eight ranks, against one process that knows of no rank. Same weights,
# same eight rows of text, fp64. Every gradient is compared, norm-wise:


# %%
ROWS, T = 8, 32
TEXT = torch.randint(4096, (ROWS, T + 1), generator=torch.Generator().manual_seed(0))


def gradients(parallel):
    """On a rank: the gradients of one batch, whole, of the parameters that this rank has a part of; and their norm."""
    from deepseek_lab.data.batches import Batch
    from deepseek_lab.parallel.engine import parallelize
    from deepseek_lab.parallel.mesh import build_mesh

    mesh = build_mesh(parallel, "cpu")
    engine = parallelize(lab.small_config(), mesh, parallel, dtype=torch.float64)
    engine.model.train()
    mine = TEXT.chunk(mesh.size("dp"))[mesh.rank("dp")]
    batch = Batch(mine[:, :-1], mine[:, 1:], torch.zeros_like(mine[:, 1:]))
    engine.run(
        list(batch.split(2)),
        lambda chunk, x, micro: engine.run_stage(chunk, x, micro.input_ids, micro.labels),
        ROWS * T,
    )
    engine.finish_backward()
    return {name: whole.clone() for name, whole in engine.full("grad")}, engine.grad_norm().item()


alone, norm_alone = gradients(ParallelConfig())
EIGHT = ParallelConfig(tp=2, pp=2, ep=2, zero_stage=1, schedule="zb_h1", sequence_parallel=True)
SUMS = {"deepseek_lab.parallel.engine.gradient_axes": gradient_axes}
ran = run_ranks(gradients, 8, EIGHT, overrides=SUMS)
worst = lab.deviations([found for found, _ in ran], alone)
print(f"{len(worst)} of {len(alone)} parameters compared; the worst is off by {max(worst.values()):.1g}")

# %% [markdown]
# Only rounding is left, with a split backward, sequence parallelism and ZeRO on top. This is one cell of the parity
# matrix: the tests of this package run 30 of them at each change, and 210 under `make parity`, in which every three
# settings meet.
#
# What would a mistake look like? Here are three, on the same eight ranks: experts are added up over all of dp, as
# everything else is; partial gradients are not added up over tp; the two ends of the pipeline keep their own gradient
# of the table that they share.


# %%
MISTAKES = {
    "yours": gradient_axes,
    "experts over dp": lambda layout, twice: ["dp"] + ["tp"] * layout.partial + ["ends"] * twice,
    "no sum over tp": lambda layout, twice: ["edp" if layout.expert else "dp"] + ["ends"] * twice,
    "ends apart": lambda layout, twice: ["edp" if layout.expert else "dp"] + ["tp"] * layout.partial,
}


def try_all(parallel, mistakes):
    from deepseek_lab import slots

    found = {}
    for name, axes in mistakes.items():
        with slots.filled({"deepseek_lab.parallel.engine.gradient_axes": axes}):
            found[name] = gradients(parallel)
    return found


tried = run_ranks(try_all, 8, EIGHT, MISTAKES)
off = {name: lab.by_kind(lab.deviations([found[name][0] for found in tried], alone)) for name in MISTAKES}
with theme.figure(figsize=(7, 1.8)) as (figure, axes):
    draw.draw_deviations(axes, off)
show_figure(figure)
for name in MISTAKES:
    print(f"{name:16} gradient norm {tried[0][name][1]:.4f}, of one process {norm_alone:.4f}")

# %% [markdown]
# Each mistake spoils its own kinds of parameters, and leaves the others right to the last digits. Nothing crashes,
# shapes agree, and the loss of this step is right in all four. Adding up two different experts hardly shows in the
# norm, either. So gradients must be compared one by one.
#
# ## 4 · How often a number is there
#
# The norm of *all* gradients decides how far they are clipped. Every rank adds up the squares of what it holds, and one
# all-reduce adds the ranks up. So a number that lies on four ranks counts four times, unless each divides by four.
#
# ### Exercise 9.4 · `copies_of`  (core, 15 minutes)

# %% exercise: deepseek_lab.parallel.engine.copies_of

# %%
check(copies_of)

# %%
COUNTED = {**SUMS, "deepseek_lab.parallel.engine.copies_of": copies_of}
OTHERS = {
    "tp 2 x dp 2 x pp 2, ep 2, ZeRO-1": EIGHT,
    "dp 8, ep 4": ParallelConfig(ep=4),
    "dp 4 x tp 2, ep 2": ParallelConfig(tp=2, ep=2),
}
every = run_ranks(lambda: [gradients(parallel)[1] for parallel in OTHERS.values()], 8, overrides=COUNTED)
print(f"{'one process':33} {norm_alone:.12f}")
for name, norms in zip(OTHERS, zip(*every, strict=True), strict=True):
    print(f"{name:33}", *sorted({f"{norm:.12f}" for norm in norms}))

# %% [markdown]
# One number on all eight ranks, to the last digits but one or two, whatever the layout. And the six answers of rank 5,
# by your two functions:

# %% tags=["nbval-check-output"]
from deepseek_lab.parallel.tensor import Layout
from deepseek_lab.plan.grid import members

ALONG = {"dp": ("edp", "ep"), "edp": ("edp",), "tp": ("tp",), "ends": ("pp",)}  # of two stages, both are ends
KINDS = {
    "(a) norm weight": (Layout((64,), partial=True), False),
    "(b) column of an expert": (Layout((8, 64, 64), dim=1, expert=True), False),
    "(c) tied table": (Layout((4096, 64), dim=0), True),
}
for name, (layout, twice) in KINDS.items():
    others = {axis: set(members(5, ALONG[axis], sizes)) - {5} for axis in gradient_axes(layout, twice)}
    where = copies_of(layout, twice, {"tp": 2, "dp": 2, "edp": 1}, zero_stage=1)
    print(f"{name:23}  on {where} ranks;", ", ".join(f"{axis}: {ranks or 'nobody'}" for axis, ranks in others.items()))

# %% [markdown]
# The sums go in that order: when rank 4 is added along tp, it holds the sum of 4 and 6.
#
# ### Find the bug
#
# Somebody writes the training step the other way round: each rank divides its loss by its own tokens, and gradients are
# averaged instead of added up. For data parallelism, and equally long rows, that is the same. Here are ten steps of
# both on four ranks, without expert parallelism and with it:

# %%
from deepseek_lab.data.corpus import load_corpus
from deepseek_lab.data.tokenizer import load_tokenizer
from deepseek_lab.data.tokens import prepare

tokens = prepare(load_corpus(None), load_tokenizer(None))
STEPS = {"right": lab.right_step, "suspect": lab.suspect_step}


def compare(ep):
    return {name: lab.train(step, ParallelConfig(ep=ep), tokens) for name, step in STEPS.items()}


seen = run_ranks(lambda: {ep: compare(ep) for ep in (1, 4)}, 4)[0]
print("             loss: first, last      norm: first, last")
for ep, by_name in seen.items():
    for name, (losses, norms, _) in by_name.items():
        print(f"ep {ep}, {name:7}   {losses[0]:.4f}  {losses[-1]:.4f}      {norms[0]:.4f}  {norms[-1]:.4f}")

# %% [markdown]
# The losses agree to four digits, even after ten steps. Look at the norms. Which gradients are wrong, and by how much?
# Write a guess down. Then look at the suspect:

# %%
import inspect

print(inspect.getsource(lab.suspect_step))
print(inspect.getsource(lab.averaged))

# %%
hint("9-bug")

# %% [markdown]
# Now repair it. This is the same pass: change it until your norms are the right ones for every ep.

# %%
from deepseek_lab import slots


def repaired(engine, micros, forward):
    """The suspect, until you change it."""
    mine = sum(micro.labels.numel() for micro in micros)
    with slots.filled({"deepseek_lab.parallel.zero.start_reduction": lab.averaged}):
        loss_sum, _ = engine.run(micros, forward, mine)
    engine.finish_backward()
    return loss_sum


def norms_of(step, ep):
    return lab.train(step, ParallelConfig(ep=ep), tokens, steps=1)[2]


tried = run_ranks(lambda: [(ep, norms_of(lab.right_step, ep), norms_of(repaired, ep)) for ep in (1, 2, 4)], 4)[0]
print("norm of the gradients of    experts             all others")
for ep, right, yours in tried:
    kinds = [f"{yours[kind]:.4f} ({right[kind]:.4f})" for kind in ("experts", "others")]
    print(f"ep {ep}: yours (right)      ", "    ".join(kinds))

# %% [markdown]
# ## 5 · Read the trace
#
# The trainer records one step: every message, with the ranks that took part, and how long this rank stood still for it.
# To tell which axis costs what, each message has to be put down to one. Ranks alone do not tell: ep and dp can have
# the same, and the two ends of a pipeline of two stages are all of it. After
# the check, your 9.3, 9.4 and 9.5 run in the trainer for a few steps.
#
# ### Exercise 9.5 · `axis_of`  (core, 15 minutes)

# %% exercise: deepseek_lab.train.recorded.axis_of

# %%
check(axis_of)

# %%
from deepseek_lab.train.config import DataConfig, RunConfig, TrainConfig
from deepseek_lab.viz.pipeline import draw_schedule

settings = RunConfig(
    model=lab.small_config(num_hidden_layers=4),
    data=DataConfig(seq_len=32),
    train=TrainConfig(steps=12, global_batch_size=8, micro_batch_size=1),
    parallel=ParallelConfig(tp=2, pp=2, ep=2, zero_stage=1),
)
AXIS = {"deepseek_lab.train.recorded.axis_of": axis_of}
step, _ = run_ranks(lab.record_step, 8, settings, tokens, overrides={**COUNTED, **AXIS}, timeout=120)[0]
with theme.figure(figsize=(7, 2.2)) as (figure, axes):
    draw.draw_waiting(axes, step.axes)
show_figure(figure)
show_figure(draw_schedule(step.pipeline, f"step {step.step}, the ranks of one pipeline"))

# %% [markdown]
# Eight ranks on a few cores wait for each other more than they work, so the shares of two runs differ. What stays: dp
# hands over the most bytes and waits little, since it sends once a step, while backward goes on. The ends add up their
# shares of one table, once a step as well. tp and ep send in the middle of every layer, and nothing can be done until
# the answer is there. Their bytes grow with every token, those of dp and of the ends with the parameters only. That is
# why tp sits innermost, on the fastest links. What pp waits for is not its few bytes but the bubble: the gaps of the
# second picture.
#
# ## 6 · What the articles say

# %%
claims_table("09")

# %% [markdown]
# Section 2 shows what each of the 1,024 GPUs would hold. And the pipeline's bubble, with 8 or 16 stages?

# %% tags=["nbval-check-output"]
from deepseek_lab.plan.schedules import build_schedule, simulate

print("micro-batches      " + "".join(f"{m:7}" for m in (8, 16, 32, 64, 128)))
for stages in (8, 16):
    rates = [simulate(build_schedule("1f1b", stages, m)).bubble_rate for m in (8, 16, 32, 64, 128)]
    print(f"1F1B, {stages:2} stages    " + "".join(f"{rate:7.1%}" for rate in rates))

# %% [markdown]
# With dp 16 and 64 micro-batches of 4,096 tokens a batch has 4 million tokens, and a tenth of the time is bubble.
# Smaller batches have more.
#
# The other claim: begin with about 100 million parameters, and learn (and scale) in the order data, tensor, pipeline.
# What does a model of 100 million need? And how many parameters can dp, tp and pp carry? Guess before you look.

# %% tags=["nbval-check-output"]
NARROW = {"kv_lora_rank": 128, "q_lora_rank": None, "vocab_size": 32768, "tie_word_embeddings": True}
small = lab.dense_config(12, 768, **NARROW)  # 104 million
for name, parallel, ranks in (
    ("one GPU", ParallelConfig(), 1),
    ("dp 8", ParallelConfig(), 8),
    ("dp 8, ZeRO-1", ParallelConfig(zero_stage=1), 8),
):
    need = estimate(small, parallel, micro_batch_size=8, seq_len=1024, precision="mixed", world_size=ranks)
    print(f"{name:13} {sum(need.values()) / 1e9:5.1f} GB, of which state {sum(list(need.values())[:3]) / 1e9:4.1f}")

# %% [markdown]
# It fits on one GPU, with nothing split: right as an order to learn in, which this course took. And to scale in? If
# half of an 80 GB GPU is for the state:

# %% tags=["nbval-check-output"]
from deepseek_lab.plan.memory import zero_state_bytes

for name, parts, stage in (
    ("dp", 1, 0),
    ("dp 64, ZeRO-1", 1, 1),
    ("the same, tp 8", 8, 1),
    ("the same, tp 8 and pp 8", 64, 1),
):
    bytes_each = sum(zero_state_bytes(64_000, 64, stage, *MIXED).values()) / 64_000
    print(f"{name:24} {parts * 40 / bytes_each:6.1f} billion parameters, at {bytes_each:5.2f} bytes each")

# %% [markdown]
# So the order holds for dense models: first dp with ZeRO, until the model no longer fits or the batch cannot grow, then
# tp inside the node, then the pipeline. With experts there is another one: DeepSeek-V3 used no tp at all in
# training, but 16 pipeline stages and experts over 64 ranks (arXiv 2412.19437, section 3.2).
#
# ## 7 · At scale
#
# Everything here is written to run unchanged with a GPU for each rank (untested on GPUs). To read the real thing:
# `parallel_dims.py` and `parallelize.py` in torchtitan, and `parallel_state.py` in Megatron-LM, whose groups are those
# of this chapter.
#
# ## 8 · Your trainer now
#
# All that you wrote in nine chapters, on eight ranks and real text, in about four minutes:
#
# ```
# accelerate launch --config_file configs/accelerate/cpu.yaml --num_processes 8 -m deepseek_lab.train \
#     --config configs/tiny_mesh.yaml --mine --out runs/mesh
# ```
#
# `make train` is the same on the package's own functions. Look at `runs/mesh/pipeline.png`, and at "recorded_step" in
# `runs/mesh/summary.json`. Then run it on one rank (`python -m deepseek_lab.train` with `--parallel.tp 1`,
# `--parallel.pp 1` and `--parallel.ep 1`), and compare the losses of both `metrics.jsonl`, step by step.

# %%
progress()

# %% [markdown]
# Next: `10_attention`.
