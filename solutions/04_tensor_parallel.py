# %% [markdown]
# # 04 · Tensor parallelism
#
# Data parallelism gives every rank the whole model. When one layer is too large for one device, or one device too slow
# for one sequence, the layer itself has to be split. Here you split matrices, attention heads, the vocabulary and its
# loss over ranks, and count what each cut costs.

# %%
from deepseek_lab.learn import check, exercise, hint, progress, record, run_ranks, show_traffic
from deepseek_lab.learn.widgets import claims_table, cost_box, show_figure, slider_figure
from deepseek_lab.viz import tensor as pictures

cost_box(
    minutes=0.5,
    ranks=4,
    memory="about 0.7 GB; ranks share the memory that they were forked with",
    at_scale="the same code over NVLink, inside a node; section 9 says why not further",
    before="chapter 02: f, g, and what a ring sends",
)

# %% [markdown]
# ## The question
#
# A feed-forward layer multiplies by a matrix W, and later by a second one. Four ranks are to share both matrices. They
# work on the *same* tokens, and at the end every rank needs the whole result.
#
# **Predict.** How often do the ranks have to talk in one block of a transformer, forward and backward? And if the
# layer is made four times as wide, how many more bytes do they send? Write both answers down.
#
# ## 1 · Two ways to cut a matrix

# %%
show_figure(pictures.draw_splits())

# %% [markdown]
# Cut by its outputs, a matrix needs no communication. Cut by its inputs, it needs one sum. Both need to know which
# slice is whose.
#
# ### Exercise 4.1 · `shard`  (warm-up, 5 minutes)
#
# Give rank r the r-th of `size` equal, contiguous slices along `dim`. (Weights are stored as $W$ of shape (outputs,
# inputs), and used as $y = xW^\top$: cut by outputs means dim 0.) `divisors(6)` is the text "1, 2, 3 or 6", for whoever
# meets the error.
#
# Names end in their shapes: B sequences of T tokens, D the model's width, F a layer's, V the vocabulary. An `l` behind
# a letter is this rank's slice of it (`w_FlD`, `logits_Vl`), and t its piece of the T tokens (`x_BtD`).

# %% exercise: deepseek_lab.parallel.tensor.shard

# %%
check(shard)

# %% [markdown]
# This course tests the claims of two articles, E1, E2, … of the first and P1, P2, … of the second. (The table in
# chapter 00 lists them.) The first has a 128-wide weight cut into 8 × 16 pieces over 16 GPUs: claim E2. Try it:

# %% tags=["nbval-check-output"]
import torch

w = torch.zeros(128, 128)
for dim in (0, 1):
    pieces = [shard(w, dim, rank, 16) for rank in range(16)]
    print(f"dim {dim}: 16 pieces of {tuple(pieces[0].shape)}, {sum(p.numel() for p in pieces):,} numbers in all")
print(
    f"16 pieces of 8 × 16 hold {16 * 8 * 16:,} of {w.numel():,} numbers; {w.numel() // (8 * 16)} such pieces are needed"
)

# %% [markdown]
# ## 2 · By columns: nothing to send in forward
#
# Every rank has all of x and its own rows of W, so it finds its own columns of y alone. The bill arrives in backward:
# each rank knows the gradient of its own columns only, and finds *its part* of the gradient of x.
#
# ### Exercise 4.2 · `column_parallel_linear`  (core, 10 minutes)
#
# Chapter 02 has the function for that.
#
# This one and the next two have a switch, `sequence_parallel`. With it, each rank holds only its piece of the sequence
# between the layers, (B, T/R, D). The linear layer itself needs all tokens, so `collectives.gather_sequence` takes the
# place of chapter 02's function. Section 6 says what that is for.

# %% exercise: deepseek_lab.parallel.tensor.column_parallel_linear

# %%
check(column_parallel_linear)

# %% [markdown]
# Back to your second prediction: 256 tokens of 512 numbers, layers of growing width, on our own ring, where bytes are
# measured.


# %% tags=["nbval-check-output"]
from deepseek_lab.parallel import collectives


def column_traffic(width):
    collectives.set_algorithm("ring")
    rank, n_ranks = collectives.rank_in(), collectives.size_of()
    x = torch.ones(1, 256, 512, requires_grad=True)
    w_FlD = shard(torch.ones(width, 512), 0, rank, n_ranks).requires_grad_()
    with record() as forward:
        y_TFl = column_parallel_linear(x, w_FlD)
    with record() as backward:
        y_TFl.sum().backward()
    return forward, backward


