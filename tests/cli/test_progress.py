from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_cli.progress import RunProgress, clock
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.hookspecs import FitInfo

FOLDER = Path("runs") / ("a-very-long-name-" * 12) / "[bold]ppo"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(progress: object, *, episodes: int = 2, fail: bool = False) -> None:
    relay = HookRelay()
    relay.register(progress)
    info = FitInfo(
        algorithm="ppo",
        num_episodes=episodes,
        samples_per_episode=4,
        updates_per_episode=1,
        num_parameters={"policy": 1234},
    )
    summary = {"status": "done", "eval_before": 0.25, "eval_after": 0.75, "wall_s": 125.0}
    with relay.span("run", run_folder=FOLDER, config={}) as whole, relay.span("fit", info=info):
        for episode in range(episodes):
            with relay.span("episode", episode=episode) as span:
                with relay.span("make_experience", num_prompts=2, num_samples=4):
                    pass
                with relay.span("update", step=episode + 1) as update:
                    update.set("metrics", {"loss/policy": 0.5})
                if fail:
                    raise RuntimeError("broken")
                span.set("metrics", {"reward/mean": 0.5 + episode / 8, "kl/mean": 0.001, "loss/policy": -0.25})
        with relay.span("eval", step=episodes) as evaluation:
            evaluation.set("metrics", {"eval/score": 0.75})
        whole.set("summary", summary)


def test_a_pipe_gets_one_whole_line_per_episode():
    stream = io.StringIO()
    progress = RunProgress(stream)
    run(progress)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "ppo: 2 episodes on cpu, parameters: policy 1,234"
    assert lines[1].startswith("episode 1/2  reward 0.500  kl 0.001  loss policy -0.250  ")
    assert " left" in lines[1] and " left" not in lines[2]
    assert lines[3] == "held-out after 2 updates: score 0.750"
    assert "held-out score  0.250 -> 0.750" in lines
    assert "reward          0.500 -> 0.625" in lines
    assert "wall time       2 min 05 s" in lines
    assert lines[-1].endswith(str(FOLDER))
    assert "\x1b" not in stream.getvalue()


def test_quiet_says_only_the_end():
    stream = io.StringIO()
    progress = RunProgress(stream, quiet=True)
    run(progress)
    assert stream.getvalue().startswith("status")
    assert "0.250 -> 0.750" in stream.getvalue() and "episode" not in stream.getvalue()


def test_a_second_run_starts_from_nothing():
    stream = io.StringIO()
    progress = RunProgress(stream)
    run(progress, episodes=3)
    stream.truncate(0)
    run(progress, episodes=1)
    assert "reward          0.500 -> 0.500" in stream.getvalue()


def test_a_terminal_gets_bars_and_a_summary(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    progress = RunProgress(stream)
    run(progress)
    shown = stream.getvalue()
    for part in ("episode", "rollout", "reward", "update", "2/2", "4/4", "0.750", "[bold]ppo"):
        assert part in shown


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_a_failed_run_ends_its_bars_and_says_so(stream: io.StringIO):
    with pytest.raises(RuntimeError, match="broken"):
        run(RunProgress(stream), fail=True)
    assert "failed" in stream.getvalue()
    assert "episode 1/2" not in stream.getvalue()


def test_a_reader_that_leaves_does_not_stop_the_run():
    code = (
        "import os, sys\n"
        "from rlhf_cli.progress import RunProgress\n"
        "progress = RunProgress(os.fdopen(int(sys.argv[1]), 'w'))\n"
        "for _ in range(3): progress.print_line('line')\n"
        "os._exit(7)\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code, str(writer)], pass_fds=[writer], capture_output=True, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (7, "")


def test_nothing_heavy_is_imported():
    code = "import sys, rlhf_cli.progress; assert not {'torch', 'rich', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (61, "1 min 01 s"), (7300, "2 h 01 min")])
def test_clock(seconds, text):
    assert clock(seconds) == text
