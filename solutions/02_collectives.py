# %% [markdown]
# # 02 · Collectives
#
# Data parallelism ends every step with the same request: *add up this tensor over all ranks, and give everybody the
# sum*. That is an all-reduce. Here you build it, and its relatives, from single messages, count every byte, and find
# out what it costs on any network.

# %%
from deepseek_lab.learn import Link, check, exercise, hint, progress, record, run_ranks, show_traffic
from deepseek_lab.learn.widgets import cost_box, show_figure, slider_figure
from deepseek_lab.viz import rings, theme

cost_box(
    minutes=0.5,
    ranks=8,
    memory="about 0.5 GB; ranks share the memory that they were forked with",
    at_scale="the same code over NCCL; bytes as here, times by the model of section 5",
    before="chapter 00; chapter 01 is not needed",
)

# %% [markdown]
# ## The question
#
# Four ranks hold a gradient of 1 MB each. Every rank needs the sum of all four. In the obvious way, everybody sends to
# rank 0, which adds up and sends the sum back to each. With 2,000 ranks, rank 0 would have to send 1,999 gradients per
# step, while 1,999 links stand idle.
#
# **Predict.** How many bytes does *each* rank have to send, at the least, if the work is shared fairly? Does that
# grow with the number of ranks? Write both answers down before you go on.
#
# ## 1 · Messages, and a meter
#
# `collectives.exchange(x, dst, y, src)` sends `x` to rank `dst` and receives `y` from rank `src` at the same time. All
# of this chapter is built from it. `record()` keeps an *event* for each operation.

# %%
import torch

from deepseek_lab.parallel import collectives


def pass_to_the_right():
    rank, n_ranks = collectives.rank_in(), collectives.size_of()
    mine, arrived = torch.full((1000,), float(rank)), torch.empty(1000)
    with record() as trace:
        collectives.exchange(mine, (rank + 1) % n_ranks, arrived, (rank - 1) % n_ranks)
    return arrived[0].item(), trace


arrived_R, traces = zip(*run_ranks(pass_to_the_right, 4), strict=True)
print("what arrived on ranks 0, 1, 2, 3:", arrived_R)
traces[0].events[0]

# %% [markdown]
# `payload_bytes` is what was handed over. `wire_bytes` is what this rank itself sent: measured, not computed. It is
# `None` when torch carries out a collective for us, because then nobody here can see the messages.
#
# ### Exercise 2.1 · `traffic_matrix`  (warm-up, 5 minutes)
#
# Turn events into a table: row = sender (`event.rank`; traces may come in any order), column = receiver, bytes that
# were sent. An exchange leaves one event, for what this rank sent. A `send` and its `recv` leave one each; that of the
# receiver has `wire_bytes` 0. A collective has no `peer`: it is None.

# %% exercise: deepseek_lab.viz.traffic.traffic_matrix

# %%
check(traffic_matrix)

# %% [markdown]
# Now the obvious all-reduce, on 1,000 numbers (4,000 bytes, which is 3.906 KiB):

# %% tags=["nbval-check-output"]
from deepseek_lab.learn.chapters.c02_collectives import star_all_reduce


def traced(all_reduce, n_elements=1000):
    with record() as trace:
        all_reduce(torch.ones(n_elements))
    return trace


star = run_ranks(traced, 4, star_all_reduce)
for row in traffic_matrix(star, 4):
    print(row)

# %%
show_traffic(star)

# %% [markdown]
# Rank 0 sends and receives three tensors, every other rank one. Time is what the busiest link takes, so this all-reduce
# slows down with every rank that is added.
#
# ## 2 · Ring reduce-scatter: everybody adds a part
#
# Cut the tensor into R rows, one per rank, and let each rank become responsible for one row of the sum. A row travels
# round the ring. It starts just behind its owner, and at every stop the rank adds its own term and passes the partial
# sum on. All R rows travel at the same time, so every link is busy in every step.

# %%
import ipywidgets as widgets

slider_figure(
    rings.draw_row_journey,
    figsize=(7, 3.6),
    ranks=widgets.IntSlider(4, min=2, max=8, description="ranks"),
    row=widgets.IntSlider(0, min=0, max=7, description="row"),
)

