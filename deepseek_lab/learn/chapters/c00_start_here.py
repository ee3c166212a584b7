"""Chapter 00: one small exercise, so that the whole loop of the course is felt in ten minutes."""

from math import isnan

import torch
import torch.distributed as dist

from deepseek_lab.learn.exercises import Exercise
from deepseek_lab.learn.ranks import RankTimeout, run_ranks
from deepseek_lab.learn.verdict import Verdict, close, ok, wrong
from deepseek_lab.learn.wiretap import wiretap
from deepseek_lab.parallel import data_parallel

PATH = "deepseek_lab.parallel.data_parallel.global_token_mean"

# Four ranks; no two hold as many tokens, and their means differ as well (about 2, 3, 5 and 6 nats a token).
LOSS_SUMS = (512.5, 96.25, 80.75, 30.5)
N_TOKENS = (256, 32, 16, 5)
# The same, but rank 3 has nothing, and rank 0 has one token more than fp32 can count.
IDLE_LOSS_SUMS = (*LOSS_SUMS[:3], 0.0)
IDLE_N_TOKENS = (2**24 + 1, 32, 16, 0)
ASKED = "float64 tensor of shape ()"


def grade_global_token_mean(fn) -> Verdict:
    """Uneven shares over the world, then in groups of two, then with fp32 losses and a rank that has no tokens."""
    results = run_ranks(_on_rank, 4, timeout=10, overrides={PATH: fn})
    means = [result["mean"] for result in results]
    expected = sum(LOSS_SUMS) / sum(N_TOKENS)
    rows = [
        (f"rank {r}", expected, result["kind"] if isnan(means[r]) else means[r]) for r, result in enumerate(results)
    ]
    if all(result["kind"] == "None" for result in results):
        return wrong("The function returned None on every rank.", "nothing is returned", rows)
    if not all(close(mean, expected) for mean in means):
        return wrong(*_why_wrong(means, expected), rows)
    if any(result["overwritten"] for result in results):
        return wrong("The numbers are right, but the caller's loss_sum changed.", "it overwrites its argument")

    pairs = [sum(LOSS_SUMS[:2]) / sum(N_TOKENS[:2]), sum(LOSS_SUMS[2:]) / sum(N_TOKENS[2:])]
    pair_rows = [(f"rank {r}, group of two", pairs[r // 2], results[r]["pair_mean"]) for r in range(4)]
    if not all(close(got, asked) for _, asked, got in pair_rows):
        summary = "Over the whole world it is right. In a group of two ranks it is not: only they may take part."
        return wrong(summary, "it ignores the group", pair_rows)
    if problem := _traffic_problem(results[0]["calls"]) or _type_problem(results) or _idle_problem(fn):
        return problem
    n_bytes = sum(call.payload_bytes for call in results[0]["calls"])
    return ok(
        f"Every rank has the mean over all {sum(N_TOKENS)} tokens. It took one all-reduce of {n_bytes} bytes.", rows
    )


def _traffic_problem(calls) -> Verdict | None:
    """The numbers are right; were they come by with one all-reduce?"""
    if not all(call.our_door for call in calls):
        summary = "The numbers are right, but torch.distributed was called directly, where no meter sees it."
        return wrong(summary, "it goes past our own door")
    ops = [call.op for call in calls]
    if ops == ["all_reduce"]:
        return None
    if ops == ["all_reduce", "all_reduce"]:
        return wrong(
            "The numbers are right, but each of the two went its own way.", "two all-reduces where one would do"
        )
    n_bytes = sum(call.payload_bytes for call in calls)
    summary = f"The numbers are right, but it took {len(calls)} collectives and {n_bytes} bytes."
    return wrong(summary, "more traffic than two all-reduced numbers need")


def _type_problem(results) -> Verdict | None:
    """The numbers are right; are they in the form that callers rely on?"""
    kinds = [(f"rank {r} returned", ASKED, result["kind"]) for r, result in enumerate(results)]
    if all(got == ASKED for *_, got in kinds):
        return None
    return wrong("The number is right, but not what it is wrapped in.", "not a scalar tensor in fp64", kinds)


def _idle_problem(fn) -> Verdict | None:
    """Rank 3 has no tokens, and the losses are in fp32: does everybody take part, and in fp64?"""
    expected = sum(IDLE_LOSS_SUMS) / sum(IDLE_N_TOKENS)
    try:
        results = run_ranks(_with_an_idle_rank, 4, timeout=4, overrides={PATH: fn})
    except RankTimeout as timeout:
        summary = "Rank 3 has no tokens here, and the ranks wait for each other. An all-reduce needs every rank."
        return Verdict(False, summary, "a rank without tokens stays away", detail=str(timeout))
    rows = [(f"rank {r}, while rank 3 has no tokens", expected, mean) for r, (mean, _) in enumerate(results)]
    if all(close(mean, expected) and kind == ASKED for mean, kind in results):
        return None
    if all(close(mean, expected, 1e-6) for mean, _ in results):
        summary = (
            f"With losses in fp32 the sums are in fp32, too: {sum(IDLE_N_TOKENS):,} tokens cannot be counted in it."
        )
        return wrong(summary, "the sums take the type of the losses", rows)
    return wrong("It is right as long as every rank has tokens. Here rank 3 has none.", None, rows)


def _on_rank() -> dict:
    """Runs on each rank: the learner's function over the world, then over pairs of ranks."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    loss_sum = torch.tensor(LOSS_SUMS[rank], dtype=torch.float64)
    with wiretap() as calls:
        mean = data_parallel.global_token_mean(loss_sum, N_TOKENS[rank])
    overwritten = loss_sum.item() != LOSS_SUMS[rank]
    loss_sum.fill_(LOSS_SUMS[rank])
    pair_mean = _number(data_parallel.global_token_mean(loss_sum, N_TOKENS[rank], pairs[rank // 2]))
    seen = {"mean": _number(mean), "kind": _kind(mean)}
    return seen | {"pair_mean": pair_mean, "overwritten": overwritten, "calls": calls}


def _with_an_idle_rank() -> tuple[float, str]:
    rank = dist.get_rank()
    mean = data_parallel.global_token_mean(torch.tensor(IDLE_LOSS_SUMS[rank]), IDLE_N_TOKENS[rank])
    return _number(mean), _kind(mean)


def _kind(value) -> str:
    """In words, what was returned: its type, and the shape of a tensor."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a Python {type(value).__name__}"


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
