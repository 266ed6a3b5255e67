"""Images that come after the prompt, and those of served chats: what vLLM's process gets, with `fake/vllm`.

Its answers are the first token of the prompt, plus the number of images and of their rows of pixels.
"""

from __future__ import annotations

import asyncio
import base64
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from playing import driven, items, play
from seeing_models import Seeing, picture, write_folder

from rlhf_core.config import ModelConfig
from rlhf_episodes import Keys, Outcome
from rlhf_episodes.sight import Sight
from rlhf_images import ImageLimits
from rlhf_serve.server import start
from rlhf_serve.serving import serve_model
from rlhf_web import ServerLimits

pytestmark = pytest.mark.usefixtures("fake_vllm")


@pytest.fixture
def seeing(tmp_path: Path) -> Seeing:
    """A LLaVA whose weights are zero, and whose prompts begin with the role of the first message."""
    write_folder("llava", tmp_path)
    made = Seeing(tmp_path)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.zero_()
    made.model.save_pretrained(tmp_path)
    made.tokenizer.chat_template = made.tokenizer.chat_template.removeprefix("{{ bos_token }}")
    made.tokenizer.save_pretrained(tmp_path)
    return made


def shown(*sizes: tuple[int, int]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": picture(size)} for size in sizes]}


def address(size: tuple[int, int]) -> str:
    file = BytesIO()
    picture(size).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_images_of_observations_reach_vllm_with_the_places_of_the_trainer(seeing: Seeing, engine: Any) -> None:
    """The fake asserts that each image token belongs to an image, in every turn and branch."""

    async def run(task: Any, policy: Any) -> Outcome:
        await policy.turn()
        other = policy.fork()
        await policy.turn([shown((16, 24), (50, 20))])
        await policy.turn([{"role": "user", "content": "No image"}])
        await policy.turn([shown((20, 20))])
        await other.turn([shown((20, 20))])
        return Outcome()

    made = engine(seeing.model, seeing.tokenizer, max_model_tokens=512)
    sight = Sight(seeing.kind, ImageLimits(), Path())
    options = {"engine": made, "tokenizer": seeing.tokenizer, "sight": sight, "max_new_tokens": 2, "max_turns": 9}
    prompt = seeing.prompt("Which?", (32, 32))
    first = prompt.prompt_ids[0]
    for played in play(driven(run), samples=2, prompt=prompt, **options):
        found = [[turn.token_ids[0] - first for turn in row.turns if turn.role == "policy"] for row in played.rows]
        assert found == [[2, 6, 6, 8], [2, 4]]
        assert [len(each.columns["observed_sizes"]) for each in items(played)] == [3, 1]


def test_a_served_chat_gives_vllm_its_images(seeing: Seeing) -> None:
    """As `rlhf serve --engine vllm` does. While requests may join, the fake adds 100, which the weights take back."""
    with torch.no_grad():
        next(seeing.model.parameters()).view(-1)[0] = -100
    seeing.model.save_pretrained(seeing.path)
    config = ModelConfig(path=seeing.path, device="cpu")

    async def ask() -> list[str]:
        answers = []
        with closing(serve_model(config, engine="vllm", seed=0, max_new_tokens=2)) as model:
            keys = Keys()
            key = keys.add(model)
            server = await start(keys.find, host="127.0.0.1", port=0, limits=ServerLimits())
            async with openai.AsyncOpenAI(base_url=server.base_url, api_key=key, max_retries=0) as client:
                for sizes in ((), ((16, 24),), ((16, 24), (50, 20))):
                    images = [{"type": "image_url", "image_url": {"url": address(each)}} for each in sizes]
                    content: Any = [*images, {"type": "text", "text": "Which?"}]
                    messages: Any = [{"role": "user", "content": content}]
                    reply = await client.chat.completions.create(model="mine", messages=messages, temperature=0)
                    answers.append(str(reply.choices[0].message.content))
            server.close()
        return answers

    assert asyncio.run(ask()) == ["uu", "ww", "yy"]
