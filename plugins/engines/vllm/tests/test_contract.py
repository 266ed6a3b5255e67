"""The contract of engines, with the real vLLM."""

from __future__ import annotations

import pytest

from rlhf_testing.contracts import EngineContract

pytest.importorskip("vllm", reason="needs vLLM: make setup-vllm")
pytestmark = pytest.mark.slow


class TestOwnProcess(EngineContract):
    plugin = "vllm"
    options = {"kv_cache_bytes": 64 * 1024**2}
    # vLLM reports the tokens that min-p keeps only with top_k.
    option_values = {**EngineContract.option_values, "min_p": 0.0}
    hidden_size = 64  # the CPU build's attention wants heads of 32 at least
