"""All-to-all dispatch against an all-gather of tokens, bytes and time of a step: `python benchmarks/expert.py`.

The peer needs no counts: every rank gathers the tokens of all, runs its own experts on those that chose them, and the
results are summed and split again.  It sends R-1 rows for each token, however few experts the token visits; all-to-all
sends one for each other rank that holds any of them.  Bytes are measured on our own messages, time on the process
group's collectives: ten alternating pairs on loopback, and ten on a link of 1 ms and 100 MB/s, where bytes cost what
they would on a network.
"""

import statistics
import time

import torch

from deepseek_lab.learn import Link, run_ranks
from deepseek_lab.model import DeepSeekConfig, moe
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.expert import ExpertParallel

CONFIG = DeepSeekConfig.preset("small")
TOKENS = 1024  # of each rank
PAIRS = 10


class AllGatherExperts(ExpertParallel):
    """The peer: tokens of all ranks, gathered.  Every rank must have as many."""

    def forward(self, x_TD, weight_TK, index_TK, counts_E):
        here = len(self.gate_proj)
        x_TD, weight_TK = (collectives.gather_sequence(t[None], self.group)[0] for t in (x_TD, weight_TK))
        local_TK = collectives.all_gather(index_TK, self.group) - here * collectives.rank_in(self.group)
        local_TK = local_TK.where((local_TK >= 0) & (local_TK < here), here)
        counts = local_TK.flatten().bincount(minlength=here + 1)[:here]
        y_TD = moe.Experts.forward(self, x_TD, weight_TK, local_TK, counts)
        return collectives.scatter_sequence(y_TD[None], self.group)[0]


def step(layer, visits):
    x_TD, weight_TK, index_TK, counts_E = visits
    x_TD, weight_TK = x_TD.detach().requires_grad_(), weight_TK.detach().requires_grad_()
    collectives.barrier()
    start_s = time.perf_counter()
    y_TD = layer(x_TD, weight_TK, index_TK, counts_E)
    y_TD.backward(y_TD.detach())
    collectives.barrier()
    return time.perf_counter() - start_s, (y_TD.detach(), x_TD.grad, weight_TK.grad)


def measure(pairs):
    generator = torch.Generator().manual_seed(collectives.rank_in())
    x_TD = torch.randn(TOKENS, CONFIG.hidden_size, generator=generator)
    weight_TK, index_TK = torch.rand(TOKENS, CONFIG.n_routed_experts, generator=generator).topk(
        CONFIG.num_experts_per_tok
    )
    visits = x_TD, weight_TK, index_TK, index_TK.flatten().bincount(minlength=CONFIG.n_routed_experts)
    experts = moe.Experts(CONFIG)
    for seed, w in enumerate(experts.parameters()):
        torch.nn.init.normal_(w, std=0.02, generator=torch.Generator().manual_seed(seed))
    layers = [ExpertParallel(experts), AllGatherExperts(experts)]
    sent, results = [], []
    collectives.set_algorithm("ring")
    for layer in layers:
        with collectives.record() as trace:
            results.append(step(layer, visits)[1])
        sent.append(trace.wire_bytes())
    collectives.set_algorithm("gloo")
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    seconds = [[step(layer, visits)[0] for layer in layers] for _ in range(pairs + 1)][1:]
    return sent, seconds


def main() -> None:
    experts = f"{CONFIG.num_experts_per_tok} of {CONFIG.n_routed_experts} experts"
    print(f"{TOKENS} tokens a rank, width {CONFIG.hidden_size}, {experts}, fp32, forward and backward of one layer")
    print(f"{'':24}MiB sent by a rank             ms")
    print("ranks  link            all-to-all all-gather  ratio  all-to-all all-gather  ratio (spread)")
    for n_ranks in (2, 4):
        for name, link in (("loopback", None), ("1 ms, 100 MB/s", Link(1e-3, 100e6))):
            ranks = run_ranks(measure, n_ranks, PAIRS, link=link, timeout=300)
            ours, theirs = (max(sent[i] for sent, _ in ranks) / 2**20 for i in range(2))
            ours_s, theirs_s = (statistics.median(pair[i] for pair in ranks[0][1]) for i in range(2))
            ratios = sorted(a / b for a, b in ranks[0][1])
            print(
                f"{n_ranks:5}  {name:15} {ours:10.2f} {theirs:10.2f} {ours / theirs:6.2f} "
                f"{ours_s * 1e3:11.1f} {theirs_s * 1e3:10.1f} {statistics.median(ratios):6.2f} "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


if __name__ == "__main__":
    main()
