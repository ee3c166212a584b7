# %% [markdown]
# # 03 · Data parallelism
#
# Every rank holds the whole model and a share of the batch. Each works out a gradient from its share, the gradients are
# added up, and all take the same step. That is data parallelism, and it stands or falls with one question: who waits
# for the network, and how long?

# %%
from deepseek_lab.learn import Link, check, exercise, hint, progress, record, run_ranks
from deepseek_lab.learn.widgets import claims_table, cost_box, show_figure, slider_figure
from deepseek_lab.viz import data_parallel as draw
from deepseek_lab.viz import timeline

cost_box(
    minutes=1,
    ranks=4,
    memory="about 0.8 GB; ranks share the memory that they were forked with",
    at_scale="the same code over NCCL; a gradient of 14 GB where here it is 1 MB",
    before="chapters 00 and 02",
)

# %% [markdown]
# ## The question
#
# One article trains on 128 GPUs: each handles 1/128 of the batch, and gradients are all-reduced. Take a model of 7
# billion parameters, gradients in bf16, and links of 50 GB/s.
#
# **Predict.** How many bytes does each GPU send in a step? How long does that take? If forward and backward take one
# second, and nothing overlaps, which part of the step is spent waiting? Write your guesses down.
#
# ## 1 · The same gradient, whoever works it out
#
# A DeepSeek model small enough for a laptop: latent attention, experts, four layers. It reads real text, byte by byte.
# Each rank takes its rows of the batch, divides the sum of its losses by the tokens of *all* ranks, and adds up
# gradients. Here with one all-reduce for each parameter, on the ring of chapter 02, which counts what it sends:

# %%
import functools

import torch

from deepseek_lab.learn.chapters import c03_data_parallel as chapter
from deepseek_lab.model import DeepSeekConfig, DeepSeekModel
from deepseek_lab.parallel import collectives

config = DeepSeekConfig.preset(
    "tiny",
    vocab_size=256,
    num_hidden_layers=4,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    q_lora_rank=32,
    kv_lora_rank=32,
    initializer_range=0.06,
)
text_N = chapter.text_bytes()


def my_backward(model, n_rows=8, length=64, step=0):
    rank, n_ranks = collectives.rank_in(), collectives.size_of()
    ids_BT, labels_BT = chapter.windows(text_N, step, n_rows=n_rows, length=length, rank=rank, n_ranks=n_ranks)
    loss_sum, _ = model.loss_sum(ids_BT, labels_BT)
    return lambda: (loss_sum / (n_rows * length)).backward()


# %% tags=["nbval-check-output"]
def one_by_one():
    collectives.set_algorithm("ring")
    model = DeepSeekModel(config).double()
    my_backward(model)()
    with record() as trace:
        for p in model.parameters():
            collectives.all_reduce(p.grad)
    return [p.grad for p in model.parameters()], sum(e.within is None for e in trace.events), trace.wire_bytes()


numels = [p.numel() for p in DeepSeekModel(config).parameters()]
print(f"{sum(numels):,} parameters in {len(numels)} tensors: {8 * sum(numels):,} bytes of fp64 gradient")
one_rank = run_ranks(one_by_one, 1)[0][0]
for n_ranks in (2, 4):
    gradients, n_messages, sent = run_ranks(one_by_one, n_ranks)[0]
    worst = max(((g - one).norm() / one.norm()).item() for g, one in zip(gradients, one_rank, strict=True))
    share = sent / (8 * sum(numels))
    print(f"{n_ranks} ranks: rank 0 sent {sent:,} bytes ({share:.3f} of the gradient) in {n_messages} all-reduces;")
    print(f"   every gradient is that of one rank, to 1 part in 10⁹: {worst < 1e-9}")

# %% [markdown]
# The numbers do not depend on how many ranks share the work: the law of this course. Each sends $2\frac{R-1}{R}$ of the
# gradient. Now let us see *when*. A slow link makes it visible: 20 MB/s, and 1 ms for each message of the ring. We take
# two ranks, so that on a laptop each has a core. (The link is modelled: an operation takes at least as long as it would
# there. Compute is measured, and takes longer when the machine is busy.) Time runs to the right; a rank has a row for
# its own work and one for its network.

