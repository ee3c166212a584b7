"""What a run is: nested dataclasses, filled from a YAML file and then from the command line.

    python -m deepseek_lab.train --config configs/tiny.yaml --optim.lr 3e-3 --model.num_hidden_layers 4

Every key exists, every value has its field's type, and every value is possible, or nothing starts.  The batch is
global (`train.global_batch_size` sequences); how many ranks share it never changes what a step learns.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.parallel.config import ParallelConfig

PRECISIONS = ("fp32", "bf16", "mixed", "fp64")
ENGINES = ("lab", "torch")
OPTIMIZERS = ("adamw", "sgd")


class ConfigError(ValueError):
    """A key that does not exist, or a value that cannot be."""


@dataclass(frozen=True)
class DataConfig:
    """`source`: a text file or folder, None for the shipped corpus; `tokenizer`: a file, None for the shipped one.

    With `document_mask`, attention stays inside the documents that packing put into one sequence of `seq_len` tokens.
    """

    source: str | None = None
    tokenizer: str | None = None
    seq_len: int = 128
    document_mask: bool = True

    def __post_init__(self) -> None:
        _at_least("data.seq_len", self.seq_len, 2)


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and schedule: linear warm-up over `warmup_steps` to `lr`, then half a cosine to `min_lr`.

    Weight decay is decoupled and applies to matrices only; `clip_norm` bounds the global gradient norm (0: no bound).
    """

    name: str = "adamw"
    lr: float = 3e-3
    min_lr: float = 3e-4
    warmup_steps: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        _one_of("optim.name", self.name, OPTIMIZERS)
        _at_least("optim.warmup_steps", self.warmup_steps, 0)
        for name in ("lr", "min_lr", "weight_decay", "eps", "clip_norm"):
            _at_least(f"optim.{name}", getattr(self, name), 0)
        if self.min_lr > self.lr:
            raise ConfigError(f"optim.min_lr={self.min_lr} is above optim.lr={self.lr}, where the cosine starts")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optim.{name}={getattr(self, name)} must be at least 0 and below 1")


