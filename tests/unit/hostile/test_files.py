"""Broken and hostile files: each is one message, no traceback, and no wait."""

import json
import logging
import os
import random
import sys
from types import SimpleNamespace

import pytest
import yaml

from rlhf_cli.main import run as rlhf
from rlhf_core.config.load import read_run_file
from rlhf_core.config.sections import ModelConfig
from rlhf_core.errors import ConfigError, DataError, UserInputError
from rlhf_core.prompts.jsonl import JsonlSource
from rlhf_core.runfolder.checkpoints import find_damage
from rlhf_core.util.yaml12 import parse_yaml
from rlhf_data.config import HfDatasetConfig
from rlhf_data.hf_dataset import build
from rlhf_models import load_policy
from rlhf_testing.models import save_tiny_model
from rlhf_testing.runs import tiny_run

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


@pytest.fixture(autouse=True)
def _own_logger():
    logger = logging.getLogger("rlhf")
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers, logger.level = handlers, level


def one_message(capsys, *arguments, code=2):
    """The command's one message."""
    assert rlhf([str(each) for each in arguments]) == code
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert shown.err.count("error: ") + shown.err.count("Error: ") == 1, shown.err
    return shown.err


@pytest.mark.parametrize(
    "text", [LAUGHS, MERGES, "a: &a [*a]", "a: &a {b: *a}"], ids=["lists", "merges", "loop", "map"]
)
def test_aliases_are_bounded(text, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"more than 100,000 values|contains itself|undefined alias"):
        parse_yaml(text, "run.yaml")
    (tmp_path / "run.yaml").write_text(text)
    one_message(capsys, "config", "check", tmp_path / "run.yaml")


def test_aliases_of_a_common_size_are_taken():
    assert parse_yaml("a: &a {b: [1, 2]}\nc: *a\nd: {<<: *a, e: 1}", "x")["d"] == {"b": [1, 2], "e": 1}


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 5000, "-" + "9" * 5000, "1e99999", "9" * 90])
def test_numbers_of_many_digits(number, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_run()) + f"\ncheckpoint: {{keep: {number}}}\n")
    one_message(capsys, "config", "check", tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_run()))
    one_message(capsys, "config", "check", tmp_path / "run.yaml", "--set", f"train.seed={number}")
    one_message(capsys, "train", tmp_path / "run.yaml", "--num-processes", number)


@pytest.mark.parametrize(
    "argument", ["model.path=\udcff", 'model.path="\\ud800"', "mod\udcffel.path=x", '{"\\ud800": 1}=1']
)
def test_half_a_character(argument, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_run()))
    one_message(capsys, "config", "check", tmp_path / "run.yaml", "--set", argument)


@pytest.mark.parametrize("flag", ["--model", "--reward", "--algorithm", "--from", "--resume"])
@pytest.mark.parametrize("value", ["\udcff", "x" * 300, "x/" * 3000, ""])
def test_odd_values_of_flags(flag, value, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_run()))
    one_message(capsys, "train", "run.yaml", "--dry-run", flag, value)


@pytest.mark.parametrize("name", ["x" * 300, "y/" * 3000])
def test_names_that_no_folder_can_have(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_run()))
    for more in ([], ["--resume", "auto"]):
        assert "too long" in one_message(capsys, "train", "run.yaml", "--output", name, *more)
    for command in (["report"], ["samples"], ["control"], ["ray", "status"]):
        one_message(capsys, *command, name, *(["pause"] if command == ["control"] else []))
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_pipes_and_devices_are_no_files(tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (pipe, "/dev/zero"):
        with pytest.raises(ConfigError, match="pipe or device"):
            read_run_file(place)
        with pytest.raises(DataError, match="no such file"):
            JsonlSource(tmp_path / place)
        with pytest.raises(DataError, match="cannot be read as a dataset"):
            build(HfDatasetConfig(path=str(place)), SimpleNamespace(base_folder=tmp_path))
        one_message(capsys, "train", place)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "train.jsonl")
    with pytest.raises(DataError, match="cannot be read as a dataset"):
        build(HfDatasetConfig(path=str(tmp_path / "folder")), SimpleNamespace(base_folder=tmp_path))
    os.mkfifo(tmp_path / "folder" / "files.json")
    assert find_damage(tmp_path / "folder") == "its files.json is missing"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "\\ud800"}', "lone surrogate"),
        ('{"prompt": "x", "a": {"\\udfff": 1}}', "lone surrogate"),
        ('{"prompt": "x", "a": ' + "9" * 5000 + "}", "too many digits"),
        ('{"prompt": ' + "[" * 100_000, "nested too deep"),
    ],
)
def test_lines_of_prompts(tmp_path, line, says):
    (tmp_path / "p.jsonl").write_text('{"prompt": "\\ud83d\\ude00"}\n' + line + "\n")
    source = JsonlSource(tmp_path / "p.jsonl")
    assert source[0]["prompt"] == "\U0001f600"
    with pytest.raises(DataError, match=says):
        source[1]
    _, wrong = source.scan()
    assert isinstance(wrong, DataError) and says in wrong.message


