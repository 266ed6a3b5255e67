"""Plays episodes of programs with a policy that says what a test wants."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from chat_templates import chat_tokenizer
from interrupted import Engine, journal
from playing import Reworded

from rlhf_core.config.problems import Problems
from rlhf_core.types import SamplingParams
from rlhf_episodes.player import build_environment_player
from rlhf_episodes.selected import resolve_environment
from rlhf_testing.episodes import prompt_stream
from rlhf_testing.models import tiny_model

TOKENIZER = chat_tokenizer("qwen2")
AGENT = Path(__file__).parents[4] / "recipes" / "shell-agent" / "agent.py"
CHAT = {"prompt": [{"role": "user", "content": "Write hello to the file greeting."}]}
WRITES = "I will do it.\n```sh\necho hello > greeting\n```"


class Recorded(Reworded):
    """Says each text in turn, and keeps each request with its answer."""

    def __init__(self, texts):
        super().__init__(TOKENIZER, texts, end=TOKENIZER.eos_token_id)
        self.turns = []

    def generate(self, requests, sampling):
        by_place = {(each.sample_id, each.branch): each for each in requests}
        for each in super().generate(requests, sampling):
            self.turns.append((by_place[each.sample_id, each.branch], each.token_ids))
            yield replace(each, finish_reason="stop")


class Interrupted(Engine):
    """Writes the greeting, then is done. Ends the run after `limit` turns."""

    def __init__(self, limit=None):
        super().__init__(limit, answer=self.reply)

    @staticmethod
    def reply(request, version):
        text = "Done." if request.offset else WRITES
        return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]

    def generate(self, requests, sampling):
        for each in super().generate(requests, sampling):
            yield replace(each, finish_reason="stop")


def environment(**options):
    """The checked section of a run file, with the shell agent unless `command` is another one."""
    defaults = {"command": ["python", str(AGENT), "{prompt}"], "read": [str(AGENT)], "timeout_seconds": 60.0}
    problems = Problems()
    selected = resolve_environment({"name": "program", **defaults, **options}, problems)
    problems.raise_if_any("a test")
    return selected


def play(
    texts=("",), *, record=None, folder=None, samples=1, engine=None, max_new_tokens=200, recorded=None, **options
):
    """Play the episodes of one prompt, with a policy that says each of `texts` in turn.

    `recorded` is the folder of a journal.
    """
    engine = engine or Recorded(texts)
    player = build_environment_player(
        environment(**options),
        engine,
        TOKENIZER,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        seed=0,
        base_folder=folder,
    )
    lines = None
    if recorded is not None:
        lines, player.journal = journal(recorded, engine)
    prompt = prompt_stream([record or CHAT], TOKENIZER, seed=0).prompt(0)
    try:
        return sorted(player.play([(prompt, number) for number in range(samples)]), key=lambda each: each.sample_id)
    finally:
        player.close()
        if lines is not None:
            lines.close()


def run_file(folder, section, **changes):
    """A run of a model that knows nothing, which is saved in the folder."""
    tiny_model(TOKENIZER, hidden_size=32).save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    (folder / "tasks.jsonl").write_text(json.dumps(CHAT) + "\n")
    return {
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "prompts": {"name": "jsonl", "path": str(folder / "tasks.jsonl")},
        "environment": {"name": "program", "max_turns": 2, **section},
        "algorithm": {"name": "grpo", "kl_coef": 0.0},
        "optimizer": {"lr": 1e-4},
        "engine": {"max_new_tokens": 8},
        "train": {"episodes": 2, "prompts_per_episode": 1, "samples_per_prompt": 2, "train_batch_size": 2},
        "checkpoint": {"every_episodes": None},
        **changes,
    }


def metrics(played):
    """What the environment measured."""
    return played.rows[0].columns["environment"]
