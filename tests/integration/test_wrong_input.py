"""Wrong input: exit 2 where it can be found before the run, else 1; one message, no traceback, nothing half-written."""

import json
import logging
from pathlib import Path

import pytest
import yaml
from run_files import start, tree, write_run

from rlhf_cli.main import run as rlhf
from rlhf_core.errors import DataError
from rlhf_testing.models import save_tiny_model, tiny_model, tiny_tokenizer
from rlhf_testing.runs import tiny_run

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(autouse=True)
def _own_logger():
    logger = logging.getLogger("rlhf")
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers, logger.level = handlers, level


def refused(arguments, capsys, code=2):
    """Run the command; its one message."""
    assert rlhf([str(each) for each in arguments]) == code
    err = capsys.readouterr().err
    assert err.count("error: ") == 1, err
    assert "Traceback" not in err
    return err


def train(tmp_path, changes, capsys, code=2, *flags):
    """A tiny run that must fail; the message. With code 2 no trace of a run folder may be left."""
    output = tmp_path / "out" / "run"
    message = refused(["train", write_run(tmp_path, changes), "--output", output, *flags], capsys, code)
    assert (tmp_path / "out").exists() == (code != 2)
    return message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"modle": {}}, 'did you mean "model"'),
        ({"train": {"episodez": 3}}, 'did you mean "episodes"'),
        ({"train": {"episodes": "many"}}, "train.episodes"),
        ({"optimizer": {"lr": -1}}, "optimizer.lr"),
        ({"hooks": "none"}, "hooks"),
        ({"hooks": -0.5}, "hooks"),
        ({"hooks": {"disable": [1, None]}}, "hooks.disable"),
        ({"algorithm": {"name": "ppo", "clip_eps": 2}}, "algorithm.clip_eps"),
        ({"algorithm": {"name": "ppp"}}, 'did you mean "ppo"'),
        ({"rewards": [{"name": "exact-mach"}]}, 'did you mean "exact-match"'),
        ({"rewards": []}, "learns from rewards"),
        ({"model": {"path": "builtin:none"}}, "builtin:tiny-digits"),
        ({"model": {"path": "./nowhere"}}, "no folder './nowhere'"),
        ({"prompts": {"name": "jsonl", "path": "nowhere.jsonl"}}, "nowhere.jsonl"),
        ({"eval": {"num_prompts": 64}}, "leave none to train on"),
        ({"eval": {"prompts": {"name": "jsonl", "path": "nowhere.jsonl"}}}, "nowhere.jsonl"),
        ({"engine": {"max_cache_tokens": 64, "max_new_tokens": 128}}, "engine.max_cache_tokens"),
        ({"rewards": [{"name": "./nowhere.py:f"}]}, "nowhere.py"),
    ],
)
def test_a_wrong_run_file(tmp_path, capsys, changes, says):
    assert says in train(tmp_path, changes, capsys)


def test_several_mistakes_are_told_together(tmp_path, capsys):
    message = train(tmp_path, {"train": {"episodes": 0}, "optimizer": {"lr": "x"}}, capsys)
    assert "train.episodes" in message
    assert "optimizer.lr" in message


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "empty"),
        ('{"prompt": "1>"}\n{"prompt": \n', "2"),
        ('{"prompt": "1>"}\n[1]\n', "2"),
        ('{"prompt": "1>"}\n{"question": "1>"}\n', "2"),
        ('{"prompt": 5}\n', "1"),
        ('{"prompt": "1>"}\n\n', "2"),
        ('{"prompt": "1>"}\n{"prompt": ""}\n', "2"),
        ('{"prompt": [{"role": "user", "content": "1>"}]}\n', "chat template"),
    ],
)
def test_wrong_prompts_name_the_line(tmp_path, capsys, lines, says):
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    message = train(tmp_path, {"prompts": {"name": "jsonl", "path": str(path)}}, capsys)
    assert "prompts.jsonl" in message
    assert says in message


