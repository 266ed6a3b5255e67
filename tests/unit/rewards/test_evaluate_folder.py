"""`rlhf eval` scores answers under the rewards' own policies, as far as it can without a run folder."""

import pytest

from rlhf_core.config.problems import Problems
from rlhf_core.config.resolve import resolve_reward
from rlhf_core.entry.inference import evaluate_folder
from rlhf_core.types import SamplingParams

pytest.importorskip("rlhf_hf")
REWARD = "def digits(rollouts, *, factor: float = 1.0) -> list[float]:\n    return [factor for _ in rollouts]\n"


@pytest.mark.parametrize("policy", [{}, {"cache": True}, {"cache": True, "isolate": True}], ids=str)
def test_a_cached_reward_is_scored_without_its_cache(tmp_path, policy):
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "31>"}\n{"prompt": "20>"}\n{"prompt": "77>"}\n')
    problems = Problems()
    entry = {"name": f"{tmp_path / 'mine.py'}:digits", "factor": 2.5, **policy}
    reward = resolve_reward(entry, problems, "reward")
    problems.raise_if_any("test")
    scores = evaluate_folder(
        "builtin:tiny-digits",
        str(tmp_path / "prompts.jsonl"),
        [reward],
        num_prompts=2,
        sampling=SamplingParams(max_new_tokens=3, greedy=True),
        engine="hf",
        device="cpu",
    )
    assert scores == {"digits": 2.5, "weighted_score": 2.5, "num_prompts": 2.0, "num_scored": 2.0}
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix) == ["mine.py", "prompts.jsonl"]
