"""Model cards: what they say about a run, and what they never say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from run_files import start

from rlhf_cli.main import run
from rlhf_export.card import write_run_cards
from rlhf_testing.models import builtin_model

pytestmark = pytest.mark.usefixtures("no_plots")
TRAIN = {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 1, "train_batch_size": 4}
BASE: dict[str, Any] = {"train": TRAIN, "checkpoint": {"every_episodes": 1}}


def base_model(folder: Path, card: str | None = None) -> Path:
    model, tokenizer = builtin_model("builtin:tiny-digits", 0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if card is not None:
        (folder / "README.md").write_text(card)
    return folder


def metadata(folder: Path) -> dict[str, Any]:
    return ModelCard.load(folder / "README.md").data.to_dict()


def test_a_finished_run_has_a_card(tmp_path: Path) -> None:
    start({**BASE, "eval": {"num_prompts": 8, "every_episodes": 1}}, tmp_path / "first")
    card = ModelCard.load(tmp_path / "first" / "model" / "README.md")
    data, summary = card.data.to_dict(), json.loads((tmp_path / "first" / "summary.json").read_text())
    assert (data["library_name"], data["pipeline_tag"], data["tags"]) == (
        "transformers",
        "text-generation",
        ["rlhf", "ppo"],
    )
    assert not {"base_model", "license", "datasets"} & data.keys(), "the base has random weights"
    (result,) = data["model-index"][0]["results"]
    assert (result["metrics"][0]["type"], result["metrics"][0]["value"]) == ("exact-match", summary["eval_after"])
    for fact in ("`builtin:tiny-digits`, which has random weights", "| episodes | 2 |", "| updates | 2 |", "kl_coef:"):
        assert fact in card.text
    versions = json.loads((tmp_path / "first" / "manifest.json").read_text())["libraries"]
    assert f"`torch` {versions['torch']}" in card.text and "`rlhf-ppo`" in card.text
    (code,) = [part for part in card.text.split("```") if part.startswith("python\n")]
    compile(code.removeprefix("python\n"), "card", "exec")


def test_an_export_describes_the_checkpoint(tmp_path: Path) -> None:
    start({**BASE, "eval": {"num_prompts": 8, "every_episodes": 1}}, tmp_path / "run")
    first = min((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert run(["export", str(first), "--to", str(tmp_path / "old")]) == 0
    assert "| updates | 1 |" in (tmp_path / "old" / "README.md").read_text()
    (tmp_path / "old" / "README.md").write_text("mine")
    assert run(["export", str(tmp_path / "old"), "--to", str(tmp_path / "new"), "--dtype", "float16"]) == 0
    assert (tmp_path / "new" / "README.md").read_text() == "mine"
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == "float16"


def test_an_adapter_names_its_base(tmp_path: Path) -> None:
    card = "---\nbase_model: acme/large\nlicense: apache-2.0\n---\n"
    start(
        {**BASE, "model": {"path": str(base_model(tmp_path / "secret-place" / "sft", card)), "lora": {"r": 2}}},
        tmp_path / "run",
    )
    for name, library in (("model", "transformers"), ("adapter", "peft")):
        data = metadata(tmp_path / "run" / name)
        assert (data["library_name"], data["base_model"], data["license"]) == (library, "acme/large", "apache-2.0")
        text = (tmp_path / "run" / name / "README.md").read_text()
        assert "`sft`, a local folder, which is based on `acme/large`" in text and "secret-place" not in text
        assert "lora: {r: 2" in text
    assert "lora" in metadata(tmp_path / "run" / "adapter")["tags"]
    assert "A LoRA adapter" in text and "AutoPeftModelForCausalLM" in text


def test_nothing_private_is_published(tmp_path: Path) -> None:
    reward = tmp_path / "private-place" / "my_reward.py"
    reward.parent.mkdir()
    reward.write_text(
        "def brevity(rollouts, *, token: str = '', note: str = ''):\n    return [0.0 for _ in rollouts]\n"
    )
    prompts = tmp_path / "private-place" / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}>", "answer": str(i)}) + "\n" for i in range(8)))
    entry = {"name": f"{reward}:brevity", "token": "sEcReT1", "note": "ask http://10.1.2.3/ as admin"}
    changes = {"prompts": {"name": "jsonl", "path": str(prompts)}, "rewards": [entry]}
    changes |= {
        "model": {"path": str(base_model(tmp_path / "private-place" / "base", "---\nbase_model: /data/me\n---"))}
    }
    start({**BASE, **changes}, tmp_path / "run")
    text = (tmp_path / "run" / "model" / "README.md").read_text()
    for private in ("private-place", "sEcReT1", "10.1.2.3", "/data/me", str(tmp_path), str(Path.cwd())):
        assert private not in text
    for public in ("`jsonl: prompts.jsonl`", "`brevity` (weight 1)", "`base`, a local folder"):
        assert public in text


def test_names_cannot_break_out_of_the_card(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start(BASE, folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["rewards"][0]["label"] = "x` | <script>alert(1)</script>\n---\nlicense: mine\n---\n"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    write_run_cards(folder)
    text = (folder / "model" / "README.md").read_text()
    assert "`x <script>alert(1)</script> --- license: mine ---` (weight 1)" in text
    assert "license" not in metadata(folder / "model")


def test_a_reward_model_has_a_card(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"{i}>", "chosen": "1", "rejected": "2"}) + "\n" for i in range(8)))
    changes = {"prompts": {"name": "jsonl", "path": str(pairs)}, "algorithm": {"name": "reward-model"}, "rewards": []}
    start({**BASE, **changes}, tmp_path / "run")
    assert metadata(tmp_path / "run" / "model")["pipeline_tag"] == "text-classification"
    text = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "A reward model that was trained" in text and "AutoModelForSequenceClassification.from_pretrained" in text


def test_a_failed_card_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(folder: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("rlhf_export.card.write_run_cards", broken)
    start(BASE, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "done"
    assert "the model card was not written: No space left" in caplog.text


def test_the_card_can_be_disabled(tmp_path: Path) -> None:
    start({**BASE, "hooks": {"disable": ["model-card"]}}, tmp_path / "run")
    assert (tmp_path / "run" / "model").is_dir() and not (tmp_path / "run" / "model" / "README.md").exists()
