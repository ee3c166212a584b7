"""The same model on PyTorch's production parts: what `engine: torch` runs.

The one idea: weights at rest are DTensors, and their layout says what a rank holds of them.  Tensor parallelism lays
them out over `tp` (`parallelize_module`), then data parallelism shards what is left over `dp` (`fully_shard`, known as
FSDP2), or copies it (`DistributedDataParallel`).  The model's own code sees plain local tensors only.

Gradients are sums here, as everywhere in this package.  PyTorch's parts take means over ranks, and are told not to.

Shapes: as in `model`; N rows of logits, one a token.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from deepseek_lab.data.batches import Batch
from deepseek_lab.model import DeepSeekConfig, DeepSeekModel
from deepseek_lab.model.loss import IGNORE_INDEX
from deepseek_lab.model.moe import MoE
from deepseek_lab.model.transformer import Block
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.engine import Forward, StateShard, boundary_shape, evaluate, sum_losses
from deepseek_lab.parallel.mesh import Mesh
from deepseek_lab.parallel.pipeline import Elsewhere, StagedModel
from deepseek_lab.parallel.recompute import apply_recompute
from deepseek_lab.parallel.tensor import Layout
from deepseek_lab.parallel.torch_pipeline import StageModule, TorchPipeline
from deepseek_lab.parallel.zero import Piece, storage_bytes
from deepseek_lab.plan.stages import split_layers


def parallelize(
    config: DeepSeekConfig,
    mesh: Mesh,
    parallel: ParallelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    master_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    blocks_per_unit: int = 1,
) -> TorchEngine:
    """The model of `config`, spread over `mesh` as `parallel` says: the counterpart of `engine.parallelize`.

    Args:
        dtype: of weights and gradients while they are used; `master_dtype`: of the weights that the optimizer updates.
        blocks_per_unit: how many blocks FSDP gathers at a time.

    Raises:
        ValueError: for what PyTorch's parts do not do, naming what does.
    """
    mixed = master_dtype not in (None, dtype)
    parallel.check_torch_engine(mixed)
    if mixed and mesh.size("dp") == 1:
        raise ValueError(
            "engine: torch keeps the wider weights of precision='mixed' in FSDP's shards, which need dp > 1"
        )
    model = _build(config, mesh, parallel, seed).to(device or torch.device("cpu"), master_dtype or dtype)
    if mesh.size("tp") > 1:
        apply_tensor_parallel(model, _axis(mesh, "tp"), parallel.sequence_parallel)
    apply_recompute(model, parallel.recompute)
    if isinstance(model, StagedModel):
        return _pipelined(model, mesh, parallel, dtype, blocks_per_unit)
    ddp = None
    if mesh.size("dp") > 1 and parallel.zero_stage == 0 and mesh.size("tp") == 1:
        ddp = apply_ddp(model, mesh, parallel.bucket_mb)
    elif mesh.size("dp") > 1:
        policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
        apply_fsdp(model, list(model.layers), _axis(mesh, "dp"), parallel.zero_stage, policy, blocks_per_unit)
        register_fsdp_forward_method(model, "loss_sum")
    return TorchEngine(model, mesh, parallel, ddp)


def _build(config: DeepSeekConfig, mesh: Mesh, parallel: ParallelConfig, seed: int) -> DeepSeekModel:
    """The serial model, or as much of it as a rank of the pipeline holds."""
    if mesh.size("pp") == 1 and parallel.chunks == 1:
        return DeepSeekModel(config, seed)
    place = parallel.pipeline()
    layers = split_layers(config.num_hidden_layers, place.stages, parallel.stage_layers)
    model = StagedModel(config, place, layers, mesh.group("pp"))
    model.init_weights(seed)
    return model


def _pipelined(
    model: StagedModel, mesh: Mesh, parallel: ParallelConfig, dtype: torch.dtype, blocks_per_unit: int
) -> TorchEngine:
    stages = [StageModule(model, chunk) for chunk in range(parallel.chunks)]
    if mesh.size("dp") > 1:
        policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
        for stage in stages:
            how = (_axis(mesh, "dp"), parallel.zero_stage, policy, blocks_per_unit)
            apply_fsdp(stage, list(stage.blocks), *how)
    device = next(model.parameters()).device
    return TorchEngine(model, mesh, parallel, None, TorchPipeline(stages, parallel.schedule, mesh, device))


def _axis(mesh: Mesh, name: str) -> DeviceMesh:
    assert mesh.device_mesh is not None
    if name == "dp":  # made of two axes, and asked for by them: a flattened axis is no longer found by its own name
        return mesh.device_mesh["edp", "ep"]._flatten("dp")
    return mesh.device_mesh[name]


# --- data parallelism -----------------------------------------------------------------------------------------


def apply_fsdp(
    model: nn.Module,
    blocks: list[nn.Module],
    dp_mesh: DeviceMesh,
    zero_stage: int,
    policy: MixedPrecisionPolicy,
    blocks_per_unit: int,
) -> None:
    """Shard (stages 2, 3) or copy (stage 0) what tensor parallelism has left, a few blocks to a message.

    Stage 2 keeps weights between forward and backward; stage 3 frees a unit's after each.
    """
    how: dict[str, Any] = {"mesh": dp_mesh, "mp_policy": policy}
    if zero_stage:
        how["reshard_after_forward"] = zero_stage == 3
    wrap: Any = fully_shard if zero_stage else replicate
    for start in range(0, len(blocks), blocks_per_unit):
        wrap(blocks[start : start + blocks_per_unit], **how)
    wrap(model, **how)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def apply_ddp(model: DeepSeekModel, mesh: Mesh, bucket_mb: float) -> DistributedDataParallel:
    """Send `model.loss_sum` through DistributedDataParallel, whose buckets are the gradients' own storage."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # its successor is not in torch 2.11
        ddp = DistributedDataParallel(
            _LossSum(model),
            process_group=mesh.group("dp"),
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # routers count their own rank's visits
            init_sync=False,
        )
    ddp.register_comm_hook(mesh.group("dp"), _sum_bucket)
    object.__setattr__(model, "loss_sum", ddp)
    return ddp


