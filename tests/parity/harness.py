"""Runs cells of a design, on real ranks, and compares each with one serial process.

A cell is five AdamW steps of the Trainer in fp64.  Everything that can be compared is, on every rank: loss and global
norm of every step, gradients before clipping, router visits and biases, parameters and bytes at the end.

The batch is uneven on purpose: ranks and passes never get equally many of its rows, and with `uneven` some rows are
padding for the most part, one of them wholly.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from deepseek_lab.data.batches import IGNORE, Batch, rank_slice
from deepseek_lab.learn import run_ranks
from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.mesh import Mesh, build_mesh
from deepseek_lab.plan import memory
from deepseek_lab.train import optim
from deepseek_lab.train.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from deepseek_lab.train.loop import Trainer
from tests.parity.design import Cell, world_size

STEPS, ROWS, T = 5, 11, 16
MODEL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "vocab_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
CLIP_NORM = 0.5
SERIAL = {"dp": 1, "tp": 1, "zero_stage": 0, "sequence_parallel": False, "accumulation": 1, "recompute": "none"}
SETTINGS = [field.name for field in dataclasses.fields(ParallelConfig)]  # the axes with these names are passed on


@dataclasses.dataclass
class Run:
    """What one rank saw of a cell."""

    loss: list[float]
    norm: list[float]
    gradients: dict[str, torch.Tensor]
    visits: torch.Tensor
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
    micro_batch_size = math.ceil(math.ceil(ROWS / cell["dp"]) / cell["accumulation"])
    return RunConfig(
        model=DeepSeekConfig.preset("tiny", **MODEL, tie_word_embeddings=cell["tied"], q_lora_rank=cell["q_lora_rank"]),
        data=DataConfig(seq_len=T),
        optim=OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=1, clip_norm=CLIP_NORM),
        train=TrainConfig(steps=STEPS, global_batch_size=ROWS, micro_batch_size=micro_batch_size, label_smoothing=0.1),
        parallel=ParallelConfig(bucket_mb=0.05, **{name: cell[name] for name in SETTINGS if name in cell}),
        precision="fp64",
        engine=cell.get("engine", "lab"),
    )


def global_batch(step: int, uneven: bool) -> Batch:
    """Rows of random tokens in documents of random lengths."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(MODEL["vocab_size"], (ROWS, T + 1), generator=generator)
    labels = ids[:, 1:].clone()
    if uneven:
        labels[0, 2:] = labels[3] = labels[7, 3:] = IGNORE
    return Batch(ids[:, :-1], labels, (torch.rand(ROWS, T, generator=generator) < 0.2).cumsum(1))


def train(cell: Cell, mesh: Mesh, out: Path) -> Run:
    """The steps of one cell on this rank."""
    collectives.set_algorithm(cell["collectives"])
    trainer = Trainer(config_of(cell), {}, mesh, torch.device("cpu"), out)
    engine, optimizer = trainer.engine, trainer.optimizer
    gradients: dict[str, torch.Tensor] = {}
    visits: list[torch.Tensor] = []
    scale, balance = engine.scale_gradients, optim.balance_experts

    def keep_gradients(factor):
        if not gradients:
            gradients.update((name, whole.clone()) for name, whole in engine.full("grad"))
        scale(factor)

    def keep_visits(model, rate, group):
        mine = torch.stack([router.visits_E for router in model.routers().values()])
        visits.append(collectives.all_reduce(mine.clone(), group))
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
        gradients=gradients,
        visits=torch.stack(visits),
        parameters={name: whole.clone() for name, whole in engine.full("model")},
        bias={name: tensor for name, tensor in state.items() if name.endswith("correction_bias")},
        state_bytes=engine.state_bytes(optimizer),
    )


def serial(cell: Cell, out: Path) -> Run:
    """The reference of a cell: everything at once in this process."""
    run = train({**cell, **SERIAL, "engine": "lab"}, Mesh(None), out)
    assert min(run.norm) > CLIP_NORM, "nothing is clipped, so that a wrong norm would not show"
    return run


def reference_of(cell: Cell) -> tuple[Any, ...]:
    """Cells that agree in this share their reference."""
    return cell["tied"], cell["q_lora_rank"], cell["uneven"]


def run_cells(
    cells: Iterable[Cell], out: Path, *, plant: Callable[[], None] | None = None, timeout: float = 300
) -> list[Report]:
    """Run `cells`, those of one world size on the same ranks, and report on each, in the order of `cells`.

    `plant` is called first on every rank, to patch a mistake in.
    """
    cells = list(cells)
    references = {reference_of(cell): serial(cell, out) for cell in cells}
    reports: dict[int, Report] = {}
    by_size = sorted(range(len(cells)), key=lambda n: (world_size(cells[n]), cells[n]["dp"]))
    for size, numbers in itertools.groupby(by_size, key=lambda n: world_size(cells[n])):
        numbers = list(numbers)
        group = [cells[n] for n in numbers]
        by_rank = run_ranks(_compare_all, size, group, references, out, plant, timeout=timeout)
        for n, *found in zip(numbers, *by_rank, strict=True):
            reports[n] = _worst_of(cells[n], found)
    return [reports[n] for n in range(len(cells))]


def _compare_all(
    cells: list[Cell], references: Mapping[Any, Run], out: Path, plant: Callable[[], None] | None
) -> list[tuple[dict[str, float], str]]:
    """On a rank: deviations and a digest of the final parameters, for each cell."""
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
        digest = hashlib.sha256()
        for name in sorted(run.parameters):
            digest.update(run.parameters[name].numpy().tobytes())
        found.append((_deviations(cell, run, references[reference_of(cell)]), digest.hexdigest()))
    return found


def _deviations(cell: Cell, run: Run, reference: Run) -> dict[str, float]:
    promised = memory.zero_state_bytes(parameters_of_a_rank(cell), cell["dp"], cell["zero_stage"], 8, 8, 16)
    return {
        "loss": max(abs(a / b - 1) for a, b in zip(run.loss, reference.loss, strict=True)),
        "norm": max(abs(a / b - 1) for a, b in zip(run.norm, reference.norm, strict=True)),
        "gradients": _worst_deviation(run.gradients, reference.gradients),
        "parameters": _worst_deviation(run.parameters, reference.parameters),
        "visits": deviation(run.visits.double(), reference.visits.double()),
        "bias": _worst_deviation(run.bias, reference.bias),
        "too_many_bytes": max(run.state_bytes[kind] / promised[kind] for kind in promised) - 1,
    }


def _worst_of(cell: Cell, found: list[tuple[dict[str, float], str]]) -> Report:
    deviations, digests = zip(*found, strict=True)
    worst = {key: max(d[key] for d in deviations) for key in deviations[0]}
    return Report(cell, drift=len(set(digests)) > 1, **worst)


def parameters_of_a_rank(cell: Cell) -> int:
    """How many parameters one tensor-parallel rank has."""
    config = config_of(cell).model
    counts = [memory.layer_parameters(config, layer) for layer in range(config.num_hidden_layers)]
    return sum(memory.parameters_of_a_rank(c, cell["tp"]) for c in [*counts, memory.end_parameters(config)])


def _worst_deviation(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(deviation(ours[name], theirs[name]) for name in theirs)


def deviation(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """‖ours - theirs‖ / ‖theirs‖; where theirs is zero, ours must be: otherwise 1.  NaN counts as infinitely far."""
    assert ours.shape == theirs.shape
    if not theirs.any():
        return float(ours.any())
    found = (torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs)).item()
    return math.inf if math.isnan(found) else found
