"""Episodes of several turns: the log-probs the engine sampled with are those of a plain forward over each row."""

from __future__ import annotations

from functools import lru_cache, partial

import pytest
import torch
from chat_templates import chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from playing import driven, player

from rlhf_core.components import EngineContext
from rlhf_core.types import Prompt
from rlhf_episodes import Outcome
from rlhf_hf.config import HfEngineConfig
from rlhf_hf.engine import build
from rlhf_testing.models import tiny_model

FAMILIES = ["chatml", "qwen2", "qwen3", "qwen3-no-thinking", "llama3", "gemma"]
EMPTY = Prompt(position=0, text="", prompt_ids=())


@lru_cache
def policy(family):
    """A Llama over the family's tokenizer, with large weights, and the engine over it."""
    tokenizer = chat_tokenizer(family)
    module = tiny_model(tokenizer, hidden_size=32, num_layers=2, num_heads=2, seed=3).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.1, generator=generator)
    context = EngineContext(model=module, tokenizer=tokenizer, device=torch.device("cpu"), seed=11)
    return module, build(HfEngineConfig(), context)


async def talk(task, branch, *, texts, forks):
    """Say each text; where `forks` says so, to a second branch as well, which goes on alone."""
    same = []
    for text, forks_here in zip(texts, (False, *forks), strict=True):
        other = branch.fork() if forks_here else None
        reply = await branch.turn(text)
        if other is not None:
            same.append((await other.turn(text)).token_ids == reply.token_ids)
            branch = other
    return Outcome(metrics={"forks": len(same), "alike": sum(same)})


def forward(module, row):
    """Log-prob of each token of the response, by a plain forward over the row."""
    with torch.no_grad():
        logits = module(torch.tensor([row.sequence])).logits[0, len(row.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(row.ids)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(texts=st.lists(st.text(max_size=6), min_size=2, max_size=4), data=st.data())
def test_the_trainers_log_probs_are_the_engines(family, texts, data):
    forks = data.draw(st.lists(st.booleans(), min_size=len(texts) - 1, max_size=len(texts) - 1))
    module, engine = policy(family)
    tokenizer = chat_tokenizer(family)
    history = data.draw(st.sampled_from(["append", "branch"]))
    made = player(
        driven(partial(talk, texts=texts, forks=forks)),
        engine=engine,
        tokenizer=tokenizer,
        max_new_tokens=6,
        context_tokens=engine.context_tokens,
        history=history,
    )
    episodes = list(made.play([(EMPTY, sample) for sample in range(3)]))
    rows = [row for each in episodes for row in each.rows]
    for row in rows:
        mask = torch.tensor(row.mask)
        engines = torch.tensor(row.logprobs)
        assert (forward(module, row) - engines)[mask].abs().max() < 1e-4
        assert not engines[~mask].any()
    assert sum(each.rows[0].columns["environment"]["own/alike"] for each in episodes) == 0, (
        "two forks of one prefix draw different noise"
    )
    # What was sampled does not survive its text, and is right all the same.
    assert any(tokenizer.encode(tokenizer.decode(row.ids), add_special_tokens=False) != row.ids for row in rows)
