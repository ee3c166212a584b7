# %% [markdown]
# # 00 · Start here
#
# In this course you build, one small function at a time, the trainer of a DeepSeek-class language model, and run each
# part on real processes that talk to each other. This chapter shows how that works, in ten minutes.

# %%
from deepseek_lab.learn import check, exercise, hint, progress, record, reveal, run_ranks
from deepseek_lab.learn.course import course_map
from deepseek_lab.learn.widgets import claims_table, cost_box, slider_figure

cost_box(
    minutes=0.3,
    ranks=4,
    memory="about 0.5 GB; ranks share the memory that they were forked with",
    at_scale="the same; this chapter moves 16 bytes",
    before="nothing; `python -m deepseek_lab doctor` should find no fault",
)

# %% [markdown]
# The map. Chapters with a dashed edge are not written yet; the others fill up as you pass their exercises.

# %%
course_map()

# %% [markdown]
# ## 1 · Ranks in a cell
#
# A *rank* is one process of a parallel job; on a cluster each has its own GPU. `run_ranks(fn, 4)` starts four on this
# machine, joins them into one group, runs `fn` on each, and returns the list of what they returned. Functions defined
# in a cell will do.

# %%
import torch.distributed as dist


def hello():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"one of {world_size}")
    return rank * rank


# %% tags=["nbval-check-output"]
run_ranks(hello, 4)

# %% [markdown]
# Each printed line carries its rank. When a rank raises, you get that rank's own traceback, and a line on what the
# others were waiting for; nothing hangs, and no process is left behind.
#
# ## 2 · The question: one mean over uneven ranks
#
# Four ranks share a batch. Their documents differ in length, so the ranks hold different numbers of tokens. Each rank
# knows the sum of its token losses. What is the mean loss per token of the whole batch? A common answer: each rank
# takes its own mean, and the means are averaged. That is wrong as soon as the counts differ.
#
# **Predict.** Below, three ranks hold 400 tokens each, at a loss of about 2.5. Rank 3 holds 40 tokens, at a loss of
# 6.0. How far apart are the two averages? Where must the slider stand for them to agree?

# %%
import ipywidgets as widgets

from deepseek_lab.viz.averages import draw_uneven_ranks

slider = widgets.IntSlider(40, min=10, max=400, step=10, description="tokens on rank 3")
slider_figure(draw_uneven_ranks, tokens=slider)

# %% [markdown]
# With 40 tokens, rank 3 holds 3% of the batch and has 25% of the say. The two averages agree only at 400, where all
# ranks hold the same number. The gradient is scaled by the same mistake.
#
# ### Exercise 0.1 · `global_token_mean`  (warm-up, 5 minutes)
#
# Return the mean loss per token over all ranks:
#
# $$\frac{\sum_r \mathrm{loss\_sum}_r}{\sum_r \mathrm{n\_tokens}_r}$$
#
# `collectives.all_reduce(x, group)` adds `x` up over the ranks of `group`, **in place**, and returns it. Replace the
# `raise` by your code, run the cell, then run the check below it.

# %% exercise: deepseek_lab.parallel.data_parallel.global_token_mean

# %%
check(global_token_mean)

# %% [markdown]
# The check ran your function on four real processes, and once more in two groups of two. It looked at the numbers on
# every rank and at what was sent. Until you have written something, it says "not yet", and the package's own function
# runs in place of yours, so that every cell of every chapter runs from the start.
#
# If you are stuck, open a hint. Each holds the next one, from a nudge to nearly everything. After the last,
# `reveal("0.1")` shows the package's own function.

# %%
hint("0.1")

# %% [markdown]
# ### Use it
#
# Sixteen real documents, English and Chinese, short and long. As loss we take that of a unigram table: minus the log of
# how often a token occurs. We split the same documents over 1, 2 and 4 ranks and ask for the mean loss per token.
# `record()` notes what is sent.

# %%
import torch

from deepseek_lab.data.corpus import load_corpus
from deepseek_lab.data.tokenizer import load_tokenizer
from deepseek_lab.parallel import collectives

corpus, tokenizer = load_corpus(), load_tokenizer()
counts_V = torch.ones(tokenizer.vocab_size, dtype=torch.float64)
for document in corpus.train[::20]:
    ids_T = torch.tensor(tokenizer.encode(document.text))
    counts_V += torch.bincount(ids_T, minlength=tokenizer.vocab_size)
nats_V = -(counts_V / counts_V.sum()).log()
losses = [nats_V[tokenizer.encode(document.text)] for document in corpus.val[::15]]
print("tokens per document:", sorted(len(loss) for loss in losses))


# %% tags=["nbval-check-output"]
def both_means():
    rank, n_ranks = collectives.rank_in(), collectives.size_of()
    my_losses = torch.cat(losses[rank * 16 // n_ranks : (rank + 1) * 16 // n_ranks])
    with record() as trace:
        right = global_token_mean(my_losses.sum(), len(my_losses))
    naive = collectives.all_reduce(my_losses.mean()) / n_ranks
    return len(my_losses), right.item(), naive.item(), trace.events


for n_ranks in (1, 2, 4):
    tokens_R, right_R, naive_R, events_R = zip(*run_ranks(both_means, n_ranks), strict=True)
    sent = ", ".join(f"{event.op} of {event.payload_bytes} bytes" for event in events_R[0])
    print(f"{n_ranks} rank(s), with {tokens_R} tokens; rank 0 recorded: {sent or 'nothing'}")
    print(f"   over all tokens {right_R[0]:.4f}, mean of means {naive_R[0]:.4f}")

# %% [markdown]
# The same documents, the same losses: the mean over all tokens does not depend on how many ranks share them, the mean
# of means does. **How work is split must never change the numbers.** That rule runs through the whole course: every
# parallel layout is held against one process, to nine digits. It cost one all-reduce of 16 bytes.
#
# ### Find the bug
#
# Somebody wanted the loss in the log, printed by rank 0 only. Their `log_the_loss` works on one rank. On four, this is
# what happens. Say why **before** you open the hint.

# %%
from deepseek_lab.learn import RankError
from deepseek_lab.learn.chapters.c00_start_here import log_the_loss

run_ranks(log_the_loss, 1)
try:
    run_ranks(log_the_loss, 4, timeout=2)
except RankError as error:
    print(error)

# %%
hint("0-bug")

# %% [markdown]
# ## 3 · What the articles say
#
# Two articles are what this course starts from. Each of their claims belongs to a chapter that builds the thing and
# measures it. A claim is open until its chapter has settled it, with a number and the command that prints the number.

# %%
claims_table()

# %% [markdown]
# ## 4 · At scale
#
# On 2,048 GPUs it is still two numbers per rank: the price is the latency of a few hops, and next to no bandwidth.
# Trainers count the valid tokens of the whole batch *before* the first backward pass, so that every rank can scale its
# loss by the right number at once; ours does. Well-known trainers got it wrong first: read torchtitan issue 1842 and
# transformers issue 34191.
#
# ## 5 · Your trainer now
#
# A function that passed is kept in `.lab/`, and the trainer runs on it when you say `--mine`:
#
# ```
# accelerate launch --config_file configs/accelerate/cpu.yaml -m deepseek_lab.train \
#     --config configs/tiny.yaml --mine --out runs/first
# ```
#
# It lists which of its functions are yours. Your progress is kept there too, and survives a restart:

# %%
progress()

# %% [markdown]
# Next: `01_one_rank`, in which you train a small model on real text.
