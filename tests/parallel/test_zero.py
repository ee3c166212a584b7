"""ZeRO on real ranks: what each holds, to the byte, and when weights come and go."""

import dataclasses
import gc
import weakref

import pytest
import torch

from deepseek_lab.learn import run_ranks
from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.parallel import collectives, zero
from deepseek_lab.parallel import engine as engine_module
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.engine import parallelize
from deepseek_lab.parallel.mesh import build_mesh
from deepseek_lab.plan.memory import zero_state_bytes

R = 4
MODEL = DeepSeekConfig.preset("tiny", num_hidden_layers=3, hidden_size=64, vocab_size=256)
BYTES = {"fp32": (4, 4, 8), "mixed": (2, 2, 12)}  # of weights, gradients, optimizer state


def build(parallel, precision="fp32", model=MODEL):
    dtype = torch.bfloat16 if precision == "mixed" else torch.float32
    mesh = build_mesh(parallel, "cpu")
    return parallelize(model, mesh, parallel, dtype=dtype, master_dtype=torch.float32)


def one_pass(engine, last=True):
    ids = torch.randint(engine.model.config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(0))
    with engine.micro_batch(last=last):
        loss_sum, _ = engine.model.loss_sum(ids[:, :-1], ids[:, 1:])
        loss_sum.backward()


def update(engine, optimizer):
    engine.finish_backward()
    optimizer.step()
    engine.after_step()


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 4096])
@pytest.mark.parametrize("n_ranks", [1, 3, 8])
def test_shares_are_equal_and_cover_everything_once(numel, n_ranks):
    ranges = [zero.shard_range(numel, rank, n_ranks) for rank in range(n_ranks)]
    assert len({stop - start for start, stop in ranges}) == 1
    assert [i for start, stop in ranges for i in range(start, stop)][:numel] == list(range(numel))
    assert ranges[-1][1] - numel < n_ranks  # no more padding than there must be


def held(parallel, precision, model):
    """Bytes held after each of two backwards, by the engine's account, and by all tensors that live in the process."""

    def alive():
        gc.collect()
        storages = (t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))
        return sum({s.data_ptr(): s.nbytes() for s in storages if s.device.type == "cpu"}.values())

    before = alive()
    engine = build(parallel, precision, model)
    optimizer = torch.optim.AdamW([*engine.optimizer_tensors()[0], *engine.optimizer_tensors()[1]])
    one_pass(engine)
    update(engine, optimizer)
    engine.zero_grad()
    samples = []
    for last in (False, True):
        one_pass(engine, last)
        samples.append((engine.state_bytes(optimizer), alive() - before))
    padded = [len(bucket.weights_P) for bucket in engine.buckets]
    return samples, sum(padded), sum(p.numel() for bucket in engine.buckets for p in bucket.shapes.values())


def all_held(layout, model):
    """`held`, for every stage and precision."""
    gc.freeze()  # so that looking for tensors passes over the many objects that were there before
    cases = [(stage, precision) for stage in range(4) for precision in BYTES]
    return {case: held(ParallelConfig(zero_stage=case[0], **layout), case[1], model) for case in cases}


@pytest.mark.ranks
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", [{"dp": 4}, {"dp": 2, "tp": 2}])
def test_state_is_what_the_formula_says_to_the_byte(layout, tied):
    model = dataclasses.replace(MODEL, tie_word_embeddings=tied)
    for found in run_ranks(all_held, R, layout, model, timeout=120):
        for (stage, precision), (samples, padded, numel) in found.items():
            expected = zero_state_bytes(padded, layout["dp"], stage, *BYTES[precision])
            assert padded - numel < 8 * layout["dp"]  # no bucket is padded by more than its ranks
            for account, alive in samples:
                assert account == expected
                # Beside the state there are only tables, counters and the batch.
                assert 0 <= alive - sum(expected.values()) < 40_000
            assert sum(expected.values()) > 1_000_000 / R  # so that the slack could not hide a share


