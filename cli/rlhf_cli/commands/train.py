"""`rlhf train`: train from a run file or the quickstart, changed by flags."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from rlhf_core.util.redact import PrintableFormatter, printable

from ..output import echo
from ..quickstart import find_quickstart, trainer_of
from ..run_arguments import RunArguments, report_dropped, run_options
from ..signals import drop_signals

if TYPE_CHECKING:
    from rlhf_core.entry.train import TrainResult
    from rlhf_core.wiring.inputs import RunInputs

Verbosity = Literal["quiet", "normal", "verbose"]

_PROGRESS = "rlhf_cli.progress:RunProgress"
_QUIET = "rlhf_cli.progress:quiet_progress"
"""Progress is passed by import path, not as an object, so that another process can create it."""

_SHOWN_IDS = 6
MAPPING_SOURCE = "run file"
"""The location in core's errors for a run that was passed as a mapping."""

_HELP = """Train a model: sample answers, score them, update the policy.

Without RUN.yaml, the quickstart runs: a tiny model is warm-started on sorting digits, then learns by PPO on a CPU in
about two minutes. With --environment, that environment's own quickstart runs, if it has one. A run file must name a
model, and prompts or an environment. All else has defaults. Flags override the run file, and --set overrides flags.

\b
Examples:
  rlhf train --algorithm ppo --strategy gemini
  rlhf train run.yaml --output runs/first
  rlhf train run.yaml --reward exact-match --reward ./my_reward.py:brevity:0.1
  rlhf train run.yaml --strategy torch-ddp --num-processes 2 --set train.episodes=10
  rlhf train --environment guess-number
  rlhf train --output runs/first --resume auto
  rlhf train --from runs/first --output runs/again --set train.seed=1
"""


