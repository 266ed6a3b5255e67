"""Strategy components of this distribution. Imports only pydantic and core, and ColossalAI when a run starts."""

from rlhf_core.components import Component

from .config import DdpConfig, GeminiConfig, LowLevelZeroConfig

_REQUIRES = ("colossalai", "galore_torch", "bitsandbytes", "einops")
# ColossalAI 0.5.0 pins old versions of torch and transformers that its boosters do not need.
_INSTALL = "pip install --no-deps colossalai==0.5.0 galore_torch bitsandbytes && pip install einops"

ddp = Component(
    summary="Full model in every process, gradients are averaged (PyTorch DistributedDataParallel)",
    config=DdpConfig,
    build="rlhf_colossalai.ddp:DdpStrategy",
)

low_level_zero = Component(
    summary="Optimizer state (stage 1) and gradients (stage 2) sharded over processes (LowLevelZeroPlugin)",
    config=LowLevelZeroConfig,
    build="rlhf_colossalai.low_level_zero:LowLevelZeroStrategy",
    requires=_REQUIRES,
    install=_INSTALL,
    optimizers=("adamw",),  # with the interface of HybridAdam
)

gemini = Component(
    summary="Weights, gradients and optimizer state sharded in chunks, with offload (GeminiPlugin), in bf16 or fp16",
    config=GeminiConfig,
    build="rlhf_colossalai.gemini:GeminiStrategy",
    requires=_REQUIRES,
    install=_INSTALL,
    optimizers=("adamw",),  # with the interface of HybridAdam
)