print("width F   sent in forward   sent in backward, each rank")
for width in (512, 2048, 8192):
    traces = run_ranks(column_traffic, 4, width)
    forward, backward = (sum(trace.wire_bytes() for trace in way) // 4 for way in zip(*traces, strict=True))
    print(f"{width:7,} {forward:13} B {backward:15,} B")

# %%
show_traffic([backward for _, backward in traces])

# %% [markdown]
# $2\,\frac{R-1}{R}$ of the 524,288 bytes of x, at any width. **A wider layer costs no more communication.** That is why
# the first matrix of a feed-forward is cut by its outputs.
#
# ## 3 · By rows: one sum
#
# The second matrix takes what the first has left split. Its inputs lie on different ranks, so cut it by inputs: each
# rank multiplies what it has, and the products have to be added.
#
# $$ y = \sum_f x_f\, w_f = \sum_{r} \; \sum_{f \text{ on rank } r} x_f\, w_f $$
#
# ### Exercise 4.3 · `row_parallel_linear`  (core, 10 minutes)
#
# (With `sequence_parallel`, `collectives.scatter_sequence` takes the place of chapter 02's function. So in 4.4.)

# %% exercise: deepseek_lab.parallel.tensor.row_parallel_linear

# %%
check(row_parallel_linear)

# %% [markdown]
# Put together, they are a feed-forward. The model's kind, SwiGLU, is down(silu(gate(x)) · up(x)): it has two first
# matrices. If each is a `column_parallel_linear`, the gradient of the same x is summed twice. Enter once instead:


# %% tags=["nbval-check-output"]
import torch.nn.functional as F


def swiglu_traffic(enter_once):
    rank, n_ranks = collectives.rank_in(), collectives.size_of()
    x = torch.ones(1, 64, 32, requires_grad=True)
    gate, up = (shard(torch.ones(128, 32), 0, rank, n_ranks).requires_grad_() for _ in range(2))
    down = shard(torch.ones(32, 128), 1, rank, n_ranks).requires_grad_()
    with record() as forward:
        if enter_once:
            entered = collectives.copy_to_group(x)
            hidden = F.silu(F.linear(entered, gate)) * F.linear(entered, up)
        else:
            hidden = F.silu(column_parallel_linear(x, gate)) * column_parallel_linear(x, up)
        y = row_parallel_linear(hidden, down)
    with record() as backward:
        y.sum().backward()
    return [[event.op for event in trace.events] for trace in (forward, backward)]


for enter_once in (False, True):
    forward, backward = run_ranks(swiglu_traffic, 4, enter_once)[0]
    print(f"{'entered once' if enter_once else 'f in each matrix':17} forward: {forward}  backward: {backward}")

# %% [markdown]
# One sum in forward, where the feed-forward ends. One in backward, where it begins.
#
# ## 4 · Heads, and a whole block
#
# Attention has the same shape. Queries, keys and values of a head need nothing from other heads, so heads are split
# like columns, and the output projection takes them in like a row-parallel layer. `apply_tensor_parallel` does that to
# a whole DeepSeek model. The meter says what each part sends:


# %% tags=["nbval-check-output"]
from deepseek_lab.model import DeepSeekConfig, DeepSeekModel, rope
from deepseek_lab.parallel.tensor import apply_tensor_parallel

config = DeepSeekConfig.preset("tiny", num_hidden_layers=2)  # its first block is dense, its second has experts


def traffic_of_parts(config):
    model = DeepSeekModel(config)
    apply_tensor_parallel(model)
    tables = rope.rope_tables(config, torch.arange(64), torch.float32)
    ids = torch.randint(config.vocab_size, (1, 64))
    dense, moe = model.layers
    parts = {
        "embedding": lambda x: model.embed_tokens(ids),
        "a norm": dense.input_layernorm,
        "attention": lambda x: dense.self_attn(x, tables),
        "feed-forward, dense": dense.mlp,
        "feed-forward, experts": moe.mlp,
        "head and loss": lambda x: model.lm_head(x, ids)[0],
    }
    counts = {}
    for name, part in parts.items():
        x = torch.randn(1, 64, config.hidden_size, requires_grad=True)
        with record() as forward:
            y = part(x)
        with record() as backward:
            y.sum().backward()
        counts[name] = [[event.payload_bytes for event in trace.events] for trace in (forward, backward)]
    return counts


print(f"{'bytes of each all-reduce':24} {'forward':>12} {'backward':>12}")
for name, (forward, backward) in run_ranks(traffic_of_parts, 4, config)[0].items():
    print(f"{name:24} {forward or '-'!s:>12} {backward or '-'!s:>12}")

# %% [markdown]
# There they are: **two all-reduces a block in forward, where attention and feed-forward end, two in backward, where
# they begin.** Each carries one activation, here 64 tokens × 128 numbers × 4 bytes. All experts together need no more
# than a dense layer. Beyond the blocks, two more such activations travel in each step: the embedding sums one in
# forward, the head one in backward. (The two small messages at the end are the loss; section 5 builds it.)
#
# A head cannot be cut. Six heads of 48 rows make 288 rows, which four ranks could share: 72 rows each, one head and a
# half. That would run, and be nonsense. So it is refused:


# %% tags=["nbval-check-output"]
def attempt(heads):
    try:
        apply_tensor_parallel(
            DeepSeekModel(DeepSeekConfig.preset("tiny", num_hidden_layers=1, num_attention_heads=heads))
        )
    except ValueError as error:
        return str(error)
    return "fine"


for heads, n_ranks in [(4, 4), (6, 4), (4, 3)]:
    print(f"{heads} heads, {n_ranks} ranks: {run_ranks(attempt, n_ranks, heads)[0]}")

# %% [markdown]
# Not everything is split. DeepSeek's attention (MLA) first projects each token to two short vectors, the latents. All
# heads read them, and these projections are small, so every rank holds them whole; so it does with the router, which
# picks a token's experts. But each rank's own heads, or its own slice of the experts, send back only *their part* of
# the gradient:


# %% tags=["nbval-check-output"]
def gradients(config, split):
    model = DeepSeekModel(config).double()
    layouts = apply_tensor_parallel(model) if split else {}
    ids = torch.randint(config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(1))
    model.loss_sum(ids, ids.roll(-1))[0].backward()
    return {name: (w.grad, layouts.get(name)) for name, w in model.named_parameters()}


serial = gradients(config, split=False)
ranks = run_ranks(gradients, 4, config, True)
print("norm of each rank's gradient, in % of the true one; then how far their sum is off")
for name in ("self_attn.kv_a_proj_with_mqa", "self_attn.q_a_layernorm", "mlp.gate", "input_layernorm"):
    name = f"layers.1.{name}.weight"
    true, (parts, layouts) = serial[name][0], zip(*(rank[name] for rank in ranks), strict=True)
    shares = "  ".join(f"{part.norm() / true.norm():6.1%}" for part in parts)
    total = sum(parts) if layouts[0].partial else parts[0]
    off = "below 1e-12" if (total - true).norm() < 1e-12 * true.norm() else "far"
    words = f"partial, summed: {off}" if layouts[0].partial else f"whole already: {off}"
    print(f"{name:45} {shares}   {words}")

# %% [markdown]
# Forget that sum, and the replicas of a weight drift apart, with no error anywhere. The block's own norms, such as
# `input_layernorm`, need none: they stand before f, so what comes back to them is summed already. The latents' norms,
# such as `q_a_layernorm`, stand behind f and before the heads, so they need it. The package's `Layout` says it for
# every parameter: split along which dim, or whole, and if whole, whether its gradient is `partial`.
#
# ## 5 · The vocabulary, and a loss that never sees the logits
#
# The two largest matrices of a small model are its embedding and its head. Both are cut by the vocabulary: rank r
# holds the rows of tokens $rV/R$ up to $(r+1)V/R$. For a token of another rank, a rank has nothing to offer, so it
# offers zeros.
#
# ### Exercise 4.4 · `vocab_parallel_embedding`  (core, 15 minutes)

# %% exercise: deepseek_lab.parallel.tensor.vocab_parallel_embedding

# %%
check(vocab_parallel_embedding)

# %% [markdown]
# The head is a column-parallel layer: each rank gets the logits of its own part of the vocabulary. The loss of a token
# with label $k$ is
#
# $$ \log \sum_v e^{z_v} - z_k . $$
#
# The obvious way is to gather all logits. With 129,280 of them that is half a megabyte a token. But the loss needs only
# two numbers, a sum over all ranks and one logit. (And a third, so that no exponential overflows.)
#
# ### Exercise 4.5 · `vocab_parallel_cross_entropy_sum`  (stretch, 30 minutes)

# %% exercise: deepseek_lab.parallel.tensor.vocab_parallel_cross_entropy_sum

# %%
check(vocab_parallel_cross_entropy_sum)

# %% [markdown]
# What it saves, for 64 tokens on four ranks (what a ring would send, modelled from the recorded operations, since gloo
# carried them out):

# %%
from deepseek_lab.model import loss
from deepseek_lab.viz.traffic import modelled_matrix

VOCABULARIES = [1024, 4096, 16384, 65536]


def loss_traffic(vocabulary, gather):
    generator = torch.Generator().manual_seed(collectives.rank_in())
    logits_Vl = torch.randn(64, vocabulary // collectives.size_of(), generator=generator)
    labels = torch.arange(64)
    with record() as trace:
        if gather:
            loss_sum, _ = loss.cross_entropy_sum(collectives.gather_last_dim(logits_Vl), labels)
        else:
            loss_sum, _ = vocab_parallel_cross_entropy_sum(logits_Vl, labels)
    return loss_sum.item(), trace


costs = {"gather the logits": [], "exchange three numbers": []}
for vocabulary in VOCABULARIES:
    for name in costs:
        losses, traces = zip(*run_ranks(loss_traffic, 4, vocabulary, name == "gather the logits"), strict=True)
        costs[name].append(sum(modelled_matrix(traces, 4)[0]) / 64)
        print(f"V = {vocabulary:6,}  {name:23} loss {losses[0]:.2f}  {costs[name][-1]:11,.0f} bytes a token")
show_figure(pictures.draw_vocabulary(VOCABULARIES, costs))

# %% [markdown]
# The same loss for 18 bytes a token, at any vocabulary. Memory gains as much: 4,096 tokens of 129,280 logits in fp32
# are 2.1 GB. On eight ranks nobody holds more than an eighth of it.
#
# ## 6 · Sequence parallelism
#
# Between attention and feed-forward stand norms and residual sums. So far every rank does all of them, on all tokens,
# and keeps the same activations as everybody else. But these parts treat each token alone. So cut the *sequence*
# there. An all-reduce is a reduce-scatter and an all-gather (chapter 02), and between the two every rank needs only its
# own tokens.
#
# ### Exercise 4.6 · `GatherSequence`  (core, 10 minutes)
#
# Its twin `ScatterSequence` stands where g stood: a reduce-scatter in forward, and in backward an all-gather. Yours
# stands where f stood. Before you write it, say why its backward is not just "take my piece of the gradient".

# %% exercise: deepseek_lab.parallel.collectives.GatherSequence

# %%
check(GatherSequence)

# %% [markdown]
# **Predict.** Does sequence parallelism send fewer bytes? Does it save memory, and how much on four ranks? Now measure
# a training step of 256 tokens: bytes on our ring, and what autograd keeps from forward to backward.


# %%
def step(config, sequence_parallel):
    collectives.set_algorithm("ring")
    model = DeepSeekModel(config)
    layouts = apply_tensor_parallel(model, sequence_parallel=sequence_parallel)
    ids = torch.randint(config.vocab_size, (2, 128), generator=torch.Generator().manual_seed(1))
    weights = {w.untyped_storage().data_ptr() for w in model.parameters()}
    kept = {}  # one entry for each piece of memory, however often autograd refers to it

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with record() as trace, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = model.hidden(ids)  # the head and its loss are left out: they keep the same either way
        hidden.sum().backward()
    partial = sum(4 * w.numel() for name, w in model.named_parameters() if layouts[name].partial)
    return trace.wire_bytes(), partial, sum(kept.values())


four_blocks = DeepSeekConfig.preset("tiny", num_hidden_layers=4, first_k_dense_replace=4)
kept_MiB = {"without": {1: run_ranks(step, 1, four_blocks, False)[0][2] / 2**20}, "with sequence parallelism": {}}
kept_MiB["with sequence parallelism"][1] = kept_MiB["without"][1]
print("ranks                             sent, each rank   partial gradients   kept for backward")
for n_ranks in (2, 4):
    for name in kept_MiB:
        sent, partial, kept = run_ranks(step, n_ranks, four_blocks, name != "without")[0]
        kept_MiB[name][n_ranks] = kept / 2**20
        print(f"{n_ranks:5}  {name:25} {sent:13,} B {partial:17,} B {kept / 2**20:15.2f} MiB")
show_figure(pictures.draw_kept(kept_MiB))

# %% [markdown]
# **Not a byte less is sent, to the last one**, and the norms' gradients are partial now, so a little more has to be
# summed after backward. What it saves is memory, and the norms' own work. It pays when activations are what does not
# fit. Neither line reaches the even split: where attention and feed-forward begin, our ranks keep the gathered tokens.
# (Megatron-LM drops those, and gathers them once more in backward.)
#
# ## 7 · Find the bug
#
# The first article shows a parallel matmul in a few lines: each rank works out a part of the outputs, and an all-gather
# puts them together. `suspect_parallel_linear` does what those lines do. It passes every test that one thinks of first:

# %% tags=["nbval-check-output"]
from deepseek_lab.learn.chapters.c04_tensor_parallel import loss_with, suspect_parallel_linear


def usual_tests(linear):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 32, generator=generator), torch.randn(128, 32, generator=generator)
    right, got = x @ w.T, linear(x, w)
    return {
        "the shape": got.shape == right.shape,
        "all ones": torch.equal(linear(torch.ones(2, 32), torch.ones(128, 32)), torch.full((2, 128), 32.0)),
        "mean over the outputs": torch.allclose(got.mean(-1), right.mean(-1), atol=1e-5),
        "variance over the outputs": torch.allclose(got.var(-1), right.var(-1), rtol=1e-4),
        "largest output of each token": torch.equal(got.amax(-1), right.amax(-1)),
        "norm of each token": torch.allclose(got.norm(dim=-1), right.norm(dim=-1)),
    }


for test, passed in run_ranks(usual_tests, 4, suspect_parallel_linear)[0].items():
    print(f"{'passed' if passed else 'FAILED'}  {test}")

# %% [markdown]
# Put it into the feed-forward layers of two models: a fresh one, and the trained one that ships with the course. Both
# read the same 512 tokens of real text.

# %%
from deepseek_lab.data.corpus import load_corpus
from deepseek_lab.train.restore import load_model

trained, tokenizer = load_model()
models = {"a fresh model": DeepSeekModel(DeepSeekConfig.preset("tiny")), "a trained model": trained}
text = [token for document in load_corpus().val[:8] for token in tokenizer.encode(document.text)][:513]


def two_losses(linear):
    return {name: loss_with(linear, model, text) for name, model in models.items()}


right, suspect = two_losses(F.linear), run_ranks(two_losses, 4, suspect_parallel_linear)[0]
losses = {name: {"right": right[name], "suspect": suspect[name]} for name in right}
show_figure(pictures.draw_two_models(losses))

# %% [markdown]
# On the fresh model the two agree to within 0.2%: nobody would look twice. The trained one is now worse than the fresh
# one. And then there is this:

# %% tags=["nbval-check-output"]
from deepseek_lab.parallel.tensor import column_parallel_linear as right_linear


def has_gradient(linear):
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    return linear(x, w).requires_grad


for name, linear in [("suspect", suspect_parallel_linear), ("column_parallel_linear", right_linear)]:
    print(f"{name:23} its result can be trained: {run_ranks(has_gradient, 4, linear)[0]}")

# %% [markdown]
# Two mistakes. Find the first one **before** you open the hint. You may call `suspect_parallel_linear` on any x and W.

# %%
hint("4-bug")

# %% [markdown]
# ## 8 · What the articles say
#
# E2 you have settled in section 1, E4 in section 7. P3b says that heads are spread over GPUs to reduce the traffic
# *between nodes*. Take four ranks as two nodes of two, train a two-block model for one step in three layouts, and count
# the bytes that cross from one node to the other. (dp: ranks that share the batch; tp: ranks that share every layer.
# So dp 2 × tp 2 is two pairs: the two of a pair share the layers, each pair has half of the batch.)

# %%
from deepseek_lab.learn.chapters.c04_tensor_parallel import LAYOUTS, bytes_between_nodes

TOKENS = [512, 2048]
crossing = {layout: [bytes_between_nodes(layout, n) / 2**20 for n in TOKENS] for layout in LAYOUTS}
for layout, values in crossing.items():
    print(f"{layout:40}", "  ".join(f"{n:,} tokens: {value:5.2f} MiB" for n, value in zip(TOKENS, values, strict=True)))
show_figure(pictures.draw_nodes(TOKENS, crossing))

# %% [markdown]
# Without split heads the gradient crosses, whatever the batch. With heads split inside a node, fewer bytes cross, since
# each rank has half of the gradient to add up. (A ring that first adds up inside each node would send a little less,
# 10.7 MiB, without splitting anything.) With heads split *across* nodes, activations cross, four times a block, and
# they grow with the tokens: a third of the gradient's bytes at 512 tokens a step, more than them at 2,048. (Four
# activations of T × D numbers stand against some 12 D² weights in a dense block. So from about 3 D tokens a step on
# that one replica works through, activations are more: 24,576 tokens at a width of 8,192, which real steps exceed.) The
# claim holds only if the ranks that share heads sit in one node.

# %%
claims_table("04")

# %% [markdown]
# ## 9 · At scale
#
# A gradient can travel while backward goes on. These all-reduces cannot hide: the next layer waits for each of them. So
# compare their time with that of the matmuls. DeepSeek-V3's shapes, 4,096 tokens, bf16, matmuls at 40% of an H800's
# peak; links as in chapter 02 (assumed: 5 µs and 200 GB/s inside a node, 10 µs and 50 GB/s between nodes):

# %% tags=["nbval-check-output"]
from deepseek_lab.plan import network
from deepseek_lab.plan.flops import PEAK_FLOPS_PER_S, flops_per_token

LINKS = {"on NVLink": (5e-6, 200e9), "between nodes": (10e-6, 50e9)}


def block_ms(preset, n_tokens, n_ranks):
    """One block, forward and backward: its matmuls, and its four all-reduces on each link."""
    shapes = DeepSeekConfig.preset(preset)
    flops = n_tokens * flops_per_token(shapes, 4096) / shapes.num_hidden_layers / n_ranks
    n_bytes = n_tokens * shapes.hidden_size * 2
    waits = {name: 4e3 * network.ring_all_reduce_seconds(n_bytes, n_ranks, *link) for name, link in LINKS.items()}
    return 1e3 * flops / (0.4 * PEAK_FLOPS_PER_S["H800"]["bf16"]), waits


for n_ranks in (2, 4, 8, 16):
    matmuls, waits = block_ms("deepseek_v3", 4096, n_ranks)
    listed = ", ".join(f"all-reduces {ms:5.2f} ms {name}" for name, ms in waits.items())
    print(f"tp {n_ranks:2}: matmuls {matmuls:5.2f} ms, {listed}")

# %%
import ipywidgets as widgets

RANKS = [2, 4, 8, 16, 32]


def draw(axes, preset, n_tokens):
    times = [block_ms(preset, n_tokens, n_ranks) for n_ranks in RANKS]
    links = {name: [waits[name] for _, waits in times] for name in LINKS}
    pictures.draw_links(axes, [matmuls for matmuls, _ in times], links, RANKS)


slider_figure(
    draw,
    preset=widgets.Dropdown(options=["deepseek_v3", "deepseek_v2", "deepseek_v2_lite"], description="model"),
    n_tokens=widgets.SelectionSlider(options=[512, 1024, 4096, 16384], value=4096, description="tokens"),
)

# %% [markdown]
# More ranks shorten the matmuls, and lengthen the all-reduces. At tp 8 these take 44% of the matmuls' time on NVLink,
# and 165% of it between nodes. So public trainers keep tensor parallelism inside a node. DeepSeek-V3's team went
# further: they trained without tensor parallelism, which they call costly (arXiv 2412.19437, section 3.2). Their
# experts are 2,048 wide. Cut in eight, a matmul of 256 columns keeps no GPU busy. Chapter 08 spreads whole experts
# instead.
#
# The real thing: Megatron-LM's `core/tensor_parallel/layers.py` and `cross_entropy.py`; in PyTorch,
# `ColwiseParallel`, `RowwiseParallel` and `SequenceParallel`, used in torchtitan's `parallelize.py` of each model.
#
# ## 10 · Your trainer now
#
# Two ranks share every layer, and two such pairs share the batch. The head, the loss and all output projections run on
# your functions. (On two cores it takes several minutes.)
#
# ```
# accelerate launch --config_file configs/accelerate/cpu.yaml -m deepseek_lab.train \
#     --config configs/tiny.yaml --parallel.tp 2 --parallel.sequence_parallel true --mine --out runs/tensor
# ```

# %%
progress()

# %% [markdown]
# Next: `05_zero`, where data-parallel ranks stop holding the same things.
