# %% [markdown]
# # 09 · All of it composed
#
# Data, tensor, pipeline and expert parallelism, ZeRO, recomputation: each was right by itself. Together they share the
# same ranks, and most mistakes that trainers have made lie in between: a gradient added up over the wrong group, a
# number counted twice. Here you lay out the grid of ranks, say for every parameter who must add up with whom, compare a
# composed run with one process, number by number, and read what your trainer spends its time on.

# %%
import torch

from deepseek_lab.learn import check, exercise, hint, progress, run_ranks
from deepseek_lab.learn.chapters import c09_compose as lab
from deepseek_lab.learn.widgets import claims_table, cost_box, show_figure
from deepseek_lab.parallel.config import ParallelConfig

cost_box(
    minutes=0.5,
    ranks=8,
    memory="about 0.6 GB",
    at_scale="the same code over NCCL, one rank a GPU",
    before="chapters 03 to 08",
)

# %% [markdown]
# ## The question
#
# Eight ranks: two pipeline stages, in each two data-parallel ranks, each of them two tensor-parallel ones. Experts are
# spread over the two data-parallel ranks. ZeRO-1 shares out the optimizer's state.
#
# **Predict.** Rank 5 has just found its gradient for (a) a norm weight, (b) a column of an expert, (c) the table of the
# embedding, which the head uses as well. With which ranks must it add up each of them? And when the global norm of all
# gradients is worked out, how many of the eight ranks hold each of the three? Write the six answers down.
#
# ## 1 · The grid
#
# Some axes talk all the time, some once a step. Neighbouring ranks share the fast links, so the rank's number counts
# along tp first, then along data parallelism, then along the pipeline. Data parallelism is a grid of its own: the ranks
# of one *ep* group hold different experts, those of one *edp* group the same. For everything but experts the two are
# one axis, dp.
#
# ### Exercise 9.1 · `coordinates`  (warm-up, 10 minutes)

# %% exercise: deepseek_lab.plan.grid.coordinates

# %%
check(coordinates)

# %% tags=["nbval-check-output"]
sizes = {"pp": 2, "edp": 1, "ep": 2, "tp": 2}
for rank in range(8):
    print(f"rank {rank}:", ", ".join(f"{axis} {n}" for axis, n in coordinates(rank, sizes).items()))

# %% [markdown]
# ## 2 · What a rank holds
#
# Before anything is started, one can say what fits. The pipeline and tp decide which parameters a rank has; ZeRO, over
# how many ranks they are shared out.
#
# ### Exercise 9.2 · `state_of_a_rank`  (core, 15 minutes)
#
# `units_of_a_rank` counts a rank's parameters, block by block: all but routed experts, and routed experts.
# `zero_state_bytes` is your exercise 5.1.

# %% exercise: deepseek_lab.plan.memory.state_of_a_rank

# %%
check(state_of_a_rank)

# %% [markdown]
# The articles' largest layout: 16 × 8 × 8 ranks, for 128 layers of width 8,192. They do not say which factor is which.
# Here is what a GPU would hold, in bf16 with fp32 master weights and Adam, if the 16 are pipeline stages, tp or dp:

# %% tags=["nbval-check-output"]
config, MIXED = lab.dense_config(), (2, 2, 12)
print("                                weights, gradients, optimizer state of the fullest GPU, in GB")
for dp, tp, pp in ((8, 8, 16), (8, 16, 8), (16, 8, 8)):
    for stage in (0, 1):
        layout = ParallelConfig(dp=dp, tp=tp, pp=pp, zero_stage=stage)
        states = [state_of_a_rank(config, layout, rank, 1024, MIXED) for rank in range(pp)]
        fullest = max(states, key=lambda state: sum(state.values()))
        sizes = ", ".join(f"{size / 1e9:5.2f}" for size in fullest.values())
        print(f"dp {dp:2}, tp {tp:2}, pp {pp:2}, ZeRO-{stage}:   {sizes}   {sum(fullest.values()) / 1e9:6.2f}")

# %% [markdown]
# All of them fit in 80 GB, so memory does not choose. What does? tp sends four sums of activations a layer, in the
# middle of the work, and nodes have eight GPUs: tp 16 sends half of them between nodes. Seconds per layer and
# micro-batch of 4,096 tokens, for links of 400 GB/s inside a node and 50 GB/s between nodes:

# %% tags=["nbval-check-output"]
activations = 2 * 4096 * 8192
for tp, bandwidth in ((8, 400e9), (16, 50e9)):
    seconds = 4 * 2 * (tp - 1) / tp * activations / bandwidth
    work = 6 * 4096 * (12 * 8192**2) / tp / 400e12
    print(f"tp {tp:2}: {seconds * 1e3:4.2f} ms of messages beside {work * 1e3:4.2f} ms of work (at 400 TFLOP/s)")

# %% [markdown]
# Inside a node the messages cost a fifth of the work's time. Across nodes they take three times as long as the work. So
# the 16 should not be tp.
#
# ## 3 · With whom to add up
#
# Backward leaves a gradient on every rank. Is it whole? Ask for each axis: do its ranks hold the same parameter, and
# has each seen only a part of what the loss depends on?
#
# ### Exercise 9.3 · `gradient_axes`  (core, 15 minutes)
#
# A `Layout` says how a parameter lies on the ranks: `dim`, the dimension that tp splits, or None; `partial`, held
# whole, but each tp rank finds a part of the gradient (chapter 04); `expert`, spread over ep. The axes have the names
# "dp", "edp", "tp", and "ends" for the first stage and the last.

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
# What would a mistake look like? Here experts are added up over all of dp, as everything else:


# %%
def all_alike(layout, twice):
    return ["dp"] + ["tp"] * layout.partial + ["ends"] * twice


