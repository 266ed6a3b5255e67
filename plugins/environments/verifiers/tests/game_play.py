"""Episodes of environments of verifiers, played without a model."""

from playing import Reworded

from rlhf_core.config.problems import Problems
from rlhf_core.types import SamplingParams
from rlhf_episodes.player import build_environment_player
from rlhf_episodes.selected import resolve_environment
from rlhf_testing.episodes import episode_tokenizer, prompt_stream


class Bounded(Reworded):
    """Says how many tokens there is room for."""

    context_tokens = None


def play(*replies, samples=1, records=None, context_tokens=None, chat=True, **options):
    """The episodes of a policy that says these replies."""
    problems = Problems()
    environment = resolve_environment({"name": "verifiers", "env": "number-game", **options}, problems)
    problems.raise_if_any("test")
    tokenizer = episode_tokenizer(chat=chat)
    engine = Bounded(tokenizer, replies)
    engine.context_tokens = context_tokens
    sampling = SamplingParams(max_new_tokens=100)
    player = build_environment_player(environment, engine, tokenizer, sampling=sampling, seed=0)
    stream = prompt_stream(records or [{"prompt": ""}] * samples, tokenizer, seed=0, may_be_empty=True)
    return list(player.play([(stream.prompt(place), place) for place in range(samples)]))


def observations(played):
    return [turn.text for turn in played.rows[0].turns if turn.role == "environment"]
