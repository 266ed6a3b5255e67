"""Options and plug of the ColossalAI strategies: no ColossalAI is imported for them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError
from running import PATIENCE_SECONDS

from rlhf_colossalai.config import DdpConfig, GeminiConfig, LowLevelZeroConfig


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (GeminiConfig, {"precision": "fp32"}, "gemini does not support fp32: use bf16"),
        (GeminiConfig, {"offload_param_frac": 0.5}, "needs shard_param_frac: 1 and offload_optim_frac: 1"),
        (GeminiConfig, {"offload_optim_frac": 1.5}, "less than or equal to 1"),
        (LowLevelZeroConfig, {"stage": 3}, "1 or 2"),
        (DdpConfig, {"stage": 1}, "Extra inputs are not permitted"),
        (DdpConfig, {"timeout_seconds": 0}, "greater than 0"),
    ],
)
def test_bad_options_say_why(config, options, message):
    with pytest.raises(ValidationError) as caught:
        config(**options)
    assert message in str(caught.value)


def test_offload_of_everything_is_allowed():
    config = GeminiConfig(offload_optim_frac=1.0, offload_param_frac=1.0)
    assert config.offload_param_frac == 1.0


@pytest.mark.parametrize("config", [DdpConfig, LowLevelZeroConfig, GeminiConfig])
def test_every_option_is_described(config):
    assert all(field.description for field in config.model_fields.values())


def test_the_plug_loads_neither_torch_nor_colossalai():
    code = "import sys, rlhf_colossalai.plugin as p; print(p.gemini.install); "
    code += "sys.exit(bool({'torch', 'colossalai'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0
    line = "pip install --no-deps colossalai==0.5.0 galore_torch bitsandbytes && pip install einops"
    assert done.stdout.strip() == line
