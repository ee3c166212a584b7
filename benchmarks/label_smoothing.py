"""Does label smoothing relieve overfitting? A small model on too little text, with and without (claim P12).

    python benchmarks/label_smoothing.py

The model sees the same few thousand tokens again and again. Both runs are measured without smoothing, in bits per byte,
on the text that they trained on and on validation text: at the end, and at the step where validation was best.
"""

import math
import statistics

import torch

from deepseek_lab.data.batches import train_batch, val_batches
from deepseek_lab.data.tokenizer import load_tokenizer
from deepseek_lab.data.tokens import TokenFile, prepare
from deepseek_lab.model import DeepSeekConfig, DeepSeekModel

SEQ_LEN, BATCH, ROWS, STEPS, EVERY = 128, 16, 64, 240, 20
CONFIG = DeepSeekConfig.preset("tiny", num_hidden_layers=2, first_k_dense_replace=2, q_lora_rank=None)


def bits_per_byte(model: DeepSeekModel, ids_BT: torch.Tensor, labels_BT: torch.Tensor, text: TokenFile) -> float:
    with torch.no_grad():
        loss_sum, n_valid = model.loss_sum(ids_BT, labels_BT)
    return float(loss_sum / n_valid) / math.log(2) * text.n_tokens / text.n_bytes


def run(tokens: dict, epsilon: float, seed: int) -> dict[str, float]:
    few = train_batch(tokens["train"], seed=seed, step=0, global_batch_size=ROWS, seq_len=SEQ_LEN)
    held_out = next(iter(val_batches(tokens["val"], seq_len=SEQ_LEN, batch_size=10_000)))
    every_tenth = held_out.input_ids[5::10], held_out.labels[5::10]
    model = DeepSeekModel(CONFIG, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    order = torch.Generator().manual_seed(seed)
    curve = []
    for step in range(STEPS):
        rows = torch.randperm(ROWS, generator=order)[:BATCH]
        loss_sum, n_valid = model.loss_sum(few.input_ids[rows], few.labels[rows], label_smoothing=epsilon)
        optimizer.zero_grad()
        (loss_sum / n_valid).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            train = bits_per_byte(model, few.input_ids, few.labels, tokens["train"])
            curve.append((train, bits_per_byte(model, *every_tenth, tokens["val"])))
    train, val = curve[-1]
    return {"train": train, "val": val, "gap": val - train, "best val": min(v for _, v in curve)}


def main() -> None:
    tokens = prepare(None, load_tokenizer())
    print(f"{ROWS * SEQ_LEN} tokens of text, {STEPS * BATCH // ROWS} epochs; bits per byte, median (spread) of 3 seeds")
    for epsilon in (0.0, 0.1):
        runs = [run(tokens, epsilon, seed) for seed in range(3)]
        columns = {name: [r[name] for r in runs] for name in runs[0]}
        shown = (f"{n} {statistics.median(v):.2f} ({max(v) - min(v):.2f})" for n, v in columns.items())
        print(f"smoothing {epsilon:g}:  " + "   ".join(shown), flush=True)


if __name__ == "__main__":
    main()
