"""Every installed engine keeps the contract."""

from __future__ import annotations

from rlhf_testing.contracts import EngineContract, contracts_for

# vLLM takes its time to start, and http needs a server: the plugins' own tests run the contract.
globals().update(contracts_for(EngineContract, skip={"http": "needs a server", "vllm": "slow"}))
