"""Folders of tiny reward models, and samples."""

import sys
from pathlib import Path

import pytest

from rlhf_core.types import Rollout

sys.path.append(str(Path(__file__).parent))

from tiny_reward_models import make_tokenizer


@pytest.fixture
def save(tmp_path):
    """save(model, tokenizer, name): a folder; either may be None."""

    def write(model, tokenizer, name="reward"):
        folder = tmp_path / name
        for part in (model, tokenizer):
            if part is not None:
                part.save_pretrained(folder)
        return str(folder)

    return write


@pytest.fixture
def rollout():
    """rollout(sample_id, completion, tokenizer): a finished answer to a text prompt."""

    def make(sample_id, completion, tokenizer=None, *, prompt="312>", **fields):
        tokenizer = tokenizer or make_tokenizer()
        finished = fields.get("finish_reason", "stop") == "stop"
        ids = tokenizer(completion)["input_ids"] + ([tokenizer.eos_token_id] if finished else [])
        values = {
            "sample_id": sample_id,
            "prompt": prompt,
            "messages": None,
            "prompt_ids": tuple(tokenizer(prompt)["input_ids"]),
            "completion": completion,
            "completion_ids": tuple(ids),
            "logprobs": (-0.5,) * len(ids),
            "answer": None,
            "metadata": {},
            "policy_version": 0,
            "finish_reason": "stop",
        }
        return Rollout(**(values | fields))

    return make
