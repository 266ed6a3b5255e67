"""`rlhf serve-reward`: serves an installed reward over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rlhf_core.rewards import RewardScorer
    from rlhf_core.types import Rollout

    from .server import Score

_STOP_SECONDS = 30.0
"""Grace period of requests in flight when the server stops."""


@click.command("serve-reward")
@click.argument("name")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the reward, or of its calls (batch_size, timeout_seconds, isolate, …). Repeatable.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address. All but loopback need --token-env.")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="0 selects a free port.")
@click.option("--token-env", metavar="VARIABLE", help="Environment variable with the token that requests must send.")
@click.option("--device", default="auto", show_default=True, help="Device of the reward: auto, cpu, cuda, cuda:N.")
@click.option("--max-in-flight", type=click.IntRange(min=1), default=8, show_default=True, help="Concurrent requests.")
@click.option(
    "--max-body-bytes", type=click.IntRange(min=1024), default=8 * 2**20, show_default=True, help="Request size limit."
)
def serve_reward(
    name: str,
    options: tuple[str, ...],
    host: str,
    port: int,
    token_env: str | None,
    device: str,
    max_in_flight: int,
    max_body_bytes: int,
) -> None:
    """Serve the reward NAME (or FILE.py:FUNCTION) to runs that use the reward `http`.

    \b
    Examples:
      rlhf serve-reward model --option path=runs/reward-model/model
      rlhf serve-reward ./my_reward.py:brevity --option target_tokens=64 --port 9000
    """
    from contextlib import closing

    from rlhf_web import ServerLimits, serve_until_stopped

    from .protocol import SCORE_PATH
    from .server import make_app

    token = _token(token_env, host)
    limits = ServerLimits(max_in_flight=max_in_flight, max_body_bytes=max_body_bytes)

    def print_address(address: str) -> None:
        click.echo(f'serving reward "{name}" at {address}{SCORE_PATH}')

    with closing(_make_scorer(name, options, device, max_in_flight)) as scorer:
        app = make_app(_score_by(scorer), limits, token=token, host=None if token else host)
        all_finished = serve_until_stopped(
            app,
            limits,
            host=host,
            port=port,
            where="rlhf serve-reward",
            ready=print_address,
            grace_seconds=_STOP_SECONDS,
        )
    click.echo("stopped")
    if not all_finished:
        click.echo(f"requests still running after {_STOP_SECONDS:g} s were cut off", err=True)


def _token(variable: str | None, host: str) -> str | None:
    from rlhf_core.errors import UserInputError
    from rlhf_web import environment_key, is_loopback

    if variable is None:
        if is_loopback(host.lower()):
            return None
        raise UserInputError(
            f"{host} can be reached from other machines", where="--host", hint="add --token-env VARIABLE"
        )
    return environment_key(variable, where="--token-env")


def _make_scorer(name: str, pairs: Sequence[str], device: str, concurrency: int) -> RewardScorer:
    from rlhf_core.components import RewardContext
    from rlhf_core.config import RewardCallOptions, resolve_reward
    from rlhf_core.place import resolve_device
    from rlhf_core.rewards import RewardScorer, make_reward_spec

    entry: dict[str, Any] = {"concurrency": concurrency, **dict(map(_parse_option, pairs)), "name": name}
    reward = resolve_reward(entry, "rlhf serve-reward")
    options = reward.typed(RewardCallOptions)
    context = RewardContext(str(resolve_device(device)), seed=0)
    return RewardScorer([make_reward_spec(reward, reward.config, context, options)])


def _parse_option(text: str) -> tuple[str, Any]:
    from rlhf_core.errors import ConfigError
    from rlhf_core.util import parse_yaml

    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f'"{text}" is not key=value', where="--option", hint="--option target_tokens=64")
    return key, parse_yaml(value, f"--option {key}")


def _score_by(scorer: RewardScorer) -> Score:
    async def score(rollouts: Sequence[Rollout]) -> list[float | None]:
        rows = await asyncio.wrap_future(scorer.submit(rollouts))
        return [None if row is None else next(iter(row.values())) for row in rows]

    return score
