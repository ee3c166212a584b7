# %% [markdown]
# # 06 · Pipelines
#
# A model of 128 layers does not fit on one GPU, so eight GPUs hold 16 layers each. Now seven of them wait while one
# works. A pipeline is the art of not waiting: batches are cut small, and each GPU is given something to do. What to do,
# and in which order, is all there is to it. You write these orders, play them on paper, and run them on real ranks.

# %%
from deepseek_lab.learn import check, exercise, hint, progress, run_ranks
from deepseek_lab.learn.widgets import claims_table, cost_box, show_figure, slider_figure
from deepseek_lab.plan.schedules import Action, Schedule, build_schedule, simulate, validate
from deepseek_lab.viz import theme
from deepseek_lab.viz.pipeline import draw_choice, draw_schedule, utilization

cost_box(
    minutes=0.6,
    ranks=4,
    memory="about 0.5 GB",
    at_scale="the same schedules over NCCL; a stage computes where ours waits",
    before="chapter 02",
)

# %% [markdown]
# ## The question
#
# Cut a model into four *stages*, one on each rank. A batch goes through forward, stage by stage, and backward the other
# way. Backward takes twice as long as forward. Cut the batch into m *micro-batches*, and rank 1 can work on the first
# while rank 0 works on the second. Gradients add up, and when all micro-batches are through, the weights are updated.
#
# **Predict.** For which share of the time does a rank work if the batch is not cut at all? How many micro-batches does
# it take to make that three quarters? And what does a rank have to keep in the meantime? Write the three answers down.
#
# ## 1 · An order for every rank
#
# A *schedule* is a list for each rank: what to do, in which order. `F0` is the forward of micro-batch 0, `B0` its
# backward. Nothing is said about time: each action starts as soon as its rank is free and its input is there.
#
# ### Exercise 6.1 · `gpipe`  (warm-up, 5 minutes)
#
# The simplest order (Huang et al., 2018). An action is made like this: `Action("F", 0)`. Return a list, or yield one
# action after the other.

# %% exercise: deepseek_lab.plan.schedules.gpipe

# %%
check(gpipe)

# %% [markdown]
# `simulate` plays the lists, and works out when everything happens. Here F takes one unit of time and B two:

# %%
from deepseek_lab.learn.chapters.c06_pipeline import schedule_of

show_figure(draw_schedule(simulate(schedule_of(gpipe, 4, 8)), "GPipe, simulated"))

# %% [markdown]
# What is blank is the *bubble*: nobody works there. Now real ranks. An `Executor` carries out a schedule: it sends what
# a stage makes to the next one, calls backward, sends the gradient back. All it needs to know of the model is a
# `Stage`. This one is a layer with weights of its own, and real autograd:

# %%
import torch
from torch import nn

from deepseek_lab.learn.chapters.c06_pipeline import takes_time
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.pipeline import Executor, Stage

ROWS, WIDTH, M = 16, 32, 8
torch.manual_seed(0)
INPUTS, TARGETS = torch.randn(2, 9, ROWS, WIDTH, dtype=torch.float64)


class MyStage(Stage):
    def __init__(self, number, last, seconds=0.0):
        torch.manual_seed(1 + number)
        self.linear, self.last, self.seconds = nn.Linear(WIDTH, WIDTH, bias=False).double(), last, seconds

    def forward(self, m, x):
        y = torch.tanh(self.linear(INPUTS[m] if x is None else x))
        y = takes_time(y, self.linear.weight, self.seconds)
        return nn.functional.mse_loss(y, TARGETS[m]) / M if self.last else y

    def input_like(self, m):
        return torch.empty(ROWS, WIDTH, dtype=torch.float64)


def one_step(schedule, seconds=0.0):
    """Carry the schedule out on this rank."""
    rank = collectives.rank_in()
    numbers = [schedule.stage(rank, chunk) for chunk in range(schedule.chunks)]
    stages = [MyStage(number, number == schedule.stages - 1, seconds) for number in numbers]
    executor = Executor(schedule, stages)
    executor.run()
    gradients = {number: stage.linear.weight.grad for number, stage in zip(numbers, stages, strict=True)}
    return executor.spans, executor.peak_activations, gradients


ran = run_ranks(one_step, 4, schedule_of(gpipe, 4, M), 0.02)
show_figure(draw_schedule([spans for spans, *_ in ran], "GPipe, recorded on four ranks"))

# %% [markdown]
# (`takes_time` makes a stage wait 20 ms in forward and 40 in backward. Four ranks that share two cores cannot compute
# at the same time, but they can wait at the same time.)
#
# And are these the gradients of one process that does the whole batch by itself?


