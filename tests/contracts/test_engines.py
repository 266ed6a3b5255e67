"""Every installed engine keeps the contract."""

from __future__ import annotations

from rlhf_testing.contracts import EngineContract, contracts_for

# vLLM takes its time to start: the plugin's own slow tests run the contract.
globals().update(contracts_for(EngineContract, skip={"vllm": "slow"}))
