"""The tool `python`: runs a program that the policy wrote, in the sandbox."""

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
    """The function, as the policy is told of it. Raises `ConfigError` where this machine has no such sandbox."""
    if lacking := missing(config.python_sandbox):
        other = "environment.python_sandbox: landlock" if config.python_sandbox == "namespaces" else "a newer Linux"
        raise ConfigError(lacking, where="environment.functions", hint=f"allow user namespaces here, or use {other}")
    limits = Limits(
        timeout_seconds=config.python_timeout_seconds,
        cpu_seconds=config.python_cpu_seconds,
        memory_bytes=config.python_memory_bytes,
    )

    def python(code: str) -> str:
        """Run a Python program and give back what it prints. It has no network, and nothing is kept between calls.

        Args:
            code: The program. Print what you want to know.
        """
        result = run_program(code, "", limits, mode=config.python_sandbox)
        told = result.output
        # The kernel ends a program at the limit of one process, the sandbox at that of all together.
        stopped_for = "processor" if result.exit_code == 128 + signal.SIGXCPU else result.stopped_for
        if stopped_for:
            told += f"\n[ended: {_ENDED[stopped_for]}]"
        elif result.exit_code:
            # An error's last lines say what it is.
            told += f"\n[exit code {result.exit_code}]\n{result.error_output[-config.max_output_chars // 2 :]}"
        return _cut(told.strip(), config.max_output_chars) or "[it printed nothing]"

    return python


def _cut(text: str, longest: int) -> str:
    """The beginning and the end of a text that is too long."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[: longest - half]}\n[{len(text) - longest} characters left out]\n{text[len(text) - half :]}"
