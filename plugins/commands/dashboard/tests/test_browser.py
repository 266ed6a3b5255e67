"""The page in a real browser, where one is installed: what it draws, that it grows, and that no text becomes markup."""

import json
import re
import shutil
import subprocess
import threading

import pytest
from dashboard_runs import KEY, add_episode, make_run
from running import PATIENCE_SECONDS, wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
CHAT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]


@pytest.fixture
def serve():
    """Starts a server over runs in a thread of this process; returns its address."""
    import uvicorn

    from rlhf_dashboard.app import make_app

    started = []

    def start(runs):
        app = make_app(runs, key=KEY, host="127.0.0.1")
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        started.append((server, thread))
        wait_until(lambda: server.started, "the server")
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"

    yield start
    for server, thread in started:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)


def dumped(address, tmp_path, budget_ms=12_000):
    """The document after some (virtual) time in the browser."""
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--virtual-time-budget={budget_ms}"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True).stdout


def steps(page, metric="reward/mean"):
    """The last step of a metric's curve."""
    chart = page.partition(f'data-metric="{metric}"')[2].partition("</svg>")[0]
    return int(re.findall(r">(\d+)</text>", chart)[-1])


def test_it_shows_runs_curves_events_and_samples(serve, runs, tmp_path):
    from rlhf_dashboard.runs import Runs

    add_episode(runs / "first", 2, completion="hi<|im_end|>", prompt=CHAT)
    page = dumped(f"{serve(Runs(runs))}#key={KEY}", tmp_path)
    assert 'data-state="ready"' in page and KEY not in page
    assert '<span class="status running">running</span>' in page
    assert steps(page) == 3
    assert 'data-metric="kl/mean"' not in page, "a curve of zeros"
    assert "guard entropy, update 3" in page and "from_step 2" in page
    assert '<div class="who">user</div><div class="text prompt">Say hi</div>' in page
    assert '<div class="text completion">hi</div>' in page
    assert '<td class="text">exact-match</td>' in page


def test_runs_are_nested_and_the_best_is_selected(serve, runs, tmp_path):
    from rlhf_dashboard.runs import Runs

    for name, score in (("first", 0.5), ("first/warm-start", 0.3), ("second", 0.9)):
        folder = runs / name if name == "first" else make_run(runs / name)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "kl/mean": 7.64e-14}) + "\n")
        (folder / "summary.json").write_text(json.dumps({"status": "done", "eval_after": score}))
    page = dumped(f"{serve(Runs(runs))}#key={KEY}", tmp_path)
    assert '<span class="depth1">└ <button class="link" type="button" aria-pressed="false">warm-start<' in page
    assert re.search(r'aria-pressed="true">second</button> <span class="chip">best<', page)
    assert "e-14" not in page
    assert 'aria-sort="descending"><button class="link" type="button">changed ↓<' in page


def test_curves_and_samples_grow_while_it_is_open(serve, runs, tmp_path):
    from rlhf_dashboard.runs import Runs

    class Growing(Runs):
        """Each look finds another episode."""

        episode = 1

        def rows(self):
            self.episode += 1
            add_episode(runs / "first", self.episode, completion=f"answer-{self.episode}")
            return super().rows()

    growing = Growing(runs)
    page = dumped(f"{serve(growing)}#key={KEY}", tmp_path)
    assert growing.episode > 3 and steps(page) > 4
    assert "answer-2" in page and "answer-4" in page


def test_what_a_model_wrote_is_text(serve, runs, tmp_path):
    from rlhf_dashboard.runs import Runs

    evil = make_run(runs / "<img src=x onerror=alert(1)>")
    add_episode(evil, 2, completion=EVIL, prompt=EVIL)
    with (evil / "run.log").open("a") as log:
        log.write(f"2026-11-23 05:36:44,300 WARNING rlhf: {EVIL}\n")
    page = dumped(f"{serve(Runs(runs))}#key={KEY}", tmp_path)
    assert "<title>rlhf dashboard</title>" in page
    assert "<img" not in page and "&lt;img src=x" in page


def test_without_the_key_it_asks_for_it(serve, runs, tmp_path):
    from rlhf_dashboard.runs import Runs

    page = dumped(serve(Runs(runs)), tmp_path)
    assert 'data-state="locked"' in page and 'id="ask" class="panel">' in page and "first" not in page
