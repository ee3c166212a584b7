"""A checkpoint is whole or it is not read, and nothing good is ever lost."""

import json

import pytest
import torch

from deepseek_lab.learn import run_ranks
from deepseek_lab.parallel import collectives
from deepseek_lab.train import checkpoint
from deepseek_lab.train.checkpoint import CheckpointError, Part

TENSORS = {"model.w": torch.arange(6.0).view(2, 3), "model.n": torch.tensor(3), "optim.w.exp_avg": torch.ones(2, 3)}
META = {"fingerprint": {"train.seed": 0}}


def save(root, step, keep=5):
    parts = [Part(key, tuple(t.shape), t.flatten(), 0, t.numel()) for key, t in TENSORS.items()]
    return checkpoint.save(root, step, parts, META, keep=keep)


def test_what_was_saved_comes_back(tmp_path):
    folder = save(tmp_path, 12)
    found = checkpoint.verify(folder)
    assert (found.step, found.meta) == (12, META)
    assert found.tensors().keys() == TENSORS.keys()
    assert all(torch.equal(found.tensors()[name], TENSORS[name]) for name in TENSORS)


def test_only_the_last_ones_are_kept_and_leftovers_are_swept(tmp_path):
    (tmp_path / "step-0000001.partial").mkdir(parents=True)
    for step in (5, 10, 15):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000010", "step-0000015"]


def truncate(folder):
    shard = next(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])


def flip_a_bit(folder):
    shard = next(folder.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def drop_a_shard(folder):
    next(folder.glob("*.safetensors")).unlink()


def drop_the_index(folder):
    (folder / "index.json").unlink()


def cut_the_index(folder):
    (folder / "index.json").write_text((folder / "index.json").read_text()[:40])


def of_a_later_format(folder):
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "format": 99}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "truncated"),
        (flip_a_bit, "altered or damaged"),
        (drop_a_shard, "is missing"),
        (drop_the_index, "not a checkpoint of this trainer"),
        (cut_the_index, "cannot be read"),
        (of_a_later_format, "format 99"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(damage, reason, tmp_path):
    save(tmp_path, 1)
    damage(save(tmp_path, 2))
    found, refused = checkpoint.latest(tmp_path, META["fingerprint"])
    assert found is not None
    assert found.step == 1
    assert len(refused) == 1
    assert "step-0000002" in refused[0]
    assert reason in refused[0]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    save(tmp_path, 1)
    found, refused = checkpoint.latest(tmp_path, {"train.seed": 7})
    assert found is None
    assert "train.seed is 0 there, 7 here" in refused[0]


def test_a_crash_while_saving_leaves_the_one_before(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 2)
    found, refused = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.step, refused) == (1, [])


def test_weights_of_another_shape_are_refused(tmp_path):
    model = torch.nn.Linear(3, 3, bias=False)
    with pytest.raises(CheckpointError, match="no weight of shape"):
        checkpoint.load_weights({"model.weight": torch.zeros(3, 2)}, model)


def save_on_ranks(root):
    """Two slices along dim 1, each written in two parts of unequal length by two ranks."""
    whole, rank = torch.arange(24.0).view(4, 6), collectives.rank_in()
    local = whole.chunk(2, dim=1)[rank // 2].flatten()
    start, stop = (0, 7) if rank % 2 == 0 else (7, 12)
    part = Part("model.w", (4, 6), local[start:stop], start, stop, cuts=((1, rank // 2, 2),))
    return checkpoint.save(root, 4, [part], META, keep=1).name


@pytest.mark.ranks
def test_what_ranks_wrote_in_parts_is_read_whole(tmp_path):
    assert run_ranks(save_on_ranks, 4, tmp_path) == ["step-0000004"] * 4
    found = checkpoint.verify(tmp_path / "step-0000004")
    assert len(list(found.folder.glob("*.safetensors"))) == 4
    assert torch.equal(found.tensor("model.w"), torch.arange(24.0).view(4, 6))


def test_slices_of_slices_are_put_together(tmp_path):
    """Experts are cut along their number and, under tensor parallelism, along a width."""
    whole = torch.arange(48.0).view(4, 6, 2)
    parts = [
        Part("model.w", (4, 6, 2), whole[2 * e : 2 * e + 2, 3 * t : 3 * t + 3].flatten(), 0, 12, ((0, e, 2), (1, t, 2)))
        for e in range(2)
        for t in range(2)
    ]
    checkpoint.save(tmp_path, 1, parts, {}, keep=1)
    assert torch.equal(checkpoint.verify(tmp_path / "step-0000001").tensor("model.w"), whole)


def test_a_part_that_nobody_wrote_is_noticed(tmp_path):
    half = Part("model.w", (4, 6), torch.zeros(12), 0, 12)
    checkpoint.save(tmp_path, 4, [half], META, keep=1)
    with pytest.raises(CheckpointError, match="12 numbers of model"):
        checkpoint.verify(tmp_path / "step-0000004").tensor("model.w")
