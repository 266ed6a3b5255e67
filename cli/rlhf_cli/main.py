"""The `rlhf` command: its table of commands, and the conversion of errors to messages and exit codes."""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from rlhf_core.distributed.interrupts import handle_signals
from rlhf_core.errors import InterruptedRun, RlhfError, UserInputError, full_disk

from .lazy import LazyCommand, LazyGroup
from .output import discard_output, echo, ignore_closed_pipe
from .signals import end_with_writer, exit_at_signals, ignore_signals, raise_at_signals

_HELP = """Train language models from feedback.

\b
Examples:
  rlhf train --algorithm ppo            the quickstart: a tiny model learns to sort digits
  rlhf train run.yaml --strategy torch-ddp --num-processes 2
  rlhf plugins list
  rlhf config check run.yaml
"""

COMMANDS = {
    "train": LazyCommand("rlhf_cli.commands.train:train", "Train a model from a run file, or the quickstart."),
    "plugins": LazyCommand("rlhf_cli.commands.plugins:plugins", "List, show, check and create plugins."),
    "config": LazyCommand("rlhf_cli.commands.config:config", "Show and check run files, and their schema."),
    "generate": LazyCommand("rlhf_cli.commands.generate:generate", "Print a trained model's answers to prompts."),
    "eval": LazyCommand("rlhf_cli.commands.evaluate:evaluate", "Score a model's answers to a file of prompts."),
    "version": LazyCommand("rlhf_cli.commands.version:version", "Print the versions of the parts."),
}

cli = LazyGroup("rlhf", COMMANDS, help=_HELP)

_NO_BARS = {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Defaults of environment variables that keep libraries from drawing their own progress bars."""

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point. Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted (once or several times)."""
    if sys.platform != "linux":
        hint = "use Linux, WSL 2 or a Linux container"
        error = UserInputError(f"rlhf runs on Linux only (this is {sys.platform})", hint=hint)
        _print_message(str(error))
        sys.exit(error.exit_code)
    raise_at_signals()
    code = EXIT_FAILED
    atexit.register(lambda: end_with_writer(code))  # handlers that are registered later run before
    atexit.register(ignore_signals)  # runs just before Python removes its handlers
    for name, value in _NO_BARS.items():
        os.environ.setdefault(name, value)
    try:
        code = _run(argv)
        exit_at_signals(code)
    except KeyboardInterrupt:  # a second one, during the handling of the first
        code = EXIT_INTERRUPTED
        exit_at_signals(code)
    sys.exit(code)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command without ending the process. Print errors on stderr, and return the exit code."""
    with handle_signals(signal.default_int_handler):
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    try:
        code = cli.main(args=None if argv is None else list(argv), prog_name="rlhf", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        echo(shown.getvalue(), err=True, newline=False)
        return error.exit_code
    except InterruptedRun as error:
        _print_message(str(error), is_error=False)
        return error.exit_code
    except RlhfError as error:
        _print_message(str(error))
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _print_message("interrupted", is_error=False)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe (`rlhf plugins list | head`), so further output cannot be written.
        discard_output(sys.stdout)
        return EXIT_FAILED
    except Exception as error:  # a bug, ours or a plugin's
        return _report_bug(error)
    return code if isinstance(code, int) else 0


def _report_bug(error: Exception) -> int:
    """Print an error that is not the user's. Its traceback is in the run's log (`error.run_log`), else on stderr."""
    if disk_error := full_disk(error):
        _print_message(str(disk_error))
        return disk_error.exit_code
    log = getattr(error, "run_log", None)
    if log is None:
        echo("".join(traceback.format_exception(error)), err=True, newline=False)
    hint = f"\n  -> the traceback is in {log}" if log is not None else ""
    _print_message(f"{type(error).__name__}: {error}{hint}")
    return EXIT_FAILED


def _print_message(message: str, *, is_error: bool = True) -> None:
    with ignore_closed_pipe(sys.stderr):
        echo(f"error: {message}" if is_error else message, err=True)
