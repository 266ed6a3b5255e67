"""`rlhf export`: what it writes is the policy of the checkpoint, as transformers loads it."""

import json
import shutil

import pytest
import torch
from run_files import command, start, write_run
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.main import run
from rlhf_control.control_box import ControlBox, parse_command
from rlhf_core.errors import InterruptedRun, RlhfError
from rlhf_testing.models import builtin_model

TRAIN = {"episodes": 3, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
BASE = {"train": TRAIN, "checkpoint": {"every_episodes": 1}}
pytestmark = pytest.mark.usefixtures("no_plots")


def export(*arguments):
    return run(["export", *map(str, arguments)])


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_runs_newest_checkpoint_and_an_earlier_one(tmp_path, capsys):
    start({**BASE, "optimizer": {"lr": 1e-2}}, tmp_path / "run")
    assert export(tmp_path / "run", "--to", tmp_path / "new") == 0
    assert "step-6" in capsys.readouterr().out
    assert_same(weights(tmp_path / "new"), weights(tmp_path / "run" / "model"))
    assert AutoTokenizer.from_pretrained(tmp_path / "new").encode("12")
    assert export(tmp_path / "run" / "checkpoints" / "step-2", "--to", tmp_path / "old", "--dtype", "bfloat16") == 0
    stored = load_file(tmp_path / "old" / "model.safetensors")
    trained = load_file(tmp_path / "run" / "checkpoints" / "step-2" / "policy" / "model.safetensors")
    assert all(torch.equal(stored[name], trained[name].bfloat16()) for name in stored)
    assert json.loads((tmp_path / "old" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_lora_run_as_an_adapter_or_merged(tmp_path, capsys):
    model, tokenizer = builtin_model("builtin:tiny-digits", 0)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    lora = {"path": str(tmp_path / "base"), "lora": {"r": 4}}
    start({**BASE, "model": lora, "optimizer": {"lr": 1e-2}}, tmp_path / "run")
    assert export(tmp_path / "run", "--to", tmp_path / "merged", "--merge-lora") == 0
    assert_same(weights(tmp_path / "merged"), weights(tmp_path / "run" / "model"))
    assert export(tmp_path / "run", "--to", tmp_path / "adapter") == 0
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    with_adapter = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(with_adapter(tokens).logits, merged(tokens).logits)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.slow
def test_a_quantized_run_is_merged_as_it_was_trained(kind, tmp_path, capsys):
    pytest.importorskip("bitsandbytes")
    model, tokenizer = builtin_model("builtin:tiny-digits", 0)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    options = {"path": str(tmp_path / "base"), "lora": {"r": 4}, "quantize": kind, "dtype": "bfloat16"}
    start({**BASE, "model": options, "optimizer": {"lr": 1e-2}}, tmp_path / "run")
    assert export(tmp_path / "run", "--to", tmp_path / "merged", "--merge-lora") == 0
    assert_same(weights(tmp_path / "merged"), weights(tmp_path / "run" / "model"))
    builtin_model("builtin:tiny-digits", 1)[0].save_pretrained(tmp_path / "base")
    assert export(tmp_path / "run", "--to", tmp_path / "other", "--merge-lora") == 1
    assert "is model.path still the model that the run started from?" in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_without_a_base_to_load_is_refused(tmp_path, capsys):
    start({**BASE, "model": {"lora": {"r": 4}}}, tmp_path / "run")
    assert export(tmp_path / "run", "--to", tmp_path / "adapter") == 2
    assert "add --merge-lora" in capsys.readouterr().err
    assert not list(tmp_path.glob("*adapter*"))
    assert export(tmp_path / "run", "--to", tmp_path / "merged", "--merge-lora") == 0


def test_a_reward_model(tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"{i}>", "chosen": "1", "rejected": "2"}) + "\n" for i in range(8)))
    dataset = {"prompts": {"name": "jsonl", "path": str(pairs)}, "algorithm": {"name": "reward-model"}, "rewards": []}
    start({**BASE, **dataset, "train": {"episodes": 1, "prompts_per_episode": 4}}, tmp_path / "run")
    assert export(tmp_path / "run", "--to", tmp_path / "scores") == 0
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scores")
    assert_same(found.state_dict(), load_reward(tmp_path / "run" / "model"))


def load_reward(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder).state_dict()


class Stop:
    def rlhf_run_start(self, run_folder):
        self.box = ControlBox(run_folder / "control")

    def rlhf_update_end(self, step):
        if step == 3:
            self.box.send(parse_command(["stop"]))


def test_a_stopped_run_has_its_model(tmp_path):
    with pytest.raises(InterruptedRun, match=r"stopped after episode 2 of 3. A checkpoint and the model are written"):
        start({**BASE, "optimizer": {"lr": 1e-2}}, tmp_path / "run", hooks=[Stop()])
    assert summary(tmp_path / "run")["status"] == "interrupted"
    assert summary(tmp_path / "run")["model"] == "model"
    assert export(tmp_path / "run", "--to", tmp_path / "new") == 0
    assert_same(weights(tmp_path / "new"), weights(tmp_path / "run" / "model"))


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


class Fail:
    def rlhf_episode_start(self, episode):
        if episode == 2:
            raise RlhfError("stopped by the test")


def test_a_failed_run_says_how_to_make_its_model(tmp_path):
    with pytest.raises(RlhfError, match="stopped by the test"):
        start(BASE, tmp_path / "run", hooks=[Fail()])
    assert summary(tmp_path / "run")["model"] == f"rlhf export {tmp_path / 'run'} --to DIR"
    assert export(tmp_path / "run", "--to", tmp_path / "new") == 0


def test_a_wanted_stop_is_no_error(monkeypatch, capsys):
    def stopped(**_):
        raise InterruptedRun("stopped after episode 2 of 3", hint="continue with --resume auto")

    monkeypatch.setattr("rlhf_cli.main.cli.main", stopped)
    assert run(["train"]) == 130
    assert capsys.readouterr().err == "stopped after episode 2 of 3\n  -> continue with --resume auto\n"


def test_what_cannot_be_exported_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert export(tmp_path / "empty", "--to", tmp_path / "new") == 2
    assert "contains no complete checkpoint" in capsys.readouterr().err
    start({**BASE, "train": {**TRAIN, "episodes": 1}}, tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert export(tmp_path / "run", "--to", tmp_path / "full") == 2
    assert "already exists" in capsys.readouterr().err
    damaged = tmp_path / "run" / "checkpoints" / "step-2"
    shutil.copytree(damaged, tmp_path / "run" / "checkpoints" / "step-1")
    (damaged / "policy" / "model.safetensors").write_bytes(b"damaged")
    assert export(damaged, "--to", tmp_path / "new") == 2
    assert "files are damaged" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["torch-ddp", "fsdp", "low-level-zero", "gemini"])
def test_lora_under_every_strategy_of_two_processes(tmp_path, strategy):
    file = write_run(tmp_path, {**BASE, "model": {"lora": {"r": 4}}, "strategy": {"name": strategy}})
    done = command("train", file, "--output", tmp_path / "run", "--num-processes", "2", quick_ranks=True)
    assert done.returncode == 0, done.stderr
    assert "kernels" not in done.stderr
    assert export(tmp_path / "run", "--to", tmp_path / "merged", "--merge-lora") == 0
    assert_same(weights(tmp_path / "merged"), weights(tmp_path / "run" / "model"))


def test_a_full_disk_is_told(tmp_path, capsys, monkeypatch):
    start(BASE, tmp_path / "run")

    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("rlhf_models.causal_lm.write_transformers_folder", full)
    assert export(tmp_path / "run", "--to", tmp_path / "new") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
