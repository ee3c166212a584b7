"""Training speed of DeepSeekModel beside transformers' DeepseekV3ForCausalLM, in one run, as ratios.

    python benchmarks/model.py [--rounds 5] [--threads 2] [--profile]

Same weights, same batch, same optimizer (torch's fused AdamW), on the CPU.  The peers take turns, so that a drift of
the machine's speed meets all of them; each round is a full step: forward, loss, backward, update.  How much of our own
step is matmuls and attention bounds the ratio: no code around them can be faster than none.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from deepseek_lab.model import DeepSeekConfig, DeepSeekModel

CONFIG = DeepSeekConfig.preset(
    "small", num_hidden_layers=6, vocab_size=4096, hidden_size=256, n_routed_experts=16, num_experts_per_tok=4
)
BATCH, SEQ = 8, 256
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
MATMULS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", ATTENTION, f"{ATTENTION}_backward"}


def step_of_ours(model: DeepSeekModel, ids: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    loss_sum, n_tokens = model.loss_sum(ids[:, :-1], ids[:, 1:])
    loss = loss_sum / n_tokens
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def step_of_hf(model: torch.nn.Module, ids: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    logits = model(ids[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def contenders() -> dict[str, tuple[torch.nn.Module, Callable[..., float]]]:
    """Ours, and the peer with each of its expert implementations, all with the same weights."""
    from transformers import DeepseekV3ForCausalLM

    ours = DeepSeekModel(CONFIG)
    found: dict[str, tuple[torch.nn.Module, Callable[..., float]]] = {"deepseek_lab": (ours, step_of_ours)}
    with tempfile.TemporaryDirectory() as folder:
        ours.save_hf(folder)
        for experts in ("grouped_mm", "eager"):
            peer = DeepseekV3ForCausalLM.from_pretrained(
                folder, experts_implementation=experts, attn_implementation="sdpa", dtype=torch.float32
            )
            found[f"transformers, {experts}"] = (peer.train(), step_of_hf)
    return found


def share_of_matmuls(step: Callable[[], float]) -> float:
    """The share of a step's time that is spent in matrix products and fused attention."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as run:
        for _ in range(3):
            step()
    seconds = {event.key: event.self_cpu_time_total for event in run.key_averages()}
    return sum(time for name, time in seconds.items() if name in MATMULS) / sum(seconds.values())


def measure(rounds: int, autocast: bool) -> None:
    ids = torch.randint(0, CONFIG.vocab_size, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    runs = {}
    for name, (model, step) in contenders().items():
        runs[name] = (model, step, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    times: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, float] = {}
    for round_ in range(rounds + 1):
        for name, (model, step, optimizer) in runs.items():
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses[name] = step(model, ids, optimizer)
            if round_:  # the first is a warm-up
                times[name].append(time.perf_counter() - start)
    print(f"\n{'bf16 autocast' if autocast else 'fp32'}, {torch.get_num_threads()} threads, {rounds} rounds")
    ours = times["deepseek_lab"]
    peers = [times[name] for name in times if name != "deepseek_lab"]
    for name, seconds in times.items():
        tokens = BATCH * SEQ / statistics.median(seconds)
        print(f"  {name:28s} {tokens:8,.0f} tokens/s   loss after the last step {losses[name]:.4f}")
    ratios = sorted(min(them) / us for us, *them in zip(ours, *peers, strict=True))
    print(
        f"  ratio to the faster peer: median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}"
    )
    model, step, optimizer = runs["deepseek_lab"]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        share = share_of_matmuls(lambda: step(model, ids, optimizer))
    bound = statistics.median(ratios) / share
    print(f"  matmuls and attention are {share:.0%} of our step: with all else free the ratio would be {bound:.2f}")


def profile() -> None:
    ids = torch.randint(0, CONFIG.vocab_size, (BATCH, SEQ + 1))
    model = DeepSeekModel(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step_of_ours(model, ids, optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as run:
        step_of_ours(model, ids, optimizer)
    print(run.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="show where our own step spends its time, and stop")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.profile:
        profile()
    else:
        measure(arguments.rounds, autocast=False)
        measure(arguments.rounds, autocast=True)
