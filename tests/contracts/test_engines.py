"""Every installed engine keeps the contract."""

from __future__ import annotations

from rlhf_core.testing.contracts import EngineContract, contracts_for

globals().update(contracts_for(EngineContract))
