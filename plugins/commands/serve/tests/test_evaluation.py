"""The commands of docs/evaluation.md, against a server and the folder of a small model (`make soak-clients`)."""

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import closing
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version
from test_server import KEY, serving
from transformers import AutoTokenizer

from rlhf_core import train
from rlhf_core.config import ModelConfig
from rlhf_serve.serving import model_of, serve_model
from rlhf_testing.runs import tiny_run

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "evaluation.md"
NUM_PROBLEMS = 16
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
DEADLINE_SECONDS = 600
HAS_INSPECT = find_spec("inspect_ai") is not None and Version(version("openai")) >= Version("3.4")
NEEDS = {
    "lm-eval": pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval: make env-clients"),
    "inspect": pytest.mark.skipif(not HAS_INSPECT, reason="needs inspect-ai and openai 3.4, see docs/evaluation.md"),
}
MODULES = {"lm-eval": "lm_eval", "inspect": "inspect_ai"}


def commands(program):
    """The page's commands of a program."""
    blocks = re.findall(r"^```\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith(f"{program} ")]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with `runs/first`, whose model has a chat template, and the examples."""
    desk = tmp_path_factory.mktemp("desk")
    run = train(tiny_run(), output=desk / "runs" / "first").run_folder
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(run / "model")
    (desk / "examples").symlink_to(ROOT / "examples")
    return desk


@pytest.fixture(scope="module")
def port(desk):
    config = ModelConfig(path=model_of(str(desk / "runs" / "first")), device="cpu")
    model = serve_model(config, engine="hf", seed=0, max_new_tokens=64)
    with closing(model), serving(model, model="first") as (port, _):
        yield port


def run(words, desk, port, *more):
    environment = {
        **os.environ,
        "HF_HOME": str(desk / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OPENAI_API_KEY": KEY,
        "RLHF_API_KEY": KEY,
        "RLHF_BASE_URL": f"http://127.0.0.1:{port}/v1",
    }
    words = [word.replace(":8765/", f":{port}/") for word in words]
    command = [sys.executable, "-m", MODULES[words[0]], *words[1:], "--limit", str(NUM_PROBLEMS), *more]
    done = subprocess.run(
        command, cwd=desk, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@NEEDS["lm-eval"]
def test_lm_eval_measures_the_same_at_the_server_and_in_the_folder(desk, port):
    found = {}
    for words in commands("lm-eval"):
        name = words[words.index("--model") + 1]
        run(words, desk, port, "--output_path", f"results-{name}")
        (path,) = (desk / f"results-{name}").rglob("results_*.json")
        results = json.loads(path.read_text())["results"]
        found[name] = {task: values.get("acc,none", values.get("exact_match,none")) for task, values in results.items()}
    assert set(found) == {"local-completions", "local-chat-completions", "hf"}
    assert found["local-completions"] == found["hf"] and set(found["hf"]) == {"sort_digits", "sort_digits_choice"}
    assert found["hf"]["sort_digits_choice"] > 0, "one of four is right by chance"
    assert found["local-chat-completions"] == {"sort_digits": found["hf"]["sort_digits"]}


@NEEDS["inspect"]
def test_inspect_asks_the_server_for_text_and_for_messages_and_reads_the_folder(desk, port):
    served, folder = commands("inspect")
    chat = [word.replace("openai-api-completions/", "openai-api/") for word in served]
    texts = []
    for number, words in enumerate(
        (served, [*chat, "--num-choices", "2", "--logprobs", "--top-logprobs", "3"], folder)
    ):
        run(words, desk, port, "--log-dir", f"logs-{number}", "--log-format", "json", "--display", "plain")
        (path,) = (desk / f"logs-{number}").glob("*.json")
        log = json.loads(path.read_text())
        assert log["status"] == "success"
        assert log["results"]["completed_samples"] == NUM_PROBLEMS
        texts.append([each["output"]["choices"][0]["message"]["content"] for each in log["samples"]])
        choices = log["samples"][0]["output"]["choices"]
        if number == 1:
            assert len(choices) == 2 and len(choices[0]["logprobs"]["content"][0]["top_logprobs"]) == 3
    assert texts[0] == texts[1] == texts[2]
