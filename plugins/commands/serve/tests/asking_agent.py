"""An environment whose agent asks by plain HTTP, from a thread."""

import asyncio
import json
from urllib.request import Request, urlopen

from rlhf_episodes import Outcome


class Asks:
    """Two calls, the second of which continues the first; the turn of each has a reward."""

    async def run(self, task, policy):
        endpoint = await policy.endpoint()
        assert endpoint == await policy.endpoint()
        first = await asyncio.to_thread(_ask, endpoint, "1")
        text = "1" + first["choices"][0]["text"]
        last = await asyncio.to_thread(_ask, endpoint, text + "2")
        rewards = {each["rlhf"]["turn"]: float(len(each["choices"][0]["text"])) for each in (first, last)}
        return Outcome(turn_rewards=rewards, metrics={"places": len(rewards)})


def _ask(endpoint, prompt):
    request = Request(
        f"{endpoint.base_url}/completions",
        data=json.dumps({"model": endpoint.model, "prompt": prompt}).encode(),
        headers={"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"},
    )
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)
