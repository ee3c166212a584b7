"""Runs cells of a design, on real ranks, and compares each with one serial process.

A cell is five AdamW steps of the Trainer in fp64.  Everything that can be compared is, on every rank: loss and global
norm of every step, gradients before clipping, router visits and biases, parameters and bytes at the end.

The batch is uneven on purpose: ranks and passes never get equally many of its rows, and with `uneven` some rows are
padding for the most part, one of them wholly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from deepseek_lab.data.batches import IGNORE, PADDING, Batch, rank_slice
from deepseek_lab.learn import run_ranks
from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.mesh import Mesh, build_mesh
from deepseek_lab.plan import memory
from deepseek_lab.train import optim
from deepseek_lab.train.config import ConfigError, DataConfig, OptimConfig, RunConfig, TrainConfig
from deepseek_lab.train.loop import Trainer
from tests.parity.design import Cell, world_size

STEPS, ROWS, T = 5, 19, 16
MODEL: dict[str, Any] = {
    "hidden_size": 32,
    "vocab_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "aux_loss_alpha": 0.01,
}
CLIP_NORM = 0.3
CHUNKS = {"interleaved": 2, "dualpipe_v": 2}
SERIAL = {"dp": 1, "tp": 1, "pp": 1, "ep": 1, "schedule": "1f1b", "zero_stage": 0, "sequence_parallel": False}
SERIAL |= {"accumulation": 1, "recompute": "none"}
SETTINGS = [field.name for field in dataclasses.fields(ParallelConfig)]  # the axes with these names are passed on


@dataclasses.dataclass
class Run:
    """What one rank saw of a cell."""

    loss: list[float]
    norm: list[float]
    experts: list[float]
    gradients: dict[str, torch.Tensor]
    visits: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    bias: dict[str, torch.Tensor]
    state_bytes: dict[str, int]


@dataclasses.dataclass
class Report:
    """How far a cell is from the serial run, the worst of all ranks.

    Deviations are relative; 1.0 also stands for anything but zeros where the reference is zero.  `drift`: ranks do not
    hold bit for bit the same parameters.  `too_many_bytes`: the state that a rank holds, over what ZeRO promises.
    """

    cell: Cell
    loss: float
    norm: float
    gradients: float
    parameters: float
    visits: float
    bias: float
    drift: bool
    too_many_bytes: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.norm, self.gradients, self.parameters, self.visits, self.bias)

    def __str__(self) -> str:
        settings = " ".join(f"{name}={value}" for name, value in self.cell.items())
        return f"{self.worst:8.1e}  {settings}"


def config_of(cell: Cell) -> RunConfig:
    """The run that a cell stands for."""
    chunks = CHUNKS.get(cell["schedule"], 1)
    known = {name: cell[name] for name in SETTINGS if name in cell}
    parallel = ParallelConfig(bucket_mb=0.05, chunks=chunks, **known)
    model = DeepSeekConfig.preset(
        "tiny",
        **MODEL,
        num_hidden_layers=layers_of(cell),
        tie_word_embeddings=cell["tied"],
        q_lora_rank=cell["q_lora_rank"],
        capacity_factor=cell["capacity_factor"],
    )
    train = TrainConfig(steps=STEPS, global_batch_size=ROWS, label_smoothing=0.1)
    config = RunConfig(
        model=model,
        data=DataConfig(seq_len=T),
        optim=OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=1, clip_norm=CLIP_NORM),
        train=train,
        parallel=parallel,
        precision="fp64",
        engine=cell.get("engine", "lab"),
    )
    for size in micro_batch_sizes(cell):
        suits = dataclasses.replace(config, train=dataclasses.replace(train, micro_batch_size=size))
        with contextlib.suppress(ConfigError):
            suits.check(world_size(cell))
            return suits
    raise AssertionError(f"no number of micro-batches suits {cell}")


def layers_of(cell: Cell) -> int:
    """As few as there can be, and never a multiple of the stages, of which there may be up to 8."""
    return cell.get("layers") or (3 if cell["pp"] * CHUNKS.get(cell["schedule"], 1) <= 2 else 9)


def micro_batch_sizes(cell: Cell) -> list[int]:
    """That with which there are `accumulation` passes; if the schedule cannot have so many, next to try are more."""
    share = math.ceil(ROWS / cell["dp"])
    wanted = math.ceil(share / cell["accumulation"])
    return [*range(wanted, 0, -1), *range(wanted + 1, share + 1)]


def global_batch(step: int, uneven: bool) -> Batch:
    """Rows of random tokens, none twice in a row, in documents of random lengths.

    An expert without room for both of two equal tokens that see nothing else (a document "aa", say) would drop
    whichever the last bit of a sum says, and that is not the same in every layout.
    """
    generator = torch.Generator().manual_seed(step)
    ids = torch.rand(ROWS, MODEL["vocab_size"], generator=generator).argsort(1)[:, : T + 1]
    labels = ids[:, 1:].clone()
    if uneven:
        labels[0, 2:] = labels[3] = labels[7, 3:] = labels[12] = IGNORE
    doc_ids = (torch.rand(ROWS, T, generator=generator) < 0.2).cumsum(1)
    if uneven:
        doc_ids[3] = doc_ids[7, 3:] = PADDING  # the others have text that is not asked for, as prompts have
    return Batch(ids[:, :-1], labels, doc_ids)


def train(cell: Cell, mesh: Mesh, out: Path) -> Run:
    """The steps of one cell on this rank."""
    collectives.set_algorithm(cell["collectives"])
    trainer = Trainer(config_of(cell), {}, mesh, torch.device("cpu"), out)
    engine, optimizer = trainer.engine, trainer.optimizer
    gradients: dict[str, torch.Tensor] = {}
    visits: dict[str, list[torch.Tensor]] = {}
    scale, balance = engine.scale_gradients, optim.balance_experts

    def keep_gradients(factor):
        if not gradients:
            gradients.update((name, whole.clone()) for name, whole in engine.full("grad"))
        scale(factor)

    def keep_visits(model, rate, group):
        for name, router in model.routers().items():
            visits.setdefault(name, []).append(collectives.all_reduce(router.visits_E.clone(), group))
        balance(model, rate, group)

    engine.scale_gradients, optim.balance_experts = keep_gradients, keep_visits
    lines = []
    try:
        for step in range(STEPS):
            whole = global_batch(step, cell["uneven"])
            mine = rank_slice(ROWS, mesh.rank("dp"), mesh.size("dp"))
            batch = Batch(whole.input_ids[mine], whole.labels[mine], whole.doc_ids[mine])
            n_tokens, _ = trainer.agree(int((batch.labels != IGNORE).sum()), stop=False)
            lines.append(trainer.step(batch, n_tokens))
    finally:
        optim.balance_experts = balance
    state = trainer.model.state_dict()
    return Run(
        loss=[line["loss"] for line in lines],
        norm=[line["grad_norm"] for line in lines],
        experts=[line[name] for line in lines for name in ("aux_loss", "dropped") if name in line],
        gradients=gradients,
        visits={name: torch.stack(steps).double() for name, steps in visits.items()},
        parameters={name: whole.clone() for name, whole in engine.full("model")},
        bias={name: tensor for name, tensor in state.items() if name.endswith("correction_bias")},
        state_bytes=engine.state_bytes(optimizer),
    )


def serial(cell: Cell, out: Path) -> Run:
    """The reference of a cell: everything at once in this process."""
    layers = layers_of(cell)
    run = train({**cell, **SERIAL, "engine": "lab", "layers": layers}, Mesh(None), out)
    assert min(run.norm) > CLIP_NORM, "nothing is clipped, so that a wrong norm would not show"
    return run


def reference_of(cell: Cell) -> tuple[Any, ...]:
    """Cells that agree in this share their reference."""
    return cell["tied"], cell["q_lora_rank"], cell["capacity_factor"], cell["uneven"], layers_of(cell)


_references: dict[tuple[Any, ...], Run] = {}  # by `reference_of`; no plant reaches them


def run_cells(
    cells: Iterable[Cell], out: Path, *, plant: Callable[[], None] | None = None, timeout: float = 300
) -> list[Report]:
    """Run `cells`, those of one world size on the same ranks, and report on each, in the order of `cells`.

    `plant` is called first on every rank, to patch a mistake in.
    """
    cells = list(cells)
    for cell in cells:
        if (key := reference_of(cell)) not in _references:
            _references[key] = serial(cell, out)
    references = {key: _references[key] for key in map(reference_of, cells)}
    reports: dict[int, Report] = {}
    by_size = sorted(range(len(cells)), key=lambda n: (world_size(cells[n]), cells[n]["dp"]))
    for size, numbers in itertools.groupby(by_size, key=lambda n: world_size(cells[n])):
        numbers = list(numbers)
        group = [cells[n] for n in numbers]
        by_rank = run_ranks(_compare_all, size, group, references, out, plant, timeout=timeout)
        for n, *found in zip(numbers, *by_rank, strict=True):
            reports[n] = _worst_of(cells[n], found, set(references[reference_of(cells[n])].parameters))
    return [reports[n] for n in range(len(cells))]


def _compare_all(
    cells: list[Cell], references: Mapping[Any, Run], out: Path, plant: Callable[[], None] | None
) -> list[tuple[dict[str, float], dict[str, str]]]:
    """On a rank, for each cell: deviations, and digests of the final parameters that are here."""
    if plant is not None:
        plant()
    meshes: dict[tuple[int, ...], Mesh] = {}
    found = []
    for cell in cells:
        parallel = config_of(cell).parallel
        sizes = tuple(parallel.sizes(world_size(cell)).values())
        if sizes not in meshes:
            meshes[sizes] = build_mesh(parallel, "cpu")
        run = train(cell, meshes[sizes], out)
        digests = {name: hashlib.sha256(w.numpy().tobytes()).hexdigest() for name, w in run.parameters.items()}
        found.append((_deviations(cell, run, references[reference_of(cell)], meshes[sizes]), digests))
        if collectives.rank_in() == 0:
            print(f"cell {len(found)} of {len(cells)} on {world_size(cell)} ranks")  # `make parity` shows it
    return found


def _deviations(cell: Cell, run: Run, reference: Run, mesh: Mesh) -> dict[str, float]:
    config = config_of(cell)
    world = world_size(cell)
    promised = memory.state_of_a_rank(config.model, config.parallel, mesh.rank("pp"), world, (8, 8, 16))
    return {
        "loss": max(
            abs(a / b - 1) for a, b in zip(run.loss + run.experts, reference.loss + reference.experts, strict=True)
        ),
        "norm": max(abs(a / b - 1) for a, b in zip(run.norm, reference.norm, strict=True)),
        "gradients": _worst_deviation(run.gradients, reference.gradients),
        "parameters": _worst_deviation(run.parameters, reference.parameters),
        "visits": _worst_deviation(run.visits, reference.visits),
        "bias": _worst_deviation(run.bias, reference.bias),
        "too_many_bytes": max(run.state_bytes[kind] / promised[kind] for kind in promised) - 1,
    }


def _worst_of(cell: Cell, found: list[tuple[dict[str, float], dict[str, str]]], names: set[str]) -> Report:
    deviations, digests = zip(*found, strict=True)
    worst = {key: max(d[key] for d in deviations) for key in deviations[0]}
    assert set().union(*digests) == names, "the ranks do not hold the whole model together"
    drift = any(len({d[name] for d in digests if name in d}) > 1 for name in names)
    return Report(cell, drift=drift, **worst)


def _worst_deviation(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max((deviation(ours[name], theirs[name]) for name in ours), default=0.0)


def deviation(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """‖ours - theirs‖ / ‖theirs‖; where theirs is zero, ours must be: otherwise 1.  NaN counts as infinitely far."""
    assert ours.shape == theirs.shape
    if not theirs.any():
        return float(ours.any())
    found = (torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs)).item()
    return math.inf if math.isnan(found) else found
