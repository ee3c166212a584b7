"""Expert parallelism: outputs and all gradients are those of the serial layer; bytes are what the counts say.

The serial layer sees the tokens of all ranks at once.  Rows reach an expert in the same order as there, so only the
shapes of some matmuls differ: round-off in fp64, far below 1e-9 of a tensor's norm.
"""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from deepseek_lab.learn.ranks import run_ranks
from deepseek_lab.model import DeepSeekConfig, DeepSeekModel, moe
from deepseek_lab.parallel import collectives, expert, tensor
from deepseek_lab.parallel.collectives import record
from deepseek_lab.parallel.recompute import apply_recompute

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])
TOLERANCE = 1e-9
D, E, K = 12, 8, 2
CONFIG = DeepSeekConfig.preset(
    "tiny",
    vocab_size=64,
    hidden_size=D,
    intermediate_size=16,
    moe_intermediate_size=6,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    initializer_range=0.3,
)
# For each of four ranks (two use the first two): how many tokens, and to which experts they may go.
CASES = {
    "even": ([6, 6, 6, 6], range(E)),
    "uneven": ([9, 1, 4, 2], range(E)),
    "ranks without tokens": ([0, 7, 0, 3], range(E)),
    "no tokens at all": ([0, 0, 0, 0], range(E)),
    "all to two experts": ([5, 5, 5, 5], [6, 7]),
    "experts without tokens": ([5, 2, 5, 1], [0, 3, 5]),
    "some visits nowhere": ([5, 2, 5, 1], [0, 3, 5, E]),
    "all visits nowhere": ([2, 1, 2, 1], [E]),
}


def deviation(got, expected):
    """‖got - expected‖ / ‖expected‖; where the expected is zero, so must the other be."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype == torch.float64
    if not expected.any():
        return 0.0 if not got.any() else float("inf")
    return ((got - expected).norm() / expected.norm()).item()


def visits(tokens, experts, seed):
    """Tokens (T, D), weights (T, K), experts (T, K) and how many go to each; nowhere has weight 0."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(tokens, D, generator=generator, dtype=torch.float64)
    weight_TK = torch.rand(tokens, K, generator=generator, dtype=torch.float64)
    index_TK = torch.tensor(list(experts))[torch.randint(len(experts), (tokens, K), generator=generator)]
    counts_E = index_TK.flatten().bincount(minlength=E + 1)[:E]
    return x_TD.requires_grad_(), weight_TK.where(index_TK < E, 0).requires_grad_(), index_TK, counts_E


def serial_experts():
    experts = moe.Experts(CONFIG).double()
    for seed, w in enumerate(experts.parameters()):
        torch.nn.init.normal_(w, std=0.3, generator=torch.Generator().manual_seed(seed))
    return experts


def spread_experts(group=None):
    return expert.ExpertParallel(serial_experts(), group)


