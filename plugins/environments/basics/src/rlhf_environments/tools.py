"""`tools`: plain Python functions that the policy may call; the episode ends with the first turn that calls none."""

from __future__ import annotations

from rlhf_core.components import TaskContext
from rlhf_core.plugins import function_from_file

from .config import PYTHON, ToolsConfig
from .python_tool import python_tool


class Tools:
    """Gives no reward of its own: `rewards` judge the rollout."""

    def __init__(self, config: ToolsConfig, context: TaskContext) -> None:
        """Those of one episode.

        Raises `PluginError` where a file has no such function, `ConfigError` where this machine has no sandbox.
        """
        self.tools = {
            name.rpartition(":")[2]: python_tool(config)
            if name == PYTHON
            else function_from_file(name, context.base_folder, "tool")
            for name in config.functions
        }
