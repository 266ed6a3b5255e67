"""An environment whose agent requests answers in a format, and forces a call."""

from adding_agent import QUESTION
from openai import AsyncOpenAI

from rlhf_episodes import Outcome

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
ADD = {"type": "function", "function": {"name": "add", "parameters": {**PARAMETERS, "additionalProperties": False}}}
SCHEMA = {"enum": ["yes", "no", 12]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


class Structured:
    """Rewarded for its call. Its second call continues the row of the first one, and the third is free."""

    async def run(self, task, policy):
        endpoint = await policy.endpoint()
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            ask = client.chat.completions.create
            asked = {"model": endpoint.model, "tools": [ADD]}
            first = (await ask(messages=QUESTION, tool_choice="required", parallel_tool_calls=False, **asked)).choices[
                0
            ]
            (call,) = first.message.tool_calls
            result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
            told = [*QUESTION, first.message.model_dump(exclude_none=True), result]
            second = (await ask(messages=told, response_format=FORMAT, **asked)).choices[0]
            told += [second.message.model_dump(exclude_none=True), *QUESTION]
            await ask(messages=told, max_tokens=4, **asked)
        answer = second.message.content or "call"
        return Outcome(reward=float(len(answer)), metrics={"is_structured": answer in ('"yes"', '"no"', "12", "call")})
