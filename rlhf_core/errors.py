"""Errors that users can act on.

Every `RlhfError` names the place, the problem, the plugin with its version (if one is involved) and what to do next.
The command prints it without a traceback. Bugs keep their traceback.
"""

from __future__ import annotations

import errno


class RlhfError(Exception):
    """Base of all errors for users. `exit_code` is the command's exit code.

    Args:
        message: the problem.
        where: place of the problem: a file, option or plugin.
        hint: what to do next, such as a command to run.

    Example:
        >>> print(ConfigError("is required", where="model.path", hint="add --model PATH"))
        model.path: is required
          -> add --model PATH
    """

    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.message = message
        self.where = where
        self.hint = hint
        super().__init__(self.render())

    def render(self) -> str:
        """Return the text shown to the user: `where: message` and, on a separate line, the hint."""
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\n  -> {self.hint}" if self.hint else text

    def raised_by(self, who: str) -> None:
        """Add the plugin `who` that raised the error to the message, once. `where` is unchanged."""
        if who not in self.render():
            self.message = f"{self.message} ({who})"
            self.args = (self.render(),)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors are pickled between processes (Ray, torch elastic). The default would drop the keyword arguments.
        return (_rebuild, (type(self), self.message, self.where, self.hint))


def _rebuild(cls: type[RlhfError], message: str, where: str | None, hint: str | None) -> RlhfError:
    return cls(message, where=where, hint=hint)


def full_disk(error: BaseException) -> RlhfError | None:
    """Return the error to report if `error` is the system's error for a full disk or quota, otherwise None."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return RlhfError(
        "the disk is full",
        where=None if error.filename is None else str(error.filename),
        hint="free some space, then --resume auto continues from the newest checkpoint, which is complete",
    )


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, or the error's type if the message is empty.

    Args:
        error: the error to quote.

    Example:
        >>> first_line(ValueError("bad shape\\n(long details)")), first_line(KeyboardInterrupt())
        ('bad shape', 'KeyboardInterrupt')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class UserInputError(RlhfError):
    """The user's input is wrong. Raised before anything runs."""

    exit_code = 2


class ConfigError(UserInputError):
    """A run file, flag or option is wrong. One error may list several problems."""


class PluginError(UserInputError):
    """A plugin is missing, broken, provided twice or made for another core."""


class DataError(UserInputError):
    """A prompt or data file is wrong. Names the file and line."""


class RewardError(RlhfError):
    """A reward failed or returned an invalid score. Names plugin, sample and value."""


class EpisodeError(RlhfError):
    """An environment failed. Names it, the failed step, and the sample."""


class EngineLostError(RlhfError):
    """An engine lost the process that generates for it. A transport may start a new maker as a replacement."""


class SyncError(RlhfError):
    """A weight transfer was rejected: wrong keys, shapes, checksum or version, or its deadline passed."""


class DeadlineError(RlhfError):
    """A wait passed its deadline. Names the event that was waited for."""


class LostRankError(DeadlineError):
    """Other processes of the group did not respond within the deadline."""

    ranks: tuple[int, ...] = ()
    """The lost ranks. Empty if they cannot be determined."""


class DivergenceError(RlhfError):
    """Loss or gradient is not finite. Names the key to lower."""


class GuardStop(RlhfError):
    """A guard ended the run. Names the guard and the reason."""


class OutOfMemoryError(RlhfError):
    """The device ran out of memory. Names the key to lower."""


class CheckpointError(RlhfError):
    """A checkpoint cannot be written or read."""


class HookError(RlhfError):
    """A hook raised. Names plugin, distribution and hook."""


class InterruptedRun(RlhfError):
    """Ctrl-C: the run wrote a checkpoint and stopped."""

    exit_code = 130
