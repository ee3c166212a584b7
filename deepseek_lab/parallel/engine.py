"""From a serial model to one whose layers, state and gradients are spread over the ranks of a mesh.

`parallelize` applies the techniques in order.  The `Engine` that it returns is all that a training loop needs to know:
it runs passes, adds gradients up, and hands the optimizer what is this rank's to update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from deepseek_lab.model import DeepSeekConfig, DeepSeekModel
from deepseek_lab.model.transformer import initial_weight
from deepseek_lab.parallel import collectives, compression, data_parallel, tensor, zero
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.mesh import Mesh
from deepseek_lab.parallel.recompute import apply_recompute


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
    with torch.device("meta"):
        model = DeepSeekModel(config)
    layouts = tensor.apply_tensor_parallel(model, mesh.group("tp"), parallel.sequence_parallel)
    apply_recompute(model, parallel.recompute)
    engine = Engine(model, layouts, mesh, parallel, dtype, master_dtype or dtype, device or torch.device("cpu"))
    for name, layout in layouts.items():
        engine.assign("model", name, initial_weight(name, torch.Size(layout.full_shape), config, seed))
    return engine


class Engine:
    """A model in pieces: data parallelism with ZeRO, over a model that tensor parallelism has cut already."""

    def __init__(
        self,
        model: DeepSeekModel,
        layouts: dict[str, tensor.Layout],
        mesh: Mesh,
        parallel: ParallelConfig,
        dtype: torch.dtype,
        master_dtype: torch.dtype,
        device: torch.device,
    ):
        self.model, self.layouts, self.mesh, self.parallel = model, layouts, mesh, parallel
        self.stage = parallel.zero_stage
        self.compress = compression.get(parallel.compression)
        self.overlap: data_parallel.Overlap | None = None
        self.in_flight: list[zero.Reduction] = []
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        names = list(shapes)
        self.members = self._stage_3_members() if self.stage == 3 else self._members(shapes, dtype)
        self.buckets = [
            zero.Bucket(
                {names[i]: shapes[names[i]] for i in bucket}, self.stage, mesh.group("dp"), dtype, master_dtype, device
            )
            for bucket in self.members
        ]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.shapes}
        self._place_parameters()
        _place_buffers(model, dtype if dtype == torch.float64 else torch.float32, device)
        self._free_weights()
        if self.stage == 3:
            zero.gather_when_used(list(self._units()))

    # --- laying out -----------------------------------------------------------------------------------------

    def _members(self, shapes: dict[str, torch.Size], dtype: torch.dtype) -> list[list[int]]:
        bucket_numel = int(self.parallel.bucket_mb * 2**20 / dtype.itemsize)
        return data_parallel.plan_buckets([shape.numel() for shape in shapes.values()], bucket_numel)

    def _modules(self) -> list[list[nn.Module]]:
        """Modules whose weights are gathered together in stage 3, in the order in which they begin."""
        model = self.model
        first: list[nn.Module] = [model.embed_tokens]
        last: list[nn.Module] = [model.norm, model.lm_head]
        blocks: list[list[nn.Module]] = [[block] for block in model.layers]
        return [first + last, *blocks] if model.config.tie_word_embeddings else [first, *blocks, last]

    def _stage_3_members(self) -> list[list[int]]:
        """One bucket for the parameters of each of `_modules`, last first, as backward finishes them."""
        number = {id(parameter): i for i, parameter in enumerate(self.model.parameters())}
        found = []
        for modules in self._modules():
            parameters = [parameter for module in modules for parameter in module.parameters()]
            found.append(list(dict.fromkeys(number[id(parameter)] for parameter in parameters)))
        return found[::-1]

    def _units(self) -> Iterator[zero.Unit]:
        for modules, bucket in zip(self._modules(), reversed(self.buckets), strict=True):
            assert bucket.gathered is not None
            # The gradient of a table that is only looked up does not depend on what the table holds.
            yield zero.Unit(modules, bucket.gathered, used_in_backward=modules != [self.model.embed_tokens])

    def _place_parameters(self) -> None:
        """Put every parameter's storage into its bucket."""
        placed: dict[int, nn.Parameter] = {}
        for i, (name, laid_out) in enumerate(list(self.model.named_parameters())):
            bucket = self.bucket_of[name]
            parameter = nn.Parameter(torch.empty(0, dtype=bucket.weights_P.dtype, device=bucket.weights_P.device))
            parameter.data = bucket.view(bucket.weights_P, name)
            if self.stage < 2:
                assert bucket.gradients_P is not None
                parameter.grad = bucket.view(bucket.gradients_P, name)
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(i, name))
            placed[id(laid_out)] = parameter
        for module in self.model.modules():
            for key, laid_out in module.named_parameters(recurse=False, remove_duplicate=False):
                setattr(module, key, placed[id(laid_out)])

    # --- passes ---------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        for bucket in self.buckets:
            bucket.zero_grad()

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around the forward and backward of one micro-batch.

        Gradients travel in the `last` pass only, while backward works on; from stage 2 on in every pass, since no rank
        has room to keep them all.
        """
        travel = last or self.stage >= 2
        self.overlap = data_parallel.Overlap(self.members, self._start) if travel else None
        yield
        if self.overlap is not None:
            if self.parallel.overlap or self.stage or self.compress:
                self.overlap.finish()
            else:
                gradients = [parameter.grad for parameter in self.model.parameters()]
                data_parallel.all_reduce_gradients(gradients, self.mesh.group("dp"), self._bucket_bytes)
            self.in_flight.clear()
            self.overlap = None
        self._free_weights()

    def _free_weights(self) -> None:
        for bucket in self.buckets:
            if bucket.gathered is not None:
                bucket.gathered.free()

    @property
    def _bucket_bytes(self) -> int:
        return int(self.parallel.bucket_mb * 2**20)

    def _gradient_hook(self, i: int, name: str):
        def hook(parameter: nn.Parameter) -> None:
            if self.stage >= 2:
                self.bucket_of[name].take(name, parameter)
            if self.overlap is not None and self.parallel.overlap:
                self.overlap.ready(i)

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
        parts = [piece.gradient for piece in self._pieces() if self.layouts[piece.name].partial]
        data_parallel.all_reduce_gradients(parts, self.mesh.group("tp"), self._bucket_bytes)

    def grad_norm(self) -> Tensor:
        """The norm of all gradients, each number of the model once; the same on every rank."""
        tp = self.mesh.size("tp")
        pieces = list(self._pieces())
        nothing = self.buckets[0].my_gradients_S.new_zeros(1)  # a rank's shares may be all padding
        gradients = [nothing, *(piece.gradient for piece in pieces)]
        copies = [1, *(tp if self.layouts[piece.name].dim is None else 1 for piece in pieces)]
        groups = [self.mesh.group("tp")] + ([self.mesh.group("dp")] if self.stage else [])
        return zero.global_grad_norm(gradients, copies, groups)

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
        """Every parameter's weights ("model"), gradient ("grad") or optimizer state, whole, one after the other.

        Collective: all ranks must go through all of it.
        """
        for bucket in self.buckets:
            my_flat_S = torch.zeros_like(bucket.master_S)
            for piece in bucket.pieces:
                bucket.my_part(my_flat_S, piece).copy_(_part(piece, kind, optimizer))
            flat_P = bucket.whole(my_flat_S)
            for name in bucket.shapes:
                local, dim = bucket.view(flat_P, name), self.layouts[name].dim
                yield name, local if dim is None else tensor.unshard(local, dim, self.mesh.group("tp"))

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
        if layout.dim is not None:
            local = tensor.shard(whole, layout.dim, self.mesh.rank("tp"), self.mesh.size("tp"))
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
    def shards(self, kind: str, optimizer: torch.optim.Optimizer | None = None) -> Iterator[tuple[zero.Piece, Tensor]]:
        """What this rank writes into a checkpoint, so that together the ranks write everything once."""
        dp_rank, dp = self.mesh.rank("dp"), self.mesh.size("dp")
        for n, bucket in enumerate(self.buckets):
            if self.stage == 0 and n % dp != dp_rank:
                continue
            for piece in bucket.pieces:
                if self.layouts[piece.name].dim is not None or self.mesh.rank("tp") == 0:
                    yield piece, _part(piece, kind, optimizer)

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
