# %% [markdown]
# # 07 · MoE
#
# DeepSeek-V3 has 671 billion parameters, and a token meets 37 billion of them: in each layer it visits 8 of 256
# experts. Who sends it there? A matrix, the *router*. Here you build what it decides, what it learns from, and what
# keeps it from sending everybody to the same few.

# %%
from deepseek_lab.learn import check, exercise, hint, progress, run_ranks
from deepseek_lab.learn.widgets import claims_table, cost_box, show_figure, slider_figure
from deepseek_lab.viz import moe as draw
from deepseek_lab.viz import theme

cost_box(
    minutes=0.7,
    ranks=4,
    memory="about 0.5 GB",
    at_scale="the same decisions; experts live on different GPUs, which is chapter 08",
    before="chapter 01; chapter 02 for the ranks in section 3",
)

# %% [markdown]
# ## The question
#
# The router gives each of E experts a score. A token visits the K best, and their outputs are added up. To pick the
# best is a step function: moving a score a little changes nothing, so the *choice* has no gradient.
#
# **Predict.** If the outputs of the K experts are averaged, what is the gradient of the router? And 32 experts, 4 for
# each token: after 60 steps in which nothing keeps the load even, how many visits does the busiest expert get, as a
# multiple of the mean?

# %%
import torch

from deepseek_lab import slots
from deepseek_lab.data.batches import train_batch
from deepseek_lab.data.corpus import load_corpus
from deepseek_lab.data.tokenizer import load_tokenizer
from deepseek_lab.data.tokens import prepare
from deepseek_lab.learn.chapters.c07_moe import small_config, train
from deepseek_lab.model import DeepSeekConfig, DeepSeekModel

corpus, tokenizer = load_corpus(), load_tokenizer()
tokens = prepare(corpus, tokenizer)
fresh = DeepSeekModel(small_config())
(router,) = fresh.routers().values()
batch = train_batch(tokens["train"], seed=0, step=0, global_batch_size=16, seq_len=64)
fresh(batch.input_ids)
with theme.figure(figsize=(7, 2.2)) as (figure, axes):
    draw.draw_visits(axes, router.visits_E.tolist())
show_figure(figure)

# %% [markdown]
# 16 sequences of real text, a router that has learned nothing yet: the load is uneven already. Tokens are not equally
# frequent, and all copies of a token begin alike.
#
# ## 1 · What the router learns from
#
# One of the articles lists a layer of 128 experts. It takes the numbers of the 4 best, runs these, and averages their
# outputs. Here is our own layer with that one decision:

# %%
MOE = "deepseek_lab.model.moe"


def averaged(scores_TE, index_TK, normalise, scale):
    return torch.full(index_TK.shape, 1 / index_TK.shape[1], dtype=scores_TE.dtype)


def gradients(combine):
    """Norms, after one pass on real text, with 4 of 128 experts."""
    with slots.filled({f"{MOE}.combine_weights": combine}):
        model = DeepSeekModel(small_config(n_routed_experts=128, moe_intermediate_size=16))
        loss_sum, n_tokens = model.loss_sum(batch.input_ids, batch.labels)
        (loss_sum / n_tokens).backward()
    (router,) = model.routers().values()
    experts = model.layers[1].mlp.experts.down_proj.grad
    return {"router": router.weight.grad, "experts": experts}


for part, gradient in gradients(averaged).items():
    print(f"{part:8} {'no gradient at all' if gradient is None else f'gradient of norm {gradient.norm():.4f}'}")

# %% [markdown]
# So the first answer is: none, not even zeros. The experts learn; the router does not. The scores decided who is
# visited, and were then thrown away. They must be kept in play: multiply each output by the score of its expert. V3
# takes sigmoids as scores, divides the K chosen ones by their sum, and multiplies by a constant; V2 takes a softmax
# over all experts, and does not divide.
#
# ### Exercise 7.1 · `combine_weights`  (warm-up, 10 minutes)

# %% exercise: deepseek_lab.model.moe.combine_weights

