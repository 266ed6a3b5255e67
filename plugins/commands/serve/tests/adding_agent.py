"""An environment whose agent drives itself: it asks, calls the tool it is asked to, and tells the result."""

from openai import AsyncOpenAI

from rlhf_episodes import Outcome

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
QUESTION = [{"role": "user", "content": "1 and 2?"}]


class Adds:
    """Rewarded for its calls; of every other sample the first answer is put in other words, which makes a branch."""

    async def run(self, task, policy):
        endpoint = await policy.endpoint()
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            first = await client.chat.completions.create(model=endpoint.model, messages=QUESTION, tools=[ADD])
            message = first.choices[0].message
            calls = message.tool_calls or []
            if task.sample_id % 2:
                await client.chat.completions.create(
                    model=endpoint.model, messages=[*QUESTION, {"role": "assistant", "content": "?"}, *QUESTION]
                )
            results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls] or QUESTION
            told = [*QUESTION, message.model_dump(exclude_none=True), *results]
            last = await client.chat.completions.create(model=endpoint.model, messages=told, tools=[ADD])
        turn = last.model_extra["rlhf"]["turn"]
        digits = sum(char.isdigit() for char in last.choices[0].message.content or "")
        return Outcome(reward=float(len(calls)), turn_rewards={turn: digits / 10}, metrics={"tool_calls": len(calls)})
