"""The transport `local`, with which every other one is compared, keeps the contract."""

from __future__ import annotations

from rlhf_core.testing.contracts import TransportContract


class TestLocal(TransportContract):
    plugin = "local"