# %% [markdown]
# ### Exercise 2.2 · `ring_reduce_scatter`  (core, 15 minutes)
#
# Which row does rank r send in step s, and to which row does it add what arrives? That is all there is to decide.
# A misplaced index gives plausible numbers, so the check uses readable ones: rank r contributes $10^r$. In a sum of
# `1101`, the term of rank 1 is missing. (Rings that turn left are as good as those that turn right, here and below.)

# %% exercise: deepseek_lab.parallel.collectives.ring_reduce_scatter

# %%
check(ring_reduce_scatter)


# %% tags=["nbval-check-output"]
def scatter():
    rank = collectives.rank_in()
    rows_RC = torch.tensor([[(row + 1) * 10**rank] for row in range(4)])
    with record() as trace:
        mine_C = ring_reduce_scatter(rows_RC)
    return mine_C.tolist(), [(event.peer, event.wire_bytes) for event in trace.events]


for rank, (mine, sent) in enumerate(run_ranks(scatter, 4)):
    print(f"rank {rank} holds row {rank} of the sum: {mine}; sent (to rank, bytes): {sent}")

# %% [markdown]
# Three messages of one row each. Nobody holds the whole sum, and nobody sent more than $\frac{R-1}{R}$ of the tensor.
#
# ## 3 · Ring all-gather, and the two together
#
# Now every rank has one finished row, and everybody needs all of them. The rows go round once more; this time nothing
# is added.
#
# ### Exercise 2.3 · `ring_all_gather`  (core, 10 minutes)

# %% exercise: deepseek_lab.parallel.collectives.ring_all_gather

# %%
check(ring_all_gather)

# %% [markdown]
# ### Exercise 2.4 · `ring_all_reduce`  (core, 10 minutes)
#
# A reduce-scatter, then an all-gather. Gradients come in any shape, and R rarely divides their size: pad with zeros.

# %% exercise: deepseek_lab.parallel.collectives.ring_all_reduce

# %%
check(ring_all_reduce)

# %% [markdown]
# Back to your prediction. Each rank sends R-1 rows twice, which is $2\,\frac{R-1}{R}$ of the padded tensor:

