"""`model/` is a plain transformers folder that does what the trained policy does."""

import errno
import json

import pytest
import torch
from run_files import start
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_cli.main import run as rlhf
from rlhf_core.errors import CheckpointError
from rlhf_testing.models import save_tiny_model

pytestmark = pytest.mark.usefixtures("no_plots")
PROMPTS = ["312>", "5>", "0987>"]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def greedy(folder, prompt, limit):
    model, tokenizer = load(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(ids, do_sample=False, max_new_tokens=limit, attention_mask=torch.ones_like(ids))
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(4, 14)[None]).logits


@pytest.mark.parametrize("prompt", PROMPTS)
def test_transformers_and_rlhf_generate_say_the_same(run, capsys, prompt):
    assert rlhf(["generate", "--model", str(run / "model"), "--prompt", prompt, "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out.rstrip("\n").endswith(greedy(run / "model", prompt, 6))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return start({"train": TRAIN}, tmp_path_factory.mktemp("plain") / "run").run_folder


TRAIN = {"episodes": 2, "prompts_per_episode": 8, "train_batch_size": 4}


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    base = save_tiny_model(folder / "base")
    changes = {
        "model": {"path": str(base), "lora": {"r": 2}},
        "optimizer": {"lr": 0.05},
        "train": TRAIN,
    }
    return base, start(changes, folder / "run").run_folder


def test_training_changed_the_model(run, tmp_path):
    untrained = start({"train": TRAIN, "optimizer": {"lr": 0}}, tmp_path / "untrained").run_folder
    assert not torch.equal(logits(load(run / "model")[0]), logits(load(untrained / "model")[0]))


def test_a_lora_run_ends_in_the_base_with_its_adapter_merged(lora):
    from peft import PeftModel

    base, folder = lora
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder / "adapter").eval()
    merged = logits(load(folder / "model")[0])
    assert torch.allclose(logits(adapted), merged, atol=1e-5)
    with adapted.disable_adapter():
        off = logits(adapted)
    assert torch.equal(off, logits(load(base)[0]))
    assert (merged - off).abs().max() > 1e-3


def test_a_run_from_an_adapter_starts_at_the_merged_model(lora, tmp_path):
    _, folder = lora
    (folder / "adapter" / "tokenizer.json").write_bytes((folder / "model" / "tokenizer.json").read_bytes())
    (folder / "adapter" / "tokenizer_config.json").write_bytes((folder / "model/tokenizer_config.json").read_bytes())
    changes = {"model": {"path": str(folder / "adapter")}, "optimizer": {"lr": 0}, "train": TRAIN}
    again = start(changes, tmp_path / "again").run_folder
    assert torch.allclose(logits(load(again / "model")[0]), logits(load(folder / "model")[0]), atol=1e-5)


def test_the_reference_of_a_lora_run_is_its_start(lora):
    _, folder = lora
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first["kl/mean"] == pytest.approx(0, abs=1e-6)


def test_fine_tuning_learns_and_eval_scores_the_folder(tmp_path, capsys):
    changes = {
        "algorithm": {"name": "sft"},
        "prompts": {"name": "sort-digits", "num_digits": 2, "size": 100},
        "optimizer": {"lr": 1e-2},
        "eval": {"num_prompts": 10, "every_episodes": None},
        "train": {"episodes": 12, "prompts_per_episode": 90, "train_batch_size": 45},
    }
    result = start(changes, tmp_path / "sft")
    losses = [line["loss/policy"] for line in result.metrics]
    assert losses[-1] < 0.5 * losses[0]
    assert "eval/loss/policy" in result.metrics[-1]
    assert result.summary["eval_before"] is not None
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}0>", "answer": f"0{i}"}) + "\n" for i in range(10)))
    arguments = ["--model", str(result.run_folder / "model"), "--prompts", str(prompts), "--max-new-tokens", "4"]
    assert rlhf(["eval", *arguments]) == 0
    assert "exact-match" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_reward_is_what_is_learnt_from(tmp_path, shuffled):
    """The control: the same rewards handed to the wrong answers teach nothing."""
    path = tmp_path / "reward.py"
    path.write_text(
        "def share_of_nines(rollouts):\n"
        "    true = [r.completion.count('9') / max(1, len(r.completion_ids)) for r in rollouts]\n"
        f"    return true[1:] + true[:1] if {shuffled} else true\n"
    )
    changes = {
        "rewards": [{"name": f"{path}:share_of_nines", "batch_size": 64}],
        "optimizer": {"lr": 2e-3},
        "algorithm": {"name": "ppo", "kl_coef": 0.0},
        "train": {"episodes": 30, "prompts_per_episode": 64, "train_batch_size": 64},
    }
    rewards = [line["reward/mean"] for line in start(changes, tmp_path / "run").metrics]
    rise = sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5
    assert rise < 0.15 if shuffled else rise > 0.3


@pytest.fixture
def no_room(monkeypatch):
    """A disk that has no room for the parts of a checkpoint."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rlhf_core.training.checkpoint_saver.save_run_state", full)


def test_the_model_is_written_where_the_last_checkpoint_has_no_room(tmp_path, no_room):
    folder = tmp_path / "run"
    with pytest.raises(CheckpointError, match="the disk is full. The model after update 4 is written") as caught:
        start({}, folder)
    assert caught.value.exit_code == 1
    assert str(folder / "model") in caught.value.hint
    load(folder / "model")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["model"]) == ("failed", "model")
    assert not list((folder / "checkpoints").glob("*"))


def test_where_neither_has_room_the_error_says_both(tmp_path, no_room, monkeypatch):
    def full(*_, **__):
        raise CheckpointError("the model cannot be written: no room", where="model")

    monkeypatch.setattr("rlhf_models.causal_lm.CausalLM.save_policy", full)
    with pytest.raises(CheckpointError, match="the disk is full, and the model cannot be written: no room"):
        start({}, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["model"]) == ("failed", None)