# %%
slow = Link(latency_s=1e-3, bytes_per_s=20e6)
model_spans = ("forward", "backward")


def timed_step(communicate):
    """One step, after one to warm up, as spans; `communicate(model, backward, spans)` runs backward and adds up."""
    model = DeepSeekModel(config)
    for _ in range(2):
        spans = []
        model.zero_grad()
        collectives.barrier()
        with record() as trace:
            with timeline.span(spans, "forward"):
                backward = my_backward(model, n_rows=16, length=128)
            communicate(model, backward, spans)
    return spans + timeline.network_spans(trace)


def each_by_itself(model, backward, spans):
    with timeline.span(spans, "backward"):
        backward()
    for p in model.parameters():
        collectives.all_reduce(p.grad)


steps = {"one message for each gradient": run_ranks(timed_step, 2, each_by_itself, link=slow, timeout=120)}
show_figure(timeline.draw_timeline(steps["one message for each gradient"], title="one message for each gradient"))

# %% [markdown]
# The network begins only when compute has ended. Much of its time is *latency*: 63 all-reduces, each with two messages
# inside, and each message takes 1 ms however few numbers it carries. That makes 126 ms, where the bytes alone take 67.
#
# ## 2 · Fewer, larger messages
#
# So gradients travel together, in *buckets*. Which ones? Backward begins at the loss, so the last parameters' gradients
# are ready first, the embedding's last. Roughly: torch calls a hook as soon as a parameter's gradient is complete, and
# here is the order in which it does.


# %% tags=["nbval-check-output"]
def order_of_hooks():
    model, order = DeepSeekModel(config), []
    for i, p in enumerate(model.parameters()):
        p.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i))
    my_backward(model)()
    return order


print(*run_ranks(order_of_hooks, 1)[0])

# %% [markdown]
# From the end to the beginning, with neighbours out of turn. A bucket that is to leave early must hold neighbours from
# the end.
#
# ### Exercise 3.1 · `plan_buckets`  (warm-up, 10 minutes)

# %% exercise: deepseek_lab.parallel.data_parallel.plan_buckets

# %%
check(plan_buckets)

# %% [markdown]
# ### Exercise 3.2 · `all_reduce_gradients`  (core, 15 minutes)
#
# A bucket is one flat tensor: copy its gradients in, add up, copy the sums back. Nothing is divided by the number of
# ranks, because the loss was divided by the tokens of all ranks already.

# %% exercise: deepseek_lab.parallel.data_parallel.all_reduce_gradients

# %%
check(all_reduce_gradients)


# %%
BUCKET_BYTES = 300_000


def in_buckets(model, backward, spans, bucket_bytes=BUCKET_BYTES):
    with timeline.span(spans, "backward"):
        backward()
    all_reduce_gradients([p.grad for p in model.parameters()], bucket_bytes=bucket_bytes)


steps["buckets, after backward"] = run_ranks(timed_step, 2, in_buckets, link=slow, timeout=120)
show_figure(timeline.draw_timeline(steps["buckets, after backward"], title="in buckets, after backward"))

# %% [markdown]
# The same bytes in a handful of all-reduces: of 126 latencies ten or so are left. What remains is bandwidth, and a
# network that does nothing while ranks compute, and ranks that do nothing while it sends.
#
# ## 3 · While backward goes on
#
# The first bucket is complete when backward has barely begun. It can leave at once, if somebody notices: the hooks from
# above. `collectives.start_all_reduce` starts an all-reduce and returns at once, with a `Pending`; its `wait()` returns
# the sum when it has arrived. One thing can go wrong. Collectives are matched by their *order*.
# If rank 0 starts bucket 2 first and rank 1 bucket 1, they add up different things, or hang. So a bucket leaves only
# when all before it have left.
#
# ### Exercise 3.3 · `Overlap`  (core, 20 minutes)
#
# Three methods. A parameter may never get a gradient (an expert that nobody visited): other ranks still wait for its
# bucket, so `finish` sends what is left.

# %% exercise: deepseek_lab.parallel.data_parallel.Overlap

# %%
check(Overlap)


