"""What rank 0 shows and writes while a run goes on, and when it ends."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from deepseek_lab.parallel.mesh import AXES
from deepseek_lab.plan import grid
from deepseek_lab.plan.stages import split_layers
from deepseek_lab.train import metrics
from deepseek_lab.train.loop import Trainer
from deepseek_lab.train.metrics import MetricsFile, read_metrics
from deepseek_lab.viz.loss import draw_loss
from deepseek_lab.viz.pipeline import draw_schedule

PLAIN_LINES = 20  # over a whole run, where there is no terminal


class Reporter:
    """Writes `metrics.jsonl`, `config.yaml`, `summary.json` and pictures to `out`, and shows progress.

    Args:
        mine: slots that hold the learner's functions.
    """

    def __init__(self, trainer: Trainer, accelerator: Accelerator, out: Path, mine: list[str]):
        self.trainer, self.accelerator, self.out, self.mine = trainer, accelerator, out, mine
        self.console = Console(file=sys.stdout)
        self.started = time.perf_counter()
        out.mkdir(parents=True, exist_ok=True)
        trainer.config.save(out / "config.yaml")
        self.metrics = MetricsFile(out / "metrics.jsonl", trainer.steps_done)
        accelerator.init_trackers("tensorboard")
        self._announce()

    def _announce(self) -> None:
        trainer, train = self.trainer, self.trainer.config.train
        self.console.print(
            f"{trainer.n_parameters:,} parameters, {trainer.flops_per_token / 1e6:,.1f} MFLOPs a token; "
            f"{self._layout()} on {trainer.device.type}, {trainer.config.precision}, "
            f"peak {trainer.peak_flops_per_s / 1e9:,.0f} GFLOP/s; steps {trainer.steps_done} to {train.steps}, "
            f"{train.global_batch_size} x {trainer.config.data.seq_len} tokens each",
            highlight=False,
        )
        if trainer.mesh.size("world") > 1:
            self.console.print(mesh_table(trainer))
        for path in self.mine:
            self.console.print(f"running your {path}", highlight=False)

    def _layout(self) -> str:
        parallel, mesh = self.trainer.config.parallel, self.trainer.mesh
        parts = [
            " x ".join(f"{axis} {mesh.size(axis)}" for axis in ("pp", "dp", "tp") if mesh.size(axis) > 1) or "1 rank"
        ]
        parts += [f"{parallel.schedule}"] if parallel.pp > 1 else []
        parts += [f"experts over {parallel.ep}"] if parallel.ep > 1 else []
        parts += [f"ZeRO-{parallel.zero_stage}"] if parallel.zero_stage else []
        parts += ["sequence parallel"] if parallel.sequence_parallel else []
        parts += [f"{parallel.recompute} recomputation"] if parallel.recompute != "none" else []
        parts += [f"{parallel.compression} gradients"] if parallel.compression != "none" else []
        return ", ".join(parts + (["engine torch"] if self.trainer.config.engine == "torch" else []))

    def follow(self, steps: Iterator[dict[str, float]]) -> None:
        """Write and show every step."""
        show = self._rich(steps) if self.console.is_terminal else self._plain(steps)
        for values in show:
            self.metrics.write(values)
            self.accelerator.log({k: v for k, v in values.items() if k != "step"}, step=int(values["step"]))
        self.metrics.close()

    def _rich(self, steps: Iterator[dict[str, float]]) -> Iterator[dict[str, float]]:
        columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console) as progress:
            task = progress.add_task("", total=self.trainer.config.train.steps, completed=self.trainer.steps_done)
            for values in steps:
                progress.update(task, completed=values["step"], description=_line(values))
                yield values

    def _plain(self, steps: Iterator[dict[str, float]]) -> Iterator[dict[str, float]]:
        total = self.trainer.config.train.steps
        every = max(total // PLAIN_LINES, 1)
        for values in steps:
            if values["step"] % every == 0 or values["step"] == total or "val_loss" in values:
                print(f"step {values['step']:>{len(str(total))}}/{total}  {_line(values)}", flush=True)
            yield values

    def finish(self, baselines: dict[str, float], samples: dict[str, str]) -> None:
        """Write the summary and the curve, and show how the run compares."""
        lines = read_metrics(self.out / "metrics.jsonl")
        trainer = self.trainer
        evaluated = [line for line in lines if "val_bits_per_byte" in line]
        summary: dict[str, Any] = {
            "steps_done": trainer.steps_done,
            "interrupted": trainer.interrupted,
            "seconds": time.perf_counter() - self.started,
            "tokens": sum(line["tokens"] for line in lines),
            "loss": lines[-1]["loss"] if lines else None,
            "val_loss": evaluated[-1]["val_loss"] if evaluated else None,
            "val_bits_per_byte": evaluated[-1]["val_bits_per_byte"] if evaluated else None,
            "baselines_bits_per_byte": baselines,
            "tokens_per_s": statistics.median(line["tokens_per_s"] for line in lines) if lines else None,
            "mfu": statistics.median(line["mfu"] for line in lines) if lines else None,
            "parameters": trainer.n_parameters,
            "flops_per_token": trainer.flops_per_token,
            "peak_flops_per_s": trainer.peak_flops_per_s,
            "ranks": {axis: trainer.mesh.size(axis) for axis in ("dp", "tp", "pp", "ep")},
            "schedule": trainer.config.parallel.schedule,
            "state_bytes": trainer.engine.state_bytes(trainer.optimizer),
            "peak_memory_bytes": metrics.peak_memory_bytes(trainer.device),
            "recorded_step": self._recorded(),
            "mine": self.mine,
            "samples": samples,
        }
        partial = self.out / "summary.json.partial"
        partial.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
        os.replace(partial, self.out / "summary.json")
        if lines:
            draw_loss(lines, trainer.tokens["val"], baselines).savefig(self.out / "loss.png", dpi=150)
        if trainer.recorded is not None and len(trainer.recorded.pipeline) > 1:
            title = f"step {trainer.recorded.step}, the ranks of one pipeline"
            draw_schedule(trainer.recorded.pipeline, title).savefig(self.out / "pipeline.png", dpi=150)
        self._show(summary)

    def _recorded(self) -> dict[str, Any] | None:
        recorded = self.trainer.recorded
        if recorded is None:
            return None
        return {"step": recorded.step, "seconds": recorded.seconds, "axes": recorded.axes}

    def _show(self, summary: dict[str, Any]) -> None:
        print_ = self.console.print
        if summary["interrupted"]:
            print_(f"stopped after step {summary['steps_done']}, saved; add --resume to go on", highlight=False)
        if summary["val_bits_per_byte"] is not None:
            table = Table("validation text", "bits per byte", title="The model, and what it has to beat")
            rows = {**summary["baselines_bits_per_byte"], "this model": summary["val_bits_per_byte"]}
            for name, bits in sorted(rows.items(), key=lambda row: -row[1]):
                table.add_row(name, f"{bits:.3f}", style="bold" if name == "this model" else "")
            print_(table)
        if summary["recorded_step"] and summary["recorded_step"]["axes"]:
            step = summary["recorded_step"]
            parts = [
                f"{axis} {of['share']:.0%} ({of['bytes'] / 1e6:,.1f} MB)"
                for axis, of in sorted(step["axes"].items(), key=lambda item: -item[1]["share"])
            ]
            print_(
                f"in step {step['step']} a rank waited for messages, by axis of the mesh: {', '.join(parts)} of "
                f"{step['seconds'] * 1e3:,.0f} ms",
                highlight=False,
            )
        for language, text in summary["samples"].items():
            print_(f"sample ({language}): {text!r}", highlight=False, markup=False, soft_wrap=True)
        if summary["mfu"] is not None:
            print_(
                f"{summary['tokens']:,} tokens in {summary['seconds']:.0f} s; median {summary['tokens_per_s']:,.0f} "
                f"tokens/s, MFU {summary['mfu']:.1%}; written to {self.out}",
                highlight=False,
            )


def mesh_table(trainer: Trainer) -> Table:
    """Which rank is where in the mesh, and which blocks and experts it holds."""
    config, mesh = trainer.config, trainer.mesh
    tp, ep, place = mesh.size("tp"), mesh.size("ep"), config.parallel.pipeline()
    layers = split_layers(config.model.num_hidden_layers, place.stages, config.parallel.stage_layers)
    table = Table(title=f"{mesh.size('world')} ranks, by what they hold", show_lines=False)
    for column in ("pp", "blocks", "dp", "experts", *(f"tp {n}" for n in range(tp))):
        table.add_column(column, justify="right")
    n_experts = config.model.n_routed_experts // ep
    sizes = {axis: mesh.size(axis) for axis in AXES}
    rows: dict[tuple[int, int, int], list[str]] = {}
    for rank in range(mesh.size("world")):
        at = grid.coordinates(rank, sizes)
        rows.setdefault((at["pp"], at["edp"], at["ep"]), []).append(str(rank))
    for (pp, edp, expert), ranks in rows.items():
        held = [layers[place.stage(pp, chunk)] for chunk in range(place.chunks)]
        blocks = ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in held)
        dp, first = edp * ep + expert, expert * n_experts
        where = (str(pp), blocks) if dp == 0 else ("", "")
        table.add_row(*where, str(dp), f"{first} to {first + n_experts - 1}", *ranks)
        if dp == mesh.size("dp") - 1:
            table.add_section()
    return table


def _line(values: dict[str, float]) -> str:
    text = f"loss {values['loss']:.3f}  grad {values['grad_norm']:.2f}  lr {values['lr']:.1e}"
    text += f"  {values['tokens_per_s']:,.0f} tok/s  MFU {values['mfu']:.0%}"
    if "dropped" in values:
        text += f"  dropped {values['dropped']:.0%}"
    if "val_bits_per_byte" in values:
        text += f"  val {values['val_bits_per_byte']:.3f} bits/byte"
    return text
