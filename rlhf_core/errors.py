"""Errors a user can act on.

Every `RlhfError` says where it happened, what is wrong, who (plugin and version, where one is involved)
and what to type next. The command prints it without a traceback; a bug keeps its traceback.
"""

from __future__ import annotations

import errno


class RlhfError(Exception):
    """Base of all errors meant for the user. `exit_code` is the command's exit code."""

    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.message = message
        self.where = where
        self.hint = hint
        super().__init__(self.render())

    def render(self) -> str:
        """The message as shown: `where: what` and, on a separate line, the hint."""
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\n  -> {self.hint}" if self.hint else text

    def raised_by(self, who: str) -> None:
        """Add the plugin that raised it to the message, once; `where` is unchanged."""
        if who not in self.render():
            self.message = f"{self.message} ({who})"
            self.args = (self.render(),)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (Ray, torch elastic); the default would lose the keywords.
        return (_rebuild, (type(self), self.message, self.where, self.hint))


def _rebuild(cls: type[RlhfError], message: str, where: str | None, hint: str | None) -> RlhfError:
    return cls(message, where=where, hint=hint)


def full_disk(error: BaseException) -> RlhfError | None:
    """The error to report if `error` is the system's error for a full disk or quota; otherwise None."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return RlhfError(
        "the disk is full",
        where=None if error.filename is None else str(error.filename),
        hint="free some space; --resume auto goes on from the newest checkpoint, which is whole",
    )


def first_line(error: BaseException) -> str:
    """First line of another library's error message, to quote; the error's type where it is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class UserInputError(RlhfError):
    """The user's input is wrong; found before anything ran."""

    exit_code = 2


class ConfigError(UserInputError):
    """A run file, flag or option is wrong; may report several problems together."""


class PluginError(UserInputError):
    """A plugin is missing, broken, clashing or made for another core."""


class DataError(UserInputError):
    """A prompt or data file is wrong; names the file and line."""


class RewardError(RlhfError):
    """A reward failed or returned an invalid score; names plugin, sample and value."""


class EpisodeError(RlhfError):
    """An environment failed; names it, what it was doing, and the sample."""


class EngineLostError(RlhfError):
    """The process that an engine generates in is gone. A transport may start a new maker in place of this one."""


class SyncError(RlhfError):
    """A weight transfer was refused: wrong keys, shapes, checksum, version or a deadline passed."""


class DeadlineError(RlhfError):
    """A wait passed its deadline; says what was waited for."""


class LostRankError(DeadlineError):
    """Other processes of the group did not respond within the deadline."""

    ranks: tuple[int, ...] = ()
    """The lost ranks; empty where they cannot be determined."""


class DivergenceError(RlhfError):
    """Loss or gradient is not finite; names the key to lower."""


class GuardStop(RlhfError):
    """A guard ended the run; says which and why."""


class OutOfMemoryError(RlhfError):
    """The device ran out of memory; names the key to lower."""


class CheckpointError(RlhfError):
    """A checkpoint cannot be written or read."""


class HookError(RlhfError):
    """A hook raised; names plugin, distribution and hook."""


class InterruptedRun(RlhfError):
    """Ctrl-C: the run wrote a checkpoint and stopped."""

    exit_code = 130