class _LossSum(nn.Module):
    def __init__(self, model: DeepSeekModel):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return DeepSeekModel.loss_sum(self.model, *args, **kwargs)


def _sum_bucket(group, bucket):
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# --- tensor parallelism ---------------------------------------------------------------------------------------


def apply_tensor_parallel(model: DeepSeekModel, tp_mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Lay every weight out over `tp_mesh`.  Between layers activations are whole, or split along the sequence.

    Heads, hidden units and vocabulary are split; latent projections and norms are copied.  One sum over the ranks where
    attention or feed-forward ends, and in backward one where it begins (for attention at its latents, which are small).
    """
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    # A norm between the layers sees part of the sequence, so its gradient comes out in parts.
    norm = Local({"weight": Replicate()}, Partial() if sequence_parallel else Replicate())
    copied = Local({"weight": Replicate()}, Replicate())
    plan: dict[str, ParallelStyle] = {}
    if not isinstance(model.embed_tokens, Elsewhere):
        plan["embed_tokens"] = _Rowwise(input_layouts=Replicate(), output_layouts=between)
    if not isinstance(model.lm_head, Elsewhere):
        plan |= {"norm": norm, "lm_head": VocabParallelHead(between)}
    for n, block in enumerate(cast(list[Block], model.layers)):
        if isinstance(block, Elsewhere):
            continue
        here: dict[str, ParallelStyle] = {
            "input_layernorm": norm,
            "post_attention_layernorm": norm,
            "self_attn": _Whole(between, local=True),
            "self_attn.kv_a_proj_with_mqa": Local({"weight": Replicate()}, Replicate(), sum_output_gradient=True),
            "self_attn.kv_a_layernorm": Local({"weight": Replicate()}, Partial()),
            "self_attn.kv_b_proj": Local({"weight": Shard(0)}, Partial()),
            "self_attn.o_proj": _Rowwise(output_layouts=between),
        }
        if model.config.q_lora_rank is None:
            here["self_attn.q_proj"] = ColwiseParallel()
        else:
            here |= {"self_attn.q_a_proj": copied, "self_attn.q_a_layernorm": copied}
            here["self_attn.q_b_proj"] = ColwiseParallel()
        plan |= {f"layers.{n}.{name}": style for name, style in here.items()}
        # Generation reads this weight from outside the module that holds it.
        parallelize_module(block.self_attn, tp_mesh, Local({"kv_b_proj.weight": Shard(0)}, Partial()))
        plan |= {f"layers.{n}.{name}": style for name, style in _feed_forward(block.mlp, between).items()}
        if isinstance(block.mlp, MoE):
            block.mlp.gate.aux_share = 1 / tp_mesh.size()  # every rank works the router out
    parallelize_module(model, tp_mesh, plan, src_data_rank=None)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight


def _feed_forward(mlp: nn.Module, between: Placement) -> dict[str, ParallelStyle]:
    """SwiGLU layers by column and row.  In a mixture each part's result is left in parts, and summed once."""
    if not isinstance(mlp, MoE):
        return {
            "mlp": _Whole(between, local=False),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": _Rowwise(output_layouts=between),
        }
    plan = {
        "mlp": _Whole(between, local=False, sum_output=True),
        "mlp.gate": Local({"weight": Replicate()}, Partial()),
        "mlp.experts": Local({"gate_proj": Shard(1), "up_proj": Shard(1), "down_proj": Shard(2)}, Partial()),
    }
    if hasattr(mlp, "shared_experts"):
        plan |= {
            "mlp.shared_experts.gate_proj": ColwiseParallel(),
            "mlp.shared_experts.up_proj": ColwiseParallel(),
            "mlp.shared_experts.down_proj": RowwiseParallel(output_layouts=Partial()),
        }
    return plan


def _layout(between: Placement, module: nn.Module) -> tuple[Placement]:
    """How activations between layers are laid out now: outside training the sequence may be a single token."""
    return (between if module.training else Replicate(),)


class _Rowwise(RowwiseParallel):
    """`RowwiseParallel` whose output is split along the sequence in training only."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        layouts = _layout(output_layouts[0], mod)
        return RowwiseParallel._prepare_output_fn(layouts, use_local_output, mod, outputs, device_mesh)


class _Whole(ParallelStyle):
    """Gives a module the whole sequence: as a plain tensor (`local`), or as a DTensor that sums partial gradients.

    `sum_output`: what it returns are parts, to be summed over the ranks.
    """

    def __init__(self, between: Placement, local: bool, sum_output: bool = False):
        super().__init__()
        self.between, self.local, self.sum_output = between, local, sum_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, args: tuple) -> tuple:
            x = DTensor.from_local(args[0], device_mesh, _layout(self.between, module), run_check=False)
            x = x.redistribute(placements=(Replicate(),))
            return (x.to_local() if self.local else x, *args[1:])

        def leave(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            y = DTensor.from_local(output, device_mesh, (Partial(),), run_check=False)
            return y.redistribute(placements=_layout(self.between, module)).to_local()

        module.register_forward_pre_hook(enter)
        if self.sum_output:
            module.register_forward_hook(leave)
        return module


class Local(ParallelStyle):
    """Parameters that are DTensors at rest and plain local tensors while the module runs.

    For code that DTensor does not know (stacked experts, custom autograd functions), and where nothing is to be sent.

    Args:
        layouts: the layout of each parameter, by its name inside the module.
        gradient: how the gradients of copied parameters come out, and of inputs that are DTensors: Partial() if every
            rank finds only a part of them.
        sum_output_gradient: whether the ranks' gradients of the output are parts, to be summed.
    """

    def __init__(self, layouts: dict[str, Placement], gradient: Placement, sum_output_gradient: bool = False):
        super().__init__()
        self.layouts, self.gradient, self.sum_output_gradient = layouts, gradient, sum_output_gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # For each parameter: the module that holds it, its name there, how its gradient comes out.
        owners: list[tuple[Any, str, tuple[Placement]]] = []
        for path, layout in self.layouts.items():
            owner, name = module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
            weight = distribute_tensor(getattr(owner, name).detach(), device_mesh, [layout], src_data_rank=None)
            setattr(owner, name, nn.Parameter(weight))
            owners.append((owner, name, (self.gradient if layout.is_replicate() else layout,)))

        def enter(module: nn.Module, args: tuple) -> tuple:
            for owner, name, gradient in owners:  # found before the parameter of that name
                owner.__dict__[name] = owner._parameters[name].to_local(grad_placements=gradient)
            return tuple(x.to_local(grad_placements=(self.gradient,)) if isinstance(x, DTensor) else x for x in args)

        def leave(module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
            for owner, name, _ in owners:
                owner.__dict__.pop(name, None)
            if not self.sum_output_gradient:
                return None
            y = DTensor.from_local(output, device_mesh, (Replicate(),), run_check=False)
            return y.to_local(grad_placements=(Partial(),))

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


class VocabParallelHead(ParallelStyle):
    """The output head by rows of the vocabulary, and the loss on logits that stay where they are."""

    def __init__(self, between: Placement):
        super().__init__()
        self.between = between

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        weight = distribute_tensor(module.weight.detach(), device_mesh, [Shard(0)], src_data_rank=None)
        module.weight = nn.Parameter(weight)

        def forward(x_BTD: Tensor, labels: Tensor | None = None, label_smoothing: float = 0.0):
            x = DTensor.from_local(x_BTD, device_mesh, _layout(self.between, module), run_check=False)
            logits_BTV: Any = F.linear(x.redistribute(placements=(Replicate(),)), module.weight)
            if labels is None:
                return logits_BTV.full_tensor()
            # The engine's `micro_batch` puts a whole pass under `loss_parallel`, since backward needs it too.
            alone = contextlib.nullcontext() if torch.is_grad_enabled() else loss_parallel()
            with alone:
                return _cross_entropy_sum(logits_BTV.flatten(0, 1), labels.flatten(), label_smoothing)

        module.forward = forward
        return module


def _cross_entropy_sum(logits_NV: Any, labels_N: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """`loss.cross_entropy_sum` of logits (N, V) that are split over V."""
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    valid_N = labels_N != IGNORE_INDEX
    parts: Any = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE_INDEX, reduction="sum")
    loss_sum = parts.to_local().clone()
    if label_smoothing:  # `loss_parallel` knows none: it moves weight from the label to the mean of all classes
        mesh = logits_NV.device_mesh
        labels_N1 = DTensor.from_local(labels_N.where(valid_N, 0)[:, None], mesh, (Replicate(),), run_check=False)
        excess_N = logits_NV.gather(1, labels_N1).full_tensor()[:, 0] - logits_NV.mean(1).full_tensor()
        loss_sum = loss_sum + label_smoothing * excess_N.where(valid_N, 0).sum()
    return loss_sum, valid_N.sum()


# --- the engine -----------------------------------------------------------------------------------------------


class TorchEngine:
    """What a training loop needs to know of a model in PyTorch's hands: the same methods as `engine.Engine`."""

    def __init__(
        self,
        model: DeepSeekModel,
        mesh: Mesh,
        parallel: ParallelConfig,
        ddp: DistributedDataParallel | None,
        pipeline: TorchPipeline | None = None,
    ):
        self.model, self.mesh, self.stage, self.ddp, self.parallel = model, mesh, parallel.zero_stage, ddp, parallel
        self.pipeline, self.dtype = pipeline, next(model.parameters()).dtype
        if pipeline is not None:  # generation runs stages from outside: their weights must be gathered first
            object.__setattr__(model, "run_stage", pipeline.run_stage)
        self.device = next(model.parameters()).device
        self.timeline: list[Any] = []
        self.parameters: dict[str, Any] = dict(model.named_parameters())  # as they are at rest
        self.layouts = {name: Layout(tuple(p.shape)) for name, p in self.parameters.items()}  # as they are saved: whole

    # --- passes ---------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def run_stage(
        self,
        chunk: int,
        x_BTD: Tensor | None,
        input_ids: Tensor,
        labels: Tensor,
        doc_ids: Tensor | None,
        real_BT: Tensor | None,
        label_smoothing: float,
    ) -> Any:
        """As `StagedModel.run_stage`; without a pipeline the whole model is the only stage."""
        if isinstance(self.model, StagedModel):
            batch = (input_ids, labels, doc_ids, real_BT, label_smoothing)
            return StagedModel.run_stage(self.model, chunk, x_BTD, *batch)
        return self.model.loss_sum(input_ids, labels, doc_ids, label_smoothing, real_BT)

    def run(self, micros: Sequence[Batch], forward: Forward, n_tokens: int) -> tuple[Tensor, Tensor]:
        """As `Engine.run`: forward and backward of a step's micro-batches."""
        if self.pipeline is not None:
            rows, (_, T) = max(len(micro) for micro in micros), micros[0].input_ids.shape
            boundary = boundary_shape(self, rows, T)
            with loss_parallel() if self.mesh.size("tp") > 1 else contextlib.nullcontext():
                return self.pipeline.step(micros, forward, n_tokens, boundary, self.dtype)
        losses = []
        for n, micro in enumerate(micros, start=1):
            with self.micro_batch(last=n == len(micros)):
                loss_sum, count = forward(0, None, micro)
                (loss_sum / n_tokens).backward()
            losses.append((loss_sum.detach(), count))
        return sum_losses(losses, self.device)

    @torch.no_grad()
    def evaluate(self, micros: Sequence[Batch], forward: Forward) -> tuple[Tensor, Tensor]:
        """As `Engine.evaluate`: the summed loss of `micros`, and how many labels counted."""
        if self.pipeline is None:
            return sum_losses([forward(0, None, micro) for micro in micros], self.device)
        modules = self.pipeline.modules
        return evaluate(self, micros, lambda k, x, micro: modules[k](x, call=lambda: forward(k, x, micro)))

    def free_weights(self, chunk: int | None = None) -> None:
        """Nothing: FSDP sees to it."""

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around the forward and backward of one micro-batch; stage 0 sends gradients in the `last` one only."""
        model = self.model
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last or self.stage > 0)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last or self.stage == 3)
        with contextlib.ExitStack() as stack:
            if self.ddp is not None and not last:
                stack.enter_context(self.ddp.no_sync())
            if self.mesh.size("tp") > 1:
                stack.enter_context(loss_parallel())
            yield

    @torch.no_grad()
    def finish_backward(self) -> None:
        """From here on every gradient is laid out as its parameter.  Parts are summed over `tp` in one message."""
        parameters = self.parameters.values()
        moved = [p for p in parameters if getattr(p.grad, "placements", None) != getattr(p, "placements", None)]
        parts = [p for p in moved if any(placement.is_partial() for placement in p.grad.placements)]
        if parts:
            gradients = [p.grad.to_local() for p in parts]
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat, group=self.mesh.group("tp"))
            for g, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                g.copy_(total.view_as(g))
        for p in moved:
            whole = [Replicate() if placement.is_partial() else placement for placement in p.grad.placements]
            summed = DTensor.from_local(p.grad.to_local(), p.device_mesh, whole, run_check=False)
            p.grad = summed.redistribute(placements=p.placements)

    # --- between backward and the next pass -------------------------------------------------------------------

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm over every parameter once, the same number on every rank."""
        by_copies: dict[int, list[Tensor]] = {}  # how many ranks hold the same numbers -> what this one holds
        for gradient in (p.grad for p in self.parameters.values() if p.grad is not None):
            copies = self.mesh.size("tp") * self.mesh.size("dp")
            if isinstance(gradient, DTensor):
                for placement, size in zip(gradient.placements, gradient.device_mesh.shape, strict=True):
                    copies //= 1 if placement.is_replicate() else size
            by_copies.setdefault(copies, []).append(_local(gradient))
        squares = [get_total_norm(gradients) ** 2 / copies for copies, gradients in by_copies.items()]
        square = torch.stack(squares).sum()
        if self.mesh.size("world") > 1:
            dist.all_reduce(square)
        return square.sqrt()

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply all gradients by `factor`."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        torch._foreach_mul_([_local(g) for g in gradients], factor)

    def optimizer_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """What this rank's optimizer updates: of matrices, which decay, and of vectors, which do not."""
        parameters = list(self.parameters.values())
        return [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]

    def after_step(self) -> None:
        """Nothing: the next forward gathers what the optimizer wrote."""

    # --- what is where ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def full(self, kind: str, optimizer: torch.optim.Optimizer | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's weights ("model"), gradient ("grad") or optimizer state, whole, one after the other.

        Collective: all ranks must go through all of it.
        """
        self._reshard()
        for name in self.parameters:
            yield name, _whole(self._part(kind, name, optimizer))

    @torch.no_grad()
    def assign(self, kind: str, name: str, whole: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Take this rank's part of a parameter's weights ("model") or optimizer state.

        Raises:
            ValueError: when `whole` has another shape than the parameter.
        """
        parameter = self.parameters[name]
        if whole.shape != parameter.shape:
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}, not {tuple(whole.shape)}")
        self._reshard()
        part = whole.to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            everywhere = DTensor.from_local(part, mesh, [Replicate()] * mesh.ndim, run_check=False)
            part = everywhere.redistribute(placements=parameter.placements)
        if kind == "model":
            parameter.copy_(part)
        else:
            assert optimizer is not None
            optimizer.state[parameter][kind] = part.clone()

    @torch.no_grad()
    def shards(self, kind: str, optimizer: torch.optim.Optimizer | None = None) -> Iterator[StateShard]:
        """What this rank writes into a checkpoint: whole parameters, of which the ranks take turns.  Collective."""
        sharers = self.mesh.size("dp") * self.mesh.size("tp")
        mine = self.mesh.rank("dp") * self.mesh.size("tp") + self.mesh.rank("tp")
        for n, (name, whole) in enumerate(self.full(kind, optimizer)):
            if n % sharers == mine:
                yield StateShard(Piece(name, 0, whole.numel(), whole), whole.flatten(), [])

    def state_bytes(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """Bytes that this rank holds now, every storage once; step counters left out.

        Between forward and backward these include the weights that FSDP has gathered and not freed.
        """
        weights = [*self.parameters.values(), *self.model.parameters()]
        gradients = [p.grad for p in weights if p.grad is not None]
        moments = [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
        kinds: dict[str, list[Tensor]] = {"parameters": weights, "gradients": gradients, "optimizer": moments}
        return {kind: storage_bytes([_local(t.detach()) for t in held]) for kind, held in kinds.items()}

    def _part(self, kind: str, name: str, optimizer: torch.optim.Optimizer | None) -> Tensor:
        parameter = self.parameters[name]
        if kind == "model":
            return parameter
        if kind == "grad":
            return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert optimizer is not None
        return optimizer.state[parameter][kind]

    def _reshard(self) -> None:
        """Forget gathered weights: they would hide what is written, and `state_dict` forgets them on its rank alone."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _whole(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x.detach()
    placements = list(x.placements)
    for axis in range(len(placements)):  # one after the other: data parallelism has cut what tensor parallelism left
        placements[axis] = Replicate()
        x = x.redistribute(placements=placements)
    return x.to_local()
