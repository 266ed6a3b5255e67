class RlhfError(Exception):
    exit_code = 1

    def __init__(self, message: str, *, where: str | None=None, hint: str | None=None) -> None:
        ...

    def render(self) -> str:
        ...

    def raised_by(self, who: str) -> None:
        ...

def full_disk(error: BaseException) -> RlhfError | None:
    ...

def first_line(error: BaseException) -> str:
    ...

class UserInputError(RlhfError):
    exit_code = 2

class ConfigError(UserInputError):
    ...

class PluginError(UserInputError):
    ...

class DataError(UserInputError):
    ...

class RewardError(RlhfError):
    ...

class EpisodeError(RlhfError):
    ...

class SyncError(RlhfError):
    ...

class DeadlineError(RlhfError):
    ...

class DivergenceError(RlhfError):
    ...

class GuardStop(RlhfError):
    ...

class OutOfMemoryError(RlhfError):
    ...

class CheckpointError(RlhfError):
    ...

class HookError(RlhfError):
    ...

class InterruptedRun(RlhfError):
    exit_code = 130
