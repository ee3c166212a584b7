"""Whole runs, launched as a user would: resume bit for bit, interrupt, generate, export, refuse."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from deepseek_lab import __main__ as cli
from deepseek_lab.data.tokenizer import load_tokenizer
from deepseek_lab.train import checkpoint
from deepseek_lab.train.metrics import MetricsFile, read_metrics
from deepseek_lab.train.restore import load_model

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--model.num_hidden_layers=2",
    "--model.hidden_size=32",
    "--model.intermediate_size=32",
    "--model.moe_intermediate_size=16",
    "--data.seq_len=32",
    "--train.global_batch_size=5",
    "--train.micro_batch_size=2",
    "--train.steps=6",
    "--optim.warmup_steps=2",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A user's own text, small enough that evaluation takes no time."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(12):
        (folder / f"{index}.txt").write_text("".join(f"Line {n} of text {index}: 你好，世界。\n" for n in range(20)))
    return folder


def command(text, out, *more, ranks=1):
    words = [sys.executable, "-m"]
    if ranks > 1:
        config = str(ROOT / "configs" / "accelerate" / "cpu.yaml")
        words += ["accelerate.commands.launch", "--config_file", config, "--num_processes", str(ranks), "-m"]
    return [*words, "deepseek_lab.train", *SMALL, f"--data.source={text}", f"--out={out}", *more]


def run(*args, **kwargs):
    done = subprocess.run(command(*args, **kwargs), cwd=ROOT, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def curve(out):
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in read_metrics(out / "metrics.jsonl")]


def tensors(out):
    found, refused = checkpoint.latest(out / "checkpoints")
    assert not refused
    return found.tensors()


@pytest.mark.launch
def test_n_and_n_steps_equal_2n_bit_for_bit_on_two_ranks(text, tmp_path):
    status, printed = run(text, tmp_path / "whole", ranks=2)
    assert status == 0, printed
    status, printed = run(text, tmp_path / "halves", "--train.stop_at=3", ranks=2)
    assert status == 0, printed
    assert "stopped after step 3" in printed
    assert [line[0] for line in curve(tmp_path / "halves")] == [1, 2, 3]
    status, printed = run(text, tmp_path / "halves", "--resume", ranks=2)
    assert status == 0, printed
    assert curve(tmp_path / "halves") == curve(tmp_path / "whole")
    whole, halves = tensors(tmp_path / "whole"), tensors(tmp_path / "halves")
    assert whole.keys() == halves.keys()
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


@pytest.mark.launch
def test_layouts_can_be_compared_from_the_command_line(text, tmp_path):
    """In fp64 with plain SGD, which hides no scale, `metrics.jsonl` shows the same curve to its last digits but few."""
    plain = ["--precision=fp64", "--optim.name=sgd", "--optim.lr=0.3", "--optim.min_lr=0.1"]
    spread = ["--parallel.tp=2", "--parallel.pp=2", "--parallel.ep=2", "--parallel.zero_stage=1"]
    for out, more, ranks in (("one", plain, 1), ("eight", plain + spread, 8)):
        status, printed = run(text, tmp_path / out, *more, ranks=ranks)
        assert status == 0, printed
    assert "pp 2 x dp 2 x tp 2, 1f1b, experts over 2, ZeRO-1" in " ".join(printed.split())
    assert "8 ranks, by what they hold" in printed
    one, eight = (read_metrics(tmp_path / out / "metrics.jsonl") for out in ("one", "eight"))
    assert one[0]["loss"] > one[-1]["loss"]
    for name in ("loss", "grad_norm", "lr"):
        assert [line[name] for line in eight] == pytest.approx([line[name] for line in one], rel=1e-9)
    assert eight[-1]["val_loss"] == pytest.approx(one[-1]["val_loss"], rel=1e-9)
    samples = [json.loads((tmp_path / out / "summary.json").read_text())["samples"] for out in ("one", "eight")]
    assert samples[0] == samples[1]
    (alone, _), (spread, _) = (load_model(tmp_path / out) for out in ("one", "eight"))  # to generate with, or to export
    for name, weight in alone.named_parameters():
        assert (spread.get_parameter(name) - weight).norm() <= 1e-9 * weight.norm(), name
    summary = json.loads((tmp_path / "eight" / "summary.json").read_text())
    assert summary["ranks"] == {"dp": 2, "tp": 2, "pp": 2, "ep": 2}
    assert summary["recorded_step"]["axes"].keys() >= {"tp", "pp", "ep", "dp"}
    assert all(0 <= axis["share"] < 1 for axis in summary["recorded_step"]["axes"].values())
    assert (tmp_path / "eight" / "pipeline.png").stat().st_size > 5000
    assert summary["peak_memory_bytes"] > sum(summary["state_bytes"].values())


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    status, printed = run(text, out, "--train.eval_every=3", "--precision=bf16")
    assert status == 0, printed
    return out, printed


@pytest.mark.launch
def test_a_run_leaves_what_it_promises(finished):
    out, printed = finished
    assert {path.name for path in out.iterdir()} >= {
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "loss.png",
        "checkpoints",
        "tensorboard",
    }
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "val_bits_per_byte" in line] == [3, 6]
    assert {"loss", "grad_norm", "lr", "tokens_per_s", "mfu"} <= lines[0].keys()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["val_bits_per_byte"] == lines[-1]["val_bits_per_byte"]
    assert summary["baselines_bits_per_byte"].keys() == {"unigram", "bigram", "gzip -9", "xz -9", "xz -9 primed"}
    assert summary["samples"].keys() == {"en", "zh"}
    assert "bits per byte" in printed


@pytest.mark.launch
def test_generate_streams_the_same_text_again(finished, capsys):
    out, _ = finished
    words = ["generate", "--run", str(out), "--prompt", "Line 3", "--max-new-tokens", "20"]
    assert cli.main(words) == 0
    first = capsys.readouterr().out
    assert cli.main(words) == 0
    assert capsys.readouterr().out == first
    assert first.startswith("Line 3")


@pytest.mark.launch
def test_export_gives_transformers_the_same_logits_and_tokens(finished, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    out, _ = finished
    assert cli.main(["export", "--run", str(out), "--to", str(tmp_path)]) == 0
    model, _ = load_model(out)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    peer_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = load_tokenizer().encode("Line 3 of text 你好")
    assert peer_tokenizer("Line 3 of text 你好", add_special_tokens=False)["input_ids"] == ids
    ours, theirs = model(torch.tensor([ids])), peer(torch.tensor([ids])).logits
    assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-5


@pytest.mark.launch
def test_a_second_run_does_not_write_over_the_first(finished, text):
    out, _ = finished
    status, printed = run(text, out)
    assert status == 2
    assert "already holds a run; add --resume" in printed


@pytest.mark.launch
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_cleanly_and_the_run_goes_on(number, text, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(text, out, "--train.steps=100000"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for _ in range(600):
            if (out / "metrics.jsonl").exists() and len(curve(out)) >= 2:
                break
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.1)
        process.send_signal(number)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, printed
    done = curve(out)[-1][0]
    assert f"stopped after step {done}, saved" in printed
    found, _ = checkpoint.latest(out / "checkpoints")
    assert found.step == done
    status, printed = run(text, out, "--resume", "--train.steps=100000", f"--train.stop_at={done + 2}")
    assert status == 0, printed
    assert [line[0] for line in curve(out)] == list(range(1, done + 3))


@pytest.mark.launch
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--resume"], "nothing to resume from"),
        (["--data.source=nowhere"], "nowhere"),
        (["--data.seq_len=4000"], "one sequence of seq_len=4000"),
        (["--model.vocab_size=512"], "512"),
        (["--parallel.dp=3"], "parallel.dp=3 x tp=1 x pp=1 = 3 does not match the 1 ranks"),
        (["--parallel.tp=3"], "use 1, 2 or 4"),
        (["--model.hidden_size=65536", "--model.num_hidden_layers=40"], "a rank of this layout needs about"),
        (["--parallel.zero_stage=4"], "use 0, 1, 2 or 3"),
        (["--parallel.zero_stage=1", "--parallel.compression=int8"], "use zero_stage 0"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_it_starts(more, message, text, tmp_path, monkeypatch, capsys):
    from deepseek_lab.train.__main__ import main

    monkeypatch.chdir(ROOT)
    words = command(text, tmp_path / "out", *more)[3:]
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.launch
def test_a_launch_that_would_train_ranks_alone_is_refused(monkeypatch, tmp_path, text, capsys):
    from deepseek_lab.train.__main__ import main

    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("deepseek_lab.train.run.Accelerator", lambda **_: type("Alone", (), {"num_processes": 1})())
    assert main(command(text, tmp_path / "out")[3:]) == 2
    assert "4 processes were launched, but accelerate formed a group of 1" in capsys.readouterr().err


def test_metrics_keep_every_digit_and_drop_what_a_stop_left(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step, loss in ((1, 0.1 + 0.2), (2, 1 / 3), (3, 2 / 3)):
        file.write({"step": step, "loss": loss})
    file.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')  # cut short by a crash
    assert [line["loss"] for line in read_metrics(path)] == [0.1 + 0.2, 1 / 3, 2 / 3]
    MetricsFile(path, steps_done=2).close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