# %%
def off_by(ran, n_stages):
    """The largest difference, relative to the gradient, between the ranks' gradients and those of one process."""
    stages = [MyStage(number, number == n_stages - 1) for number in range(n_stages)]
    for m in range(M):
        x = None
        for stage in stages:
            x = stage.forward(m, x)
        x.backward()
    alone = {number: stage.linear.weight.grad for number, stage in enumerate(stages)}
    got = {number: gradient for *_, gradients in ran for number, gradient in gradients.items()}
    return max(((got[n] - alone[n]).norm() / alone[n].norm()).item() for n in alone)


print(f"the ranks' gradients are off by {off_by(ran, 4):.1g}")

# %% [markdown]
# The bubble is three forwards and three backwards long, however many micro-batches there are. So a rank works
# m / (m + 3) of the time. Recorded, on real ranks:


# %%
print("micro-batches   works   m / (m + 3)")
for m in (1, 2, 4, 9):
    spans = [spans for spans, *_ in run_ranks(one_step, 4, schedule_of(gpipe, 4, m), 0.02)]
    print(f"{m:13}   {utilization(spans):5.0%}   {m / (m + 3):5.0%}")

# %% [markdown]
# (If the middle column is lower than the right one by more than a few per cent, something else keeps your cores busy:
# run the cell again. It can't be the schedule.)
#
# A quarter without cutting, and three quarters take nine micro-batches. So the more the better? The price is memory.
#
# ## 2 · What is kept
#
# Backward needs what forward left behind: the *activations*. At scale they are gigabytes for each micro-batch.
#
# ### Exercise 6.2 · `peak_activations`  (warm-up, 10 minutes)
#
# A backward may come in two parts, I and W; section 3 says why. And an OVERLAP is a forward of one micro-batch and a
# backward of another as one action, so that one computes while messages of the other travel. Only DualPipeV, which
# DeepSeek used, has such (section 3); here it is two actions to count.

# %% exercise: deepseek_lab.plan.schedules.peak_activations

# %%
check(peak_activations)

# %% tags=["nbval-check-output"]
for m in (4, 8, 64):
    print(f"GPipe, {m:2} micro-batches: rank 0 keeps the activations of {peak_activations(gpipe(0, 4, m))}")

# %% [markdown]
# All of them. But micro-batch 0 could start its backward as soon as it has come through the last stage, and what it
# left behind could be thrown away on the way back.
#
# ### Exercise 6.3 · `one_f_one_b`  (core, 20 minutes)
#
# Start with the last rank: when can it do its first backward? Then the rank before it. 1F1B (PipeDream-flush; Narayanan
# et al., 2021) is what comes out.

# %% exercise: deepseek_lab.plan.schedules.one_f_one_b

# %%
check(one_f_one_b)

# %%
ran = run_ranks(one_step, 4, schedule_of(one_f_one_b, 4, M), 0.02)
show_figure(draw_schedule([spans for spans, *_ in ran], "1F1B, recorded on four ranks"))
print("kept at most, by rank:", [peak for _, peak, _ in ran], f"; gradients off by {off_by(ran, 4):.1g}")

# %% tags=["nbval-check-output"]
print("                   takes   works   keeps, by rank")
for order in (gpipe, one_f_one_b):
    for m in (8, 64):
        timeline = simulate(schedule_of(order, 4, m))
        works, kept = 1 - timeline.bubble_rate, timeline.peak_activations
        print(f"{order.__name__:12} {m:3} {timeline.makespan:7g} {works:7.0%}   {kept}")

# %% [markdown]
# Not a moment faster: the bubble is the same. But four micro-batches instead of 64 are kept, and so 64 can be afforded.
#
# And if …? *Interleaved* gives every rank two or more stages that are far apart, so that the pipe fills sooner. The
# other names come in section 3.

# %%
import ipywidgets as widgets