@dataclass(frozen=True)
class TrainConfig:
    """The length of a run and of a step.

    A step learns from `global_batch_size` sequences, of which each rank takes its share in passes of at most
    `micro_batch_size`.  `router_bias_rate` is how far an optimizer step moves the bias of a busy or idle expert.
    `eval_every` and `checkpoint_every` count steps, 0 meaning only at the end; the last `keep_checkpoints` stay.
    `stop_at` ends the run after that many steps as an interrupt would, with a checkpoint and the schedule unchanged.
    """

    steps: int = 100
    global_batch_size: int = 32
    micro_batch_size: int = 8
    seed: int = 0
    label_smoothing: float = 0.0
    router_bias_rate: float = 1e-3
    eval_every: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    stop_at: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch_size", "micro_batch_size", "keep_checkpoints"):
            _at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("seed", "router_bias_rate", "eval_every", "checkpoint_every"):
            _at_least(f"train.{name}", getattr(self, name), 0)
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"train.label_smoothing={self.label_smoothing} must be at least 0 and below 1")
        if self.stop_at is not None and not 1 <= self.stop_at <= self.steps:
            raise ConfigError(f"train.stop_at={self.stop_at} must be from 1 to train.steps={self.steps}")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run.

    `precision`: "fp32"; "bf16", autocast over fp32 weights; "mixed", bf16 weights and gradients with fp32 master
    weights and optimizer state; "fp64", to compare layouts.  `engine`: "lab", the parts that this course builds, or
    "torch", the production ones of PyTorch (FSDP2, DTensor).
    """

    model: DeepSeekConfig = field(default_factory=DeepSeekConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: str = "fp32"
    engine: str = "lab"

    def __post_init__(self) -> None:
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("engine", self.engine, ENGINES)
        self.parallel.check_model(self.model, self.data.seq_len)
        if self.engine == "torch":
            self.parallel.check_torch_engine(mixed=self.precision == "mixed")
            if self.parallel.pp > 1 and self.model.tie_word_embeddings:
                raise ConfigError(
                    "engine: torch has no sum over the two stages of model.tie_word_embeddings; use engine: lab"
                )
        if self.data.seq_len > self.model.max_position_embeddings:
            raise ConfigError(
                f"data.seq_len={self.data.seq_len} is more than "
                f"model.max_position_embeddings={self.model.max_position_embeddings}"
            )

    def passes(self, n_rows: int, dp: int) -> int:
        """In how many passes each of `dp` ranks has taken its share of `n_rows`: as many as the largest share needs."""
        return math.ceil(math.ceil(n_rows / dp) / self.train.micro_batch_size)

    def check(self, world_size: int) -> None:
        """Raises ValueError when the layout does not use `world_size` ranks, or its schedule cannot have the passes."""
        self.parallel.check(world_size)
        dp = self.parallel.sizes(world_size)["dp"]
        passes = self.passes(self.train.global_batch_size, dp)
        try:
            self.parallel.pipeline(passes)
            if self.engine == "torch":
                self.parallel.check_torch_pipeline(passes)
        except ValueError as error:
            raise ConfigError(
                f"{error}; a step has {passes} micro-batches: train.global_batch_size={self.train.global_batch_size} "
                f"over dp={dp}, in passes of train.micro_batch_size={self.train.micro_batch_size}"
            ) from None

    def to_dict(self) -> dict[str, Any]:
        """Nested dictionaries, section by section."""
        return dataclasses.asdict(self)

    def save(self, path: Path) -> None:
        """Write every value, defaults included, as YAML that `load` reads back."""
        path.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))


def load(path: str | Path | None = None, overrides: dict[str, str] | None = None) -> RunConfig:
    """Read the YAML file at `path`, if any, then apply `overrides`, dotted keys with values as typed by the user.

    The model section may name a `preset` whose fields the others replace.

    Raises:
        ConfigError: for an unknown key (with the nearest one), a wrong type, or an impossible value.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = yaml.safe_load(Path(path).read_text()) or {}
        except FileNotFoundError:
            raise ConfigError(f"there is no configuration file {path}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold sections such as 'model:' and 'train:', not a {type(values).__name__}")
    for key, text in (overrides or {}).items():
        *sections, name = key.split(".")
        here = values
        for section in sections:
            here = here.setdefault(section, {})
            if not isinstance(here, dict):
                raise ConfigError(f"{key}: {section} is a value, not a section")
        here[name] = yaml.safe_load(text)
    return _build(RunConfig, values, "")


def known_keys(cls: Any = RunConfig, prefix: str = "") -> list[str]:
    """Every dotted key that a configuration may set."""
    keys = []
    for name, kind in _fields(cls).items():
        keys += known_keys(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else [prefix + name]
    return keys + (["model.preset"] if cls is RunConfig else [])


def _fields(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _build(cls: Any, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise ConfigError(f"{prefix.rstrip('.')} is a section of keys, not the value {values!r}")
    values, base = dict(values), {}
    if cls is DeepSeekConfig and "preset" in values:
        base = _possible(lambda: DeepSeekConfig.preset(values.pop("preset")).to_dict())
    kinds = _fields(cls)
    for name, value in values.items():
        if name not in kinds:
            near = difflib.get_close_matches(f"{prefix}{name}", known_keys(), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"there is no setting {prefix}{name}{hint}")
        kind = kinds[name]
        if dataclasses.is_dataclass(kind):
            values[name] = _build(kind, value, f"{prefix}{name}.")
        else:
            values[name] = _convert(value, kind, f"{prefix}{name}")
    return _possible(lambda: cls(**{**base, **values}))


def _possible(make: Any) -> Any:
    try:
        return make()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _convert(value: Any, kind: Any, key: str) -> Any:
    """`value` as the field's type; numbers written as text (YAML reads 3e-4 so) count as numbers."""
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in allowed:
        return None
    for wanted in allowed:
        wanted = typing.get_origin(wanted) or wanted
        if wanted is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                return float(value)
            except ValueError:
                continue
        if type(value) is wanted:
            return value
    names = " or ".join("null" if t is type(None) else getattr(t, "__name__", str(t)) for t in allowed)
    raise ConfigError(f"{key}={value!r} has type {type(value).__name__}; it must be {names}")


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{name}={value} must be at least {least}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not known; use one of {', '.join(choices)}")
