"""Settings that cannot work are explained before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_core.config.resolve import resolve
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_testing.runs import tiny_run
from rlhf_testing.samples import make_group

ALONE = {"train": {"samples_per_prompt": 1}}


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ({"name": "grpo"}, ALONE, r"train\.samples_per_prompt: is 1, but grpo compares .*a group of one"),
        ({"name": "rloo"}, ALONE, r"train\.samples_per_prompt: is 1, but rloo compares"),
        ({"name": "reinforce++", "baseline": "group"}, ALONE, r"is 1, but reinforce\+\+ compares"),
        ({"name": "reinforce++", "advantage": "gdpo"}, ALONE, r"is 1, but reinforce\+\+ compares .*\(gdpo\)"),
        ({"name": "ppo", "advantage": "pass-at-k"}, ALONE, r"is 1, but ppo compares .*\(pass_at_k\)"),
        ({"name": "reinforce++", "dynamic_sampling": True}, ALONE, r"dynamic_sampling: rejects every group"),
        ({"name": "grpo"}, {"optimizer": {"critic_lr": 1e-4}}, r"optimizer\.critic_lr: grpo does not train a critic"),
        ({"name": "grpo", "overlong_buffer_tokens": 9}, {}, r"overlong_buffer_tokens: is 9, more than"),
        ({"name": "grpo", "clip_eps": 1.5}, {}, r"clip_eps: should be less than 1"),
        ({"name": "grpo", "importance_token_range": [2, 1]}, {}, r"needs low < high, got \[2\.0, 1\.0\]"),
        ({"name": "grpo", "policy_loss": {"name": "clip", "dual_clip": 0.5}}, {}, r"dual_clip: .*greater than 1"),
        (
            {"name": "grpo", "policy_loss": {"name": "clip", "tau": 1}},
            {},
            r"policy_loss\.tau: unknown key \(known: name, clip_eps, clip_eps_high, dual_clip\)",
        ),
        ({"name": "grpo", "policy_loss": {"clip_eps": 0.1}}, {}, r"policy_loss: needs a `name`"),
        (
            {"name": "grpo", "clip_eps": 0.1, "policy_loss": {"name": "clip", "clip_eps": 0.2}},
            {},
            r"algorithm\.clip_eps: is set in policy_loss, too",
        ),
        (
            {"name": "grpo", "advantage": "leave-one-out", "divide_by_std": False},
            {},
            r'divide_by_std: advantage estimator "leave-one-out" .* does not have this option',
        ),
    ],
)
def test_wrong_settings(algorithm: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        train(tiny_run({"algorithm": algorithm, **changes}), dry_run=True)
    assert error.value.exit_code == 2


def test_an_unknown_loss_is_an_error_with_a_guess() -> None:
    with pytest.raises(ConfigError, match=r'algorithm\.policy_loss: no policy loss "clib" is .*did you mean "clip"'):
        train(tiny_run({"algorithm": {"name": "grpo", "policy_loss": "clib"}}), dry_run=True)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"name": "grpo", "policy_loss": {"name": "clip", "clip_epz": 0.1}},
            r'algorithm\.policy_loss\.clip_epz: unknown key; did you mean "clip_eps"',
        ),
        ({"name": "grpo", "policy_loss": {"name": "clib"}}, r'policy_loss\.name: no policy loss .*did you mean "clip"'),
        ({"name": "grpo", "advantage": "ranks"}, r'algorithm\.advantage: no advantage estimator "ranks" is installed'),
        ({"name": "rloo", "advantage": "leave-one-aut"}, r'did you mean "leave-one-out"'),
        ({"name": "reinforce++", "advantage": {"name": "reward-to-go", "gama": 1}}, r'did you mean "gamma"'),
        ({"name": "reinforce++", "baseline": "group", "gamma": 0.9}, r"algorithm\.gamma: .*does not have this option"),
        ({"name": "grpo", "policy_loss": {"name": "cispo"}, "clip_eps": 2.0}, r"algorithm\.clip_eps: should be less"),
    ],
)
def test_the_check_of_a_run_file_looks_into_functions(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(tiny_run({"algorithm": algorithm}))


def test_all_problems_of_functions_are_told_together() -> None:
    algorithm = {"name": "grpo", "policy_loss": {"name": "clip", "clip_epz": 0.1}, "advantage": "ranks"}
    with pytest.raises(ConfigError, match=r"3 problems") as error:
        resolve(tiny_run({"algorithm": algorithm, "train": {"sead": 1}}))
    for part in ("train.sead", "algorithm.policy_loss.clip_epz", "algorithm.advantage"):
        assert part in str(error.value)


def test_turns_are_not_credited_where_only_their_sum_is_known() -> None:
    run = tiny_run({"algorithm": {"name": "grpo", "advantage": "gigpo"}, "reward_scaling": {"clip": [0.0, 1.0]}})
    assert resolve(run), "a single answer is a single turn"
    run |= {"environment": {"name": "guess-number"}, "prompts": None, "rewards": None}
    with pytest.raises(ConfigError, match=r"algorithm\.advantage: gigpo credits each turn"):
        resolve(run)
    run["algorithm"] = {"name": "grpo"}
    assert resolve(run)


def test_turn_gamma_needs_an_estimator_that_has_it() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.turn_gamma: .*does not have this option"):
        resolve(tiny_run({"algorithm": {"name": "grpo", "turn_gamma": 0.9}}))
    for name in ("grpo", "rloo", "reinforce++"):
        assert resolve(tiny_run({"algorithm": {"name": name, "turn_gamma": 0.9, "advantage": "turn-to-go"}}))


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


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "grpo", "reference_every": 2, "imitation": {}, "preference": {}},
        {"name": "online-dpo"},
        {"name": "rejection-sampling"},
        {"name": "ppo", "lam_alpha": 0.05},
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_a_resolved_run_file_is_valid_again(algorithm: dict[str, Any]) -> None:
    """As other processes and a resume read it, with every option."""
    resolved = resolve(tiny_run({"algorithm": algorithm})).to_mapping()
    assert resolve(resolved).to_mapping() == resolved


def test_the_path_of_records_is_absolute_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    algorithm = resolve(tiny_run({"algorithm": {"name": "grpo", "records": {"path": "texts.jsonl"}}})).algorithm
    assert algorithm.config.records.path == str(tmp_path / "texts.jsonl")  # type: ignore[attr-defined]
    algorithm = resolve(tiny_run({"algorithm": {"name": "ppo", "ptx_path": "texts.jsonl"}})).algorithm
    assert algorithm.config.ptx_path == str(tmp_path / "texts.jsonl")  # type: ignore[attr-defined]


def test_answers_that_are_compared_fit_into_an_update() -> None:
    sizes = {"samples_per_prompt": 4, "prompts_per_episode": 4, "train_batch_size": 2}
    with pytest.raises(ConfigError, match=r"preference: compares the 4 answers to a prompt, of which an update has o"):
        train(tiny_run({"algorithm": {"name": "online-dpo"}, "train": sizes}), dry_run=True)


def test_a_policy_loss_that_is_off_has_no_weights() -> None:
    late = {"transport": {"name": "ray", "max_staleness": 1}}
    algorithms = [resolve(tiny_run({"algorithm": {"name": name}, **late})).algorithm for name in ("grpo", "online-dpo")]
    caps = [each.config.importance_cap for each in algorithms]  # type: ignore[attr-defined]
    assert caps == [2.0, None]
