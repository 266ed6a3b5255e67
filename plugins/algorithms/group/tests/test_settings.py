"""Settings that cannot work are explained before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_core.errors import ConfigError, PluginError, RlhfError
from rlhf_core.testing.runs import tiny_run
from rlhf_core.testing.samples import make_group

ALONE = {"train": {"samples_per_prompt": 1}}


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ({"name": "grpo"}, ALONE, r"train\.samples_per_prompt: is 1, but grpo compares .*a group of one"),
        ({"name": "rloo"}, ALONE, r"train\.samples_per_prompt: is 1, but rloo compares"),
        ({"name": "reinforce++", "baseline": "group"}, ALONE, r"is 1, but reinforce\+\+ compares"),
        ({"name": "reinforce++", "dynamic_sampling": True}, ALONE, r"dynamic_sampling: refuses every group"),
        ({"name": "grpo"}, {"optimizer": {"critic_lr": 1e-4}}, r"optimizer\.critic_lr: grpo has no critic"),
        ({"name": "grpo", "overlong_buffer_tokens": 9}, {}, r"overlong_buffer_tokens: is 9, more than"),
        ({"name": "grpo", "clip_eps": 1.5}, {}, r"clip_eps must be below 1"),
        ({"name": "grpo", "importance_token_range": [2, 1]}, {}, r"needs low < high, got \[2\.0, 1\.0\]"),
        ({"name": "grpo", "policy_loss": {"name": "clip", "dual_clip": 0.5}}, {}, r"dual_clip: .*greater than 1"),
        ({"name": "grpo", "policy_loss": {"name": "clip", "tau": 1}}, {}, r"tau: Extra inputs"),
        ({"name": "grpo", "policy_loss": {"clip_eps": 0.1}}, {}, r"policy_loss: needs a `name`"),
        (
            {"name": "grpo", "clip_eps": 0.1, "policy_loss": {"name": "clip", "clip_eps": 0.2}},
            {},
            r"algorithm\.clip_eps: is given in algorithm\.policy_loss, too",
        ),
        (
            {"name": "grpo", "advantage": "leave-one-out", "divide_by_std": False},
            {},
            r'divide_by_std: advantage estimator "leave-one-out" .* has no such option',
        ),
    ],
)
def test_wrong_settings(algorithm: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        train(tiny_run({"algorithm": algorithm, **changes}), dry_run=True)
    assert error.value.exit_code == 2


def test_an_unknown_loss_is_an_error_with_a_guess() -> None:
    with pytest.raises(PluginError, match=r'no policy loss "clib" is installed'):
        train(tiny_run({"algorithm": {"name": "grpo", "policy_loss": "clib"}}), dry_run=True)


def test_one_answer_a_prompt_is_fine_where_the_whole_episode_is_the_baseline() -> None:
    assert train(tiny_run({"algorithm": {"name": "reinforce++"}, **ALONE}), dry_run=True) is None


def test_dynamic_sampling_keeps_groups_whose_scores_differ(algorithm: Callable[..., Any]) -> None:
    made = algorithm("grpo", {"dynamic_sampling": True}, score=lambda raw: raw["a"] + 2 * raw["b"])

    def group(*rewards: dict[str, float]) -> Any:
        whole = make_group(0, len(rewards))
        items = [replace(item, rewards=each) for item, each in zip(whole.items, rewards, strict=True)]
        return replace(whole, items=tuple(items))

    assert made.keep(group({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}))
    assert not made.keep(group({"a": 2.0, "b": 0.0}, {"a": 0.0, "b": 1.0})), "both score 2"
    assert algorithm("grpo").keep(group({"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0})), "off by default"


def test_dynamic_sampling_that_never_fills_ends_with_its_reason(tmp_path: Path) -> None:
    """No answer of an untrained model is right, so every group is refused."""
    run = tiny_run({"algorithm": {"name": "grpo", "dynamic_sampling": True, "kl_coef": 0}})
    run["rewards"] = [{"name": "exact-match", "weight": 0.0}]
    with pytest.raises(RlhfError, match=r"dynamic sampling: episode 0 drew \d+ prompts that were all refused") as error:
        train(run, output=tmp_path / "run")
    assert "more samples_per_prompt" in str(error.value)
