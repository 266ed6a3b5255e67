"""A reward model that cannot be loaded is an error at once, before anything is built or retried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlhf_core.errors import UserInputError
from rlhf_reward_model.loading import load


@pytest.mark.usefixtures("no_hub")
def test_an_unreachable_hub_is_told_before_any_file_is_asked_for() -> None:
    with pytest.raises(UserInputError, match="reward .model.: .*neither a folder here nor in the cache"):
        load("no-such-owner/no-such-model", torch.float32, None)


@pytest.mark.parametrize("layers", [-1, 10**9])
def test_a_count_of_layers_that_no_model_has_is_refused(tmp_path: Path, layers: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers}))
    with pytest.raises(UserInputError, match="between 0 and 2,000 layers"):
        load(str(tmp_path), torch.float32, None)
