"""Environments of verifiers, and a harness that runs in this process."""

import asyncio
import itertools

import httpx
import verifiers.v1 as vf
from openai import AsyncOpenAI, BadRequestError
from verifiers.v1.dialects.chat import message_to_wire


class GameData(vf.TaskData):
    goal: int


class GameTaskConfig(vf.TaskConfig):
    seconds: float = 0.0


class GameTask(vf.Task[GameData, vf.State, GameTaskConfig]):
    """Find the number. A last guess of 13 cannot be scored."""

    @vf.reward(weight=2.0)
    async def found(self, trace: vf.Trace) -> float:
        await asyncio.sleep(self.config.seconds)
        if trace.last_reply == "13":
            raise ArithmeticError("out of luck")
        return float(trace.last_reply == str(self.data.goal))

    @vf.reward(weight=0.5)
    async def is_number(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.isdigit())

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GameConfig(vf.TasksetConfig):
    task: GameTaskConfig = GameTaskConfig()
    highest: int = 4
    endless: bool = False


class GameTaskset(vf.Taskset[GameTask, GameConfig]):
    @property
    def INFINITE(self):
        return self.config.endless

    def load(self):
        for goal in itertools.count() if self.config.endless else range(self.config.highest + 1):
            yield GameTask(GameData(idx=goal, goal=goal, system_prompt="Find it."), self.config.task)


class GameEnv(vf.SingleAgentEnv):
    """Tells whether a guess is too low or too high."""

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            told = "Guess."
            while not (segment := await interaction.turn(told)).terminated:
                said = segment.last_reply
                if said in ("13", str(task.data.goal)):
                    break
                told = "A number?" if not said.isdigit() else "higher" if int(said) < task.data.goal else "lower"


class InProcessConfig(vf.HarnessConfig):
    seconds: float = 0.0
    takes_refusals: bool = False


class InProcess(vf.Harness[InProcessConfig]):
    """One call for each segment."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [message_to_wire(message) for message in prompt]
        await asyncio.sleep(self.config.seconds)
        plain = httpx.AsyncClient(verify=False, timeout=None)  # certificates take long to read; the loop is everybody's
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=plain, max_retries=0) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            except BadRequestError:
                if not self.config.takes_refusals:
                    raise
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["GameEnv", "GameTaskset", "InProcess"]
