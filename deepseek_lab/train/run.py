"""A run from start to end on this rank: set up, train, report.

`Accelerator` gives the process group, the device and the trackers; the model is never handed to its `prepare`, which
would wrap it in a data parallelism of its own.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from deepseek_lab import slots
from deepseek_lab.data.baselines import baselines
from deepseek_lab.data.batches import rows_per_epoch
from deepseek_lab.data.corpus import load_corpus
from deepseek_lab.data.tokenizer import Tokenizer, check_vocab, load_tokenizer
from deepseek_lab.data.tokens import prepare
from deepseek_lab.doctor import free_memory_gib
from deepseek_lab.model import generate
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.mesh import build_mesh
from deepseek_lab.plan import memory
from deepseek_lab.train.checkpoint import CheckpointError
from deepseek_lab.train.config import RunConfig
from deepseek_lab.train.loop import Trainer
from deepseek_lab.train.report import Reporter

PROMPTS = {"en": "In the beginning", "zh": "要插入"}
SAMPLE_TOKENS = 48
REFUSE_SECONDS = 3


def run(config: RunConfig, out: Path, *, resume: bool = False, mine: bool = False) -> int:
    """Train as `config` says, writing to `out`; returns the exit status, 0 also after a clean interrupt."""
    try:
        if (out / "metrics.jsonl").exists() and not resume:
            raise ValueError(f"{out} already holds a run; add --resume to go on with it, or give another --out")
        learners = slots.load_mine() if mine else {}
        slots.fill(learners)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        config.check(world_size)
        check_memory(config, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        accelerator = start(out)
        corpus = load_corpus(config.data.source)
        tokenizer = load_tokenizer(config.data.tokenizer)
        check_vocab(tokenizer, config.model.vocab_size)
        tokens = prepare(corpus, tokenizer)
        rows_per_epoch(tokens["train"], config.data.seq_len)
        mesh = build_mesh(config.parallel, accelerator.device.type)
        collectives.set_algorithm(config.parallel.collectives)
        trainer = Trainer(config, tokens, mesh, accelerator.device, out)
    except (ValueError, OSError, RuntimeError) as error:
        return refuse(error)
    if resume:
        try:
            refused = trainer.resume()
        except CheckpointError as error:
            return refuse(error)
        for reason in refused if accelerator.is_main_process else []:
            print(f"passed over {reason}")
    reporter = None
    if accelerator.is_main_process:
        reporter = Reporter(trainer, accelerator, out, mine=sorted(learners))
        reporter.follow(trainer.fit())
    else:
        for _ in trainer.fit():
            pass
    written = samples(trainer, tokenizer)  # on all ranks: each may hold but a part of the model
    if reporter is not None:
        reporter.finish(baselines(corpus, tokens), written)
    accelerator.end_training()
    return 0


def check_memory(config: RunConfig, world_size: int, ranks_here: int, available_gib: float | None = None) -> None:
    """Refuse what cannot fit: the state and activations of a rank, by plan/memory.py, against what there is.

    Args:
        available_gib: for the ranks of this machine together; None asks the GPUs, or the system.

    Raises:
        ValueError: with the estimate, and what would make it smaller.
    """
    need = memory.estimate(
        config.model,
        config.parallel,
        micro_batch_size=config.train.micro_batch_size,
        seq_len=config.data.seq_len,
        precision=config.precision,
        world_size=world_size,
        micro_batches=config.passes(config.train.global_batch_size, config.parallel.sizes(world_size)["dp"]),
        optimizer=config.optim.name,
        document_mask=config.data.document_mask,
    )
    if available_gib is None:
        available_gib = free_memory_gib()
        if torch.cuda.is_available():
            available_gib = sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())) / 2**30
    need_gib = sum(need.values()) / 2**30
    if available_gib is not None and need_gib * ranks_here > available_gib:
        parts = ", ".join(f"{kind} {size / 2**30:,.2f}" for kind, size in need.items())
        raise ValueError(
            f"a rank of this layout needs about {need_gib:,.2f} GiB ({parts}), and the {ranks_here} here have "
            f"{available_gib:,.1f} GiB together; a higher parallel.zero_stage or parallel.tp makes state smaller, "
            f"a smaller train.micro_batch_size or parallel.recompute=full the activations"
        )


def samples(trainer: Trainer, tokenizer: Tokenizer) -> dict[str, str]:
    """What the model writes after a few words in each language."""
    written = {}
    for language, prompt in PROMPTS.items():
        ids = tokenizer.encode(prompt)
        new = generate.stream(trainer.model, ids, max_new_tokens=SAMPLE_TOKENS, eos_id=tokenizer.eot_id)
        written[language] = tokenizer.decode([*ids, *new])
    return written


def start(out: Path) -> Accelerator:
    """The process group and device that the launcher asked for.

    Raises:
        RuntimeError: when `accelerate` did not form the group that was launched, so that ranks would train alone.
    """
    tracker = "tensorboard" if importlib.util.find_spec("tensorboard") else None
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), log_with=tracker, project_dir=out)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise RuntimeError(
            f"{launched} processes were launched, but accelerate formed a group of {accelerator.num_processes}; "
            f"launch with --config_file configs/accelerate/cpu.yaml (distributed_type: MULTI_GPU), or with --multi_gpu"
        )
    return accelerator


def refuse(error: Exception) -> int:
    """Say why nothing starts, once, and return the exit status for it."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(REFUSE_SECONDS)  # the launcher ends all ranks with the first, and rank 0 must have spoken by then
    return 2