# %%
def while_backward_works(model, backward, spans, bucket_bytes=BUCKET_BYTES):
    parameters = list(model.parameters())
    members = plan_buckets([p.numel() for p in parameters], bucket_bytes // 4)

    def start(b):
        for i in members[b]:
            if parameters[i].grad is None:  # not used in this step
                parameters[i].grad = torch.zeros_like(parameters[i])
        flat = torch.cat([parameters[i].grad.flatten() for i in members[b]])
        return collectives.start_all_reduce(flat)

    overlap = Overlap(members, start)
    hooks = [p.register_post_accumulate_grad_hook(lambda _, i=i: overlap.ready(i)) for i, p in enumerate(parameters)]
    with timeline.span(spans, "backward"):
        backward()
    sums = overlap.finish()
    for hook in hooks:
        hook.remove()
    for bucket, flat in zip(members, sums, strict=True):
        for i, total in zip(bucket, flat.split([parameters[i].numel() for i in bucket]), strict=True):
            parameters[i].grad.copy_(total.view_as(parameters[i]))


steps["buckets, while backward works"] = run_ranks(timed_step, 2, while_backward_works, link=slow, timeout=120)
show_figure(timeline.draw_timeline(steps["buckets, while backward works"], title="in buckets, while backward works"))

# %%
print("on the chosen link: which part of the network's time passed behind forward, and behind backward?")
for name, ranks in steps.items():
    shares = [[timeline.hidden_share(spans, behind) for spans in ranks] for behind in model_spans]
    end_ms = max(max(s.stop_s for s in spans) - min(s.start_s for s in spans) for spans in ranks) * 1e3
    forward, backward = (sum(share) / len(share) for share in shares)
    print(f"{name:32} behind forward {forward:4.0%}, behind backward {backward:4.0%}; the step took {end_ms:4.0f} ms")

# %% [markdown]
# Compare the shares: the milliseconds are those of two processes on this machine, and change with what else it does.
# Behind backward a good part of the transfer costs nothing; the last bucket is always left over, because it is
# complete only when backward ends. Behind *forward* there is nothing to hide. The gradient of a step does not exist
# before its backward, and the next forward begins with the layer whose gradient comes **last**. One article
# says that CUDA streams overlap forward with the transfer of gradients, and that starting the next layer's aggregation
# during backward hides communication. The second is right, the first is not. (What can travel behind forward are
# *weights*: chapter 05.)
#
# How large should a bucket be? Each costs two latencies on two ranks, so tiny ones are slow; one that holds all
# gradients leaves only when backward has ended. Between the two there is room. PyTorch's default is 25 MB, and ours:
# for gradients of gigabytes. This model's 1.3 MB need smaller ones, or nothing overlaps.


# %%
def time_bucket_sizes():
    seconds = {}
    for n_bytes in (20_000, 60_000, 200_000, 600_000, 2_000_000):
        spans = timed_step(functools.partial(while_backward_works, bucket_bytes=n_bytes))
        seconds[n_bytes] = max(s.stop_s for s in spans) - min(s.start_s for s in spans)
    return seconds


by_rank = run_ranks(time_bucket_sizes, 2, link=slow, timeout=120)
slowest = {n_bytes: max(seconds[n_bytes] for seconds in by_rank) for n_bytes in by_rank[0]}
latency_bytes = 2 * slow.latency_s * slow.bytes_per_s  # a ring of two sends a bucket in two messages, half in each
show_figure(draw.draw_bucket_sizes(slowest, latency_bytes))

# %% [markdown]
# **Accumulation** is the cheapest way to send less: run several micro-batches, let their gradients add up on each rank,
# and communicate in the last one only. Four micro-batches a step, and what rank 0 sends:


# %% tags=["nbval-check-output"]
def accumulate(every_time, n_micro=4):
    collectives.set_algorithm("ring")
    model = DeepSeekModel(config)
    with record() as trace:
        for micro in range(n_micro):
            my_backward(model, step=micro)()
            if every_time or micro == n_micro - 1:
                all_reduce_gradients([p.grad for p in model.parameters()])
    return trace.wire_bytes()


for every_time in (True, False):
    sent = run_ranks(accumulate, 4, every_time, timeout=120)[0]
    print(f"all-reduce {'in every micro-batch' if every_time else 'in the last one only':21} {sent:12,} bytes")

# %% [markdown]
# (The first line is also wrong: sums of earlier micro-batches would be summed again.)
#
# ### Find the bug
#
# Rows differ in length: half of the batch are snippets of a few bytes. To pad less, somebody sorts each batch by length
# before it is split over the ranks. Two trainers, the same seed, the same batches. Every loss falls, so we draw how far
# it lies above that of the right trainer on one rank (in nats a byte, the mean of -ln p over the bytes; all 256 equally
# likely would be 5.5):

# %%
from dataclasses import replace

small = replace(config, num_hidden_layers=2)
one_rank = run_ranks(chapter.train_mixed, 1, text_N, small, False, timeout=120)[0]
gaps = {}
for name, suspect, n_ranks in [
    ("right, 4 ranks", False, 4),
    ("suspect, 1 rank", True, 1),
    ("suspect, 2 ranks", True, 2),
    ("suspect, 4 ranks", True, 4),
]:
    curve = run_ranks(chapter.train_mixed, n_ranks, text_N, small, suspect, timeout=120)[0]
    gaps[name] = [mine - right for mine, right in zip(curve, one_rank, strict=True)]
show_figure(
    draw.draw_curves(
        gaps, every=10, title="the same batches, shared by more ranks", ylabel="loss too high (nats a byte)"
    )
)

# %% [markdown]
# Nothing crashes. On one rank `suspect` is right; on several it learns something else. (How much it loses depends on
# the seed and the learning rate; that the curves part does not.) Why? Say it **before** you open the hint.

# %%
hint("3-bug")

# %% [markdown]
# ## 4 · Smaller gradients: eight bits
#
# If the network is the bottleneck, send less. Gradients are fp32 or bf16; do they need to be? An int8 goes from -127 to
# 127 in 254 steps. With one scale for a whole tensor, a single large entry would push all small ones to zero. So each
# block of 256 neighbours gets its own scale:
#
# $$ s = \max_i |x_i| / 127, \qquad q_i = \mathrm{round}(x_i / s), \qquad x_i \approx q_i\, s .$$
#
# ### Exercise 3.4 · `quantize_int8`  (core, 15 minutes)
#
# The inverse, `dequantize_int8(q_N, scale_M, block)`, is given. Mind three edges: a last block that is shorter, a block
# of zeros, and a gradient that overflowed, which must not come out looking healthy.

# %% exercise: deepseek_lab.parallel.compression.quantize_int8

# %%
check(quantize_int8)


# %% tags=["nbval-check-output"]
def real_gradient():
    model = DeepSeekModel(config)
    my_backward(model)()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


from deepseek_lab.parallel import compression

g_N = run_ranks(real_gradient, 1)[0]
for block in (len(g_N), 4096, 256, 64):
    q_N, scale_M = quantize_int8(g_N, block)
    error = (compression.dequantize_int8(q_N, scale_M, block) - g_N).norm() / g_N.norm()
    zeros = ((q_N == 0) & (g_N != 0)).float().mean().item()
    size = (q_N.nbytes + scale_M.nbytes) / g_N.nbytes
    print(f"block of {block:7,}: {size:.3f} of the bytes, error {error:6.2%}, {zeros:6.1%} of the numbers become 0")

# %% [markdown]
# An all-reduce cannot add int8s: sums overflow, and scales differ. So each rank owns a part of the bucket. All-to-all
# brings everybody's int8 of a part to its owner, who adds them up in fp32, quantises the sum, and an all-gather brings
# it back (`Int8AllReduce`).
#
# ## 5 · Or only the largest
#
# Most entries of a gradient are small. Send the 1% of largest magnitude, each with its index. (The share that is sent
# is called the *density*.)
#
# ### Exercise 3.5 · `top_k`  (warm-up, 5 minutes)

# %% exercise: deepseek_lab.parallel.compression.top_k

# %%
check(top_k)

# %% tags=["nbval-check-output"]
for share in (0.001, 0.01, 0.1):
    index_K, value_K = top_k(g_N, int(share * len(g_N)))
    print(f"the largest {share:5.1%} hold {(value_K.norm() / g_N.norm()) ** 2:.0%} of the gradient's square")

# %% [markdown]
# ## 6 · What was left out comes later
#
# Both are lossy, and top-k always loses the same entries: what is small this time is small next time. Error feedback
# keeps a *residual* of all that was not sent, and adds it to the next gradient. Nothing is lost, only late. (Each rank
# keeps a copy of the size of the gradient for it.)
#
# ### Exercise 3.6 · `with_error_feedback`  (core, 10 minutes)

# %% exercise: deepseek_lab.parallel.compression.with_error_feedback

# %%
check(with_error_feedback)

# %% [markdown]
# **Predict.** Top-k at 1%, without and with error feedback, on real text. Where do the losses end? And int8?


# %%
def without_feedback(x_N, residual_N, compress, decompress):
    return compress(x_N)


SLOTS = "deepseek_lab.parallel.compression."
mine = {SLOTS + f.__name__: f for f in (quantize_int8, top_k, with_error_feedback)}
forgets = mine | {SLOTS + "with_error_feedback": without_feedback}
losses = {}  # overrides: which functions the ranks use in place of the package's, here yours
for optimizer, name, method, feedback in [
    ("sgd", "fp32", "none", True),
    ("sgd", "int8, feedback", "int8", True),
    ("sgd", "top 1%, forgets", "topk", False),
    ("sgd", "top 1%, feedback", "topk", True),
    ("adamw", "fp32", "none", True),
    ("adamw", "top 1%, forgets", "topk", False),
    ("adamw", "top 1%, feedback", "topk", True),
]:
    options = {"compress": method, "optimizer": optimizer, "overrides": mine if feedback else forgets, "timeout": 120}
    losses[optimizer, name] = run_ranks(chapter.train, 2, text_N, small, **options)[0]
show_figure(
    draw.draw_curves(
        {name: curve for (optimizer, name), curve in losses.items() if optimizer == "sgd"},
        every=5,
        title="SGD on two ranks",
    )
)

# %%
for (optimizer, name), curve in losses.items():
    print(f"{optimizer:6} {name:17} mean loss of the last 20 steps {sum(curve[-20:]) / 20:.3f} nats a byte")

# %% [markdown]
# Int8 costs nothing here: its error is small and points nowhere in particular. Top-k without
# feedback falls behind; with it, SGD is as good as uncompressed. How wide the gap is depends on the setting: this is a
# learning rate of 1 with clipping at 0.5. At 0.3 without clipping, uncompressed SGD was itself so slow that top-k
# without feedback hardly trailed it (3.68 after 3.65), and feedback was ahead of both (3.22; one seed, 100 steps).
#
# **Under AdamW feedback did not help.** A likely reason: an entry that was held back for many steps arrives as one
# large number, and Adam divides it by its own size. Error feedback is a theorem about SGD; for Adam it takes more
# (1-bit Adam, arXiv 2102.02888, freezes the variance first).
#
# And the bytes? Measured on the ring, for the gradient of this model:


# %% tags=["nbval-check-output"]
def bytes_sent():
    collectives.set_algorithm("ring")
    flat, sent = real_gradient(), {}
    for name, method, dtype in [
        ("fp32", "none", torch.float32),
        ("bf16", "none", torch.bfloat16),
        ("int8", "int8", torch.float32),
        ("top 1%", "topk", torch.float32),
    ]:
        all_reduce = compression.get(method) or collectives.all_reduce
        with record() as trace:
            all_reduce(flat.to(dtype))
        sent[name] = trace.wire_bytes()
    return sent


sent = run_ranks(bytes_sent, 4, overrides=mine, timeout=120)[0]
for name, n_bytes in sent.items():
    shares = " and ".join(f"{n_bytes / sent[other]:6.1%} of {other}'s" for other in ("fp32", "bf16"))
    print(f"{name:7} rank 0 of four sent {n_bytes:9,} bytes: {shares}")

# %% [markdown]
# Does it save *time*? That depends on the link, since compressing takes time, too. An all-reduce of 4 MB between two
# ranks, on links of 0.1, 1 and 10 Gbit/s, and on this machine's loopback, which no network is like. Again links are
# modelled, and what compressing costs is measured here:


# %%
def time_methods(n=1_000_000):
    flat, seconds = torch.randn(n, generator=torch.Generator().manual_seed(collectives.rank_in())), {}
    for method in ("none", "int8", "topk"):
        all_reduce, spans = compression.get(method) or collectives.all_reduce, []
        for _ in range(3):
            copy = flat.clone()
            collectives.barrier()
            with timeline.span(spans, method):
                all_reduce(copy)
        seconds[method] = min(span.seconds for span in spans)
    return seconds


links = {f"{gigabits} Gbit/s": Link(20e-6, gigabits * 1e9 / 8) for gigabits in (0.1, 1, 10)} | {"loopback": None}
times = {name: run_ranks(time_methods, 2, link=link, overrides=mine, timeout=120)[0] for name, link in links.items()}
show_figure(draw.draw_link_times(times))

# %% [markdown]
# Compression pays where the link is slower than the compressor. At 0.1 Gbit/s it clearly does: fp32 takes a third of a
# second. At 10 Gbit/s the whole transfer takes 3 ms, and rounding or sorting a million numbers on one core takes longer
# than that. In between it depends on the machine, and on what else it does. (On a GPU the same work is far cheaper, so
# the crossing lies at faster links.)
#
# ## 7 · What the articles say
#
# These numbers come from `benchmarks/data_parallel.py`: longer runs, and the median of several, so they differ from
# those above.

# %%
claims_table("03")

# %% [markdown]
# ## 8 · At scale
#
# Your predictions from the beginning, by the formula of chapter 02 (links of 50 GB/s and 10 µs; assumed):

# %% tags=["nbval-check-output"]
from deepseek_lab.plan.network import ring_all_reduce_seconds

n_params, n_ranks = 7e9, 128
for name, n_bytes in [("fp32", 4), ("bf16", 2), ("int8", 1 + 4 / 256)]:
    sent = 2 * (n_ranks - 1) / n_ranks * n_bytes * n_params
    seconds = ring_all_reduce_seconds(n_bytes * n_params, n_ranks, 10e-6, 50e9)
    waiting = seconds / (1 + seconds)
    print(f"{name}: each of 128 GPUs sends {sent / 1e9:4.1f} GB in {seconds:.2f} s: {waiting:.0%} of a step waiting")

# %% [markdown]
# A backward costs about twice a forward: of that one second it takes two thirds. Gradients in bf16 just fit behind it,
# so overlapped, data parallelism over 128 GPUs costs next to nothing. That is why large trainers hide gradients, and
# rarely compress them.
#
# Top-k has a catch that four ranks do not show. Every rank chooses other entries, so each has to receive the choices of
# all: an all-gather, which grows with the number of ranks, where an all-reduce does not. And if there were more ranks?

# %%
import ipywidgets as widgets

slider_figure(
    draw.draw_bytes_by_ranks,
    density=widgets.SelectionSlider(options=[0.0001, 0.001, 0.01, 0.1], value=0.01, description="share that is sent"),
)

# %% [markdown]
# Index and value are eight bytes, sent R-1 times; an all-reduce sends four bytes about twice. **Top-k saves nothing
# from R = 1 / density ranks on:** at 1%, from 100. Int8 sends less than it from a quarter of that on: from 26. (Deep
# Gradient Compression, arXiv 1712.01887, goes down to 0.1%.)
#
# To read the real thing: PyTorch's `torch/csrc/distributed/c10d/reducer.cpp` is `Overlap` with all its corner cases;
# `torch.distributed.algorithms.ddp_comm_hooks` holds its compressors. ZeRO++ (arXiv 2306.10013) quantises by blocks, as
# here.
#
# ## 9 · Your trainer now
#
# The trainer plans its buckets, adds up and overlaps with your functions. Try what each is worth:
#
# ```
# accelerate launch --config_file configs/accelerate/cpu.yaml -m deepseek_lab.train \
#     --config configs/tiny.yaml --mine --parallel.bucket_mb 0.25 --parallel.compression int8 --out runs/int8
# ```
#
# (`configs/tiny.yaml` has a gradient so small that one bucket of 25 MB would hold all of it, and nothing would
# overlap.) Leave out the compression, or add `--parallel.overlap false`.

# %%
progress()

# %% [markdown]
# Next: `04_tensor_parallel`, for a layer that does not fit on one GPU.