slider_figure(
    draw_choice,
    figsize=(9, 3.2),
    schedule=widgets.Dropdown(
        options=["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "dualpipe_v"], value="1f1b", description="schedule"
    ),
    ranks=widgets.IntSlider(value=4, min=1, max=8, description="ranks"),
    micro_batches=widgets.IntSlider(value=8, min=1, max=24, description="micro-batches"),
    chunks=widgets.IntSlider(value=2, min=2, max=4, description="stages a rank (interleaved)"),
    weight_part=widgets.FloatSlider(value=1, min=0.2, max=2, step=0.1, description="weight part, in forwards"),
)

# %% [markdown]
# ### Find the bug
#
# Messages belong to a schedule, too. A colleague writes them down where they are needed: a RECV right before the work,
# a SEND right behind it. That has worked for weeks. On a new machine the run hangs, with two ranks and three
# micro-batches. Here are the lists, and what `run_ranks` says of the ranks when the time is up. `SEND F1.0 1` is to be
# read: send the activation of micro-batch 1, chunk 0, to rank 1. (A *chunk* is one of the stages that a rank holds;
# here each has one, number 0.) `RECV B0.0 1` takes the gradient of micro-batch 0 from rank 1.

# %%
from deepseek_lab.learn.chapters.c06_pipeline import messages_beside_work, symptoms

two_ranks = build_schedule("1f1b", 2, 3)
suspect = messages_beside_work(two_ranks)
for rank, actions in enumerate(suspect):
    print(f"rank {rank}:", ", ".join(map(str, actions)))
print(symptoms(suspect))

# %% [markdown]
# Which messages must change places, and is there more than one way? Try it: write pairs into `PAIRS`, for example
# `(0, "SEND F0.0 1", "SEND F1.0 1")` for two messages of rank 0. `rendezvous` plays the lists without any rank, and
# names what each rank stands before when nothing moves any more. Two ranks then carry your lists out.

# %%
from deepseek_lab.learn.chapters.c06_pipeline import change_places, what_rendezvous_says

PAIRS = []  # of (rank, one message, another)
mended = suspect
for rank, one, other in PAIRS:
    mended = change_places(mended, rank, one, other)
print(what_rendezvous_says(two_ranks, mended))
if PAIRS:
    print(symptoms(mended))

# %%
hint("6-bug")

# %% [markdown]
# ## 3 · Fill the bubble
#
# Backward does two things. It finds the gradient of a stage's *input*, for which the rank before is waiting, and that
# of its *weights*, for which nobody waits until the end of the step. For a linear layer y = x wᵀ, with dy coming in:
#
# $$dx = dy\,w \qquad\qquad dw = dy^\top x$$
#
# Two matrix products of the same size. The first is the part called I, the second W. W can be done any time, for
# example where the bubble is (Qi et al., 2023).
#
# ### Exercise 6.4 · `DeferrableLinear`  (stretch, 25 minutes)
#
# A linear layer whose backward can leave `dw` for later. `parts = deferred(weight)` is None in an ordinary backward:
# then the layer does both parts itself. If not, `parts.put([weight], work_out)` notes a function that will give a tuple
# of one gradient, and backward returns None for w.
#
# The formula is for an x of rows; here x may have more dimensions, and what needs no gradient gets no work. And one
# trap: to save memory, a trainer may throw away what forward saved, and run it again when backward comes
# (recomputation). Then `ctx.saved_tensors` gives *twins*: the same numbers in other tensors. For a product a twin will
# do, but not for `deferred` and `put`: they need the parameter that the optimizer knows. An attribute of `ctx` can hold
# it.

# %% exercise: deepseek_lab.model.split_backward.DeferrableLinear

# %%
check(DeferrableLinear)

# %% [markdown]
# ### Exercise 6.5 · `zero_bubble`  (core, 20 minutes)
#
# When to do the weight parts? This is one order with two numbers. ZB-H1 is `zero_bubble(m, ahead=ranks - rank,
# behind=rank)`: as much in flight as 1F1B. ZB-H2 lets almost twice as many forwards run ahead.
#
# **Predict.** Why does rank 0 do each W at once, and rank 3 only three micro-batches later? Think of the end of the
# step: what can each rank do there, while the last gradients travel to rank 0? And of memory: who can afford to wait?

# %% exercise: deepseek_lab.plan.schedules.zero_bubble

# %%
check(zero_bubble)


# %%
def zb_h1(rank, ranks, micro_batches):
    return zero_bubble(micro_batches, ahead=ranks - rank, behind=rank)


MINE = {"deepseek_lab.model.split_backward.DeferrableLinear": DeferrableLinear}
ran = run_ranks(one_step, 4, schedule_of(zb_h1, 4, M), 0.02, overrides=MINE)
show_figure(draw_schedule([spans for spans, *_ in ran], "ZB-H1, recorded on four ranks, with your layer"))
print("kept at most, by rank:", [peak for _, peak, _ in ran], f"; gradients off by {off_by(ran, 4):.1g}")

# %% [markdown]
# On the way back, rank 3 is done with its last I first; then rank 2, 1 and 0 do theirs, one after the other. The three
# weight parts that rank 3 has put off fill this wait; rank 2 waits for less long and has two, and rank 0, whose I comes
# last, has nothing to wait for. It could not put any off either: a W that waits keeps activations. Rank r has ranks - r
# forwards in flight and r weight parts waiting, so each rank keeps the same, which is what rank 0 of 1F1B keeps anyway.
#
# All of them side by side. "Messages" are those that one rank in the middle sends and receives in a step:


# %% tags=["nbval-check-output"]
def compare(ranks, m):
    print(f"{ranks} ranks, {m} micro-batches    bubble   kept at most   messages")
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "dualpipe_v"):
        chunks = 2 if name in ("interleaved", "dualpipe_v") else 1
        schedule = build_schedule(name, ranks, m, chunks)
        timeline = simulate(schedule, t_f=1 / chunks, t_b=1 / chunks, t_w=1 / chunks)
        n_messages = sum(action.kind in ("SEND", "RECV") for action in schedule.actions[ranks // 2])
        kept = max(timeline.peak_activations) / chunks
        print(f"{name:26} {timeline.bubble_rate:7.1%} {kept:14g} {n_messages:10}")


compare(4, 16)

# %% [markdown]
# Each line buys time with something: memory (ZB-H2), messages (interleaved), both (DualPipeV). DualPipeV's gain is not
# in this table: while it computes the forward of one micro-batch, messages of another's backward travel, and with
# experts on other nodes (chapter 08) these take as long as the work itself.
#
# ## 4 · Never drain the pipe
#
# The bubble comes from draining the pipe at the end of each step. PipeDream (Harlap et al., 2018) never does: every
# stage updates its weights after each micro-batch, while the next ones are already on their way. Then a micro-batch
# meets old weights in the first stages, and newer ones further on. At least its backward must meet those that its
# forward met; so old versions are *stashed*.
#
# ### Exercise 6.6 · `StashedWeights`  (core, 20 minutes)

# %% exercise: deepseek_lab.parallel.pipedream.StashedWeights

# %%
check(StashedWeights)

# %%
show_figure(draw_schedule(simulate(build_schedule("pipedream", 4, 12)), "PipeDream, simulated; a line is an update"))

# %% [markdown]
# Rank 0 has sent micro-batches 1, 2 and 3 on their way when the gradient of micro-batch 0 comes back. So it is always
# three updates late, rank 1 two, the last rank none. What does that do to the loss? A small model guesses the next byte
# of real text. "Flush" cuts each batch of 32 into eight micro-batches, drains the pipe, and updates: the same numbers
# as one process. PipeDream takes each batch whole, as one micro-batch; and so does a careless version without stashing.

# %%
from statistics import mean

from deepseek_lab.learn.chapters.c06_pipeline import train_bytes

STASH = {"deepseek_lab.parallel.pipedream.StashedWeights": StashedWeights}
losses = {
    "flush": train_bytes(),
    "PipeDream": run_ranks(train_bytes, 4, overrides=STASH)[-1],
    "without stashing": run_ranks(train_bytes, 4, stash=False)[-1],
}
per_update = {"flush": simulate(build_schedule("1f1b", 4, 8)).makespan / 8, "PipeDream": 3.0, "without stashing": 3.0}
with theme.figure(figsize=(8, 3), ncols=2, sharey=True) as (figure, (by_update, by_time)):
    for name, curve in losses.items():
        smooth = [mean(curve[max(0, i - 19) : i + 1]) for i in range(len(curve))]
        by_update.plot(smooth, label=name)
        by_time.plot([i * per_update[name] for i in range(len(smooth))], smooth, label=name)
    by_update.set(xlabel="updates", ylabel="loss (nats a byte), mean of 20")
    by_time.set(xlabel="time, in forwards of a batch")
    by_time.legend()
show_figure(figure)
for name, curve in losses.items():
    print(f"{name:17} mean of the last 50 updates: {mean(curve[-50:]):.3f}")

# %% [markdown]
# Update for update, stale weights cost next to nothing here, and even the version without stashing gets away with it.
# One run cannot show such a difference: in the third digit the three may come in any order. Over three seeds, stale
# weights cost 0.006 nats (`python benchmarks/pipeline.py staleness`), and stashing is a matter of principle at this
# size: without it, a gradient is that of no model at all, and nothing bounds what it does.
# (At three times this learning rate, one seed of three diverges with a flush, and two with stale weights.) Second for
# second, PipeDream is ahead, since no time goes into bubbles. So why does nobody train large models that way? Because a
# stale gradient is right only as long as the weights have hardly moved: three plain steps of SGD in a small model are
# little. Here is the largest step that gradient descent can take on the simplest loss, w²/2, when its gradients are d
# updates late, and the same with a momentum of 0.9, without which nobody trains:

# %% tags=["nbval-check-output"]
from math import pi, sin

from deepseek_lab.learn.chapters.c06_pipeline import most_stable_step

print("updates late   largest step   2 sin(π / (4d + 2))   with momentum")
for delay in (0, 1, 3, 7, 15):
    print(f"{delay:12} {most_stable_step(delay):14.2f} {2 * sin(pi / (4 * delay + 2)):21.2f}", end="")
    print(f"{most_stable_step(delay, 0.9):16.3f}")

# %% [markdown]
# With four stages, the first one can take less than a quarter of the step, with momentum less than a hundredth. With 16
# stages it is worse again. And of R ranks, rank r keeps R - r versions of its weights, which are among the largest
# things that it holds. DeepSeek, like everybody else at that size, drains the pipe and fills the bubble.
#
# ## 5 · What the articles say

# %%
claims_table("06")

# %% [markdown]
# The first claim: four stages of GPipe or PipeDream lift utilization from 30% to 75%. How many micro-batches give what?

# %% tags=["nbval-check-output"]
print("micro-batches  ", *(f"{m:5}" for m in (1, 2, 3, 4, 8, 9, 12, 16, 64)))
for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_h2", 1)):
    works = []
    for m in (1, 2, 3, 4, 8, 9, 12, 16, 64):
        possible = name != "interleaved" or m % 4 == 0
        works.append(f"{1 - simulate(build_schedule(name, 4, m, chunks)).bubble_rate:5.0%}" if possible else "    -")
    print(f"{name:15}", *works)

# %% [markdown]
# With four equal stages, 30% is nothing that a schedule gives: it is 25% with one micro-batch and 40% with two. 75% is
# nine micro-batches of GPipe or 1F1B. PipeDream fills its pipe once and then works all the time.
#
# The second: 128 layers in 8 stages of 16, with a "bubble schedule".

# %% tags=["nbval-check-output"]
compare(8, 32)
layer, head = 12 * 8192**2, 129_280 * 8192
print(f"\nthe head of a vocabulary of 129,280 is worth {head / layer:.1f} layers of width 8,192:")
print(f"with 16 layers and the head, the last stage takes {1 + head / layer / 16:.3f} of what the others do")

# %% [markdown]
# 16 layers each is right for the layers, and leaves out the head: seven ranks wait for the last one 8% of the time.
# (Give it 15 layers and another stage has 17: hardly better.) And a "bubble schedule" is not one schedule but a choice:
# at 32 micro-batches between 18% of bubble and none.
#
# ## 6 · At scale
#
# DeepSeek-V3 has 16 pipeline ranks. With 15,360 sequences to a batch and 128 data-parallel ranks, there are at most 120
# micro-batches, fewer if each has several sequences:

# %% tags=["nbval-check-output"]
compare(16, 64)
for name, chunks in (("1f1b", 1), ("dualpipe_v", 2)):
    bubble = simulate(build_schedule(name, 16, 120, chunks)).bubble_rate
    print(f"with 120 micro-batches, {name}: {bubble:.1%}")

# %% [markdown]
# DualPipe's is less than half of 1F1B's, but it was chosen for what it hides besides. The real things to read:
# DeepSeek's `DualPipe` repository (`dualpipev.py`, whose eight phases are those of our `dualpipe_v`), the
# `schedules.py` of `torch.distributed.pipelining`, where a schedule is a list of actions too, and Megatron-LM's
# `schedules.py`, where it is a program. The tests of this package compare our orders with PyTorch's, and our simulator
# with the tables of the zero-bubble paper, to four digits.
#
# ## 7 · Your trainer now
#
# With `pp` above 1 the trainer cuts its model into stages and runs on your orders: `gpipe`, `one_f_one_b` and
# `zero_bubble` by the name of the schedule, `peak_activations` in every simulation, `DeferrableLinear` wherever W is a
# part of its own:
#
# ```
# accelerate launch --config_file configs/accelerate/cpu.yaml -m deepseek_lab.train \
#     --config configs/tiny.yaml --parallel.pp 2 --parallel.schedule zb_h1 --mine --out runs/pipeline
# ```
#
# The loss must be that of one stage, to rounding.

# %%
progress()

# %% [markdown]
# Next: `07_moe`, where each token chooses the layer that it goes through.