def passes_watched(parallel, n_passes):
    """Collectives of each pass, and how much was whole at once: units of weights, buckets of gradients."""
    engine = build(parallel)
    most = {"weights": 0, "gradients": 0}

    def look(*_):
        whole = [b for b in engine.buckets if b.weights_P.untyped_storage().nbytes()]
        most["weights"] = max(most["weights"], len(whole))
        most["gradients"] = max(most["gradients"], sum(b.gradients_P is not None for b in engine.buckets))

    for module in engine.model.modules():
        module.register_forward_pre_hook(look)
    for parameter in engine.model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    traces = []
    for n in range(n_passes):
        with collectives.record() as trace:
            one_pass(engine, last=n == n_passes - 1)
        traces.append([(event.op, event.payload_bytes) for event in trace.events])
    shares = [bucket.my_weights_S.nbytes for bucket in engine.buckets]
    return traces, most, shares, [bucket.weights_P.nbytes for bucket in engine.buckets]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_are_held_travel_once_a_step(stage):
    traces, _, _, whole = run_ranks(passes_watched, 2, ParallelConfig(zero_stage=stage, bucket_mb=0.25), 3)[0]
    op = "reduce_scatter" if stage else "all_reduce"
    assert traces == [[], [], [(op, n_bytes) for n_bytes in whole]]
    assert len(whole) > 3


@pytest.mark.ranks
def test_stage_2_sends_every_pass_and_keeps_few_whole_gradients():
    traces, most, _, whole = run_ranks(passes_watched, 2, ParallelConfig(zero_stage=2, bucket_mb=0.25), 2)[0]
    assert traces == [[("reduce_scatter", n_bytes) for n_bytes in whole]] * 2
    assert most["gradients"] <= 4 < len(whole)  # two on the way, one done but not received, one filling


@pytest.mark.ranks
def test_stage_3_holds_two_layers_and_gathers_each_twice():
    (trace,), most, shares, whole = run_ranks(passes_watched, 2, ParallelConfig(zero_stage=3), 1)[0]
    gathers = sorted(n_bytes for op, n_bytes in trace if op == "all_gather")
    *middle, embedding = shares
    head, *blocks = middle
    assert gathers == sorted([embedding, head, *blocks, *blocks])  # a table needs no second look, the head none
    assert sorted(n_bytes for op, n_bytes in trace if op == "reduce_scatter") == sorted(whole)
    assert most["weights"] == 2  # the one in use and the next


def order_of_gathering(parallel):
    """When each unit's gather was started and waited for, and each block ran."""
    engine, log = build(parallel), []
    for n, bucket in enumerate(reversed(engine.buckets)):
        weights = bucket.gathered
        start, gather = weights.start, weights.gather

        def started(n=n, weights=weights, start=start):
            if not weights.here and weights.pending is None:
                log.append(f"start {n}")
            start()

        def gathered(n=n, gather=gather):
            gather()
            log.append(f"use {n}")

        weights.start, weights.gather = started, gathered
    one_pass(engine)
    return log


@pytest.mark.ranks
def test_stage_3_has_the_next_layer_on_its_way():
    log = run_ranks(order_of_gathering, 2, ParallelConfig(zero_stage=3))[0]
    forward = ["start 0", "use 0", "start 1", "use 1", "start 2", "use 2", "start 3", "use 3", "start 4", "use 4"]
    backward = ["use 4", "start 3", "use 3", "start 2", "use 2", "start 1", "use 1"]
    assert log == forward + backward


def norm_of(n_ranks_with_copies):
    gradients = [torch.full((4,), 1.0 + collectives.rank_in()), torch.full((9,), 2.0)]
    return zero.global_grad_norm(gradients, [1, n_ranks_with_copies], [None]).item()


@pytest.mark.ranks
def test_the_norm_counts_shares_once_and_copies_once():
    expected = (4 * (1 + 4) + 9 * 4) ** 0.5
    assert run_ranks(norm_of, 2, 2) == [pytest.approx(expected)] * 2
    assert run_ranks(norm_of, 2, 1) != [pytest.approx(expected)] * 2  # a copy counted by both


def whole_parameters_alive(parallel):
    """How many parameters that initialisation drew are alive whenever the next one is drawn."""
    drawn, alive = [], []
    own = engine_module.initial_weight

    def initial_weight(name, shape, config, seed):
        alive.append(sum(reference() is not None for reference in drawn))
        weight = own(name, shape, config, seed)
        drawn.append(weakref.ref(weight))
        return weight

    engine_module.initial_weight = initial_weight
    engine = build(parallel)
    engine_module.initial_weight = own
    return max(alive), len(alive), sum(1 for _ in engine.model.parameters())


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [{"zero_stage": 3}, {"tp": 2, "zero_stage": 1}])
def test_a_rank_never_holds_two_whole_parameters_at_once(layout):
    for most, n_drawn, n_parameters in run_ranks(whole_parameters_alive, 2, ParallelConfig(**layout)):
        assert most <= 1
        assert n_drawn == n_parameters
