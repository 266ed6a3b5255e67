"""The build this is: the CPU's, unless the environment says `FAKE_VLLM_SLEEPS`."""

import os
from types import SimpleNamespace

current_platform = SimpleNamespace(
    is_cpu=lambda: True, is_sleep_mode_available=lambda: "FAKE_VLLM_SLEEPS" in os.environ
)