# %%
check(combine_weights)

# %%
for part, gradient in gradients(combine_weights).items():
    print(f"{part:8} gradient of norm {gradient.norm():.4f}")

STEPS = 60
runs = {}
for name, combine in (("weighted", combine_weights), ("averaged", averaged)):
    with slots.filled({f"{MOE}.combine_weights": combine}):
        runs[name] = train(small_config(), tokens, steps=STEPS)
    last = sum(runs[name]["loss"][-10:]) / 10
    print(f"{name}: loss {last:.3f}, router moved by {runs[name]['moved'][-1]:.0%} of its size")

# %%
show_figure(draw.draw_learning(runs))

# %% [markdown]
# **The loss hides it.** With averaging the router stays, to the bit, what chance made it. Nothing breaks: experts
# learn whatever tokens they are sent. (Routing by a fixed hash of the token is a known baseline that is hard to beat:
# Roller et al., 2021.) Over 300 steps, in two of three seeds the losses are still within 0.002 nats; in the third
# averaging is worse by 0.080. Only the router's gradient, or its weights after some steps, show at once that something
# is missing.
#
# Sigmoid or softmax? In a softmax an expert's score falls when another's rises. Sigmoids are independent, so a bias can
# be added to one without touching the others, which section 3 needs:

# %% tags=["nbval-check-output"]
logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
raised = torch.tensor([[2.0, 1.0, 0.0, 3.0]])  # a fourth expert that is not even chosen gets better
first_two = torch.tensor([[0, 1]])
for name, scores in (("softmax", lambda x: x.softmax(dim=-1)), ("sigmoid", torch.sigmoid)):
    before, after = (combine_weights(scores(x), first_two, False, 1.0)[0].tolist() for x in (logits, raised))
    print(f"{name}: weights {before[0]:.3f} {before[1]:.3f}, when another expert rises {after[0]:.3f} {after[1]:.3f}")

# %% [markdown]
# ## 2 · Not everywhere
#
# V3's 256 experts sit on 8 nodes. A token whose 8 experts lie on 8 nodes is sent 8 times over the slow network between
# them. So experts form groups, one a node, and a token may visit only its best 4 groups. How good is a group? V3 adds
# up the scores of its two best experts; V2 looks at the best alone (the argument `members` is 2 or 1).
#
# ### Exercise 7.2 · `choose_experts`  (core, 20 minutes)
#
# Careful with what you put in place of scores that are out: with a bias, a score can be negative.

# %% exercise: deepseek_lab.model.moe.choose_experts

# %%
check(choose_experts)

