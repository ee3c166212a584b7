"""Settings: every key exists, every value has its type and is possible, or nothing starts."""

import pytest

from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.train import config
from deepseek_lab.train.__main__ import flatten, main, parse
from deepseek_lab.train.config import ConfigError, RunConfig, TrainConfig


def test_a_file_then_the_command_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {preset: small, num_hidden_layers: 3}\noptim: {lr: 1.0e-3, min_lr: 1.0e-4}\n")
    loaded = config.load(file, {"optim.lr": "5e-4", "model.q_lora_rank": "null", "data.document_mask": "false"})
    assert loaded.model == DeepSeekConfig.preset("small", num_hidden_layers=3, q_lora_rank=None)
    assert (loaded.optim.lr, loaded.optim.min_lr, loaded.data.document_mask) == (5e-4, 1e-4, False)


def test_what_is_saved_is_what_is_read_back(tmp_path):
    original = config.load(None, {"train.steps": "7", "model.preset": "small", "precision": "fp64"})
    original.save(tmp_path / "config.yaml")
    assert config.load(tmp_path / "config.yaml") == original


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optim.learning_rate", "1", r"no setting optim.learning_rate"),
        ("trian.steps", "1", r"no setting trian; did you mean train"),
        ("train.setps", "1", r"no setting train.setps; did you mean train.steps"),
        ("model.hiden_size", "64", r"did you mean model.hidden_size"),
        ("train.steps", "many", r"train.steps='many' has type str; it must be int"),
        ("train.steps", "1.5", r"train.steps=1.5 has type float; it must be int"),
        ("train.steps", "true", r"train.steps=True has type bool; it must be int"),
        ("data.document_mask", "1", r"data.document_mask=1 has type int; it must be bool"),
        ("optim.lr", "fast", r"it must be float"),
        ("train.steps", "0", r"train.steps=0 must be at least 1"),
        ("train.stop_at", "101", r"from 1 to train.steps=100"),
        ("optim.min_lr", "1", r"above optim.lr"),
        ("optim.beta1", "1", r"below 1"),
        ("optim.name", "adam", r"use one of adamw, sgd"),
        ("precision", "fp16", r"use one of fp32, bf16, mixed, fp64"),
        ("parallel.collectives", "mpi", r"use one of gloo, ring"),
        ("parallel.dp", "0", r"parallel.dp=0 must be at least 1"),
        ("model.preset", "huge", r"choose one of tiny"),
        ("model.n_group", "3", r"use one of \[1, 2, 4, 8\]"),
        ("data.seq_len", "5000", r"more than model.max_position_embeddings=4096"),
        ("train", "5", r"train is a section of keys"),
    ],
)
def test_bad_settings_are_refused_with_what_to_do(key, value, message):
    with pytest.raises(ConfigError, match=message):
        config.load(None, {key: value})


def test_a_missing_or_broken_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no configuration file"):
        config.load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("train: [1, 2")
    with pytest.raises(ConfigError, match="not YAML"):
        config.load(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="must hold sections"):
        config.load(tmp_path / "list.yaml")


def test_the_command_line_is_options_and_overrides():
    words = ["--config", "a.yaml", "--optim.lr=1e-3", "--resume", "--train.steps", "5", "--out", "x", "--mine"]
    assert parse(words) == (
        {"config": "a.yaml", "resume": "", "out": "x", "mine": ""},
        {"optim.lr": "1e-3", "train.steps": "5"},
    )
    for words, message in ((["steps"], "a --KEY was expected"), (["--train.steps"], "needs a value")):
        with pytest.raises(ConfigError, match=message):
            parse(words)


def test_help_lists_every_setting(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"--{key} " in printed for key in flatten(config.RunConfig().to_dict()))


def test_a_bad_setting_ends_with_status_2_and_one_line(capsys):
    assert main(["--train.setps", "5"]) == 2
    assert capsys.readouterr().err == "error: there is no setting train.setps; did you mean train.steps?\n"


@pytest.mark.parametrize(
    ("parallel", "world_size", "message"),
    [
        (
            {"pp": 2, "schedule": "interleaved", "chunks": 2},
            2,
            "multiple of ranks=2 micro-batches, not 3; a step has 3",
        ),
        ({"pp": 4, "schedule": "dualpipe_v", "chunks": 2}, 4, "at least 8 micro-batches, not 3"),
        ({"pp": 2}, 3, "does not divide the 3 ranks"),
    ],
)
def test_a_schedule_that_a_step_cannot_have_is_refused_before_anything_starts(parallel, world_size, message):
    train = TrainConfig(global_batch_size=3, micro_batch_size=1)
    settings = RunConfig(train=train, parallel=ParallelConfig(**parallel))
    with pytest.raises(ValueError, match=message):
        settings.check(world_size)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"pp": 16}, "num_hidden_layers=8 is too few for 16"),
        ({"pp": 2, "stage_layers": [1, 2]}, "add up to num_hidden_layers=8"),
        ({"pp": 2, "chunks": 2}, "use interleaved for more"),
        ({"ep": 3}, "ep=3 does not divide n_routed_experts=8"),
        ({"pp": 2, "schedule": "1f2b"}, "use one of gpipe, 1f1b"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(parallel, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(parallel=ParallelConfig(**parallel))


def test_engine_torch_says_what_its_pipelines_lack():
    with pytest.raises(ValueError, match="use one of gpipe, 1f1b, interleaved"):
        RunConfig(engine="torch", parallel=ParallelConfig(pp=2, schedule="zb_h1"))
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        RunConfig(engine="torch", parallel=ParallelConfig(pp=2), model=DeepSeekConfig(tie_word_embeddings=True))
    with pytest.raises(ValueError, match="no expert dispatch"):
        RunConfig(engine="torch", parallel=ParallelConfig(ep=2))
    few = TrainConfig(global_batch_size=3, micro_batch_size=1)
    RunConfig(train=few, parallel=ParallelConfig(pp=4)).check(4)
    with pytest.raises(ValueError, match="as many micro-batches as stages"):
        RunConfig(engine="torch", train=few, parallel=ParallelConfig(pp=4)).check(4)
