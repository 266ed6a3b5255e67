"""Builds the model of a run without weights, on torch's meta device, for estimates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import ModelConfig
from rlhf_core.errors import UserInputError
from rlhf_core.models import model_kind_for
from rlhf_models import CausalLM, check_hub

if TYPE_CHECKING:
    from torch import nn


def meta_model(config: ModelConfig) -> nn.Module:
    """Build `model.path` without weights, frozen if an adapter is trained. Built-in models are tiny and have weights.

    Raises:
        UserInputError: if the model's config cannot be read.
    """
    return _meta_model(config).requires_grad_(config.lora is None)


def _meta_model(config: ModelConfig) -> nn.Module:
    import torch

    kind: Any = model_kind_for(config)
    auto_class = vars(type(kind)).get("auto_class") if isinstance(kind, CausalLM) else None
    if config.path.startswith("builtin:") or auto_class is None:  # built in code, or with an unknown config
        return kind.load(dtype=torch.float32, seed=0, tokenizer=None)  # type: ignore[no-any-return]
    import transformers
    from transformers import AutoConfig

    path = config.path
    adapter = Path(path) / "adapter_config.json"
    if adapter.exists():
        path = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    check_hub(path, where="model.path")
    try:
        sizes = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        with torch.device("meta"):
            build = getattr(transformers, auto_class).from_config
            model: nn.Module = build(sizes, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # the error's class depends on the model's own code
        raise UserInputError(
            f"its config cannot be read: {str(error).splitlines()[0]}", where=f"model.path {path}"
        ) from error
    return model
