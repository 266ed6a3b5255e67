"""`rlhf control`: pause, resume, checkpoint, stop or change a running run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rlhf_core.runfolder import RunFolder

    from .control_box import Command


@click.command("control")
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("words", metavar="pause|resume|checkpoint|stop|set KEY=VALUE", nargs=-1, required=True)
@click.option(
    "--wait-seconds",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Time to wait for the run's answer, which it sends at the end of an update.",
)
def control(run_dir: Path, words: tuple[str, ...], wait_seconds: float) -> None:
    """Send a command to a running run. It is executed between two updates and recorded in the run's manifest.

    pause holds the run, and resume continues it. checkpoint writes a checkpoint at the end of the episode. stop ends
    the run at the end of the episode and writes a checkpoint and the model, like Ctrl-C. set changes lr, critic_lr
    (peak learning rates) or kl_coef. In a run with stages, such as the quickstart, the running stage executes it.

    \b
    Examples:
      rlhf control runs/first pause
      rlhf control runs/first set lr=5e-7
      rlhf control runs/first stop
    """
    from rlhf_core.errors import UserInputError
    from rlhf_core.runfolder import RunFolder

    from .control_box import parse_command

    command = parse_command(words)
    folder = RunFolder.read(run_dir)
    if not folder.is_in_use:
        raise UserInputError(
            "no run is active in this folder", where=str(run_dir), hint=f"rlhf train --output {run_dir} --resume auto"
        )
    click.echo(_execute(command, folder, wait_seconds))


def _execute(command: Command, folder: RunFolder, wait_seconds: float) -> str:
    """Send the command to the running stage of a run, and to the next stage if that one ends first."""
    from rlhf_core.errors import DeadlineError, RlhfError, UserInputError
    from rlhf_core.runfolder import RunFolder

    for path in sorted(folder.path.iterdir()):
        if path.is_symlink() or not path.is_dir() or not (stage := RunFolder(path)).is_in_use:
            continue
        stage.refuse_oddities()
        try:
            answer = _send(stage, command, wait_seconds)
        except (UserInputError, DeadlineError):
            raise
        except RlhfError:
            if not folder.is_in_use:
                raise
        else:
            return f"{path.name}: {answer}"
    return _send(folder, command, wait_seconds)


def _send(folder: RunFolder, command: Command, wait_seconds: float) -> str:
    from .control_box import ControlBox

    box = ControlBox(folder.control)
    return box.wait(box.send(command), seconds=wait_seconds, is_running=lambda: folder.is_in_use)
