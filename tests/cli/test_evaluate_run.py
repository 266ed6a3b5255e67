"""`rlhf eval` scores answers under the rewards' own policies, as far as it can without a run folder."""

import pytest

from rlhf_cli.answers import evaluate_run

pytest.importorskip("rlhf_hf")
REWARD = "def digits(rollouts, *, factor: float = 1.0) -> list[float]:\n    return [factor for _ in rollouts]\n"


@pytest.mark.parametrize("policy", [{}, {"isolate": True}], ids=str)
def test_a_reward_is_scored_under_its_own_policy(tmp_path, policy):
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "31>"}\n{"prompt": "20>"}\n{"prompt": "77>"}\n')
    entry = {"name": f"{tmp_path / 'mine.py'}:digits", "factor": 2.5, **policy}
    source = {"name": "jsonl", "path": str(tmp_path / "prompts.jsonl")}
    scores = evaluate_run(
        {
            "model": {"path": "builtin:tiny-digits", "device": "cpu"},
            "prompts": source,
            "eval": {"prompts": source, "num_prompts": 2},
            "rewards": [entry],
            "engine": {"max_new_tokens": 3},
        }
    )
    assert (scores["eval/digits"], scores["eval/num_prompts"], scores["eval/num_scored"]) == (2.5, 2.0, 2.0)
    assert scores["eval/weighted_score"] == 2.5
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix) == ["mine.py", "prompts.jsonl"]