def test_records_without_completion_cannot_be_fine_tuned_on(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1>"}\n' * 8)
    changes = {"prompts": {"name": "jsonl", "path": str(path)}, "algorithm": {"name": "sft"}, "rewards": None}
    assert "lacks a completion" in train(tmp_path, changes, capsys)


class TestModelFolders:
    def folder(self, tmp_path):
        return save_tiny_model(tmp_path / "model")

    def message(self, folder, tmp_path, capsys):
        return train(tmp_path, {"model": {"path": str(folder)}}, capsys)

    def test_no_tokenizer(self, tmp_path, capsys):
        folder = save_tiny_model(tmp_path / "model", with_tokenizer=False)
        assert "lacks a tokenizer" in self.message(folder, tmp_path, capsys)

    def test_no_weights(self, tmp_path, capsys):
        folder = self.folder(tmp_path)
        (folder / "model.safetensors").unlink()
        assert "contains no *.safetensors" in self.message(folder, tmp_path, capsys)

    def test_no_config(self, tmp_path, capsys):
        folder = self.folder(tmp_path)
        (folder / "config.json").unlink()
        assert "lacks config.json" in self.message(folder, tmp_path, capsys)

    def test_a_runs_folder_in_place_of_its_model(self, tmp_path, capsys):
        folder = self.folder(tmp_path / "run")
        assert f"its model is {folder}" in self.message(folder.parent, tmp_path, capsys)

    def test_torn_weights(self, tmp_path, capsys):
        folder = self.folder(tmp_path)
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        assert "cannot load" in self.message(folder, tmp_path, capsys)

    def test_a_broken_tokenizer(self, tmp_path, capsys):
        folder = self.folder(tmp_path)
        (folder / "tokenizer.json").write_text("{")
        assert "cannot load the tokenizer" in self.message(folder, tmp_path, capsys)

    def test_another_models_tokenizer(self, tmp_path, capsys):
        folder = tmp_path / "model"
        tiny_model().save_pretrained(folder)
        tiny_tokenizer("0123456789>,abcdef").save_pretrained(folder)
        assert "belongs to another model" in self.message(folder, tmp_path, capsys)

    def test_a_file(self, tmp_path, capsys):
        (tmp_path / "model").write_text("x")
        assert "is a file" in self.message(tmp_path / "model", tmp_path, capsys)


@pytest.mark.parametrize("text", ["model: [", "- a\n", "model: {path: x}\nmodel: {}\n"])
def test_broken_yaml(tmp_path, capsys, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert "run.yaml" in refused(["train", path, "--output", tmp_path / "out"], capsys)
    assert not (tmp_path / "out").exists()


def test_a_run_file_that_is_not_there(tmp_path, capsys):
    assert "nowhere.yaml" in refused(["train", tmp_path / "nowhere.yaml"], capsys)


def test_wrong_flags(tmp_path, capsys):
    assert "ddp" in train(tmp_path, {}, capsys, 2, "--num-processes", "2")
    assert "is not a reward" in train(tmp_path, {}, capsys, 2, "--reward", "exact-match:x")
    assert "key.path=value" in train(tmp_path, {}, capsys, 2, "--set", "nothing")
    assert "no checkpoint" in train(tmp_path, {}, capsys, 2, "--resume", "nowhere")


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path, capsys):
    run = write_run(tmp_path, {"train": {"episodes": 1}})
    output = tmp_path / "run"
    assert rlhf(["train", str(run), "--output", str(output), "--quiet"]) == 0
    capsys.readouterr()
    before = tree(output)
    assert "--resume auto" in refused(["train", run, "--output", output], capsys)
    after = tree(output)
    before.pop(".lock"), after.pop(".lock")
    assert after == before


def test_other_files_in_the_output_folder_are_left_alone(tmp_path, capsys):
    output = tmp_path / "mine"
    (output / "notes").mkdir(parents=True)
    (output / "notes" / "a.txt").write_text("keep")
    folder = save_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"torn")
    before = tree(output)
    refused(["train", write_run(tmp_path, {"model": {"path": str(folder)}}), "--output", output], capsys)
    assert tree(output) == before
    assert rlhf(["train", str(write_run(tmp_path)), "--output", str(output), "--quiet"]) == 0


REWARDS = {
    "raises": ("raise KeyError('boom')", "KeyError"),
    "few": ("return [0.0]", "1"),
    "nan": ("return [float('nan')] * len(rollouts)", "nan"),
    "text": ("return ['a'] * len(rollouts)", "'a'"),
    "nothing": ("return None", "None"),
}


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("with_eval", [False, True])
def test_a_reward_that_fails_ends_the_run_by_name(tmp_path, capsys, kind, with_eval):
    body, says = REWARDS[kind]
    path = tmp_path / "mine.py"
    path.write_text(f"def score(rollouts):\n    {body}\n")
    changes = {"rewards": [{"name": f"{path}:score"}], "eval": {"num_prompts": 4} if with_eval else None}
    message = train(tmp_path, changes, capsys, 1)
    assert "score" in message
    assert says in message
    folder = tmp_path / "out" / "run"
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert (folder / "metrics.jsonl").read_bytes() == b"" if not with_eval else True
    assert not (folder / "model").exists()
    assert "Traceback" in (folder / "run.log").read_text()


def test_divergence_names_the_key_to_lower(tmp_path, capsys):
    message = train(tmp_path, {"optimizer": {"lr": 1e30, "max_grad_norm": None}}, capsys, 1)
    assert "optimizer.lr" in message


