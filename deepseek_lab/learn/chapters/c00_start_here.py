"""Chapter 00: one small exercise, so that the whole loop of the course is felt in ten minutes."""

import torch
import torch.distributed as dist

from deepseek_lab.learn.exercises import Exercise
from deepseek_lab.learn.ranks import run_ranks
from deepseek_lab.learn.verdict import Verdict, close, ok, wrong
from deepseek_lab.learn.wiretap import wiretap
from deepseek_lab.parallel import data_parallel

PATH = "deepseek_lab.parallel.data_parallel.global_token_mean"

# Four ranks; no two hold as many tokens, and their means differ as well (about 2, 3, 5 and 6 nats a token).
LOSS_SUMS = (512.5, 96.25, 80.75, 30.5)
N_TOKENS = (256, 32, 16, 5)


def grade_global_token_mean(fn) -> Verdict:
    """Four ranks with uneven shares: the same and right mean everywhere, then again in two groups of two."""
    results = run_ranks(_on_rank, 4, timeout=10, overrides={PATH: fn})
    means = [result["mean"] for result in results]
    expected = sum(LOSS_SUMS) / sum(N_TOKENS)
    rows = [(f"rank {rank}", expected, mean) for rank, mean in enumerate(means)]
    if not all(close(mean, expected) for mean in means):
        return wrong(*_why_wrong(means, expected), rows)
    if any(result["overwritten"] for result in results):
        return wrong("The numbers are right, but the caller's loss_sum changed.", "it overwrites its argument")

    pairs = [sum(LOSS_SUMS[:2]) / sum(N_TOKENS[:2]), sum(LOSS_SUMS[2:]) / sum(N_TOKENS[2:])]
    pair_rows = [(f"rank {r}, group of two", pairs[r // 2], results[r]["pair_mean"]) for r in range(4)]
    if not all(close(got, asked) for _, asked, got in pair_rows):
        summary = "Over the whole world it is right. In a group of two ranks it is not: only they may take part."
        return wrong(summary, "it ignores the group", pair_rows)

    calls = results[0]["calls"]
    n_bytes = sum(call.payload_bytes for call in calls)
    sent = f"{len(calls)} collective{'s' if len(calls) > 1 else ''} and {n_bytes} bytes"
    if not all(call.our_door for call in calls):
        summary = "The numbers are right, but torch.distributed was called directly, where no meter sees it."
        return wrong(summary, "it goes past our own door")
    if len(calls) > 2 or any(call.op != "all_reduce" for call in calls):
        return wrong(f"The numbers are right, but it took {sent}.", "more traffic than two all-reduced numbers need")
    return ok(f"Every rank has the mean over all {sum(N_TOKENS)} tokens. It took {sent}.", rows)


def _on_rank() -> dict:
    """Runs on each rank: the learner's function over the world, then over pairs of ranks."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    loss_sum = torch.tensor(LOSS_SUMS[rank], dtype=torch.float64)
    with wiretap() as calls:
        mean = data_parallel.global_token_mean(loss_sum, N_TOKENS[rank])
    overwritten = loss_sum.item() != LOSS_SUMS[rank]
    loss_sum.fill_(LOSS_SUMS[rank])
    pair_mean = data_parallel.global_token_mean(loss_sum, N_TOKENS[rank], pairs[rank // 2])
    return {"mean": _number(mean), "pair_mean": _number(pair_mean), "overwritten": overwritten, "calls": calls}


def _number(value) -> float:
    """What came back as a float; not-a-number when it is something else (None, a tuple, several numbers)."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return float("nan")


def _why_wrong(means: list[float], expected: float) -> tuple[str, str | None]:
    """Recognise the usual ways to miss it, each by the number that it gives."""
    local = [loss / n for loss, n in zip(LOSS_SUMS, N_TOKENS, strict=True)]
    total = sum(LOSS_SUMS)
    if close(means, [sum(local) / 4] * 4):
        return "Each rank's mean counts the same here, whether it has 256 tokens or 5.", "a mean of means"
    if close(means, local):
        return "Every rank has a mean of its own tokens only.", "a local mean"
    if close(means, [total / n for n in N_TOKENS]):
        return "The losses are summed over the ranks, the tokens are not.", "only the loss is summed"
    if close(means, [total / 4] * 4):
        return "The sum of all losses is divided by the number of ranks.", "a mean over ranks, not over tokens"
    if close(means[0], expected):
        return "Rank 0 has it. The others need it too: each of them scales its gradient by it.", "only rank 0 has it"
    if close(means, [expected] * 4, 1e-6):
        return "Close, but digits are missing: fp64 losses went through a narrower type.", "fp64 is lost on the way"
    if close(means, [sum(map(int, LOSS_SUMS)) / sum(N_TOKENS)] * 4, 1e-6):
        return "The losses lost their fractions.", "the losses are summed as integers"
    return "The ranks do not have the mean loss per token of all ranks.", None


# What the chapter shows besides


def log_the_loss() -> None:
    """The puzzle 0-bug, run on each rank: only rank 0 asks for the number, since only rank 0 prints it."""
    loss_sum = torch.tensor(LOSS_SUMS[dist.get_rank()], dtype=torch.float64)
    if dist.get_rank() == 0:
        print(f"loss {data_parallel.global_token_mean(loss_sum, N_TOKENS[0]):.4f}")


HINTS = {
    "0-bug": (
        "Look at what each rank was doing when the time was up. Who waits, and for whom?",
        "An all-reduce is complete only when every rank of its group has called it.",
        "`log_the_loss` calls `global_token_mean` on rank 0 alone, because only rank 0 prints. The cure: all ranks "
        "call it, and rank 0 prints what comes out. This is the most common hang in real training code.",
    ),
}

EXERCISES = (
    Exercise(
        number="0.1",
        path=PATH,
        title="One mean over uneven ranks",
        grade=grade_global_token_mean,
        level="warm-up",
        minutes=5,
        hints=(
            "A mean over all tokens is one sum over all tokens divided by their number. Which two numbers must every "
            "rank know about the others?",
            "Put both into one tensor: `torch.tensor([float(loss_sum), float(n_tokens)], dtype=torch.float64)`. A new "
            "tensor also leaves the caller's `loss_sum` as it was.",
            "`collectives.all_reduce(x, group)` sums `x` over the ranks of `group`, in place, and returns it. Divide "
            "the first of the two sums by the second, after the all-reduce and not before.",
        ),
    ),
)
