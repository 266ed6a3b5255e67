"""`rlhf serve-reward` and the reward `http` in real processes."""

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from http_rewards import make_rollout
from running import PATIENCE_SECONDS

from rlhf_reward_http.client import HttpReward
from rlhf_reward_http.config import HttpRewardConfig
from rlhf_web import RemoteError

REWARDS = Path(__file__).with_name("http_rewards.py")


def ask(url, rollouts, *, token=None, **options):
    async def run():
        reward = HttpReward(HttpRewardConfig(url=url, **options), token)
        try:
            return await reward(rollouts)
        finally:
            await reward.aclose()

    return asyncio.run(run())


@pytest.mark.slow
def test_200_concurrent_requests_lose_nothing_in_bounded_memory(serve):
    served = serve(
        f"{REWARDS}:slow_number", "--port", "0", "--max-in-flight", "4",
        "--option", "seconds=0.01", "--option", "concurrency=4",
    )  # fmt: skip
    ask(served.url, [make_rollout(0)])
    before = served.peak_bytes()
    size = 1_000_000
    rollouts = [make_rollout(i, "x" * size) for i in range(200)]
    scores = ask(served.url, rollouts, samples_per_request=1, max_connections=200, patience_seconds=PATIENCE_SECONDS)
    assert scores == [float(i) for i in range(200)]
    growth = served.peak_bytes() - before
    assert growth < 64 * size, f"{growth:,} bytes: about all 200 bodies at once"
    code, out, err = served.stop()
    assert (code, err) == (0, "")
    assert out == "stopped\n"


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_is_survived(serve):
    first = serve(f"{REWARDS}:slow_number", "--port", "0", "--max-in-flight", "2")
    port, url = first.port, first.url
    seen = threading.Event()
    answer: list[float] = []

    def run():
        rollouts = [make_rollout(i) for i in range(300)]
        ask(url, rollouts[:10], samples_per_request=1, max_connections=4)
        seen.set()
        answer.extend(ask(url, rollouts, samples_per_request=1, max_connections=4, patience_seconds=PATIENCE_SECONDS))

    asking = threading.Thread(target=run)
    asking.start()
    assert seen.wait(PATIENCE_SECONDS)
    first.stop(signal.SIGKILL)
    assert asking.is_alive()
    second = serve(f"{REWARDS}:slow_number", "--port", str(port))
    asking.join(PATIENCE_SECONDS)
    assert answer == [float(i) for i in range(300)]
    assert second.stop(signal.SIGINT)[0] == 0


@pytest.mark.slow
def test_installed_rewards_options_and_tokens(serve):
    served = serve(
        "length", "--port", "0", "--option", "target_tokens=1", "--token-env", "T", env={"T": "t0ken"}
    )  # fmt: skip
    assert ask(served.url, [make_rollout(0)], token="t0ken") == [0.0]
    with pytest.raises(RemoteError, match="status 401: the key is missing or wrong"):
        ask(served.url, [make_rollout(0)], token="another")
    code, out, err = served.stop()
    assert code == 0
    assert "t0ken" not in out + err


@pytest.mark.slow
def test_a_failing_reward_reaches_the_client_by_name(serve):
    served = serve(f"{REWARDS}:raises", "--port", "0")
    with pytest.raises(RemoteError, match=r'status 500: reward "raises": .*raised ValueError: no such judge'):
        ask(served.url, [make_rollout(0)])


def test_a_run_is_scored_by_a_served_reward(serve, tmp_path):
    from rlhf_core import train
    from rlhf_testing.runs import tiny_run

    served = serve("length", "--port", "0", "--option", "target_tokens=4", "--option", "shape=at-least")
    here = {"name": "length", "target_tokens": 4, "shape": "at-least"}
    there = {"name": "http", "url": served.url, "samples_per_request": 3, "weight": 0}
    result = train(tiny_run({"rewards": [here, there]}), output=tmp_path / "run")
    assert [line["reward/http"] for line in result.metrics] == [line["reward/length"] for line in result.metrics]
    assert result.metrics[-1]["reward_calls/http/calls"] == 1
    assert "stopped" in served.stop()[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-reward"], 'no reward "no-such-reward" is installed'),
        (["length", "--option", "target_token=4"], "did you mean"),
        (["length", "--option", "target_tokens"], "is not key=value"),
        (["length", "--option", "cache=true"], "cache: was removed"),
        (["length", "--host", "0.0.0.0"], "can be reached from other machines"),
        (["length", "--token-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
    ],
)
def test_wrong_input_is_told_without_a_traceback(arguments, said):
    from click.testing import CliRunner

    from rlhf_core.errors import UserInputError
    from rlhf_reward_http.command import serve_reward

    with pytest.raises(UserInputError, match=said):
        CliRunner().invoke(serve_reward, [*arguments, "--port", "0"], catch_exceptions=False)


@pytest.mark.slow
def test_the_command_is_listed_and_a_taken_port_is_exit_2(serve):
    served = serve("length", "--port", "0")
    command = [sys.executable, "-c", "from rlhf_cli.main import main; main()"]
    taken = subprocess.run(
        [*command, "serve-reward", "length", "--port", str(served.port)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert taken.returncode == 2
    assert f"cannot listen at 127.0.0.1 port {served.port}" in taken.stderr
    listed = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    assert "serve-reward" in listed.stdout
