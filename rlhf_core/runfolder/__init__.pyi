from .checkpoint_state import RunState as RunState
from .checkpoint_state import load_channel_state as load_channel_state
from .checkpoint_state import load_run_state as load_run_state
from .checkpoint_state import save_run_state as save_run_state
from .checkpoints import CheckpointStore as CheckpointStore
from .checkpoints import find_complete_checkpoint as find_complete_checkpoint
from .folder import RunFolder as RunFolder
from .metrics import PhaseTimer as PhaseTimer
