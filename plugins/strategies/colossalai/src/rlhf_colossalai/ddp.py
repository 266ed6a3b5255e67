"""`ddp`: data parallelism under the name and options that users of ColossalAI know."""

from __future__ import annotations

from rlhf_strategies import TorchDdpStrategy

from .config import DdpConfig


class DdpStrategy(TorchDdpStrategy):
    """The strategy `torch-ddp` of rlhf-torch, as `ddp`. The numbers are the same."""

    _config: DdpConfig
