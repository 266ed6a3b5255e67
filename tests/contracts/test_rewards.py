"""Every installed reward keeps the contract."""

from __future__ import annotations

import pytest

from rlhf_testing.contracts import RewardContract, contracts_for

IN_THEIR_OWN_TESTS = {
    "model": "needs a reward model's folder",
    "http": "needs a server",
    "judge": "needs a judge",
    "reasoning-gym": "needs its own prompts",
}

globals().update(
    contracts_for(
        RewardContract,
        options={
            "regex": {"options": {"pattern": r"\d+"}},
            "format-tags": {"options": {"tags": ["answer"]}},
            "json-schema": {"options": {"inline_schema": {"type": "object"}}},
            "code-execution": {"options": {"allow_execution": True}},
        },
        skip=IN_THEIR_OWN_TESTS,
    )
)
pytest.mark.slow(globals()["TestCodeExecution"])  # each score is a program in the sandbox