def test_wrong_input_found_late_is_a_failed_run(tmp_path, capsys):
    """A template that refuses the answers of a conversation: nothing of it is rendered before it is trained on."""
    model = tmp_path / "model"
    tokenizer = tiny_tokenizer()
    refused = (
        "{% for m in messages %}{{ m.content }}{{ raise_exception('no 7') if '7' in m.content else '' }}{% endfor %}"
    )
    tokenizer.chat_template = refused
    tiny_model().save_pretrained(model)
    tokenizer.save_pretrained(model)
    ask, good, bad = (
        {"role": role, "content": text} for role, text in (("user", "1"), ("assistant", "2"), ("assistant", "7"))
    )
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"messages": [ask, answer]}) + "\n" for answer in [good, *[bad] * 7]))
    run = tiny_run({"prompts": {"name": "jsonl", "path": str(path)}, "algorithm": {"name": "sft"}, "rewards": None})
    run["model"] = {"path": str(model)}
    run["train"] = {"episodes": 8, "prompts_per_episode": 1, "train_batch_size": 1}
    for seed in range(20):  # the order of the records is the seed's
        run["train"]["seed"] = seed
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
        output = tmp_path / f"run-{seed}"
        code = rlhf(["train", str(tmp_path / "run.yaml"), "--output", str(output), "--quiet"])
        assert "no 7" in capsys.readouterr().err
        if code == 1:
            assert (output / "metrics.jsonl").stat().st_size > 0
            return
        assert code == 2
        assert not output.exists()
    raise AssertionError("no seed put the good record first")


def test_a_dry_run_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path)
    before = tree(tmp_path)
    assert rlhf(["train", str(run), "--dry-run"]) == 0
    assert rlhf(["train", str(run), "--dry-run", "--output", "out"]) == 0
    assert rlhf(["train", "--dry-run"]) == 0
    assert tree(tmp_path) == before
    out = capsys.readouterr().out
    assert "nothing was written" in out
    assert "the first prompt, 4 tokens:" in out and "  first ids: " in out


def test_a_dry_run_refuses_a_folder_that_holds_a_run(tmp_path, capsys):
    run = write_run(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").touch()
    for flags in ([str(run)], []):
        assert rlhf(["train", *flags, "--dry-run", "--output", str(tmp_path / "out")]) == 2
        assert "already contains a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["prompts.filter=gone.py:keep", "environment={name: tools, functions: [gone.py:double]}"]
)
def test_a_file_of_code_that_is_not_there_is_found_by_a_check(tmp_path, capsys, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    message = refused(["config", "check", write_run(tmp_path), "--set", option], capsys)
    assert f"{option.partition('=')[0]}" in message
    assert f"no such file: {tmp_path}/gone.py" in message


def test_an_output_that_cannot_be_a_folder_is_found_by_a_dry_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path)
    Path("file").touch()
    for flags in ([], ["--dry-run"]):
        assert "file" in refused(["train", run, *flags, "--output", "file/run"], capsys)
    assert rlhf(["train", str(run), "--output", ""]) == 2
    assert "`.` is the current folder" in capsys.readouterr().err


@pytest.mark.parametrize("dry_run", [False, True])
def test_prompts_that_are_left_out_are_told(tmp_path, capsys, dry_run):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "12>", "answer": "12"}\n' * 7 + json.dumps({"prompt": "1" * 99, "answer": "1"}))
    run = write_run(tmp_path, {"prompts": {"name": "jsonl", "path": str(path), "max_prompt_tokens": 16}})
    flags = ["--dry-run"] if dry_run else ["--output", str(tmp_path / "run")]
    assert rlhf(["train", str(run), *flags]) == 0
    shown = capsys.readouterr()
    assert "1 of 8 prompts are left out: too_long 1" in (shown.out if dry_run else shown.err)


def test_a_dry_run_says_who_makes_prompts_that_have_no_text(capsys):
    assert rlhf(["train", "--environment", "guess-number", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "the environment makes each prompt when its episode begins\n" in out
    assert "0 tokens" not in out and "ids: " not in out


@pytest.mark.parametrize("dry_run", [False, True])
def test_wrong_lines_after_the_first_are_all_found_before_training(tmp_path, dry_run):
    """Of training and evaluation prompts, and of what an algorithm reads beside the prompt."""
    lines = [{"prompt": "12>", "completion": "12", "answer": "12"}] * 30
    lines[7] = {"prompt": "12>"}
    lines[20] = {"completion": "12"}
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = {"name": "jsonl", "path": str(path)}
    with pytest.raises(DataError) as caught:
        start({"algorithm": {"name": "sft"}, "prompts": source}, tmp_path / "run", dry_run=dry_run)
    assert f"{path}:8: the record lacks a completion text" in caught.value.message
    assert f"{path}:21: `prompt` is missing" in caught.value.message
    sets = {"held": {"prompts": source, "rewards": ["exact-match"]}}
    with pytest.raises(DataError) as caught:
        start({"eval": {"sets": sets}}, tmp_path / "run", dry_run=dry_run)
    assert caught.value.where == f"{path}:21"
    assert not (tmp_path / "run").exists()
