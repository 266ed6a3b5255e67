"""The critic's start and warm-up, and a lambda that depends on the answer's length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, LlamaConfig

from rlhf_core import train
from rlhf_core.errors import ConfigError, UserInputError
from rlhf_objective import adaptive_lambda, gae
from rlhf_ppo import Critic
from rlhf_ppo.critic_start import CriticStart
from rlhf_testing.models import tiny_model, tiny_tokenizer
from rlhf_testing.runs import tiny_run


def load_critic(path: str, *, policy: Any) -> Critic:
    return CriticStart(path, tiny_tokenizer()).load(policy)


def reward_model(folder: Path, *, num_labels: int = 1, vocab_size: int | None = None) -> Any:
    config: Any = LlamaConfig.from_dict({**tiny_model().config.to_dict(), "architectures": None})
    config.num_labels, config.pad_token_id = num_labels, 0
    config.vocab_size = vocab_size or config.vocab_size
    torch.manual_seed(4)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model.eval()


def test_the_head_of_a_reward_model_becomes_the_value_head(tmp_path: Path) -> None:
    model = reward_model(tmp_path)
    critic = load_critic(str(tmp_path), policy=tiny_model()).eval()
    ids = torch.tensor([[4, 5, 6, 7]])
    with torch.no_grad():
        score = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, 0]
        assert float(critic(ids, torch.ones_like(ids))[0, -1]) == pytest.approx(float(score), abs=1e-6)


def test_a_causal_lm_and_an_earlier_critic(tmp_path: Path) -> None:
    policy = tiny_model()
    policy.save_pretrained(tmp_path / "lm")
    tiny_tokenizer().save_pretrained(tmp_path / "lm")
    ids = torch.tensor([[4, 5, 6]])
    assert not load_critic(str(tmp_path / "lm"), policy=policy)(ids, torch.ones_like(ids)).any()
    earlier = Critic.from_pretrained(policy)
    torch.nn.init.normal_(earlier.value_head.weight)
    earlier.save_pretrained(tmp_path / "critic")
    loaded = load_critic(str(tmp_path / "critic"), policy=policy)
    torch.testing.assert_close(loaded(ids, torch.ones_like(ids)), earlier(ids, torch.ones_like(ids)))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_labels": 3}, "cannot load"), ({"vocab_size": 8}, "the tokenizer has 16 tokens, the model 8")],
)
def test_a_model_that_is_no_critic_is_refused(options: dict[str, int], message: str, tmp_path: Path) -> None:
    reward_model(tmp_path, **options)
    with pytest.raises(UserInputError, match=rf"algorithm\.critic\.path: {message}"):
        load_critic(str(tmp_path), policy=tiny_model())


def test_a_critic_with_other_tokens_is_refused_before_the_run(tmp_path: Path) -> None:
    reward_model(tmp_path)
    tiny_tokenizer("zyxw").save_pretrained(tmp_path)
    with pytest.raises(UserInputError, match=r"algorithm\.critic\.path: .* has a different tokenizer than the policy"):
        train(run_of({"critic": {"path": str(tmp_path)}}), dry_run=True)
    with pytest.raises(UserInputError, match=r"algorithm\.critic\.path: "):
        train(run_of({"critic": {"path": str(tmp_path / "missing")}}), dry_run=True)


def test_a_reward_model_without_its_head_is_refused(tmp_path: Path) -> None:
    reward_model(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    save_file({name: each for name, each in load_file(file).items() if "score" not in name}, file, {"format": "pt"})
    with pytest.raises(UserInputError, match=r"algorithm\.critic\.path: the files of .* lack score"):
        load_critic(str(tmp_path), policy=tiny_model())


@pytest.mark.parametrize("seed", range(4))
def test_gae_with_a_lambda_per_row_is_that_of_each_row(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(5, 30, generator=draw), torch.randn(5, 30, generator=draw)
    mask = torch.arange(30) < torch.randint(1, 31, (5, 1), generator=draw)
    lam = adaptive_lambda(mask.sum(-1), 0.1)
    together = gae(rewards, values, mask, 0.99, lam)
    for row, length in enumerate(mask.sum(-1).tolist()):
        own = max(0.0, 1 - 1 / (0.1 * length))
        assert float(lam[row]) == pytest.approx(own)
        alone = gae(rewards[row : row + 1], values[row : row + 1], mask[row : row + 1], 0.99, own)
        torch.testing.assert_close(together.advantages[row], alone.advantages[0])
        torch.testing.assert_close(together.returns[row], alone.returns[0])


def run_of(changes: dict[str, Any], episodes: int = 3) -> dict[str, Any]:
    return tiny_run(
        {
            "algorithm": {"name": "ppo", **changes},
            "rewards": [{"name": "length", "target_tokens": 1, "shape": "at-most"}],
            "engine": {"max_new_tokens": 6},
            "optimizer": {"lr": 1e-3, "critic_lr": 1e-2},
            "train": {"episodes": episodes, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4},
            "checkpoint": {"every_episodes": 1, "keep": 9},
        }
    )


@pytest.mark.parametrize(
    "extra", [{}, {"kl_controller": "adaptive", "entropy_target": 1.0}], ids=["plain", "controllers"]
)
def test_only_the_critic_learns_while_it_warms_up(extra: dict[str, Any], tmp_path: Path) -> None:
    result = train(run_of({"critic_warmup_episodes": 2, "value_clip": None, **extra}), output=tmp_path / "run")
    assert result is not None and result.summary["status"] == "done"
    warm, trained = result.metrics[:4], result.metrics[4:]
    for line in warm:
        assert line["policy/skipped"] == 1.0 and line["policy/grad_norm"] == 0.0 and line["critic/grad_norm"] > 0
        assert "loss/policy" not in line and "policy/entropy" not in line and line["loss/value"] > 0
        assert abs(line["kl/mean"]) < 1e-5, "the policy is still its start"
    for line in trained:
        assert "policy/skipped" not in line and "loss/policy" in line and line["policy/grad_norm"] > 0
    assert len({line["kl/coef"] for line in warm}) == 1


@pytest.mark.slow
def test_a_resume_continues_the_warm_up(tmp_path: Path) -> None:
    whole = train(run_of({"critic_warmup_episodes": 2}), output=tmp_path / "whole")
    train(run_of({"critic_warmup_episodes": 2}, episodes=1), output=tmp_path / "part")
    part = train(run_of({"critic_warmup_episodes": 2}), output=tmp_path / "part", resume="auto")
    assert whole is not None and part is not None
    for one, other in zip(whole.metrics, part.metrics, strict=True):
        assert one["loss/value"] == other["loss/value"]
        assert one.get("loss/policy") == other.get("loss/policy")


def test_a_run_starts_its_critic_from_a_reward_model(tmp_path: Path) -> None:
    reward_model(tmp_path / "rm")
    changes = {"critic": {"path": str(tmp_path / "rm")}, "lam_alpha": 0.5, "critic_lam": 1.0}
    result = train(run_of(changes), output=tmp_path / "run")
    assert result is not None and result.summary["status"] == "done"
    assert all(0 <= line["advantage/lambda_mean"] < 1 for line in result.metrics)
    assert abs(result.metrics[0]["value/mean"]) > 1e-4, "a new head would be 0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lam": 0.9, "lam_alpha": 0.05}, "lam_alpha replaces lam"),
        ({"critic_warmup_episodes": -1}, r"critic_warmup_episodes: should be greater than or equal to 0"),
        ({"critic": {"pth": "x"}}, r"critic\.pth: unknown key; did you mean \"path\""),
    ],
)
def test_wrong_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(run_of(changes), dry_run=True)
