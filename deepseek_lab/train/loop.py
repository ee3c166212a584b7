"""The training loop: one step is one global batch, whatever the layout.

Each rank takes its rows of the batch in micro-batches.  How many tokens count in the *global* batch is agreed upon
before the first backward, so that every micro-batch's loss is divided by that number, gradients only have to be added
up, and no split of the batch over ranks or passes changes what a step learns.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from deepseek_lab.data import batches
from deepseek_lab.data.batches import Batch
from deepseek_lab.data.tokens import TokenFile
from deepseek_lab.model import DeepSeekModel
from deepseek_lab.parallel import collectives, data_parallel
from deepseek_lab.parallel.engine import Engine, parallelize
from deepseek_lab.parallel.mesh import Mesh
from deepseek_lab.plan import flops
from deepseek_lab.train import checkpoint, metrics, optim, recorded, schedule
from deepseek_lab.train.config import RunConfig

RECORDED = 10  # which step of a launch is recorded: not one of the first, which are slower
EVALUATED_TOGETHER = 64  # batches that go through a pipeline before it drains


class Trainer:
    """A model, its optimizer and its data on this rank; `fit` trains, evaluates and saves.

    Args:
        tokens: the "train" and "val" streams.
        out: the run's folder; checkpoints go to `out/checkpoints`.
    """

    def __init__(self, config: RunConfig, tokens: Mapping[Any, TokenFile], mesh: Mesh, device: torch.device, out: Path):
        self.config, self.tokens, self.mesh, self.device = config, tokens, mesh, device
        self.checkpoints = out / "checkpoints"
        self.engine = build_engine(config, mesh, device)
        self.model = self.engine.model
        self.optimizer = optim.build_optimizer(*self.engine.optimizer_tensors(), config.optim)
        for router in self.model.routers().values():
            router.n_sequences = config.train.global_batch_size
        self.steps_done, self.steps_saved = 0, -1
        self.interrupted = False
        self.recorded: recorded.RecordedStep | None = None
        with torch.device("meta"):
            self.n_parameters = DeepSeekModel(config.model).num_parameters()
        self.flops_per_token = flops.flops_per_token(config.model, config.data.seq_len)
        collectives.barrier(mesh.group("world"))
        peak = torch.tensor([metrics.peak_flops_per_s(self.device, config.precision)], device=self.device)
        self.peak_flops_per_s = collectives.all_reduce(peak, mesh.group("world")).item()

    # --- one step ---------------------------------------------------------------------------------------------

    def batch(self, step: int) -> Batch:
        """This rank's rows of the global batch of `step`, counted from 0."""
        train, data, mesh = self.config.train, self.config.data, self.mesh
        return batches.train_batch(
            self.tokens["train"],
            seed=train.seed,
            step=step,
            global_batch_size=train.global_batch_size,
            seq_len=data.seq_len,
            rank=mesh.rank("dp"),
            size=mesh.size("dp"),
        )

    def step(self, batch: Batch, n_tokens: int) -> dict[str, float]:
        """Learn from this rank's `batch`, of a global batch in which `n_tokens` labels count."""
        config, engine, mesh = self.config, self.engine, self.mesh
        lr = schedule.warmup_cosine(
            self.steps_done,
            peak=config.optim.lr,
            floor=config.optim.min_lr,
            warmup_steps=config.optim.warmup_steps,
            total_steps=config.train.steps,
        )
        optim.set_learning_rate(self.optimizer, lr)
        engine.zero_grad()
        my_loss_sum, my_n_tokens = self.backward(batch, n_tokens)
        engine.finish_backward()
        grad_norm = optim.clip_gradients(engine, config.optim.clip_norm)
        self.optimizer.step()
        engine.after_step()
        experts = optim.expert_metrics(self.model, mesh)
        optim.balance_experts(self.model, config.train.router_bias_rate, mesh.group("dp"))
        for router in self.model.routers().values():
            router.reset_counts(self.device)
        self.steps_done += 1
        if mesh.rank("tp"):  # the ranks of a tp group share one part of the batch
            my_loss_sum, my_n_tokens = my_loss_sum * 0, my_n_tokens * 0
        loss = data_parallel.global_token_mean(my_loss_sum, my_n_tokens, mesh.group("world"))
        return {"step": self.steps_done, "loss": loss.item(), "grad_norm": grad_norm.item(), "lr": lr} | experts

    def backward(self, batch: Batch, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the gradient of (sum of my token losses) / `n_tokens`, pass by pass; return that sum and its count."""
        self.model.train()
        train, seq_len = self.config.train, self.config.data.seq_len
        micros = batches.fill_up(batch.split(train.micro_batch_size), self.passes(train.global_batch_size), seq_len)
        return self.engine.run(list(micros), self.forward, n_tokens)

    def passes(self, n_rows: int) -> int:
        """In how many passes every rank has taken its share of `n_rows`: as many as the largest share needs."""
        return self.config.passes(n_rows, self.mesh.size("dp"))

    def forward(self, chunk: int, x: torch.Tensor | None, batch: Batch) -> Any:
        """`batch` through a stage of the model, as `StagedModel.run_stage`, in the precision of the run."""
        real_BT, batch = batch.real(), batch.to(self.device)
        doc_ids = batch.doc_ids if self.config.data.document_mask else None
        smoothing = self.config.train.label_smoothing if self.model.training else 0.0
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            return self.engine.run_stage(
                chunk,
                x,
                batch.input_ids,
                batch.labels,
                doc_ids,
                None if real_BT is None else real_BT.to(self.device),
                smoothing,
            )

    # --- evaluation and saving --------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean loss and bits per byte over the whole validation text, end-of-text tokens paid for."""
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        tokens, seq_len, size = self.tokens["val"], self.config.data.seq_len, self.config.train.micro_batch_size
        parts = batches.val_batches(
            tokens, seq_len=seq_len, batch_size=size, rank=self.mesh.rank("dp"), size=self.mesh.size("dp")
        )
        filled = batches.fill_up(parts, self.passes(batches.rows_of(tokens, seq_len)), seq_len)
        while micros := list(itertools.islice(filled, EVALUATED_TOGETHER)):
            totals += torch.stack([part.double() for part in self.engine.evaluate(micros, self.forward)])
        totals = totals if self.mesh.rank("tp") == 0 else torch.zeros_like(totals)
        loss_sum, count = collectives.all_reduce(totals, self.mesh.group("world")).tolist()
        bits_per_byte = loss_sum / math.log(2) / tokens.n_bytes
        return {"val_loss": loss_sum / count, "val_bits_per_byte": bits_per_byte}

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for a resumed run to go on as if it had never stopped."""
        config, train = self.config, self.tokens["train"]
        return {
            "model": config.model.to_dict(),
            "precision": config.precision,
            "text": f"{train.n_tokens} tokens of {train.n_bytes} bytes",
            "tokenizer": train.tokenizer,
            "data.seq_len": config.data.seq_len,
            "data.document_mask": config.data.document_mask,
            "optim.name": config.optim.name,
            "train.seed": config.train.seed,
            "train.global_batch_size": config.train.global_batch_size,
        }

    def save(self) -> None:
        """Write a checkpoint, unless the newest one already stands at this step."""
        if self.steps_saved == self.steps_done:
            return
        checkpoint.save(
            self.checkpoints,
            self.steps_done,
            checkpoint.state_parts(self.engine, self.optimizer),
            {"fingerprint": self.fingerprint(), "config": self.config.to_dict()},
            keep=self.config.train.keep_checkpoints,
            group=self.mesh.group("world"),
        )
        self.steps_saved = self.steps_done

    def resume(self) -> list[str]:
        """Go on from the newest good checkpoint; returns why newer ones were passed over.

        Raises:
            checkpoint.CheckpointError: when there is none to go on from.
        """
        # One rank looks and all follow, so that no two ranks can go on from different steps.
        chosen: tuple[Any, list[str]] = (None, [])
        if self.mesh.rank("world") == 0:
            chosen = checkpoint.latest(self.checkpoints, self.fingerprint())
        found, refused = collectives.all_gather_object(chosen, self.mesh.group("world"))[0]
        if found is None:
            reasons = "".join(f"\n  {reason}" for reason in refused) or " it is empty"
            raise checkpoint.CheckpointError(f"nothing to resume from in {self.checkpoints}:{reasons}")
        checkpoint.load_state(found, self.engine, self.optimizer)
        self.steps_done = self.steps_saved = found.step
        return refused

    # --- the run ----------------------------------------------------------------------------------------------

    def fit(self) -> Iterator[dict[str, float]]:
        """Train to the last step, yielding each step's metrics; saves on the way, at the end and when told to stop.

        Ends early, with `interrupted` set, on Ctrl-C or SIGTERM to any rank and at `train.stop_at`.
        """
        train = self.config.train
        recorded_at = min(self.steps_done + RECORDED, train.steps)
        with _signals() as stop:
            while self.steps_done < train.steps:
                started = time.perf_counter()
                batch = self.batch(self.steps_done)
                n_tokens, stopping = self.agree(int((batch.labels != batches.IGNORE).sum()), stop.requested)
                if stopping:
                    self.interrupted = True
                    break
                if self.steps_done + 1 == recorded_at:
                    values = self._recorded_step(batch, n_tokens)
                else:
                    values = self.step(batch, n_tokens)
                seconds = time.perf_counter() - started
                values |= {"seconds": seconds, "tokens": n_tokens, "tokens_per_s": n_tokens / seconds}
                values["mfu"] = flops.mfu(values["tokens_per_s"], self.flops_per_token, self.peak_flops_per_s)
                last = self.steps_done == train.steps
                if last or _due(train.eval_every, self.steps_done):
                    values |= self.evaluate()
                yield values
                if not last and _due(train.checkpoint_every, self.steps_done):
                    self.save()
                if self.steps_done == train.stop_at and not last:
                    self.interrupted = True
                    break
            self.save()

    def _recorded_step(self, batch: Batch, n_tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        with collectives.record() as trace:
            values = self.step(batch, n_tokens)
        seconds, spans = time.perf_counter() - started, self.engine.timeline
        self.recorded = recorded.gather(self.steps_done, seconds, trace, spans, self.mesh)
        return values

    def agree(self, my_n_tokens: int, stop: bool) -> tuple[int, bool]:
        """Over all ranks, in one message: how many labels count, and whether any rank was told to stop."""
        # The ranks of a tp group, and the stages of a pipeline, share one part of the batch.
        mine = my_n_tokens if self.mesh.rank("tp") == self.mesh.rank("pp") == 0 else 0
        totals = torch.tensor([mine, int(stop)], dtype=torch.float64, device=self.device)
        n_tokens, stops = collectives.all_reduce(totals, self.mesh.group("world")).tolist()
        return int(n_tokens), stops > 0


def build_engine(config: RunConfig, mesh: Mesh, device: torch.device) -> Engine:
    """The model spread over the ranks, by the engine and in the precision that `config` names."""
    dtype = {"fp64": torch.float64, "mixed": torch.bfloat16}.get(config.precision, torch.float32)
    master_dtype = torch.float32 if config.precision == "mixed" else None
    build: Any = parallelize
    if config.engine == "torch":
        from deepseek_lab.parallel import torch_engine

        build = torch_engine.parallelize
    return build(
        config.model,
        mesh,
        config.parallel,
        seed=config.train.seed,
        dtype=dtype,
        master_dtype=master_dtype,
        device=device,
    )


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


class _Stop:
    requested = False


@contextlib.contextmanager
def _signals() -> Iterator[_Stop]:
    """Turn the first Ctrl-C or SIGTERM into a request; a second Ctrl-C ends the process at once."""
    stop = _Stop()

    def request(number: int, _: Any) -> None:
        stop.requested = True
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
