"""Mistakes that public trainers made, planted one at a time: each is a patch that runs on every rank."""

import contextlib
import dataclasses

import torch
import torch.distributed as dist

from deepseek_lab.data import batches
from deepseek_lab.model import moe, split_backward
from deepseek_lab.parallel import collectives, data_parallel, tensor, zero
from deepseek_lab.parallel.engine import Engine
from deepseek_lab.train import loop, optim
from deepseek_lab.train.loop import Trainer


def gradients_not_divided_by_passes() -> None:
    own = Engine.finish_backward

    def finish_backward(self):
        own(self)
        Engine.scale_gradients(self, 3.0)

    Engine.finish_backward = finish_backward


def gradients_averaged_over_ranks() -> None:
    own = zero.start_reduction

    def start_reduction(gradient_P, stage, group):
        return own(gradient_P / collectives.size_of(group), stage, group)

    zero.start_reduction = start_reduction


def mean_of_means_in_the_gradient() -> None:
    def agree(self, my_n_tokens, stop):
        return my_n_tokens * self.mesh.size("dp"), stop

    Trainer.agree = agree


def mean_of_means_in_the_loss() -> None:
    def global_token_mean(loss_sum, n_tokens, group=None):
        mine = torch.tensor([float(loss_sum) / max(float(n_tokens), 1)], dtype=torch.float64)
        return collectives.all_reduce(mine, group)[0] / collectives.size_of(group)

    data_parallel.global_token_mean = global_token_mean


def norm_of_a_shard() -> None:
    own = zero.global_grad_norm
    zero.global_grad_norm = lambda gradients, copies, groups: own(gradients, copies, [])


def copies_counted_twice_in_the_norm() -> None:
    own = zero.global_grad_norm
    zero.global_grad_norm = lambda gradients, copies, groups: own(gradients, [1] * len(copies), groups)


def partial_gradients_not_summed() -> None:
    data_parallel.all_reduce_gradients = lambda *args, **kwargs: None


def visits_counted_again_in_recomputation() -> None:
    moe.not_counting = contextlib.nullcontext


def ranks_stop_when_their_own_rows_end() -> None:
    batches.fill_up = lambda parts, n, seq_len: parts


def nothing_is_sharded() -> None:
    own = loop.parallelize

    def parallelize(config, mesh, parallel, **how):
        return own(config, mesh, dataclasses.replace(parallel, zero_stage=0), **how)

    loop.parallelize = parallelize


def shards_are_strided() -> None:
    tensor.shard = lambda w, dim, rank, size: w.transpose(0, dim)[rank::size].transpose(0, dim).clone()


def loss_divided_by_micro_batches() -> None:
    own = Engine.run
    Engine.run = lambda self, micros, forward, n_tokens: own(self, micros, forward, n_tokens * len(micros))


def ends_keep_their_own_gradient() -> None:
    Engine._twice = lambda self, name: False


def weight_parts_replace_gradients() -> None:
    """Under grad mode PyTorch makes a new tensor of an addition, and the view of the bucket is lost."""
    own = split_backward.WeightParts.run.__wrapped__
    split_backward.WeightParts.run = torch.enable_grad()(own)


def expert_gradients_times_ep() -> None:
    own = Engine.finish_backward

    def finish_backward(self):
        own(self)
        for piece in self._pieces():
            if self.layouts[piece.name].expert:
                piece.gradient.mul_(self.mesh.size("ep"))

    Engine.finish_backward = finish_backward


def auxiliary_loss_on_every_tensor_rank() -> None:
    own = tensor.apply_tensor_parallel

    def apply_tensor_parallel(model, group=None, sequence_parallel=False):
        layouts = own(model, group, sequence_parallel)
        for router in model.routers().values():
            router.aux_share = 1.0
        return layouts

    tensor.apply_tensor_parallel = apply_tensor_parallel


def bias_from_this_ranks_visits() -> None:
    own = optim.balance_experts
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    optim.balance_experts = lambda model, rate, group: own(model, rate, alone[dist.get_rank()])


def bias_moved_every_pass() -> None:
    own = Trainer.forward

    def forward(self, chunk, x, batch):
        result = own(self, chunk, x, batch)
        for router in self.model.routers().values():
            error_E = router.visits_E.double().mean() - router.visits_E
            router.e_score_correction_bias += 1e-3 * error_E.sign()
        return result

    Trainer.forward = forward


def capacity_taken_by_padding() -> None:
    batches.Batch.real = lambda self: None
