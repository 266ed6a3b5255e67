"""An environment whose agent does all that one can do to its conversations, as its seeds say."""

from random import Random

from openai import AsyncOpenAI, BadRequestError

from rlhf_episodes import Outcome


class Wanders:
    """Goes on with any earlier conversation, says something twice, or puts an answer in other words."""

    async def run(self, task, policy):
        noise, told, refused = Random(task.sample_seed), [], 0
        endpoint = await policy.endpoint()
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            while policy.remaining_turns:
                asked = [{"role": "user", "content": str(task.seed)}]
                if told:
                    asked = list(noise.choice(told[-3:]))
                    if noise.random() < 0.3:
                        asked[-1] = {**asked[-1], "content": "no"}
                    asked.append({"role": "user", "content": noise.choice(["one", "two", "", "\U0001f600"])})
                try:
                    found = await client.chat.completions.create(
                        model=endpoint.model, messages=asked, max_tokens=noise.choice([None, 3]), stop=["7", "x"]
                    )
                except BadRequestError:
                    refused += 1
                    break
                told.append([*asked, found.choices[0].message.model_dump(exclude_none=True)])
        return Outcome(reward=1.0, metrics={"refused": refused})
