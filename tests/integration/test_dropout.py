"""Dropout of an adapter is off where ratios are compared, and ordinary where a text is learnt."""

import pytest
import torch
from run_files import lines, start

LORA = {"r": 4, "alpha": 64.0, "dropout": 0.5}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_updates_see_the_policy_that_sampled(tmp_path, algorithm, checkpointing):
    changes = {
        "rewards": [{"name": "length", "target_tokens": 2}],
        "model": {"lora": LORA, "gradient_checkpointing": checkpointing},
        "algorithm": {"name": algorithm},
        "optimizer": {"lr": 0.02},
        "train": {"episodes": 2},
    }
    folder = start(changes, tmp_path / "run").run_folder
    rows = lines(folder / "metrics.jsonl")
    gaps = [row["rollout/logprob_gap_max"] for row in rows if "rollout/logprob_gap_max" in row]
    assert gaps and max(gaps) < 1e-4


def test_a_text_is_learnt_with_the_dropout_that_was_asked_for(tmp_path, monkeypatch):
    seen = []
    dropout = torch.nn.Dropout.forward

    def noted(self, values):
        seen.append((self.p, self.training))
        return dropout(self, values)

    monkeypatch.setattr(torch.nn.Dropout, "forward", noted)
    changes = {"algorithm": {"name": "sft"}, "model": {"lora": LORA}, "train": {"episodes": 1, "samples_per_prompt": 1}}
    start(changes, tmp_path / "run")
    assert (0.5, True) in seen