# %% tags=["nbval-check-output"]
print("ranks  numbers  padded bytes   2(R-1)/R of that  measured, on each rank")
for n_ranks, n_elements in [(2, 1000), (3, 1000), (4, 1000), (4, 1001), (8, 1001)]:
    padded_bytes = 4 * n_ranks * -(-n_elements // n_ranks)
    sent = [trace.wire_bytes() for trace in run_ranks(traced, n_ranks, ring_all_reduce, n_elements)]
    print(f"{n_ranks:5} {n_elements:8} {padded_bytes:13} {2 * (n_ranks - 1) * padded_bytes // n_ranks:18}  {sent}")

# %% [markdown]
# To the byte. And against the other two ways, at 2 to 8 ranks:


# %%
def everyone_to_everyone(x):
    rank, n_ranks = collectives.rank_in(), collectives.size_of()
    total, arrived = x.clone(), torch.empty_like(x)
    for step in range(1, n_ranks):
        total += collectives.exchange(x, (rank + step) % n_ranks, arrived, (rank - step) % n_ranks)
    return total


shares = {}
for all_reduce in (star_all_reduce, everyone_to_everyone, ring_all_reduce):
    name = all_reduce.__name__.replace("_", " ")
    shares[name] = {
        n_ranks: max(trace.wire_bytes() for trace in run_ranks(traced, n_ranks, all_reduce, 800)) / (800 * 4)
        for n_ranks in (2, 4, 8)
    }
with theme.figure() as (figure, axes):
    rings.draw_shares(axes, shares)
show_figure(figure)

# %% [markdown]
# The star and the exchange of everything grow with the number of ranks (their curves coincide: the busiest rank sends
# R-1 tensors either way). The ring stays below two tensors, however many ranks there are. **That is why data
# parallelism scales at all.** Can any all-reduce do better? To add R terms, R-1 of them have to be sent to where they
# are added; then the sum has to get to the R-1 ranks that lack it. That is 2(R-1) tensors in all, so the busiest of R
# ranks sends at least $2\,\frac{R-1}{R}$ of a tensor. The ring does just that.
#
# ### Find the bug
#
# `suspect_all_reduce` is a ring, too. It passes every test that its author thought of:

# %% tags=["nbval-check-output"]
from deepseek_lab.learn.chapters.c02_collectives import suspect_all_reduce, train_together


def usual_tests(all_reduce):
    rank = collectives.rank_in()
    x = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    right, got = collectives.all_reduce(x.clone()), all_reduce(x)
    return {
        "all_reduce of ones gives 4": bool((all_reduce(torch.ones(64)) == 4).all()),
        "all_reduce of my rank gives 6": bool((all_reduce(torch.full((64,), float(rank))) == 6).all()),
        "same norm as torch's": bool(torch.isclose(got.norm(), right.norm())),
        "same mean as torch's": bool(torch.isclose(got.mean(), right.mean())),
        "all ranks agree to the last bit": len({tuple(y.tolist()) for y in collectives.all_gather_object(got)}) == 1,
    }


for test, passed in run_ranks(usual_tests, 4, suspect_all_reduce)[0].items():
    print(f"{'passed' if passed else 'FAILED'}  {test}")

# %% [markdown]
# Then somebody trains with it. The learning rate gets the blame, of course, and is lowered:

# %%
losses = {"ring_all_reduce, lr 0.1": run_ranks(train_together, 4, ring_all_reduce, 0.1)[0]}
for lr in (0.1, 0.03):
    losses[f"suspect_all_reduce, lr {lr}"] = run_ranks(train_together, 4, suspect_all_reduce, lr)[0]
with theme.figure() as (figure, axes):
    rings.draw_losses(axes, losses)
show_figure(figure)

# %% [markdown]
# Find out what is wrong **before** you open the hint. You may call `suspect_all_reduce` on any tensor you like.

# %%
hint("2-bug")

# %% [markdown]
# ## 4 · All-to-all: everybody has something else for everybody
#
# In a mixture of experts, each rank has tokens for experts on all other ranks, never the same number for two of them.
# Nothing is summed; rows change hands. If all ranks began with rank 0, they would queue up there. So in step s, rank r
# sends to rank r+s: in each step every rank has exactly one sender and one receiver. (r-s does as well.)
#
# ### Exercise 2.5 · `pairwise_all_to_all`  (stretch, 15 minutes)

# %% exercise: deepseek_lab.parallel.collectives.pairwise_all_to_all

# %%
check(pairwise_all_to_all)

# %% [markdown]
# Four ranks with 300 tokens each, of 64 numbers. Expert 2 is popular:

# %%
popularity = [0.15, 0.20, 0.50, 0.15]


def route_tokens():
    rank, n_ranks = collectives.rank_in(), collectives.size_of()
    generator = torch.Generator().manual_seed(0)
    expert = torch.multinomial(torch.tensor(popularity), n_ranks * 300, replacement=True, generator=generator)
    counts_RR = torch.stack([mine.bincount(minlength=n_ranks) for mine in expert.view(n_ranks, 300)])
    with record() as trace:
        rows = pairwise_all_to_all(torch.ones(300, 64), counts_RR[rank].tolist(), counts_RR[:, rank].tolist())
    return len(rows), trace


n_rows, traces = zip(*run_ranks(route_tokens, 4), strict=True)
print("tokens that each rank's expert received:", n_rows)
show_traffic(traces)

# %% [markdown]
# The column of rank 2 is dark. It receives about half of all tokens, and computes while the others wait. Chapter 07
# balances the router, chapter 08 places popular experts twice.
#
# ## 5 · What does it cost? α and β
#
# A message has a price per message and a price per byte. With latency $\alpha$ and bandwidth $B$ (often written
# $\beta = 1/B$), S bytes take
#
# $$t(S) = \alpha + S/B .$$
#
# ### Exercise 2.6 · `ring_all_reduce_seconds`  (core, 5 minutes)
#
# Count the rounds of your ring, and what one message of a round takes.

# %% exercise: deepseek_lab.plan.network.ring_all_reduce_seconds

# %%
check(ring_all_reduce_seconds)

# %% [markdown]
# α and B of a network have to be measured: time messages of many sizes, then fit a line. The largest takes a thousand
# times as long as the smallest, so a few per cent of its time exceed all of α. Plain least squares would drown the
# small messages, and α with them.
#
# ### Exercise 2.7 · `fit_alpha_beta`  (stretch, 15 minutes)
#
# Minimise the sum of squares of the *relative* errors.

# %% exercise: deepseek_lab.plan.network.fit_alpha_beta

# %%
check(fit_alpha_beta)

# %% [markdown]
# Two networks. The first is what your ranks use anyway: gloo over this machine's loopback, which is fast and nothing
# like a network. The second is a `Link` that you choose. `run_ranks(..., link=link)` lets no operation complete earlier
# than that link would allow.

# %%
SIZES = [2**k for k in range(10, 25, 2)]  # 1 KiB to 16 MiB
link = Link(latency_s=20e-3, bytes_per_s=100e6)


def time_messages():
    other, best = 1 - collectives.rank_in(), []
    for n_bytes in SIZES:
        mine, arrived = torch.zeros(n_bytes // 4), torch.zeros(n_bytes // 4)
        with record() as trace:
            for _ in range(6):
                collectives.exchange(mine, other, arrived, other)
        best.append(min(event.seconds for event in trace.events))  # whatever disturbs a message only adds time
    return best


fits = {}
for name, chosen in [("gloo on this machine", None), ("the chosen link", link)]:
    seconds = run_ranks(time_messages, 2, link=chosen)[0]
    fits[name] = (seconds, *fit_alpha_beta(SIZES, seconds))
    print(f"{name}: α = {fits[name][1] * 1e3:.3f} ms, B = {fits[name][2] / 1e6:,.0f} MB/s")
with theme.figure(figsize=(7, 3.6)) as (figure, axes):
    rings.draw_fits(axes, SIZES, fits)
show_figure(figure)

# %% [markdown]
# The link's 20 ms and 100 MB/s come back out of the measurement, with what gloo and the operating system add on top.
# Gloo's own points scatter about their line: what else the machine does weighs more there than a message's α.
# Below about $\alpha B$ bytes (2 MB on this link) a message costs its latency, whatever its size.
#
# Does your formula predict your ring? On the chosen link:


# %%
def time_ring(n_bytes):
    with record() as trace:
        collectives.barrier()
        ring_all_reduce(torch.zeros(n_bytes // 4))
    first, last = trace.events[1], trace.events[-1]
    return last.start_s + last.seconds - first.start_s


print("ranks    bytes    predicted (s)  measured (s)   on raw loopback (s)")
for n_ranks, n_bytes in [(2, 64_000), (8, 64_000), (2, 6_400_000), (8, 6_400_000)]:
    predicted = ring_all_reduce_seconds(n_bytes, n_ranks, link.latency_s, link.bytes_per_s)
    measured, raw = (max(run_ranks(time_ring, n_ranks, n_bytes, link=chosen)) for chosen in (link, None))
    print(f"{n_ranks:5} {n_bytes:8,} {predicted:14.3f} {measured:13.3f} {raw:16.3f}")

# %% [markdown]
# From 2 to 8 ranks, the small tensor takes 7 times as long: 14 latencies instead of 2. The large one takes 4 times as
# long, and that is latencies, too: its bytes per rank grow by three quarters only. So a ring is best for large tensors
# and few ranks. With many ranks and small tensors a tree wins, since it needs only $2\log_2 R$ rounds. And if there
# were more ranks, or a slower network?

# %%
slider_figure(
    rings.draw_ring_and_tree,
    ranks=widgets.SelectionSlider(options=[4, 8, 64, 256, 1024, 4096], value=64, description="ranks"),
    latency_us=widgets.SelectionSlider(options=[1, 2, 5, 10, 20, 50], value=10, description="latency α (µs)"),
)

# %% [markdown]
# ## 6 · What autograd sees
#
# A collective inside a model needs a backward, too. Two cases are enough for all of tensor parallelism. Megatron-LM
# calls them f and g:
#
# | | forward | backward | where |
# |---|---|---|---|
# | f, `copy_to_group` | nothing | all-reduce | a shared x enters work that differs by rank |
# | g, `reduce_from_group` | all-reduce | nothing | the ranks' partial results become one |
#
# g first, since it is given. $y = \sum_r y_r$, so $\partial L / \partial y_r = \partial L / \partial y$, which every
# rank already holds: there is nothing to send.
#
# For f, each rank uses the same x in another way, and finds its own part of $\partial L/\partial x$. The true gradient
# is the sum of the parts.
#
# ### Exercise 2.8 · `CopyToGroup`  (core, 10 minutes)

# %% exercise: deepseek_lab.parallel.collectives.CopyToGroup

# %%
check(CopyToGroup)

# %% [markdown]
# Leave f out, and nothing looks wrong: the loss is right to the last digit. Four ranks compute
# $L = \lVert \sum_r \tanh(w_r x) \rVert^2$:

# %% tags=["nbval-check-output"]
w_R = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64)


def loss_and_gradient(enter):
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    y = collectives.reduce_from_group(torch.tanh(enter(x) * w_R[collectives.rank_in()]))
    y.square().sum().backward()
    return y.detach().square().sum().item(), x.grad


x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
torch.tanh(w_R[:, None] * x).sum(0).square().sum().backward()
for name, enter in [("with f", lambda x: CopyToGroup.apply(x, None)), ("without f", lambda x: x)]:
    losses_R, gradients_R = zip(*run_ranks(loss_and_gradient, 4, enter), strict=True)
    norms = ", ".join(f"{(g.norm() / x.grad.norm()).item():.1%}" for g in gradients_R)
    print(f"{name:10} loss {losses_R[0]:.6f}; gradient norm on ranks 0 to 3, in % of the true one: {norms}")

# %% [markdown]
# Without f, gradients are too small, and different on every rank. Replicas of the same weight drift apart, slowly. Adam
# divides by the size of the gradient, and hides even that. **Loss alone proves nothing:** all parity tests of this
# course compare the gradient of every parameter.
#
# ## 7 · What the articles say
#
# No claim is settled here, but two get their measuring stick. "Gradients are all-reduced over 128 GPUs" (P0, chapter
# 03) means that each GPU sends $2 \cdot \frac{127}{128}$ of the gradient in every step. And the claim that a torus
# brings an all-reduce on 1,024 GPUs from 12 to 5 ms (E6, chapter 20) can hardly be about a plain ring:

# %% tags=["nbval-check-output"]
from deepseek_lab.plan import network

print("1,024 ranks, an all-reduce of not a single byte")
for latency_us in (2, 5, 10):
    ring_s = ring_all_reduce_seconds(0, 1024, latency_us * 1e-6, 50e9)
    tree_s = network.tree_all_reduce_seconds(0, 1024, latency_us * 1e-6, 50e9)
    print(f"α = {latency_us:2} µs: ring {ring_s * 1e3:5.1f} ms, tree {tree_s * 1e3:.2f} ms")

# %% [markdown]
# ## 8 · At scale
#
# Gradients of a 7-billion-parameter model in bf16, 14 GB, on links like those of an H800 cluster (assumed: α = 5 µs and
# 200 GB/s inside a node, 10 µs and 50 GB/s between nodes):

# %% tags=["nbval-check-output"]
for what, n_ranks, latency_s, bytes_per_s in [("8 GPUs, one node", 8, 5e-6, 200e9), ("2,048 GPUs", 2048, 10e-6, 50e9)]:
    arguments = (n_ranks, latency_s, bytes_per_s)
    ring_s, tree_s = (f(14e9, *arguments) for f in (ring_all_reduce_seconds, network.tree_all_reduce_seconds))
    cross = network.ring_beats_tree_from(*arguments)
    print(f"{what}: ring {ring_s * 1e3:.0f} ms, tree {tree_s * 1e3:.0f} ms; the ring wins from {cross / 1e6:.1f} MB on")

# %% [markdown]
# Real libraries do both, and combine them: NCCL chooses among rings and pipelined double trees by size and topology,
# and reduces inside a node first. The ring kernel you have just written is `src/device/all_reduce.h` there. f and g are
# in Megatron-LM's `core/tensor_parallel/mappings.py`; DeepSeek's all-to-all for experts is the library DeepEP.
#
# ## 9 · Your trainer now
#
# With `--parallel.collectives ring`, every sum, gather and all-to-all of the trainer goes through these functions, and
# with `--mine` through yours:
#
# ```
# accelerate launch --config_file configs/accelerate/cpu.yaml -m deepseek_lab.train \
#     --config configs/tiny.yaml --parallel.collectives ring --mine --out runs/ring
# ```

# %%
progress()

# %% [markdown]
# Next: `03_data_parallel`, where the all-reduce hides behind the backward pass.