class _Folder(click.Path):
    """A folder's path. An empty one, such as an unset shell variable, is an error and not the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("is empty; `.` is the current folder", param, ctx)
        return super().convert(value, param, ctx)


@click.command("train", help=_HELP)
@run_options
@click.option("--num-processes", type=click.IntRange(min=1), help="Training processes.  [default: 1, or the run's]")
@click.option("--output", type=_Folder(path_type=Path), help="The run folder.  [default: runs/<algorithm>-<time>]")
@click.option("--resume", metavar="auto|DIR", help="Resume from the newest checkpoint (auto) or from the one in DIR.")
@click.option(
    "--restart",
    is_flag=True,
    help="With --resume auto: restart a run that does not have a checkpoint yet, and discard its updates.",
)
@click.option(
    "--trust",
    "trusts",
    is_flag=True,
    help="Run code files outside the run file's folder, and those named by an earlier run's config.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check everything, play one turn of an environment with a made-up answer, load no weights, write no files.",
)
@click.option("--verbose", "verbosity", flag_value="verbose", help="Also show the log.")
@click.option("--quiet", "verbosity", flag_value="quiet", help="Only show how the run ended.")
def train(
    request: RunArguments,
    num_processes: int | None,
    output: Path | None,
    resume: str | None,
    restart: bool,
    trusts: bool,
    dry_run: bool,
    verbosity: Verbosity | None,
) -> None:
    """Call `rlhf_core.train`."""
    from rlhf_core.errors import ConfigError

    if restart and resume != "auto":
        raise click.UsageError("--restart needs --resume auto")
    if resume is not None:
        from rlhf_core.entry.resume import find_resumed_run

        is_described = request.algorithm is not None or request.environment is not None
        request = replace(request, resumed=find_resumed_run(resume, output) or (None if is_described else output))
    mapping, dropped = request.mapping()
    log_to_stderr(verbosity or "normal")
    if verbosity != "quiet":
        report_dropped(dropped)
        if resume is None and not dry_run and (num_processes or 1) == 1:
            _report_duration(request, mapping)
    try:
        result = _train_function(request, mapping)(
            mapping,
            output=output,
            resume=resume,
            restart=restart,
            num_processes=num_processes or _process_count(request),
            dry_run=dry_run,
            trust=request.trust(everything=trusts),
            hooks=[_QUIET if verbosity == "quiet" else _PROGRESS],
            **({"on_check": print_prompt} if dry_run and verbosity != "quiet" else {}),
        )
    except KeyboardInterrupt as error:
        if not getattr(error, "run_is_done", False):
            raise
        drop_signals()
        return
    except ConfigError as error:
        # Core received a mapping, but the user named a file.
        where = request.where if error.where == MAPPING_SOURCE else error.where
        raise ConfigError(error.message, where=where, hint=error.hint) from error
    if result is not None:
        drop_signals()
    if result is None and verbosity != "quiet":
        echo(f"ok: {request.where} can run; nothing was written")


def _process_count(request: RunArguments) -> int:
    """Return the process count of a run repeated, or resumed without a run file. Otherwise, or in a launcher, 1."""
    from rlhf_core.distributed.launch_env import read_launch_env
    from rlhf_core.errors import DataError
    from rlhf_core.runfolder.folder import RunFolder

    base = request.origin or (request.resumed if request.run_file is None else None)
    if base is None or read_launch_env().world_size > 1:
        return 1
    folder = RunFolder.read(base)
    count = folder.read_json(folder.manifest).get("num_processes", 1)
    if type(count) is not int or count < 1:
        raise DataError(
            f"num_processes is {count!r}, not a count of 1 or more",
            where=str(folder.manifest),
            hint="give --num-processes",
        )
    return count


def _report_duration(request: RunArguments, mapping: dict[str, Any]) -> None:
    """Print how long the quickstart takes, if it is known, before anything large is imported."""
    if request.run_file is not None or request.origin is not None:
        return
    if (minutes := find_quickstart().expected_minutes(mapping)) is not None:
        unit = "minute" if minutes == 1 else "minutes"
        echo(f"the quickstart takes about {minutes} {unit} on two CPU cores")


def _train_function(request: RunArguments, mapping: dict[str, Any]) -> Callable[..., TrainResult | None]:
    is_quickstart = request.run_file is None and request.origin is None
    if is_quickstart and (with_stages := trainer_of(mapping, request.resumed)) is not None:
        return with_stages
    from rlhf_core.entry.train import train as run

    return run if request.origin is None else partial(run, origin=request.origin)


def print_prompt(inputs: RunInputs) -> None:
    """Print the first prompt as the model receives it, its first and last token ids, and how many are skipped."""
    from rlhf_core.prompts.records import left_out

    prompt, tokenizer = inputs.prompts.prompt(0), inputs.tokenizer
    if message := left_out(inputs.prompts.counts):
        echo(f"at least {message}")
    if not prompt.text:
        echo("the environment makes each prompt when its episode begins")
        return
    ids = list(prompt.prompt_ids)
    echo(f"the first prompt, {len(ids)} tokens:")
    echo("\n".join(f"  | {line}" for line in printable(prompt.text).splitlines() or [""]))
    for name, part in (("first", ids[:_SHOWN_IDS]), ("last", ids[-_SHOWN_IDS:])):
        shown = ", ".join(f"{each} {printable(str(tokenizer.decode([each])))!r}" for each in part)
        echo(f"  {name} ids: {shown}")


class _WithoutTraceback(PrintableFormatter):
    """Formats log records without their tracebacks, which are in the run's log."""

    def format(self, record: logging.LogRecord) -> str:
        bare = copy(record)
        bare.exc_info = bare.exc_text = bare.stack_info = None
        return super().format(bare)


def log_to_stderr(verbosity: Verbosity) -> None:
    """Send the log of this process to stderr: warnings, everything with `--verbose`, or errors with `--quiet`."""
    level = {"quiet": logging.ERROR, "normal": logging.WARNING, "verbose": logging.DEBUG}[verbosity]
    logger = logging.getLogger("rlhf")
    handler = logging.StreamHandler()
    handler.setLevel(level)
    formatter = PrintableFormatter if verbosity == "verbose" else _WithoutTraceback
    handler.setFormatter(formatter("%(levelname)s: %(message)s"))
    logger.handlers = [each for each in logger.handlers if type(each) is not logging.StreamHandler]
    logger.addHandler(handler)
    if verbosity == "verbose":
        logger.setLevel(logging.DEBUG)
