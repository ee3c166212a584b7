"""From a serial model to one whose layers, state and gradients are spread over the ranks of a mesh.

`parallelize` applies the techniques in order.  The `Engine` that it returns is all that a training loop needs to know:
it runs passes, adds gradients up, and hands the optimizer what is this rank's to update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepseek_lab.data.batches import Batch
from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.model.split_backward import WeightParts
from deepseek_lab.model.transformer import initial_weight
from deepseek_lab.parallel import collectives, compression, data_parallel, expert, pipeline, tensor, zero
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.mesh import Mesh
from deepseek_lab.parallel.recompute import apply_recompute
from deepseek_lab.plan.schedules import Schedule
from deepseek_lab.plan.stages import split_layers

Forward = Callable[[int, Tensor | None, Batch], Any]  # (chunk, its input, micro-batch): as StagedModel.run_stage


def parallelize(
    config: DeepSeekConfig,
    mesh: Mesh,
    parallel: ParallelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    master_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Engine:
    """The model of `config`, spread over `mesh` as `parallel` says.

    It is laid out without memory first; then every rank takes its part of one parameter after the other, whose values
    depend on (seed, name) alone, so that no rank ever holds more than one whole parameter beyond what is its own.

    Args:
        dtype: of weights and gradients.
        master_dtype: of the copy of the weights that the optimizer updates; by default there is no copy.
    """
    place = parallel.pipeline()
    layers = split_layers(config.num_hidden_layers, place.stages, parallel.stage_layers)
    with torch.device("meta"):
        model = pipeline.StagedModel(config, place, layers, mesh.group("pp"))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    expert.apply_expert_parallel(model, mesh.group("ep"))
    layouts = tensor.apply_tensor_parallel(model, mesh.group("tp"), parallel.sequence_parallel)
    spread = mesh.size("ep") > 1
    layouts = {
        name: dataclasses.replace(layout, full_shape=shapes[name], expert=spread and ".mlp.experts." in name)
        for name, layout in layouts.items()
    }
    apply_recompute(model, parallel.recompute)
    engine = Engine(model, layouts, mesh, parallel, dtype, master_dtype or dtype, device or torch.device("cpu"))
    for name, layout in layouts.items():
        engine.assign("model", name, initial_weight(name, torch.Size(layout.full_shape), config, seed))
    return engine


def gradient_axes(layout: tensor.Layout, twice: bool) -> list[str]:
    """Over which axes of the mesh the gradient of a parameter must be added up: each rank there found a part of it.

    Args:
        layout: how tp and ep lay the parameter out; see `tensor.Layout`.
        twice: the first stage of the pipeline and the last, the "ends", both hold the parameter.

    Returns:
        A new list of "dp", "edp", "tp" and "ends".  The data axis comes first: its sum starts during backward.
    """
    axes = ["edp" if layout.expert else "dp"]  # an expert sees the tokens of its whole ep group already
    if layout.partial:
        axes.append("tp")
    if twice:
        axes.append("ends")
    return axes


def copies_of(layout: tensor.Layout, twice: bool, sizes: dict[str, int], zero_stage: int) -> int:
    """On how many ranks the same numbers of a parameter's gradient are, once it has been added up.

    Args:
        layout, twice: as for `gradient_axes`.
        sizes: of the axes "tp", "dp" and "edp" (not "pp"); 1 for one that does not matter.
        zero_stage: from 1 on data-parallel ranks share the numbers out.
    """
    copies = 2 if twice else 1
    if layout.dim is None:
        copies *= sizes["tp"]
    if zero_stage == 0:
        copies *= sizes["edp" if layout.expert else "dp"]
    return copies


class Engine:
    """A model in pieces: data parallelism with ZeRO, over stages that tensor and expert parallelism cut before."""

    def __init__(
        self,
        model: pipeline.StagedModel,
        layouts: dict[str, tensor.Layout],
        mesh: Mesh,
        parallel: ParallelConfig,
        dtype: torch.dtype,
        master_dtype: torch.dtype,
        device: torch.device,
    ):
        self.model, self.layouts, self.mesh, self.parallel = model, layouts, mesh, parallel
        self.stage, self.dtype, self.device = parallel.zero_stage, dtype, device
        self.compress = compression.get(parallel.compression)
        self.overlap: data_parallel.Overlap | None = None
        self.in_flight: list[zero.Reduction] = []
        self.timeline: list[pipeline.Span] = []
        parameters = dict(model.named_parameters())
        self.number = {name: i for i, name in enumerate(parameters)}
        self._name = {id(parameter): name for name, parameter in parameters.items()}
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.buckets: list[zero.Bucket] = []
        self.buckets_of_chunk: list[list[int]] = []
        self._lay_out(dtype, master_dtype)
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.shapes}
        self._place_parameters()
        _place_buffers(model, dtype if dtype == torch.float64 else torch.float32, device)
        self.free_weights()

    # --- laying out -----------------------------------------------------------------------------------------

    def _lay_out(self, dtype: torch.dtype, master_dtype: torch.dtype) -> None:
        """Make the buckets of every chunk, in the order in which backward finishes them."""
        most = int(self.parallel.bucket_mb * 2**20 / dtype.itemsize)
        placed: set[str] = set()
        for chunk in range(len(self.model.stages)):
            units = [self._names(modules, placed) for modules in self._modules(chunk)]
            # In stage 3 a unit is gathered as one, whatever its size; else gradients fill buckets of a given size.
            together = [name for unit in units for name in unit]
            wholes, size = (units, sys.maxsize) if self.stage == 3 else ([together], most)
            members: list[list[str]] = []
            for names in wholes:
                for kind in self._kinds(names):
                    planned = data_parallel.plan_buckets([self.shapes[name].numel() for name in kind], size)
                    members += [[kind[i] for i in bucket] for bucket in planned]
            members.sort(key=lambda names: -min(self.number[name] for name in names))
            first = len(self.buckets)
            for names in members:
                group = self.mesh.group(self._axes(names[0])[0])
                shapes = {name: self.shapes[name] for name in names}
                self.buckets.append(zero.Bucket(shapes, self.stage, group, dtype, master_dtype, self.device))
            self.buckets_of_chunk.append(list(range(first, len(self.buckets))))

    def _modules(self, chunk: int) -> list[list[nn.Module]]:
        """Modules of a chunk whose weights are gathered together in stage 3, in the order in which they begin."""
        model, stage = self.model, self.model.stages[chunk]
        first: list[nn.Module] = [model.embed_tokens] if stage == 0 else []
        last: list[nn.Module] = [model.norm, model.lm_head] if stage == model.last_stage else []
        blocks: list[list[nn.Module]] = [[model.layers[layer]] for layer in model.stage_layers[stage]]
        if first and last and model.config.tie_word_embeddings:
            return [first + last, *blocks]
        return [modules for modules in (first, *blocks, last) if modules]

    def _names(self, modules: list[nn.Module], placed: set[str]) -> list[str]:
        """The parameters of `modules` that have no place yet, by name."""
        found = dict.fromkeys(self._name[id(parameter)] for module in modules for parameter in module.parameters())
        names = [name for name in found if name not in placed]
        placed.update(names)
        return names

    def _kinds(self, names: list[str]) -> list[list[str]]:
        """Experts, which fewer ranks share, and a table that another stage has too: their shares must be cut alike."""
        kinds: dict[tuple[bool, bool], list[str]] = {}
        for name in names:
            kinds.setdefault((self.layouts[name].expert, self._twice(name)), []).append(name)
        return list(kinds.values())

    def _units(self, chunk: int) -> Iterator[zero.Unit]:
        for modules in self._modules(chunk):
            names = [self._name[id(parameter)] for module in modules for parameter in module.parameters()]
            gathered = [bucket.gathered for bucket in dict.fromkeys(self.bucket_of[name] for name in names)]
            weights = [weights for weights in gathered if weights is not None]
            together = weights[0] if len(weights) == 1 else zero.GatheredTogether(weights)
            # The gradient of a table that is only looked up does not depend on what the table holds.
            yield zero.Unit(modules, together, used_in_backward=modules != [self.model.embed_tokens])

    def _place_parameters(self) -> None:
        """Put every parameter's storage into its bucket, and in stage 3 see to it that it is there when used."""
        units = [list(self._units(chunk)) for chunk in range(len(self.model.stages)) if self.stage == 3]
        placed: dict[int, nn.Parameter] = {}
        for name, laid_out in list(self.model.named_parameters()):
            bucket = self.bucket_of[name]
            parameter = nn.Parameter(torch.empty(0, dtype=bucket.weights_P.dtype, device=bucket.weights_P.device))
            parameter.data = bucket.view(bucket.weights_P, name)
            if self.stage < 2:
                assert bucket.gradients_P is not None
                parameter.grad = bucket.view(bucket.gradients_P, name)
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(name))
            placed[id(laid_out)] = parameter
        for module in self.model.modules():
            for key, laid_out in module.named_parameters(recurse=False, remove_duplicate=False):
                setattr(module, key, placed[id(laid_out)])
        self._name = {id(placed[old]): name for old, name in self._name.items()}
        for chunk in units:
            zero.gather_when_used(chunk)

    # --- passes ---------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        for bucket in self.buckets:
            bucket.zero_grad()

    def run_stage(self, chunk: int, x_BTD: Tensor | None, *batch: Any) -> Any:
        """As `StagedModel.run_stage`."""
        return self.model.run_stage(chunk, x_BTD, *batch)

    def run(self, micros: Sequence[Batch], forward: Forward, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of a step's micro-batches, in the order of the schedule.

        Args:
            micros: the same number on every rank.
            forward: what takes a micro-batch through a chunk of this rank.
            n_tokens: by which the summed loss is divided, over all ranks and micro-batches.

        Returns:
            The summed loss of the micro-batches and how many labels counted; zeros but on the last stage.
        """
        losses: list[tuple[Tensor, Tensor]] = []
        schedule = self.parallel.pipeline(len(micros))
        chunks = range(schedule.chunks)
        stages = [_Chunk(self, chunk, schedule, micros, forward, losses, n_tokens) for chunk in chunks]
        executor = pipeline.Executor(schedule, stages, self.mesh.group("pp"))
        executor.run()
        self.timeline = executor.spans
        return sum_losses(losses, self.device)

    @torch.no_grad()
    def evaluate(self, micros: Sequence[Batch], forward: Forward) -> tuple[Tensor, Tensor]:
        """The summed loss of `micros`, and how many labels counted; zeros but on the last stage."""
        return evaluate(self, micros, forward)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around a forward and backward of a model that is whole on this rank, outside of `run`.

        Gradients travel in the `last` pass only, while backward works on; from stage 2 on in every pass, since no rank
        has room to keep them all.
        """
        with self.backward(0, last or self.stage >= 2):
            yield

    @contextlib.contextmanager
    def backward(self, chunk: int, travel: bool, put_off: Collection[int] | None = None) -> Iterator[None]:
        """Around a backward of `chunk`, or a part of one.

        Args:
            travel: whether gradients are added up over the ranks in it, each bucket as soon as it is complete.
            put_off: the `id`s of the parameters whose gradients are still to come, if the others have come before.
        """
        buckets = self.buckets_of_chunk[chunk]
        members = [[self.number[name] for name in self.buckets[b].shapes] for b in buckets]
        self.overlap = data_parallel.Overlap(members, lambda k: self._start(buckets[k])) if travel else None
        if self.overlap is not None and put_off is not None and self.parallel.overlap:
            for name, parameter in self.model.named_parameters():
                if id(parameter) not in put_off and self.number[name] in self.overlap.bucket_of:
                    self.overlap.ready(self.number[name])
        yield
        if self.overlap is not None:
            if self.parallel.overlap or self.stage or self.compress:
                self.overlap.finish()
            else:
                self._add_up(buckets)
            self.in_flight.clear()
            self.overlap = None
        self.free_weights(chunk)

    def _add_up(self, buckets: list[int]) -> None:
        """Stage 0 without overlap: all at once, after backward."""
        for axis in ("dp", "edp"):
            names = [name for b in buckets for name in self.buckets[b].shapes if self._axes(name)[0] == axis]
            gradients = [self.model.get_parameter(name).grad for name in names]
            data_parallel.all_reduce_gradients(gradients, self.mesh.group(axis), self._bucket_bytes)

    def free_weights(self, chunk: int | None = None) -> None:
        """Stage 3: give the gathered weights of a chunk, or of all, back."""
        for b in self.buckets_of_chunk[chunk] if chunk is not None else range(len(self.buckets)):
            gathered = self.buckets[b].gathered
            if gathered is not None:
                gathered.free()

    @property
    def _bucket_bytes(self) -> int:
        return int(self.parallel.bucket_mb * 2**20)

    def _gradient_hook(self, name: str):
        number = self.number[name]

        def hook(parameter: nn.Parameter) -> None:
            if self.stage >= 2:
                self.bucket_of[name].take(name, parameter)
            if self.overlap is not None and self.parallel.overlap and number in self.overlap.bucket_of:
                self.overlap.ready(number)

        return hook

    def _start(self, b: int) -> zero.Reduction:
        bucket = self.buckets[b]
        if bucket.gathered is not None:
            bucket.gathered.free()
        if self.compress is not None and bucket.gradients_P is not None:
            bucket.gradients_P.copy_(self.compress(bucket.gradients_P, b, bucket.group))
            return zero.Reduction(bucket, collectives.Pending(bucket.gradients_P))
        reduction = bucket.start()
        self.in_flight.append(reduction)
        if self.stage >= 2 and len(self.in_flight) > 2:  # each holds a bucket of whole gradients
            self.in_flight.pop(0).wait()
        return reduction

    # --- between backward and the next pass -------------------------------------------------------------------

    def finish_backward(self) -> None:
        """From here on every piece's gradient is the sum over the global batch."""
        for bucket in self.buckets:
            bucket.hand_over()
        for axis in ("tp", "ends"):
            parts = [piece.gradient for piece in self._pieces() if axis in self._axes(piece.name)]
            if parts:
                data_parallel.all_reduce_gradients(parts, self.mesh.group(axis), self._bucket_bytes)

    def _axes(self, name: str) -> list[str]:
        return gradient_axes(self.layouts[name], self._twice(name))

    def _twice(self, name: str) -> bool:
        """Whether another stage holds this parameter, too."""
        model = self.model
        ends = (0 in model.stages) != (model.last_stage in model.stages)
        return ends and model.config.tie_word_embeddings and name == "embed_tokens.weight"

    def grad_norm(self) -> Tensor:
        """The norm of all gradients, each number of the model once; the same on every rank."""
        size = self.mesh.size
        axes = [axis for axis in ("tp", "pp") if size(axis) > 1]
        axes += ["dp"] if size("dp") > 1 and (self.stage or size("ep") > 1) else []
        axes = ["world"] if len(axes) > 1 else axes  # one message, not one for each
        summed = {axis: size(axis) if axis in axes or "world" in axes else 1 for axis in ("tp", "dp")}
        summed["edp"] = size("edp") if summed["dp"] > 1 else 1
        gradients = [self.buckets[0].my_gradients_S.new_zeros(1)]  # a rank's shares may be all padding
        copies = [1]
        for piece in self._pieces():
            gradients.append(piece.gradient)
            copies.append(copies_of(self.layouts[piece.name], self._twice(piece.name), summed, self.stage))
        return zero.global_grad_norm(gradients, copies, [self.mesh.group(axis) for axis in axes])

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply all gradients by `factor`."""
        torch._foreach_mul_([piece.gradient for piece in self._pieces()], torch.as_tensor(factor))

    def optimizer_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """What this rank's optimizer updates: of matrices, which decay, and of vectors, which do not."""
        matrices = [piece.tensor for piece in self._pieces() if len(self.layouts[piece.name].full_shape) > 1]
        vectors = [piece.tensor for piece in self._pieces() if len(self.layouts[piece.name].full_shape) == 1]
        return matrices, vectors

    def after_step(self) -> None:
        """Put what the optimizer wrote where the model reads it."""
        for pending in [bucket.after_step() for bucket in self.buckets]:
            pending.wait()

    def _pieces(self) -> Iterator[zero.Piece]:
        for bucket in self.buckets:
            yield from bucket.pieces

    # --- what is where ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def full(self, kind: str, optimizer: torch.optim.Optimizer | None = None) -> Iterator[tuple[str, Tensor]]:
        """The weights ("model"), gradient ("grad") or optimizer state of every parameter of this rank's stages, whole.

        Collective: all ranks must go through all of it.
        """
        for bucket in self.buckets:
            my_flat_S = torch.zeros_like(bucket.master_S)
            for piece in bucket.pieces:
                bucket.my_part(my_flat_S, piece).copy_(_part(piece, kind, optimizer))
            flat_P = bucket.whole(my_flat_S)
            for name in bucket.shapes:
                whole = bucket.view(flat_P, name)
                for dim, axis in reversed(self._cuts(name)):
                    whole = tensor.unshard(whole, dim, self.mesh.group(axis))
                yield name, whole

    def _cuts(self, name: str) -> list[tuple[int, str]]:
        """Along which dimension a parameter is cut, over which axis, in order."""
        layout = self.layouts[name]
        return ([(0, "ep")] if layout.expert else []) + ([(layout.dim, "tp")] if layout.dim is not None else [])

    @torch.no_grad()
    def assign(self, kind: str, name: str, whole: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Take this rank's part of a parameter's weights ("model") or optimizer state.

        Raises:
            ValueError: when `whole` has another shape than the parameter.
        """
        layout, bucket = self.layouts[name], self.bucket_of[name]
        if tuple(whole.shape) != tuple(layout.full_shape):
            raise ValueError(f"{name} has shape {tuple(layout.full_shape)}, not {tuple(whole.shape)}")
        local = whole
        for dim, axis in self._cuts(name):
            local = tensor.shard(local, dim, self.mesh.rank(axis), self.mesh.size(axis))
        if kind == "model" and self.stage < 3:
            bucket.view(bucket.weights_P, name).copy_(local)
        for piece in bucket.pieces:
            if piece.name != name:
                continue
            part = local.flatten()[piece.start : piece.stop]
            if kind == "model":
                piece.tensor.copy_(part)
                bucket.my_part(bucket.my_weights_S, piece).copy_(part)
            else:
                assert optimizer is not None
                optimizer.state[piece.tensor][kind] = part.to(piece.tensor.device, piece.tensor.dtype, copy=True)

    @torch.no_grad()
    def shards(self, kind: str, optimizer: torch.optim.Optimizer | None = None) -> Iterator[StateShard]:
        """What this rank writes into a checkpoint, so that together the ranks write everything once."""
        for n, bucket in enumerate(self.buckets):
            if self.stage == 0 and n % collectives.size_of(bucket.group) != collectives.rank_in(bucket.group):
                continue
            for piece in bucket.pieces:
                name = piece.name
                if self.layouts[name].dim is None and self.mesh.rank("tp"):
                    continue
                if self._twice(name) and 0 not in self.model.stages:
                    continue
                cuts = [(dim, self.mesh.rank(axis), self.mesh.size(axis)) for dim, axis in self._cuts(name)]
                yield StateShard(piece, _part(piece, kind, optimizer), cuts)

    def state_bytes(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """Bytes that this rank holds between passes, padding included, every storage once; step counters left out."""
        weights = [b.weights_P for b in self.buckets] + [b.my_weights_S for b in self.buckets]
        gradients = [b.my_gradients_S for b in self.buckets] + [p.grad for p in self.model.parameters()]
        masters = [b.master_S for b in self.buckets if b.master_S is not b.my_weights_S]
        moments = [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
        return {
            "parameters": zero.storage_bytes(weights),
            "gradients": zero.storage_bytes([g for g in gradients if g is not None]),
            "optimizer": zero.storage_bytes(masters + moments),
        }


@dataclasses.dataclass(frozen=True)
class StateShard:
    """The numbers that this rank has of a piece; `cuts`: (dim, number, of how many) of the slices that it lies in."""

    piece: zero.Piece
    tensor: Tensor
    cuts: list[tuple[int, int, int]]


class _Chunk(pipeline.Stage):
    """A chunk of this rank as the executor sees it, in a step of `micros`."""

    def __init__(
        self,
        engine: Engine,
        chunk: int,
        schedule: Schedule,
        micros: Sequence[Batch],
        forward: Forward,
        losses: list[tuple[Tensor, Tensor]],
        n_tokens: int = 1,
    ):
        self.engine, self.chunk, self.micros, self.through, self.losses = engine, chunk, micros, forward, losses
        self.n_tokens, self.is_last = n_tokens, engine.model.stages[chunk] == engine.model.last_stage
        self.alone, self.to_come = schedule.stages == 1, schedule.micro_batches

    def forward(self, m: int, x: Tensor | None) -> Tensor:
        result = self.through(self.chunk, x, self.micros[m])
        if not self.alone:  # other passes come before this one's backward
            self.engine.free_weights(self.chunk)
        if not self.is_last:
            return result
        loss_sum, count = result
        self.losses.append((loss_sum.detach(), count))
        return loss_sum / self.n_tokens

    def input_like(self, m: int) -> Tensor:
        shape = boundary_shape(self.engine, *self.micros[m].input_ids.shape)
        return torch.empty(shape, dtype=self.engine.dtype, device=self.engine.device)

    def around_backward(self, m: int, kind: str, parts: WeightParts) -> contextlib.AbstractContextManager:
        if kind == "I":
            return self.engine.backward(self.chunk, travel=False)
        self.to_come -= 1
        travel = self.to_come == 0 or self.engine.stage >= 2
        return self.engine.backward(self.chunk, travel, parts.weights if kind == "W" else None)


def evaluate(engine: Any, micros: Sequence[Batch], forward: Forward) -> tuple[Tensor, Tensor]:
    """Takes `micros` through the pipeline of either engine; as `Engine.evaluate`."""
    losses: list[tuple[Tensor, Tensor]] = []
    schedule = pipeline.forward_only(engine.model.place, len(micros))
    stages = [_Chunk(engine, chunk, schedule, micros, forward, losses) for chunk in range(schedule.chunks)]
    pipeline.Executor(schedule, stages, engine.mesh.group("pp")).run()
    return sum_losses(losses, engine.device)


def boundary_shape(engine: Any, B: int, T: int) -> torch.Size:
    """Of what travels between two stages, for `B` rows of `T` tokens."""
    if engine.parallel.sequence_parallel and engine.model.training:
        T //= engine.mesh.size("tp")
    return torch.Size((B, T, engine.model.config.hidden_size))


def sum_losses(losses: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The sums of micro-batches' losses (fp64) and counts."""
    loss_sum = torch.zeros((), device=device, dtype=torch.float64)
    count = torch.zeros((), device=device, dtype=torch.int64)
    for micro_loss_sum, micro_count in losses:
        loss_sum += micro_loss_sum
        count += micro_count
    return loss_sum, count


def _part(piece: zero.Piece, kind: str, optimizer: torch.optim.Optimizer | None) -> Tensor:
    if kind == "model":
        return piece.tensor
    if kind == "grad":
        return piece.gradient
    assert optimizer is not None
    return optimizer.state[piece.tensor][kind]


def _place_buffers(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            kind = dtype if buffer.is_floating_point() else buffer.dtype
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, torch.zeros(buffer.shape, dtype=kind, device=device), persistent=persistent)
