"""The tool `python`: runs a program written by the policy in the sandbox."""

from __future__ import annotations

import signal
from collections.abc import Callable

from rlhf_containment.sandbox import Limits, missing, run_program
from rlhf_core.errors import ConfigError

from .config import ToolsConfig

_ENDED = {
    "time": "it took too long",
    "processor": "it took too much processor time",
    "memory": "it took too much memory",
    "output": "it printed too much",
}


def python_tool(config: ToolsConfig) -> Callable[[str], str]:
    """Return the function that the policy calls. Raises `ConfigError` if this machine does not support the sandbox."""
    if lacking := missing(config.python_sandbox):
        other = "environment.python_sandbox: landlock" if config.python_sandbox == "namespaces" else "a newer Linux"
        raise ConfigError(lacking, where="environment.functions", hint=f"allow user namespaces here, or use {other}")
    limits = Limits(
        timeout_seconds=config.python_timeout_seconds,
        cpu_seconds=config.python_cpu_seconds,
        memory_bytes=config.python_memory_bytes,
    )

    def python(code: str) -> str:
        """Run a Python program and return its output. It cannot use the network, and nothing is kept between calls.

        Args:
            code: The program. Print what you want to know.
        """
        result = run_program(code, "", limits, mode=config.python_sandbox)
        text = result.output
        # The kernel enforces the CPU limit per process, and the sandbox enforces it over all processes.
        stopped_for = "processor" if result.exit_code == 128 + signal.SIGXCPU else result.stopped_for
        if stopped_for:
            text += f"\n[ended: {_ENDED[stopped_for]}]"
        elif result.exit_code:
            # The last lines of a traceback contain the error.
            text += f"\n[exit code {result.exit_code}]\n{result.error_output[-config.max_output_chars // 2 :]}"
        return _cut(text.strip(), config.max_output_chars) or "[it printed nothing]"

    return python


def _cut(text: str, max_chars: int) -> str:
    """Cut the middle of a text that is too long."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[: max_chars - half]}\n[{len(text) - max_chars} characters left out]\n{text[len(text) - half :]}"
