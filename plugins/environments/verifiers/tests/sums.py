"""An environment of verifiers whose tasks have a tool: a server of its own for each rollout."""

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sum"

    @vf.tool
    def add(self, first: int, second: int) -> str:
        """Add two numbers."""
        return f"it is {first + second}"


class SumTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return float("5" in trace.last_reply)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        yield SumTask(vf.TaskData(prompt="What is 2 + 3?", system_prompt="Use the tool."), self.config.task)


__all__ = ["SumTaskset"]


if __name__ == "__main__":
    Adder.run()
