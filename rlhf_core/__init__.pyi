from .algorithm import (
    Algorithm as Algorithm,
)
from .algorithm import (
    DatasetAlgorithm as DatasetAlgorithm,
)
from .algorithm import (
    EpisodeOutput as EpisodeOutput,
)
from .algorithm import (
    LossOutput as LossOutput,
)
from .algorithm import (
    LossTerm as LossTerm,
)
from .algorithm import (
    RolloutAlgorithm as RolloutAlgorithm,
)
from .columns import (
    Column as Column,
)
from .columns import (
    Columns as Columns,
)
from .components import (
    Component as Component,
)
from .config.section import (
    Section as Section,
)
from .distributed.launch import (
    launch as launch,
)
from .entry.train import (
    TrainResult as TrainResult,
)
from .entry.train import (
    train as train,
)
from .errors import (
    CheckpointError as CheckpointError,
)
from .errors import (
    ConfigError as ConfigError,
)
from .errors import (
    DataError as DataError,
)
from .errors import (
    DeadlineError as DeadlineError,
)
from .errors import (
    DivergenceError as DivergenceError,
)
from .errors import (
    GuardStop as GuardStop,
)
from .errors import (
    HookError as HookError,
)
from .errors import (
    InterruptedRun as InterruptedRun,
)
from .errors import (
    OutOfMemoryError as OutOfMemoryError,
)
from .errors import (
    PluginError as PluginError,
)
from .errors import (
    RewardError as RewardError,
)
from .errors import (
    RlhfError as RlhfError,
)
from .errors import (
    SyncError as SyncError,
)
from .errors import (
    UserInputError as UserInputError,
)
from .hookspecs import (
    hookimpl as hookimpl,
)
from .strategy import (
    Strategy as Strategy,
)
from .types import (
    Completion as Completion,
)
from .types import (
    Experience as Experience,
)
from .types import (
    GenerationRequest as GenerationRequest,
)
from .types import (
    Prompt as Prompt,
)
from .types import (
    Rollout as Rollout,
)
from .types import (
    RolloutGroup as RolloutGroup,
)
from .types import (
    SamplingParams as SamplingParams,
)