@pytest.mark.parametrize(
    "error", [KeyError("_data_files"), TypeError("x"), ValueError(""), OSError("no"), IndexError()]
)
def test_a_broken_saved_dataset(tmp_path, monkeypatch, error):
    def load_from_disk(path):
        raise error

    library = SimpleNamespace(
        load_from_disk=load_from_disk, DatasetDict=dict, disable_progress_bars=lambda: None, logging=logging
    )
    monkeypatch.setitem(sys.modules, "datasets", library)
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read as a dataset"):
        build(HfDatasetConfig(path=str(tmp_path)), SimpleNamespace(base_folder=tmp_path))


def test_a_model_file_that_lacks_tensors(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    gone = sorted(name for name in weights if "layers.0" in name)[:2]
    save_file(
        {name: t for name, t in weights.items() if name not in gone}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(UserInputError, match=rf"lack {gone[0]}, {gone[1]}"):
        load_policy(ModelConfig(path=str(folder)), dtype=torch.float32, seed=0)
    load_policy(ModelConfig(path=str(folder), allow_missing_weights=True), dtype=torch.float32, seed=0)


VALUES = [
    None,
    True,
    -1,
    0,
    1.5,
    10**4000,
    float("nan"),
    float("inf"),
    1e308,
    "x",
    "\ud800",
    "",
    [],
    {},
    [1],
    {"a": {}},
]
FILES = ("config.yaml", "manifest.json", "metrics.jsonl", "samples.jsonl", "summary.json", "performance.json")
METRIC = "reward/$\\frac{1}{0$ \\begin{x} %"


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    """A small folder of a run, as its files' JSON values."""
    metrics = [{"step": n, "episode": n, "reward/mean": 0.5, METRIC: 0.1, "kl/mean": 0.0} for n in (1, 2)]
    sample = {"episode": 0, "policy_version": 0, "prompt": "p", "completion": "c", "rewards": {METRIC: 1.0}}
    samples = [{**sample, "sample_id": n, "score": 1.0, "finish_reason": "stop", "num_tokens": 3} for n in range(3)]
    return {
        "config.yaml": {"model": {"path": "m"}, "algorithm": {"name": "ppo"}, "rewards": [{"name": "x"}]},
        "manifest.json": {"seed": 0, "events": [{"kind": "resume"}], "plugins": {"a": "1"}, "num_processes": 1},
        "metrics.jsonl": metrics,
        "samples.jsonl": samples,
        "summary.json": {"status": "done", "eval_before": 0.1, "eval_after": 0.2, "wall_s": 3.0},
        "performance.json": {"time_share": {"a": 0.5}, "tokens_per_second": {"b": 3.0}, "samples_per_second": 2.0},
    }


def write(folder, files):
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        text = value if isinstance(value, str) else None
        if text is None and name.endswith("l") and isinstance(value, list):
            text = "".join(json.dumps(line) + "\n" for line in value)
        (folder / name).write_text(json.dumps(value) if text is None else text, errors="surrogateescape")
    return folder


def change(value, chance):
    """The value with one part of it replaced."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(sorted(value))
        return {**value, key: change(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.85:
        place = chance.randrange(len(value))
        return [*value[:place], change(value[place], chance), *value[place + 1 :]]
    return chance.choice(VALUES)


@pytest.mark.slow
def test_broken_run_folders(good_run, tmp_path, capsys, monkeypatch, with_plots):
    monkeypatch.setattr("rlhf_report.draw", lambda runs: {})
    for seed in range(150):
        chance = random.Random(seed)
        files = dict(good_run)
        name = chance.choice(FILES)
        broken = chance.choice(["", "{", "[" * 10**5, "\udcff", "[]", "3"])
        files[name] = broken if seed % 5 == 0 else change(files[name], chance)
        try:
            folder = write(tmp_path / "run", files)
        except ValueError:  # no file can say this
            continue
        for command in (["report"], ["samples"], ["samples", "--json"]):
            with with_plots():
                code = rlhf([*command, str(folder)])
            shown = capsys.readouterr().err
            assert "Traceback" not in shown, (seed, name, command, shown)
            assert code in (0, 2), (seed, name, command, shown)


def test_a_metric_may_have_the_name_of_a_formula(good_run, tmp_path):
    from rlhf_report.data import read_run
    from rlhf_report.plots import draw

    assert "reward" in draw([read_run(write(tmp_path / "run", good_run))])
