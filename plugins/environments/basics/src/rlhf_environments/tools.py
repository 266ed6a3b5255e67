"""`tools`: Python functions that the policy may call. The episode ends with the first turn without calls."""

from __future__ import annotations

from rlhf_core.components import TaskContext
from rlhf_core.plugins import function_from_file

from .config import PYTHON, ToolsConfig
from .python_tool import python_tool


class Tools:
    """The tools of one episode. The reward is 0: use `rewards` to judge the rollout."""

    def __init__(self, config: ToolsConfig, context: TaskContext) -> None:
        """Load the functions.

        Raises `PluginError` if a file does not define its function, and `ConfigError` if this machine does not support
        the sandbox.
        """
        self.tools = {
            name.rpartition(":")[2]: python_tool(config)
            if name == PYTHON
            else function_from_file(name, context.base_folder, "tool")
            for name in config.functions
        }
