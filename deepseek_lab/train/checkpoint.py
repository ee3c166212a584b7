"""Checkpoints that are complete or absent.

A checkpoint is a folder `step-0000100` of safetensors shards, one written by each rank, and an `index.json`: the size
and digest of each file, and which parts of which tensor it holds.  The parts are those of the layout that wrote them;
reading puts them together again one tensor at a time, so that any other layout can go on.  The folder is written under
another name, flushed, and renamed when every rank is done, so that a crash leaves the ones before it untouched.
Reading verifies all digests, and falls back to the newest good one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepseek_lab.model import DeepSeekModel
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.engine import Engine

FORMAT = 3
INDEX = "index.json"


class CheckpointError(RuntimeError):
    """A checkpoint that must not be read: its reason says why."""


@dataclass(frozen=True)
class Part:
    """What one rank holds of the tensor `key`: numbers `start` to `stop` of a slice of it, flattened.

    `cuts` say which slice of the tensor of `shape`: along dimension `dim`, number `n` of so `many` equal ones, as often
    as it was cut.  Without any the slice is the whole.
    """

    key: str
    shape: tuple[int, ...]
    tensor: Tensor
    start: int
    stop: int
    cuts: tuple[tuple[int, int, int], ...] = ()  # (dim, n, many)

    @property
    def name(self) -> str:
        """The part's own name within its file."""
        return "/".join([self.key, *(str(n) for _, n, _ in self.cuts), str(self.start)])

    def facts(self, file: str) -> dict[str, Any]:
        """What the index says of the part: where it is, and of what."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "tensor"}
        return found | {"file": file, "name": self.name}


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: the optimizer steps done, what was saved about the run, and where its tensors are."""

    folder: Path
    step: int
    meta: dict[str, Any]
    parts: dict[str, list[dict[str, Any]]]

    def tensor(self, key: str) -> Tensor:
        """One tensor, whole, whatever layout wrote it.

        Raises:
            CheckpointError: when there is no such tensor, or parts of it are missing.
        """
        if key not in self.parts:
            raise CheckpointError(f"{self.folder.name}: there is no {key}")
        whole: Tensor | None = None
        for slice_ in {json.dumps(part["cuts"]): part["cuts"] for part in self.parts[key]}.values():
            parts = [part for part in self.parts[key] if part["cuts"] == slice_]
            whole = self._add_slice(whole, slice_, parts)
        missing = math.prod(self.parts[key][0]["shape"]) - sum(p["stop"] - p["start"] for p in self.parts[key])
        if missing:
            raise CheckpointError(f"{self.folder.name}: {missing} numbers of {key} are missing")
        assert whole is not None
        return whole

    def _add_slice(self, whole: Tensor | None, cuts: list[list[int]], parts: list[dict[str, Any]]) -> Tensor:
        """Put one slice, from its parts, into the whole, which the first makes."""
        shape = list(parts[0]["shape"])
        for dim, _, many in cuts:
            shape[dim] //= many
        flat: Tensor | None = None
        for part in parts:
            with safe_open(self.folder / part["file"], framework="pt") as reader:
                read = reader.get_tensor(part["name"])
            if flat is None:
                flat = read.new_empty(math.prod(shape))
            flat[part["start"] : part["stop"]] = read
        assert flat is not None
        if not cuts:
            return flat.view(shape)
        whole = flat.new_empty(parts[0]["shape"]) if whole is None else whole
        target = whole
        for dim, n, many in cuts:
            target = target.narrow(dim, n * (target.shape[dim] // many), target.shape[dim] // many)
        target.copy_(flat.view(shape))
        return whole

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, whole."""
        return {key: self.tensor(key) for key in self.parts}


def save(
    root: Path,
    step: int,
    parts: Iterable[Part],
    meta: dict[str, Any],
    *,
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the `parts` that this rank holds, with those of all other ranks of `group`, as `root/step-…`.

    Collective: every rank must call it, and none returns before the checkpoint has its final name.
    The last `keep` stay.
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
    mine = list(parts)
    save_file({part.name: part.tensor.detach().cpu().contiguous() for part in mine}, partial / shard)
    _flush(partial / shard)
    facts = {"name": shard, "bytes": (partial / shard).stat().st_size, "sha256": _digest(partial / shard)}
    every = collectives.all_gather_object((facts, [part.facts(shard) for part in mine]), group)
    if rank == 0:
        index = {"format": FORMAT, "step": step, "meta": meta, "files": [file for file, _ in every]}
        index["parts"] = [part for _, theirs in every for part in theirs]
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
        parts: dict[str, list[dict[str, Any]]] = {}
        for part in index["parts"]:
            parts.setdefault(part["key"], []).append(part)
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
    return Checkpoint(folder, step, meta, parts)


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


def state_parts(engine: Engine, optimizer: torch.optim.Optimizer) -> Iterator[Part]:
    """What this rank writes: parts of weights as `model.NAME`, of optimizer state as `optim.NAME.KEY`."""
    for kind in ("model", *_state_kinds(optimizer)):
        for shard in engine.shards(kind, optimizer):
            piece = shard.piece
            key = f"model.{piece.name}" if kind == "model" else f"optim.{piece.name}.{kind}"
            shape, cuts = tuple(engine.layouts[piece.name].full_shape), tuple(shard.cuts)
            yield Part(key, shape, shard.tensor, piece.start, piece.stop, cuts)
    if engine.mesh.rank("dp") == engine.mesh.rank("tp") == 0:
        for name, buffer in _buffers(engine.model).items():
            yield Part(f"model.{name}", tuple(buffer.shape), buffer.flatten(), 0, buffer.numel())


def load_state(checkpoint: Checkpoint, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's weights and optimizer state in place, each rank its part, one tensor after the other.

    Raises:
        CheckpointError: when it lacks a tensor or has one too many, or a shape differs.
    """
    with torch.device("meta"):
        everything = set(DeepSeekModel(engine.model.config).state_dict())
    buffers = _buffers(engine.model)
    for key in checkpoint.parts:
        kind, name = key.split(".", 1)
        if kind == "optim":
            name, kind = name.rsplit(".", 1)
        if name not in everything:
            raise CheckpointError(f"{checkpoint.folder.name}: the model has no place for {key}")
        if name in buffers and kind == "model":
            buffers.pop(name).copy_(checkpoint.tensor(key))
        elif name in engine.layouts:  # else it is another stage's
            try:
                engine.assign(kind, name, checkpoint.tensor(key), optimizer)
            except ValueError as error:
                raise CheckpointError(f"{checkpoint.folder.name}: {error}") from None
    for name in [*engine.layouts, *buffers]:
        if f"model.{name}" not in checkpoint.parts:
            raise CheckpointError(f"{checkpoint.folder.name}: there is no {name}")
    for state in optimizer.state.values():
        state["step"] = torch.tensor(float(checkpoint.step))


def _state_kinds(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names under which the optimizer keeps a tensor as large as the parameter itself."""
    return sorted({key for state in optimizer.state.values() for key in state if key != "step"})


def _buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in parameters}


@torch.no_grad()
def load_weights(tensors: dict[str, Tensor], model: torch.nn.Module) -> None:
    """Copy the tensors named `model.…` into `model`; raises CheckpointError for one that is missing or misshapen."""
    targets = dict(model.named_parameters()) | _buffers(model)
    for name, target in targets.items():
        saved = tensors.get(f"model.{name}")
        if saved is None or saved.shape != target.shape:
            raise CheckpointError(f"the checkpoint has no {name} of shape {tuple(target.shape)}")
        target.copy_(saved)
