"""Checkpoints that are complete or absent.

A checkpoint is a folder `step-0000100` of safetensors shards, one written by each rank, and an `index.json` with the
size and digest of each.  It is written under another name, flushed, and renamed when every rank is done, so that a
crash leaves the ones before it untouched.  Reading verifies all digests, and falls back to the newest good one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepseek_lab.parallel import collectives

FORMAT = 1
INDEX = "index.json"


class CheckpointError(RuntimeError):
    """A checkpoint that must not be read: its reason says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: the optimizer steps done, and what was saved about the run."""

    folder: Path
    step: int
    meta: dict[str, Any]
    files: tuple[str, ...]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, from all shards."""
        found: dict[str, Tensor] = {}
        for file in self.files:
            with safe_open(self.folder / file, framework="pt") as reader:
                found |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
        return found


def save(
    root: Path,
    step: int,
    tensors: dict[str, Tensor],
    meta: dict[str, Any],
    *,
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `tensors`, the same on every rank of `group`, as `root/step-…`, each rank its share; keep the last `keep`.

    Collective: every rank must call it, and none returns before the checkpoint has its final name.
    """
    rank, size = collectives.rank_in(group), collectives.size_of(group)
    final = root / f"step-{step:07d}"
    partial = root / f"{final.name}.partial"
    if rank == 0:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob("*.partial"):
            shutil.rmtree(leftover)
        partial.mkdir()
    collectives.barrier(group)
    shard = f"shard-{rank:05d}-of-{size:05d}.safetensors"
    names = sorted(tensors)[rank::size]
    save_file({name: tensors[name].detach().cpu().contiguous() for name in names}, partial / shard)
    _flush(partial / shard)
    facts = {"name": shard, "bytes": (partial / shard).stat().st_size, "sha256": _digest(partial / shard)}
    every = collectives.all_gather_object(facts, group)
    if rank == 0:
        index = {"format": FORMAT, "step": step, "meta": meta, "files": every}
        (partial / INDEX).write_text(json.dumps(index, indent=1))
        _flush(partial / INDEX)
        if final.exists():  # it was refused, and the run came here again from an older one
            shutil.rmtree(final)
        os.replace(partial, final)
        _flush(root)
        for old in _by_age(root)[keep:]:
            shutil.rmtree(old)
    collectives.barrier(group)
    return final


def verify(folder: Path) -> Checkpoint:
    """Check that every shard is there, whole and unaltered.

    Raises:
        CheckpointError: with the reason, when the checkpoint must not be used.
    """
    try:
        index = json.loads((folder / INDEX).read_text())
        if index["format"] != FORMAT:
            raise CheckpointError(f"{folder.name}: format {index['format']}, this version reads {FORMAT}")
        step, meta, files = index["step"], index["meta"], index["files"]
        for file in files:
            path = folder / file["name"]
            if not path.is_file():
                raise CheckpointError(f"{folder.name}: {file['name']} is missing")
            if path.stat().st_size != file["bytes"]:
                raise CheckpointError(
                    f"{folder.name}: {file['name']} has {path.stat().st_size} bytes of {file['bytes']}: truncated"
                )
            if _digest(path) != file["sha256"]:
                raise CheckpointError(f"{folder.name}: {file['name']} does not match its digest: altered or damaged")
    except FileNotFoundError:
        raise CheckpointError(f"{folder.name}: no {INDEX}: not a checkpoint of this trainer") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder.name}: {INDEX} cannot be read ({error})") from None
    return Checkpoint(folder, step, meta, tuple(file["name"] for file in files))


def latest(root: Path, fingerprint: dict[str, Any] | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole and belongs to this run, and why newer ones were passed over.

    Args:
        fingerprint: what must equal the checkpoint's `meta["fingerprint"]` for the run to go on as if never stopped;
            None takes any.
    """
    refused = []
    for folder in _by_age(root):
        try:
            checkpoint = verify(folder)
        except CheckpointError as error:
            refused.append(str(error))
            continue
        if fingerprint is None:
            return checkpoint, refused
        theirs = checkpoint.meta.get("fingerprint", {})
        differing = sorted(key for key in fingerprint | theirs if fingerprint.get(key) != theirs.get(key))
        if not differing:
            return checkpoint, refused
        key = differing[0]
        refused.append(
            f"{folder.name}: of another run: {key} is {theirs.get(key)!r} there, {fingerprint.get(key)!r} here"
        )
    return None, refused


def _by_age(root: Path) -> list[Path]:
    """Checkpoints, newest first."""
    return sorted((f for f in root.glob("step-*") if f.is_dir() and f.suffix != ".partial"), reverse=True)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def state_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights as `model.NAME`, optimizer state as `optim.NAME.KEY`."""
    tensors = {f"model.{name}": tensor for name, tensor in _unique_state(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optim.{name}.{key}"] = value
    return tensors


def load_state(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's weights and optimizer state in place.

    Raises:
        CheckpointError: when it lacks a tensor or has one too many, or a shape differs.
    """
    tensors = checkpoint.tensors()
    load_weights(tensors, model)
    used = {f"model.{name}" for name in _unique_state(model)}
    for name, parameter in model.named_parameters():
        prefix = f"optim.{name}."
        mine = {key: tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        if mine:
            optimizer.state[parameter] = {k.removeprefix(prefix): v.to(parameter.device) for k, v in mine.items()}
        used |= mine.keys()
    if unused := sorted(tensors.keys() - used):
        raise CheckpointError(f"{checkpoint.folder.name}: the model has no place for {unused[0]}")


@torch.no_grad()
def load_weights(tensors: dict[str, Tensor], model: torch.nn.Module) -> None:
    """Copy the tensors named `model.…` into `model`; raises CheckpointError for one that is missing or misshapen."""
    for name, target in _unique_state(model).items():
        saved = tensors.get(f"model.{name}")
        if saved is None or saved.shape != target.shape:
            raise CheckpointError(f"the checkpoint has no {name} of shape {tuple(target.shape)}")
        target.copy_(saved)


def _unique_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """The state dict with tied weights once, under the name that `named_parameters` gives them."""
    tied = {id(p) for _, p in model.named_parameters()}
    names = {name for name, _ in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    return {name: tensor.detach() for name, tensor in state.items() if name in names or id(tensor) not in tied}
