"""The executor runs any schedule: serial gradients, the schedule's own memory, messages under way while it computes."""

import time
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from deepseek_lab.data.batches import Batch
from deepseek_lab.learn import Link, run_ranks
from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.parallel import collectives, pipeline
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.engine import parallelize
from deepseek_lab.parallel.mesh import build_mesh
from deepseek_lab.plan.schedules import build_schedule, simulate
from deepseek_lab.plan.stages import split_layers

WIDTH, LAYERS, MICRO_BATCHES = 6, 8, 8
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_h2", 1), ("dualpipe_v", 2)]


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


class Layers(pipeline.Stage):
    """Linear layers with a tanh between them; the last stage's loss is a sum of squares."""

    def __init__(self, layers, is_last):
        self.weights = [drawn(layer, WIDTH, WIDTH).requires_grad_() for layer in layers]
        self.is_last = is_last

    def forward(self, m, x):
        x = drawn(100 + m, 3, WIDTH) if x is None else x
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight))
        return x.square().sum() if self.is_last else x

    def input_like(self, m):
        return torch.empty(3, WIDTH, dtype=torch.double)


def execute(name, chunks, micro_batches=MICRO_BATCHES):
    rank, n_ranks = collectives.rank_in(), collectives.size_of()
    schedule = build_schedule(name, n_ranks, micro_batches, chunks)
    layers = split_layers(LAYERS, schedule.stages)
    held = [schedule.stage(rank, chunk) for chunk in range(chunks)]
    stages = [Layers(layers[stage], stage == schedule.stages - 1) for stage in held]
    executor = pipeline.Executor(schedule, stages)
    with collectives.record() as trace:
        executor.run()
    gradients = {
        layer: w.grad
        for k, stage in zip(held, stages, strict=True)
        for layer, w in zip(layers[k], stage.weights, strict=True)
    }
    return gradients, executor, trace


def results(*arguments):
    gradients, executor, trace = execute(*arguments)
    expected = simulate(executor.schedule).peak_activations[executor.rank]
    return gradients, executor.peak_activations == expected, len(executor.spans), len(trace.events)


@pytest.mark.ranks
@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_every_schedule_gives_the_serial_gradients_with_its_own_memory(n_ranks):
    serial = Layers(range(LAYERS), True)
    for m in range(MICRO_BATCHES):
        serial.forward(m, None).backward()
    for name, chunks in SCHEDULES:
        gradients = {}
        for theirs, peak_is_the_schedules, n_spans, _ in run_ranks(results, n_ranks, name, chunks):
            assert peak_is_the_schedules, name
            assert n_spans >= MICRO_BATCHES * chunks
            gradients |= theirs
        assert gradients.keys() == set(range(LAYERS))
        for layer, gradient in gradients.items():
            assert torch.allclose(gradient, serial.weights[layer].grad, rtol=1e-12, atol=1e-14), (name, layer)


def overlapped():
    _, executor, trace = execute("dualpipe_v", 2)
    overlaps = [span for span in executor.spans if span.action.kind == "OVERLAP"]
    sends = [event for event in trace.events if event.op == "send"]
    inside = [
        any(event.start_s < span.end_s and event.start_s + event.seconds > span.start_s for event in sends)
        for span in overlaps
    ]
    early = any(span.start_s < event.start_s < span.end_s for span in overlaps for event in sends)
    return inside, early


@pytest.mark.ranks
def test_an_overlap_computes_with_a_message_under_way():
    for inside, early in run_ranks(overlapped, 2, link=Link(latency_s=2e-3, bytes_per_s=1e6)):
        assert any(inside)
        assert early  # the forward's result leaves before the backward beside it is done


def test_forwards_alone_run_on_every_place():
    for name, chunks in SCHEDULES:
        for n_ranks in (1, 2, 4):
            place = build_schedule(name, n_ranks, 2 * n_ranks, chunks)
            schedule = pipeline.forward_only(place, 7)
            assert simulate(schedule).makespan >= 7  # does not deadlock, though 7 is no multiple of anything
            assert schedule.actions


def test_the_executor_refuses_a_schedule_of_other_ranks():
    with pytest.raises(ValueError, match="for 2 ranks of 1 chunks, not for 1 ranks of 1"):
        pipeline.Executor(build_schedule("1f1b", 2, 2), [Layers([0], True)])


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [((8, 4), [2, 2, 2, 2]), ((9, 4), [2, 3, 2, 2]), ((11, 4), [3, 3, 3, 2]), ((5, 2, [4, 1]), [4, 1]), ((3, 1), [3])],
)
def test_blocks_are_cut_into_consecutive_stages(arguments, sizes):
    layers = split_layers(*arguments)
    assert [len(part) for part in layers] == sizes
    assert [layer for part in layers for layer in part] == list(range(arguments[0]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((3, 4), "num_hidden_layers=3 is too few for 4"), ((4, 2, [1, 2]), "add up to"), ((4, 2, [4, 0]), "at least 1")],
)
def test_impossible_cuts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        split_layers(*arguments)


def test_a_stage_holds_its_parts_under_the_names_of_the_whole():
    config = DeepSeekConfig.preset("tiny", num_hidden_layers=4, tie_word_embeddings=True)
    place = build_schedule("1f1b", 1, 2)
    whole = pipeline.StagedModel(config, place, split_layers(4, 1))
    names = set(whole.state_dict())
    assert names == set(whole.state_dict())
    two = build_schedule("gpipe", 2, 2)
    first = pipeline.StagedModel(config, two, split_layers(4, 2))  # without a group this is rank 0
    assert set(first.state_dict()) < names
    assert {name.split(".")[1] for name in first.state_dict() if name.startswith("layers")} == {"0", "1"}
    with pytest.raises(RuntimeError, match="on another rank"):
        first.norm(torch.zeros(1))


def where_things_happen():
    """Of a step under ZB-H1, stage 3 and recomputation: what each kind of action sends and computes."""
    parallel = ParallelConfig(pp=2, zero_stage=3, schedule="zb_h1", recompute="full")
    mesh = build_mesh(parallel, "cpu")
    config = DeepSeekConfig.preset("tiny", num_hidden_layers=4, hidden_size=32, vocab_size=64, intermediate_size=48)
    engine = parallelize(config, mesh, parallel)
    engine.model.train()
    ids = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))
    micros = list(Batch(ids[:, :-1], ids[:, 1:], torch.zeros_like(ids[:, 1:])).split(1))
    attention_s, own = [], F.scaled_dot_product_attention

    def counted(*args, **kwargs):
        attention_s.append(time.monotonic())
        return own(*args, **kwargs)

    F.scaled_dot_product_attention = counted
    with collectives.record() as trace:
        engine.run(micros, lambda k, x, micro: engine.run_stage(k, x, micro.input_ids, micro.labels), 64)
    found = Counter()
    for span in engine.timeline:
        happened = [(event.op, event.start_s) for event in trace.events] + [("attention", at) for at in attention_s]
        found.update((span.action.kind, op) for op, at in happened if span.start_s <= at <= span.end_s)
    return found


@pytest.mark.ranks
def test_w_neither_gathers_weights_nor_computes_anything_twice_and_only_then_gradients_travel():
    for found in run_ranks(where_things_happen, 4):
        assert found["F", "attention"] == found["I", "attention"] == 4 * 2  # micro-batches, blocks of a stage
        assert not found["W", "attention"]
        assert found["F", "all_gather"]
        assert found["I", "all_gather"]
        assert not found["W", "all_gather"]
        assert found["W", "reduce_scatter"]
        assert not found["I", "reduce_scatter"]
