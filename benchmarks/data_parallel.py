"""What gradient compression and overlap are worth: bytes, losses, and times on links that are chosen.

    python benchmarks/data_parallel.py [bytes] [loss] [time] [overlap]

Bytes are measured on our own ring.  Losses are those of a small model on real text, over three seeds of the order of
the text.  Times are of all-reduces that are held back to a `Link`; the loopback stands beside.
"""

import statistics
import sys

import torch

from deepseek_lab.learn import Link, record, run_ranks
from deepseek_lab.learn.chapters import c03_data_parallel as chapter
from deepseek_lab.model import DeepSeekConfig, DeepSeekModel
from deepseek_lab.parallel import collectives, compression, data_parallel
from deepseek_lab.viz import timeline

CONFIG = DeepSeekConfig.preset(
    "tiny",
    vocab_size=256,
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    q_lora_rank=32,
    kv_lora_rank=32,
    initializer_range=0.06,
)
MIB = 2**20


def forgetful(x_N, residual_N, compress, decompress):
    return compress(x_N)


def bytes_sent(n=MIB):
    collectives.set_algorithm("ring")
    sent = {}
    for name, method, dtype in [
        ("fp32", "none", torch.float32),
        ("bf16", "none", torch.bfloat16),
        ("int8", "int8", torch.float32),
        ("top 1%", "topk", torch.float32),
    ]:
        flat = torch.randn(n, generator=torch.Generator().manual_seed(collectives.rank_in())).to(dtype)
        with record() as trace:
            (compression.get(method) or collectives.all_reduce)(flat)
        sent[name] = trace.wire_bytes()
    return sent


def show_bytes():
    for n_ranks in (2, 4, 8):
        sent = run_ranks(bytes_sent, n_ranks)[0]
        shares = ", ".join(f"{name} {n / sent['fp32']:.3f}" for name, n in sent.items())
        print(f"{n_ranks} ranks, bytes sent by each, of fp32's {sent['fp32']:,}: {shares}")


def show_losses():
    text_N = chapter.text_bytes()
    for optimizer in ("sgd", "adamw"):
        for method in ("none", "int8", "topk"):
            for feedback in (True, False) if method != "none" else (True,):
                overrides = {} if feedback else {chapter.FEEDBACK: forgetful}
                ends = []
                for seed in range(3):
                    options = {"compress": method, "optimizer": optimizer, "overrides": overrides}
                    curve = run_ranks(
                        chapter.train, 2, text_N[seed * 1000 :], CONFIG, steps=100, timeout=300, **options
                    )[0]
                    ends.append(statistics.mean(curve[-20:]))
                words = f"{optimizer:6} {method:5} {'with' if feedback else 'no'} feedback".ljust(26)
                print(f"{words} {statistics.mean(ends):.3f} nats a byte, from {min(ends):.3f} to {max(ends):.3f}")


def time_methods(n=2_000_000):
    flat, seconds = torch.randn(n, generator=torch.Generator().manual_seed(collectives.rank_in())), {}
    for method in ("none", "int8", "topk"):
        all_reduce, spans = compression.get(method) or collectives.all_reduce, []
        for _ in range(7):
            copy = flat.clone()
            collectives.barrier()
            with timeline.span(spans, method):
                all_reduce(copy)
        seconds[method] = statistics.median(span.seconds for span in spans[1:])
    return seconds


def show_times():
    links = {f"{gigabits} Gbit/s": Link(20e-6, gigabits * 1e9 / 8) for gigabits in (1, 10, 100)}
    for name, link in {**links, "loopback": None}.items():
        seconds = run_ranks(time_methods, 2, link=link)[0]
        print(f"{name:10} all-reduce of 8 MB:", ", ".join(f"{m} {s * 1e3:.0f} ms" for m, s in seconds.items()))


def one_step(overlap, bucket_bytes=100_000):
    """A step on rows of real text: which share of the network's time passed behind forward, and behind backward."""
    model, text_N = DeepSeekModel(CONFIG), chapter.text_bytes()
    parameters = list(model.parameters())
    members = data_parallel.plan_buckets([p.numel() for p in parameters], bucket_bytes // 4)
    for _ in range(2):
        model.zero_grad()
        ids_BT, labels_BT = chapter.windows(
            text_N, 0, n_rows=16, length=256, rank=collectives.rank_in(), n_ranks=collectives.size_of()
        )
        collectives.barrier()
        spans: list[timeline.Span] = []
        with record() as trace:
            with timeline.span(spans, "forward"):
                loss_sum, _ = model.loss_sum(ids_BT, labels_BT)

            def start(b):
                return collectives.start_all_reduce(torch.cat([parameters[i].grad.flatten() for i in members[b]]))

            sender = data_parallel.Overlap(members, start)
            hooks = [
                p.register_post_accumulate_grad_hook(lambda _, i=i, sender=sender: sender.ready(i))
                for i, p in enumerate(parameters if overlap else [])
            ]
            with timeline.span(spans, "backward"):
                loss_sum.backward()
            sender.finish()
        for hook in hooks:
            hook.remove()
    spans += timeline.network_spans(trace)
    return [timeline.hidden_share(spans, behind) for behind in ("forward", "backward")]


def show_overlap():
    link = Link(1e-3, 20e6)
    for overlap in (False, True):
        ranks = [shares for _ in range(5) for shares in run_ranks(one_step, 2, overlap, timeout=100, link=link)]
        forward, backward = (statistics.median(values) for values in zip(*ranks, strict=True))
        words = f"overlap {'on' if overlap else 'off'}, 1 ms and 20 MB/s: of the network's time {forward:.0%} passed"
        print(f"{words} behind forward, {backward:.0%} behind backward")


if __name__ == "__main__":
    parts = {"bytes": show_bytes, "loss": show_losses, "time": show_times, "overlap": show_overlap}
    for name in sys.argv[1:] or parts:
        parts[name]()