# %% tags=["nbval-check-output"]
scores_TE = torch.rand(4096, 256, generator=torch.Generator().manual_seed(0))
for topk_group in (8, 4, 1):
    index_TK = choose_experts(scores_TE, 8, 8, topk_group, 2)
    nodes = sum(len(set(row)) for row in (index_TK // 32).tolist()) / len(index_TK)
    kept = scores_TE.gather(1, index_TK).sum() / scores_TE.topk(8, dim=-1).values.sum()
    print(f"at most {topk_group} nodes: {nodes:.2f} visited, and {kept:.1%} of the best scores kept")

# %% [markdown]
# On scores drawn at random, one node fewer costs next to nothing: among 32 experts of a good group there are always
# some that will do. The bound pays in the network, not in the loss.
#
# ## 3 · A bias, and nothing else
#
# An expert that is visited more gets better, and is visited more. In the run with weights:


# %%
def report(name):
    load = sum(runs[name]["load"][-10:]) / 10
    loss = sum(runs[name]["loss"][-10:]) / 10
    idle = int((load < 0.05).sum())
    print(f"{name:14} the last 10 steps: busiest {load.max():.1f} × the mean, {idle:2} of 32 idle, loss {loss:.3f}")


report("weighted")

# %% [markdown]
# That is your second answer. (8 × would be an expert that every token visits.) V3's cure (Wang et al., 2024): add a
# bias to the scores, *for choosing only*. After each step lower it a little for the experts above the mean, and raise
# it for those below. The weights use the scores without it, so the loss never feels it.
#
# ### Exercise 7.3 · `router_bias_step`  (warm-up, 5 minutes)

# %% exercise: deepseek_lab.model.moe.router_bias_step

# %%
check(router_bias_step)

# %% [markdown]
# Whose visits? With data parallelism every rank sees a part of the batch. Four ranks here have texts of two
# languages, and the model that you trained above:

# %%
from deepseek_lab.learn.chapters.c07_moe import rows_in
from deepseek_lab.train import optim

LANGUAGES = ("en", "en", "zh", "zh")
texts = [rows for language in ("en", "zh") for rows in rows_in(language, corpus, tokenizer, n_rows=16).split(8)]
trained = runs["weighted"]["model"]


def visit(model, texts):
    from deepseek_lab.parallel import collectives

    (router,) = model.routers().values()
    router.reset_counts()
    model.train()(texts[collectives.rank_in()])
    mine_E, before_E = router.visits_E.clone(), router.e_score_correction_bias.clone()
    optim.balance_experts(model, 0.01)
    return mine_E, router.e_score_correction_bias - before_E


visits_RE = torch.stack([mine_E for mine_E, _ in run_ranks(visit, 4, trained, texts)])
show_figure(draw.draw_ranks([f"rank {r}, {language}" for r, language in enumerate(LANGUAGES)], visits_RE))
above_RE = visits_RE > visits_RE.double().mean(dim=1, keepdim=True)
above_E = visits_RE.sum(dim=0) > visits_RE.sum() / 32
for rank, language in enumerate(LANGUAGES):
    differ = int((above_RE[rank] != above_E).sum())
    print(f"rank {rank}, {language}: by its own visits it would move {differ} of 32 experts the wrong way")

# %% [markdown]
# Experts have taken to a language. A rank that goes by its own visits moves some of them the wrong way, and worse: the
# ranks then have *different* biases, so that they are copies of one model no longer. Counts must be those of the global
# batch, once a step: not once a micro-batch, and not again when a layer is recomputed in backward.
#
# ### Exercise 7.4 · `balance_experts`  (core, 15 minutes)
#
# All layers in one message: `visits_E` of each router, added up over the ranks of `group`. A router without a bias has
# no attribute `e_score_correction_bias` and stays out of the message; where no router has one, nothing is sent.

# %% exercise: deepseek_lab.train.optim.balance_experts

# %%
check(balance_experts)

# %%
MINE = {
    f"{MOE}.combine_weights": combine_weights,
    f"{MOE}.choose_experts": choose_experts,
    f"{MOE}.router_bias_step": router_bias_step,
    "deepseek_lab.train.optim.balance_experts": balance_experts,
}
steps_RE = torch.stack([step_E for _, step_E in run_ranks(visit, 4, trained, texts, overrides=MINE)])
print("the same step on all ranks:", bool((steps_RE == steps_RE[0]).all()))
print("experts that go down, up:", int((steps_RE[0] < 0).sum()), int((steps_RE[0] > 0).sum()))

with slots.filled(MINE):
    runs["bias"] = train(small_config(), tokens, steps=STEPS, rate=0.02)

# %%
show_figure(draw.draw_loads({"no balance": runs["weighted"]["load"], "bias": runs["bias"]["load"]}))
report("weighted")
report("bias")

# %% [markdown]
# Step by step the idle experts are drawn in, at no loss. The rate here is 0.02, since 60 steps have to do; V3 used
# 0.001 for most of its training, and 0 at its end. Over ten steps the load is nearly even. In a single step of 512
# tokens it still swings, as the picture below shows: this bias looks at what was, never at the batch that comes.
#
# ## 4 · The auxiliary loss
#
# The older answer adds a term to the loss. For each expert let $f_i$ be its share of the visits as a multiple of the
# mean, and $P_i$ its mean score, after each token's scores were divided by their sum:
#
# $$L = \alpha \sum_i f_i P_i, \qquad f_i = \frac{E}{K\,T}\,\#\{\text{visits of } i\}, \qquad
# P_i = \frac{1}{T}\sum_t \frac{s_{i,t}}{\sum_j s_{j,t}}$$
#
# Visits are counted, so $f$ has no gradient. It acts as a price: the busier an expert, the more its scores are pushed
# down. V3 keeps a very small $\alpha$, and takes the loss *in each sequence*, where the bias does not look.
#
# ### Exercise 7.5 · `sequence_balance_loss`  (core, 25 minutes)

# %% exercise: deepseek_lab.model.moe.sequence_balance_loss

# %%
check(sequence_balance_loss)

# %%
MINE[f"{MOE}.sequence_balance_loss"] = sequence_balance_loss
with slots.filled(MINE):
    runs["auxiliary"] = train(small_config(aux_loss_alpha=0.1), tokens, steps=STEPS)
for name in ("weighted", "bias", "auxiliary"):
    report(name)
with theme.figure(figsize=(7, 2.6)) as (figure, axes):
    draw.draw_busiest(axes, {name: runs[name]["load"] for name in ("weighted", "bias", "auxiliary")})
show_figure(figure)

# %% [markdown]
# Both work. (60 steps need a strong hand: $\alpha$ is 0.1 here, V3's is 0.0001.) The auxiliary loss pulls at the scores
# themselves, against what the text asks for, and $\alpha$ decides who wins; the bias leaves the scores alone, but acts
# with a delay, and on the sum over the batch only.
#
# How does the gradient of such a loss get in, when the layer returns activations and no loss? The layer's
# weights pass through an identity whose backward gives the auxiliary loss its gradient too (`moe.AddGradient`), so that
# no number has to travel through the pipeline of chapter 06.
#
# ### Find the bug
#
# A colleague's router. One global batch of 8 sequences, taken in 1, 2, 4 or 8 passes; the norm of its gradient from the
# auxiliary loss alone. Its source is two cells below; first say from the numbers what it divides by:

# %% tags=["nbval-check-output"]
from deepseek_lab.learn.chapters.c07_moe import SuspectRouter, auxiliary_gradient
from deepseek_lab.model.moe import Router

for router_class in (Router, SuspectRouter):
    norms = [auxiliary_gradient(router_class, passes) for passes in (1, 2, 4, 8)]
    print(f"{router_class.__name__:14}", *(f"{norm / norms[0]:.3f}" for norm in norms))

# %%
import inspect

print(inspect.getsource(SuspectRouter))

# %%
hint("7-bug")

# %% [markdown]
# ## 5 · Capacity
#
# Hardware likes fixed sizes. *Capacity* gives every expert room for C visits of a sequence, a `factor` times what is
# even, and drops the rest. A dropped visit adds nothing: the token keeps its other visits, the residual stream, and the
# **shared experts**, which every token visits whatever the router says. V3 has one, for what all tokens need.
#
# Who is dropped? The lowest scores. Padding must take no room, or the same text is routed in another way as soon as a
# longer one stands beside it.
#
# ### Exercise 7.6 · `drop_beyond_capacity`  (stretch, 25 minutes)

# %% exercise: deepseek_lab.model.moe.drop_beyond_capacity

# %%
check(drop_beyond_capacity)

# %%
MINE[f"{MOE}.drop_beyond_capacity"] = drop_beyond_capacity
for name, rate in (("capacity", 0.0), ("capacity, bias", 0.02)):
    with slots.filled(MINE):
        runs[name] = train(small_config(capacity_factor=1.25), tokens, steps=STEPS, rate=rate)
    report(name)
with theme.figure(figsize=(7, 2.6)) as (figure, axes):
    draw.draw_dropped(axes, {name: runs[name]["dropped"] for name in ("capacity", "capacity, bias")})
show_figure(figure)

# %% [markdown]
# Without balance most visits are dropped, while two thirds of the experts stand idle. With the bias it gets better
# step by step, but not good: it evens out the load of the whole batch, and one sequence is not the batch. And if the
# capacity were larger?

# %%
import ipywidgets as widgets

(router,) = runs["bias"]["model"].routers().values()
with torch.no_grad():
    seen_by_router = []
    handle = router.register_forward_pre_hook(lambda _, arguments: seen_by_router.append(arguments[0]))
    runs["bias"]["model"].eval()(batch.input_ids[:1])
    handle.remove()
    scores_BTE = (seen_by_router[0] @ router.weight.T).sigmoid()
    index_BTK = router.choose(scores_BTE[0])[None]


def draw_capacity(axes, factor):
    real_BT = torch.ones(1, 64, dtype=torch.bool)
    kept_BTK = drop_beyond_capacity(scores_BTE, index_BTK, real_BT, factor)
    wanted_E, taken_E = (index.flatten().bincount(minlength=33)[:32].tolist() for index in (index_BTK, kept_BTK))
    draw.draw_capacity(axes, wanted_E, taken_E, factor)


slider_figure(
    draw_capacity,
    figsize=(7, 2.8),
    factor=widgets.FloatSlider(value=1.25, min=0.25, max=6.0, step=0.25, description="capacity factor"),
)

# %% [markdown]
# Room or drops: one sequence of real text asks for several times the mean of some experts. V3 drops nothing, neither
# in training nor later. Here capacity acts in training only: who is dropped depends on the scores of *later* tokens,
# which a model that generates cannot know.
#
# ## 6 · What the articles say

# %%
claims_table("07")

# %% [markdown]
# The listing has more to correct. Written for one vector, it stops at the second token: a row of four numbers is no
# index into a list of experts. And it has no balance at all.

# %% tags=["nbval-check-output"]
experts, scores = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(128)), torch.nn.Linear(8, 128)
for shape in ((8,), (2, 8)):
    try:
        best = scores(torch.ones(shape)).topk(4).indices
        print(f"input {shape}: visits {len([experts[i] for i in best])} experts")
    except (TypeError, ValueError) as error:
        print(f"input {shape}: {type(error).__name__}")

# %% [markdown]
# ## 7 · At scale
#
# What does balance cost in messages? A step of V3 has 15,360 sequences of 4,096 tokens, and 58 layers count. For the
# first 14.3 of its 14.8 trillion tokens the bias moved by 0.001 a step:

# %% tags=["nbval-check-output"]
v3 = DeepSeekConfig.preset("deepseek_v3")
n_layers = v3.num_hidden_layers - v3.first_k_dense_replace
visits = 15_360 * 4_096 * v3.num_experts_per_tok
print(f"{visits / v3.n_routed_experts / 1e6:.1f} million visits of each expert in a layer and step, if even")
print(f"one all-reduce of {n_layers * v3.n_routed_experts * 8 / 1e3:.0f} kB counts them")
steps = 14.3e12 / (15_360 * 4_096)
print(f"{steps:,.0f} steps at rate 0.001: a bias could have moved by {0.001 * steps:.0f}; scores lie between 0 and 1")

# %% [markdown]
# So the bias hovers: it moves by ±0.001 a step, around the place where the load is even. To read the real thing:
# torchtitan's `models/common/moe.py` (the same loop as here; its bias moves in a hook before the optimizer step), and
# Megatron-LM's `transformer/moe/router.py`, which has every variant that anybody ever used.
#
# ## 8 · Your trainer now
#
# Every run of the trainer uses `combine_weights`, `choose_experts`, `router_bias_step` and `balance_experts`; with an
# auxiliary loss and a capacity it uses the other two. On your own code:
#
# ```
# accelerate launch --config_file configs/accelerate/cpu.yaml -m deepseek_lab.train --config configs/tiny.yaml \
#     --model.aux_loss_alpha 0.001 --model.capacity_factor 2 --mine --out runs/moe
# ```

# %%
progress()

# %% [markdown]
# Next: `08_expert_parallel`, where the experts live on different ranks, and tokens have to travel.