def rows(index_TK, rank, n_ranks):
    """Tokens with an expert on `rank`."""
    return sum(any(e // (E // n_ranks) == rank for e in experts) for experts in index_TK.tolist())


def against_serial(group_ranks=None):
    """For every case the worst deviation over outputs and gradients, and traffic beside what the counts say."""
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in group_ranks or ()}
    group = next((group for ranks, group in groups.items() if dist.get_rank() in ranks), None)
    rank, n_ranks = collectives.rank_in(group), collectives.size_of(group)
    worst, traffic = {}, {}
    for case, (tokens, allowed) in CASES.items():
        every = [visits(n, allowed, seed) for seed, n in enumerate(tokens[:n_ranks])]
        x_TD, weight_TK, index_TK, counts_E = every[rank]
        all_x, all_weights = (torch.cat([v[i].detach() for v in every]).requires_grad_() for i in range(2))
        all_index, all_counts = torch.cat([v[2] for v in every]), sum(v[3] for v in every)
        serial, ours = serial_experts(), spread_experts(group)
        expected = serial(all_x, all_weights, all_index, all_counts)
        expected.sin().sum().backward()

        collectives.set_algorithm("ring")
        with record() as trace:
            got = ours(x_TD, weight_TK, index_TK, counts_E)
            got.sin().sum().backward()
        collectives.set_algorithm("gloo")

        mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        found = {
            "output": deviation(got.detach(), expected.detach()[mine]),
            "x": deviation(x_TD.grad, all_x.grad[mine]),
            "weight": deviation(weight_TK.grad, all_weights.grad[mine]),
        }
        for name, w in serial.named_parameters():
            found[name] = deviation(getattr(ours, name).grad, tensor.shard(w.grad, 0, rank, n_ranks))
        worst[case] = max(found.items(), key=lambda item: item[1])

        rows_RR = [[rows(v[2], r, n_ranks) for r in range(n_ranks)] for v in every]
        out = sum(rows_RR[rank]) - rows_RR[rank][rank]
        back = sum(row[rank] for row in rows_RR) - rows_RR[rank][rank]
        said = [8 * (n_ranks - 1), 8 * out * (D + 2 * K), 8 * back * D, 8 * out * D, 8 * back * (D + K)]
        traffic[case] = said, [event.wire_bytes for event in trace.events if event.within is None]
        assert {event.op for event in trace.events if event.within is None} == {"all_to_all"}
    return worst, traffic


@pytest.mark.parametrize(("n_ranks", "groups"), [(2, None), (4, None), (4, [[0, 2], [1, 3]])])
def test_outputs_and_gradients_are_the_serial_ones_and_bytes_are_those_of_the_counts(n_ranks, groups):
    for worst, traffic in run_ranks(against_serial, n_ranks, groups, timeout=60):
        for case, (name, value) in worst.items():
            assert value <= TOLERANCE, f"{case}: {name}"
        for case, (said, sent) in traffic.items():
            assert sent == said, case


def whole_model(recompute, tp):
    """A model with its experts spread, and its blocks recomputed, against the serial one on the tokens of all ranks."""
    ranks = torch.arange(collectives.size_of()).view(-1, tp)
    ep_groups = [dist.new_group(column.tolist()) for column in ranks.T]
    tp_groups = [dist.new_group(row.tolist()) for row in ranks]
    ep_group, tp_group = ep_groups[collectives.rank_in() % tp], tp_groups[collectives.rank_in() // tp]
    ep = collectives.size_of(ep_group)
    rank = collectives.rank_in(ep_group)
    serial, ours = (DeepSeekModel(CONFIG, seed=1).double() for _ in range(2))
    expert.apply_expert_parallel(ours, ep_group)
    layouts = tensor.apply_tensor_parallel(ours, tp_group)
    apply_recompute(ours, recompute)
    ids_RBT, labels_RBT = torch.randint(64, (2, ep, 2, 8), generator=torch.Generator().manual_seed(2))
    serial.loss_sum(ids_RBT.flatten(0, 1), labels_RBT.flatten(0, 1))[0].backward()
    with record() as trace:
        ours.loss_sum(ids_RBT[rank], labels_RBT[rank])[0].backward()
    found = {}
    for name, w in serial.named_parameters():
        grad, layout = ours.get_parameter(name).grad, layouts[name]
        if layout.dim is not None:
            grad = tensor.unshard(grad, layout.dim, tp_group)
        elif layout.partial:
            grad = collectives.all_reduce(grad.clone(), tp_group)
        if ".mlp.experts." in name:
            found[name] = deviation(grad, tensor.shard(w.grad, 0, rank, ep))
        else:
            found[name] = deviation(collectives.all_reduce(grad.clone(), ep_group), w.grad)
    visits_E = collectives.all_reduce(ours.layers[1].mlp.gate.visits_E.clone(), ep_group)
    assert torch.equal(visits_E, serial.layers[1].mlp.gate.visits_E)
    ops = [event.op for event in trace.events if event.within is None and len(event.group_ranks) == ep]
    return max(found.items(), key=lambda item: item[1]), ops.count("all_to_all")


@pytest.mark.parametrize(("n_ranks", "tp", "recompute"), [(2, 1, "none"), (4, 1, "full"), (4, 2, "none")])
def test_a_model_with_spread_experts_has_the_serial_gradients(n_ranks, tp, recompute):
    for (name, value), n_all_to_alls in run_ranks(whole_model, n_ranks, recompute, tp, timeout=60):
        assert value <= TOLERANCE, name
        assert n_all_to_alls == (8 if recompute == "full" else 5)  # recomputed: counts, tokens and results once more


def moved():
    """Outputs with experts moved about, and moved again, against the serial layer; rows and weights that travelled."""
    rank, n_ranks = collectives.rank_in(), collectives.size_of()
    every = [visits(n, [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, E], seed) for seed, n in enumerate([9, 4, 0, 6])]
    x_TD, weight_TK, index_TK, counts_E = every[rank]
    serial, ours = serial_experts(), spread_experts().eval()
    found = []
    for expert_RS in (
        [[0, 7, 2], [0, 6, 1], [0, 5, 3], [0, 4, 2]],
        [[7, 6], [5, 4], [3, 2], [1, 0]],
        [[7, 0, 0, 0, 1]] * 2 + [[2, 3, 4, 5, 6]] * 2,  # twice on one rank is of no use, and does no harm
    ):
        collectives.set_algorithm("ring")
        before = ours.placement
        with record() as trace:
            expert.place_experts(ours, expert_RS)
        new = [[e for e in held if e not in before[r]] for r, held in enumerate(expert_RS)]
        moves = [(next(s for s in range(n_ranks) if e in before[s]), r) for r in range(n_ranks) for e in new[r]]
        said = sum(src == rank for src, _ in moves) * 3 * D * CONFIG.moe_intermediate_size * 8
        collectives.set_algorithm("gloo")
        for name, w in serial.named_parameters():
            assert torch.equal(getattr(ours, name), w[list(expert_RS[rank])])
        with torch.no_grad():
            value = deviation(ours(x_TD, weight_TK, index_TK, counts_E), serial(x_TD, weight_TK, index_TK, counts_E))
        found.append((value, said, trace.wire_bytes()))
    try:
        ours.train()(x_TD, weight_TK, index_TK, counts_E)
    except RuntimeError as error:
        return found, str(error)


def test_experts_that_moved_give_the_serial_outputs():
    for found, error in run_ranks(moved, 4):
        for value, said, sent in found:
            assert value <= TOLERANCE
            assert sent == said
        assert "for evaluation" in error


def test_visits_are_shared_evenly_among_the_places_of_an_expert():
    expert_P = torch.tensor([2, 0, 2, 1, 2, 0])
    index_TK = torch.tensor([[2, 0], [2, 1], [3, 3], [2, 0], [2, 3], [0, 2]])
    place_TK = expert.share_visits(index_TK, expert_P)
    assert place_TK.tolist() == [[0, 1], [2, 3], [6, 6], [4, 5], [0, 6], [1, 2]]
    assert expert.share_visits(index_TK, expert_P, rank=1)[0].tolist() == [2, 5]
    lonely = torch.tensor([[2, 3]])  # one visit on each of three ranks
    assert {expert.share_visits(lonely, expert_P, rank)[0, 0].item() for rank in range(3)} == {0, 2, 4}
    assert expert.share_visits(torch.empty(0, 2, dtype=torch.long), expert_P).shape == (0, 2)


def on_the_meta_device_and_in_bf16():
    with torch.device("meta"):
        model = DeepSeekModel(CONFIG)
    expert.apply_expert_parallel(model)
    shapes = {name: (tuple(w.shape), w.device.type) for name, w in model.named_parameters() if ".experts." in name}
    x_TD, weight_TK, index_TK, counts_E = visits(6, range(E), collectives.rank_in())
    serial, ours = serial_experts().float(), spread_experts().float()
    collectives.set_algorithm("ring")
    with torch.autocast("cpu", torch.bfloat16), record() as trace:
        arguments = x_TD.detach().float(), weight_TK.detach().float(), index_TK, counts_E
        expected, got = serial(*arguments), ours(*arguments)
    sent = [event.wire_bytes for event in trace.events if event.within is None]
    return shapes, expected, got, sent[1], rows(index_TK, 1 - collectives.rank_in(), 2)


def test_meta_device_and_autocast():
    for shapes, expected, got, sent, n_rows in run_ranks(on_the_meta_device_and_in_bf16, 2):
        assert shapes == {
            "layers.1.mlp.experts.gate_proj": ((4, 6, 12), "meta"),
            "layers.1.mlp.experts.up_proj": ((4, 6, 12), "meta"),
            "layers.1.mlp.experts.down_proj": ((4, 12, 6), "meta"),
        }
        assert got.dtype == expected.dtype == torch.bfloat16
        # The parts of a token's sum come home rounded to bf16's eight bits
        assert ((got - expected).norm() / expected.norm()).item() < 2**-8
        assert sent == n_rows * (D + 2 * K) * 2


def test_one_rank_changes_nothing_and_three_cannot_share_eight():
    model = DeepSeekModel(CONFIG)
    before = list(model.modules())
    expert.apply_expert_parallel(model)
    assert list(model.modules()) == before
    with pytest.raises(Exception, match="3 ranks do not divide dim 0"):
        run_ranks(spread_experts, 3)
