"""Ways to miss the mean loss per token."""

import torch
import torch.distributed as dist

from deepseek_lab.parallel import collectives
from tests.wrong_answers import Wrong


def mean_of_means(loss_sum, n_tokens, group=None):
    return collectives.all_reduce(loss_sum / n_tokens, group) / collectives.size_of(group)


def local_mean(loss_sum, n_tokens, group=None):
    return loss_sum / n_tokens


def only_the_loss(loss_sum, n_tokens, group=None):
    return collectives.all_reduce(loss_sum.clone(), group) / n_tokens


def per_rank(loss_sum, n_tokens, group=None):
    return collectives.all_reduce(loss_sum.clone(), group) / collectives.size_of(group)


def rank_0_only(loss_sum, n_tokens, group=None):
    totals = torch.stack([loss_sum, torch.tensor(float(n_tokens))])
    dist.reduce(totals, 0)
    return totals[0] / totals[1]


def in_fp32(loss_sum, n_tokens, group=None):
    totals = torch.tensor([float(loss_sum), float(n_tokens)])
    collectives.all_reduce(totals, group)
    return totals[0] / totals[1]


def as_integers(loss_sum, n_tokens, group=None):
    totals = torch.tensor([int(loss_sum), n_tokens])
    collectives.all_reduce(totals, group)
    return totals[0] / totals[1]


def overwrites_its_argument(loss_sum, n_tokens, group=None):
    total = collectives.all_reduce(loss_sum, group)
    return total / collectives.all_reduce(torch.tensor(n_tokens), group)


def ignores_the_group(loss_sum, n_tokens, group=None):
    totals = collectives.all_reduce(torch.tensor([loss_sum, n_tokens], dtype=torch.float64))
    return totals[0] / totals[1]


def past_our_door(loss_sum, n_tokens, group=None):
    totals = torch.tensor([loss_sum, n_tokens], dtype=torch.float64)
    dist.all_reduce(totals, group=group)
    return totals[0] / totals[1]


def gathers_everything(loss_sum, n_tokens, group=None):
    pairs = collectives.all_gather_object((float(loss_sum), n_tokens), group)
    return sum(loss for loss, _ in pairs) / sum(n for _, n in pairs)


def returns_the_totals(loss_sum, n_tokens, group=None):
    return collectives.all_reduce(torch.tensor([loss_sum, n_tokens], dtype=torch.float64), group)


def first_rank_alone_takes_part(loss_sum, n_tokens, group=None):
    totals = torch.tensor([loss_sum, n_tokens], dtype=torch.float64)
    if collectives.rank_in(group) == 0:
        raise RuntimeError("rank 0 has nothing to say")
    collectives.all_reduce(totals, group)
    return totals[0] / totals[1]


def _totals(loss_sum, n_tokens, group):
    return collectives.all_reduce(torch.tensor([loss_sum, n_tokens], dtype=torch.float64), group)


def nothing_returned(loss_sum, n_tokens, group=None):
    _totals(loss_sum, n_tokens, group)


def a_python_number(loss_sum, n_tokens, group=None):
    totals = _totals(loss_sum, n_tokens, group)
    return (totals[0] / totals[1]).item()


def two_all_reduces(loss_sum, n_tokens, group=None):
    total = collectives.all_reduce(loss_sum.clone(), group)
    return total / collectives.all_reduce(torch.tensor(float(n_tokens)), group)


def in_the_type_of_the_losses(loss_sum, n_tokens, group=None):
    totals = collectives.all_reduce(torch.tensor([loss_sum, n_tokens]), group)
    return totals[0] / totals[1]


def idle_rank_stays_away(loss_sum, n_tokens, group=None):
    if n_tokens == 0:
        return torch.zeros((), dtype=torch.float64)
    totals = _totals(loss_sum, n_tokens, group)
    return totals[0] / totals[1]


WRONG = [
    Wrong("0.1", mean_of_means, "a mean of means"),
    Wrong("0.1", local_mean, "a local mean"),
    Wrong("0.1", only_the_loss, "only the loss is summed"),
    Wrong("0.1", per_rank, "a mean over ranks, not over tokens"),
    Wrong("0.1", rank_0_only, "only rank 0 has it"),
    Wrong("0.1", in_fp32, "fp64 is lost on the way"),
    Wrong("0.1", as_integers, "the losses are summed as integers"),
    Wrong("0.1", overwrites_its_argument, "it overwrites its argument"),
    Wrong("0.1", ignores_the_group, "it ignores the group"),
    Wrong("0.1", past_our_door, "it goes past our own door"),
    Wrong("0.1", gathers_everything, "more traffic than two all-reduced numbers need"),
    Wrong("0.1", returns_the_totals),
    Wrong("0.1", first_rank_alone_takes_part),
    Wrong("0.1", nothing_returned, "nothing is returned"),
    Wrong("0.1", a_python_number, "not a scalar tensor in fp64"),
    Wrong("0.1", two_all_reduces, "two all-reduces where one would do"),
    Wrong("0.1", in_the_type_of_the_losses, "the sums take the type of the losses"),
    Wrong("0.1", idle_rank_stays_away, "a rank without tokens stays away"),
]
