"""Warnings of peft and bitsandbytes that users cannot act on."""

from __future__ import annotations

import logging
import warnings


def silence_peft() -> None:
    """Suppress warnings about the implementation of peft, which users of this framework cannot change.

    They are bitsandbytes' about missing kernels, which we never use, and transformers' about a property that peft 0.21
    still reads, and transformers 5.23 renamed.
    """
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
