"""Agents that ask the policy by the real `openai` client, and an engine that says what a test wants."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from chat_templates import chat_tokenizer
from openai import AsyncOpenAI
from playing import Reworded, driven, play

from rlhf_episodes import Outcome

ADDING_AGENT = Path(__file__).with_name("adding_agent.py")
TOKENIZER = chat_tokenizer("qwen2")
USER = {"role": "user", "content": "hello"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Speaks(Reworded):
    """Says each text in turn, and ends it with the tokenizer's EOS."""

    def __init__(self, tokenizer, texts):
        super().__init__(tokenizer, texts, end=tokenizer.eos_token_id)
        self._end = tokenizer.eos_token_id
        self.stops = []

    def generate(self, requests, sampling):
        self.stops.append(sampling.stop)
        for each in super().generate(requests, sampling):
            yield replace(each, finish_reason="stop" if each.token_ids[-1] == self._end or sampling.stop else "length")


@asynccontextmanager
async def client_of(policy):
    """The real client of an episode's endpoint."""
    endpoint = await policy.endpoint()
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
        yield client


def agent(function):
    """An environment whose agent is `async function(client, task, policy)`; it may return a reward."""

    async def run(task, policy):
        async with client_of(policy) as client:
            return Outcome(reward=await function(client, task, policy) or 0.0)

    return driven(run)


def episodes(function, texts=("hello",), *, family="qwen2", samples=1, **options):
    """Episodes of an agent, with a policy that says each of `texts` in turn."""
    tokenizer = options.pop("tokenizer", None) or chat_tokenizer(family)
    engine = options.pop("engine", None) or Speaks(tokenizer, texts)
    options = {"max_new_tokens": 200, "timeout_seconds": 30.0, **options}
    return play(agent(function), tokenizer=tokenizer, engine=engine, samples=samples, **options)


async def ask(client, messages, **options):
    return await client.chat.completions.create(model="policy", messages=messages, **options)


def said(completion):
    """The reply as a message that goes into the next call."""
    return completion.choices[0].message.model_dump(exclude_none=True)


def result(message, content):
    """A tool's answer to the first call of a message."""
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": content}


def speaker():
    """A policy that says hello."""
    return Speaks(TOKENIZER, ["hello"])


def decoded(ids, tokenizer=TOKENIZER):
    """With special tokens."""
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def sampled(row):
    """The ids that the policy chose and that count."""
    return [token for token, own in zip(row.ids, row.mask, strict=True) if own]


def run_file(model, **changes):
    """A run in which an agent of `adding_agent.py` calls the policy."""
    return {
        "model": {"path": str(model), "device": "cpu"},
        "environment": {"name": f"{ADDING_AGENT}:Adds", "max_turns": 4},
        "algorithm": {"name": "ppo", "kl_coef": 0.05},
        "optimizer": {"lr": 1e-4},
        "engine": {"name": "hf", "max_new_tokens": 90},
        "train": {"episodes": 2, "prompts_per_episode": 2, "samples_per_prompt": 2, "train_batch_size": 4},
        "checkpoint": {"every_episodes": None},
        "logging": {"tensorboard": False},
        **changes,
    }
