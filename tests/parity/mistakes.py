"""Mistakes that public trainers made, planted one at a time: each is a patch that runs on every rank."""

import contextlib
import dataclasses

import torch

from deepseek_lab.data import batches
from deepseek_lab.model import moe
from deepseek_lab.parallel import collectives, data_parallel, tensor, zero
from deepseek_lab.parallel.engine import Engine
from deepseek_lab.train import loop
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
