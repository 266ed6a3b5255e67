"""Cost of running environments in a separate process: guess-number with and without `environment.isolate`.

    python benchmarks/environment_isolation.py [--episodes 512] [--repeat 5]

The policy is a table lookup, so that only the environment's side is measured: constructor, `reset`, four `step`s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import closing
from dataclasses import replace

from rlhf_core.config.problems import Problems
from rlhf_core.types import SamplingParams
from rlhf_episodes.player import build_environment_player
from rlhf_episodes.section import EnvironmentConfig
from rlhf_episodes.selected import resolve_environment
from rlhf_testing.engine import FakeEngine
from rlhf_testing.episodes import episode_tokenizer
from rlhf_testing.samples import make_prompt

CALLS = 6
"""Calls per episode: its constructor, `reset`, and `step` four times."""


def main() -> None:
    """Print a line for each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    for isolate in (False, True):
        before = os.times()
        first, seconds = measure(isolate, options.episodes, options.repeat)
        after = os.times()
        calls = options.episodes * CALLS
        own, other = (
            (sum(after[place] - before[place] for place in places)) / calls / (options.repeat + 1) * 1e6
            for places in ((0, 1), (2, 3))
        )
        print(
            f"isolate: {isolate!s:5}  first play {first:.2f} s, then {seconds / calls * 1e6:.0f} microseconds a call; "
            f"processor time {own:.0f} here, {other:.0f} in the environments' process"
        )


def measure(isolate: bool, episodes: int, repeat: int) -> tuple[float, float]:
    """Seconds of the first play, in which the process starts, and the median of later ones."""
    problems = Problems()
    environment = resolve_environment({"name": "guess-number", "max_turns": 4, "isolate": isolate}, problems)
    problems.raise_if_any("benchmark")
    assert environment is not None
    tokenizer = episode_tokenizer(chat=False)
    engine = FakeEngine(answer=lambda request, version: [4, 2])  # not a number: every episode has four turns
    player = build_environment_player(environment, engine, tokenizer, sampling=SamplingParams(max_new_tokens=2), seed=0)
    samples = [(replace(make_prompt(0), answer=3), number) for number in range(episodes)]
    times = []
    with closing(player):
        for _ in range(repeat + 1):
            started = time.perf_counter()
            played = list(player.play(samples))
            times.append(time.perf_counter() - started)
            assert all(len(each.rows[0].own_turns) == environment.typed(EnvironmentConfig).max_turns for each in played)
    return times[0], statistics.median(times[1:])


if __name__ == "__main__":
    main()