ran = run_ranks(gradients, 8, EIGHT, overrides={"deepseek_lab.parallel.engine.gradient_axes": all_alike})
off = lab.deviations([found for found, _ in ran], alone)
print("wrong:", ", ".join(sorted({name.split(".", 2)[-1] for name, far in off.items() if far > 1e-9})))
print(f"norm: {ran[0][1]:.4f}, and of one process {norm_alone:.4f}")

# %% [markdown]
# Two different experts have been added up. Nothing crashes, shapes agree, and the loss of this step is right.
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
print(f"one process                    {norm_alone:.12f}")
for name, layout in {
    "tp 2 x dp 2 x pp 2, ep 2, ZeRO-1": EIGHT,
    "dp 8, ep 4": ParallelConfig(ep=4),
    "dp 4 x tp 2, ep 2": ParallelConfig(tp=2, ep=2),
}.items():
    norms = {f"{norm:.12f}" for _, norm in run_ranks(gradients, 8, layout, overrides=COUNTED)}
    print(f"{name:33}", *sorted(norms))

# %% [markdown]
# One number on all eight ranks, to the last digits but one or two, whatever the layout.
#
# ### Find the bug
#
# Somebody writes the training step the other way round: each rank divides its loss by its own tokens, and gradients are
# averaged over the ranks that share them. For data parallelism, and equally long rows, that is the same. Here are 20
# steps of both on four ranks, without expert parallelism and with it:

# %%
from deepseek_lab.data.corpus import load_corpus
from deepseek_lab.data.tokenizer import load_tokenizer
from deepseek_lab.data.tokens import prepare

tokens = prepare(load_corpus(None), load_tokenizer(None))
print("             loss: first, last      norm: first, last")
for ep in (1, 2, 4):
    for name, step in (("right", lab.right_step), ("suspect", lab.suspect_step)):
        losses, norms, _ = run_ranks(lab.train, 4, step, ParallelConfig(ep=ep), tokens)[0]
        print(f"ep {ep}, {name:7}   {losses[0]:.4f}  {losses[-1]:.4f}      {norms[0]:.4f}  {norms[-1]:.4f}")

# %% [markdown]
# The losses agree to four digits, even after 20 steps. Look at the norms. What is wrong, and for which parameters?

# %%
hint("9-bug")

# %% [markdown]
# ## 5 · Read the trace
#
# The trainer records one step: every message, with the ranks that took part, and how long this rank stood still for it.
# To tell which axis costs what, each message has to be put down to one.
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
    data=DataConfig(seq_len=64),
    train=TrainConfig(steps=12, global_batch_size=8, micro_batch_size=1),
    parallel=ParallelConfig(tp=2, pp=2, ep=2, zero_stage=1),
)
AXIS = {"deepseek_lab.train.recorded.axis_of": axis_of}
step, _ = run_ranks(lab.record_step, 8, settings, tokens, overrides={**COUNTED, **AXIS}, timeout=120)[0]
for axis, of in sorted(step.axes.items(), key=lambda item: -item[1]["share"]):
    print(f"{axis:6} a rank waited {of['share']:4.0%} of the step, and sent {of['bytes'] / 1e3:8,.1f} kB")
show_figure(draw_schedule(step.pipeline, f"step {step.step}, the ranks of one pipeline"))

# %% [markdown]
# Eight ranks on two cores wait for each other more than they work, and small messages cost as much as large ones. The
# order of the bytes is the lesson: what tp and ep send grows with every token, what dp sends with the parameters, and
# the pipeline sends least of all. That is why tp sits inside a node and the pipeline between nodes.
#
# ## 6 · What the articles say

# %%
claims_table("09")

# %% [markdown]
# 16 × 8 × 8 are 1,024 GPUs; section 2 shows what each would hold. And the pipeline's bubble, with 8 or 16 stages?

# %% tags=["nbval-check-output"]
from deepseek_lab.plan.schedules import build_schedule, simulate

print("micro-batches      " + "".join(f"{m:7}" for m in (8, 16, 32, 64, 128)))
for stages in (8, 16):
    rates = [simulate(build_schedule("1f1b", stages, m)).bubble_rate for m in (8, 16, 32, 64, 128)]
    print(f"1F1B, {stages:2} stages    " + "".join(f"{rate:7.1%}" for rate in rates))

# %% [markdown]
# The other claim: begin with about 100 million parameters, and learn (and scale) in the order data, tensor, pipeline.
# What does a model of 100 million need?

# %% tags=["nbval-check-output"]
from deepseek_lab.plan.memory import estimate

small = lab.dense_config(12, 768, vocab_size=32768, num_attention_heads=12, kv_lora_rank=128, q_lora_rank=None)
for name, layout, ranks in (
    ("one GPU", ParallelConfig(), 1),
    ("dp 8", ParallelConfig(), 8),
    ("dp 8, ZeRO-1", ParallelConfig(zero_stage=1), 8),
):
    need = estimate(small, layout, micro_batch_size=8, seq_len=1024, precision="mixed", world_size=ranks)
    print(f"{name:13} {sum(need.values()) / 1e9:5.1f} GB, of which state {sum(list(need.values())[:3]) / 1e9:4.1f}")

# %% [markdown]
# It fits on one GPU, with nothing split. As an order to learn in, that is right: this course took it. As an order to
# scale in, it holds for dense models: first dp with ZeRO, until a layer no longer fits or the batch cannot grow, then
# tp inside the node, then the pipeline. With experts there is a better one: DeepSeek-V3 used no tp at all in training,
# but 16 pipeline stages and experts over 64 ranks (arXiv 2412.19437, section 3.2).
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
