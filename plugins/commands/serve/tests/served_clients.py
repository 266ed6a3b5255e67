"""The real client of a model that is served in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import openai

from rlhf_core.config import ModelConfig
from rlhf_episodes import Keys
from rlhf_serve.server import start
from rlhf_serve.serving import serve_model
from rlhf_web import ServerLimits


@asynccontextmanager
async def served_client(config: ModelConfig, *, max_new_tokens: int) -> AsyncIterator[openai.AsyncOpenAI]:
    """Serve a model as `mine`."""
    with closing(serve_model(config, engine="hf", seed=0, max_new_tokens=max_new_tokens)) as model:
        keys = Keys()
        key = keys.add(model)
        server = await start(keys.find, host="127.0.0.1", port=0, limits=ServerLimits(), model="mine")
        try:
            async with openai.AsyncOpenAI(base_url=server.base_url, api_key=key, max_retries=0) as client:
                yield client
        finally:
            server.close()
            await asyncio.sleep(0)
