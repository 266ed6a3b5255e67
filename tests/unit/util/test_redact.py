"""Secrets are taken out of everything that is written or shown: no place a user could put one is left."""

import json
import logging
import subprocess
import sys
from urllib.parse import quote

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

from rlhf_cli.main import run as rlhf
from rlhf_core.config.load import load_run
from rlhf_core.config.resolve import resolve
from rlhf_core.config.section import options_of
from rlhf_core.errors import ConfigError
from rlhf_core.util import redact
from rlhf_core.util.redact import PrintableFormatter
from rlhf_testing.runs import tiny_run

KEYS = (
    *("api_key", "apikey", "api-key", "key", "auth", "pwd", "password", "passphrase", "secret", "client_secret"),
    *("token", "hf_token", "access_key", "cookie", "Cookie", "X-Api-Key", "Authorization", "private_key"),
    *("credentials", "signature", "openai.api_key"),
)
NO_SECRETS = (
    *("metadata_key", "tests_key", "eos_token", "max_new_tokens", "tokenizer", "monkey", "keys", "author"),
    *("token_env", "design"),
)
SECRET = st.text(st.characters(min_codepoint=33, max_codepoint=0x24F, exclude_characters="*"), min_size=8).filter(
    lambda text: len(set(text)) > 3
)


@pytest.fixture(autouse=True)
def _own_secrets(monkeypatch):
    monkeypatch.setattr(redact, "_known", {})


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_names_a_secret(key):
    assert redact.redact_mapping({key: "x", "a": [{key: 3}]}) == {key: "***", "a": [{key: "***"}]}
    assert redact.redact_command(["--set", f"rewards.0.{key}=a-secret"])[1] == f"rewards.0.{key}=***"


@pytest.mark.parametrize("key", NO_SECRETS)
def test_a_key_that_names_none(key):
    assert redact.redact_mapping({key: "plain"}) == {key: "plain"}


PLACES = {
    "key": lambda secret: {"api_key": secret},
    "number": lambda secret: {"auth": [secret, 5]},
    "header": lambda secret: {"headers": {"X-Api-Key": secret}},
    "in a list": lambda secret: {"headers": [{"Cookie": secret}]},
    "below a key": lambda secret: {"credentials": {"user": "me", "word": secret}},
    "in a query": lambda secret: {"url": f"https://host/path?a=1&api_key={quote(secret, safe='')}#x"},
    "in an address": lambda secret: {"url": f"https://me:{quote(secret, safe='')}@host/path"},
}


@given(secret=SECRET, place=st.sampled_from(sorted(PLACES)))
def test_a_secret_is_gone_from_config_command_log_and_other_texts(secret, place):
    redact._known.clear()
    part = PLACES[place](secret)
    run = {"rewards": [{"name": "x", **part}]}
    shown = json.dumps(redact.redact_mapping(run), ensure_ascii=False)
    redact.learn(run)
    texts = [
        shown,
        yaml.safe_dump(redact.redact_mapping(run), allow_unicode=True),
        *redact.redact_command(["rlhf", "--set", f"rewards.0={json.dumps(part, ensure_ascii=False)}"]),
        redact.redact_text(f"no luck with {secret} at {quote(secret)}: {secret!r} {json.dumps(secret)}"),
        PrintableFormatter().format(logging.LogRecord("rlhf", 40, "x.py", 1, "said %s", (secret,), None)),
    ]
    for text in texts:
        assert secret not in text
        assert quote(secret, safe="") not in text


@pytest.mark.parametrize("text", ["Authorization: Bearer abcdefgh", "X-Api-Key: abcdefgh", "Cookie: a=abcdefgh; b=c"])
def test_headers_in_a_text(text):
    assert "abcdefgh" not in redact.redact_text(f"sent\n{text}\nand got 401")


def test_environment_variables_that_are_secrets(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-from-here")
    monkeypatch.setenv("ANY_NAME", "sk-from-there")
    monkeypatch.setenv("PWD", "/some/working/folder")
    monkeypatch.setenv("TEST_TOKEN", "test")
    redact.learn_environment()
    assert redact.redact_text("a test in /some/working/folder") == "a test in /some/working/folder"
    redact.learn({"token_env": "ANY_NAME"})
    assert redact.redact_text("sk-from-here sk-from-there") == "*** ***"


class Options(BaseModel):
    word: SecretStr
    inner: "Options | None" = None


def test_an_option_typed_as_secret_is_hidden_whatever_its_name():
    config = Options(word=SecretStr("open sesame"), inner=Options(word=SecretStr("at the door")))
    assert options_of(config) == {"word": "open sesame", "inner": {"word": "at the door", "inner": None}}
    assert redact.redact_mapping(options_of(config)) == {"word": "***", "inner": {"word": "***", "inner": None}}


REWARD = """
import logging
def mine(rollouts, *, api_key: str = "", headers: dict = {}, url: str = "", pwd: str = "") -> list[float]:
    logging.getLogger("rlhf").warning("asked %s with %s, %s and %r", url, api_key, pwd, headers)
    if pwd == "raise-secret-w":
        raise ValueError(f"{url} said no to {api_key} and {headers}")
    return [0.0] * len(rollouts)
"""
SECRETS = [f"{word}-secret-{letter}" for word, letter in zip(("sk", "head", "query", "raise"), "xyzw", strict=True)]


@pytest.mark.parametrize("pwd", ["quiet-secret-w", "raise-secret-w"])
def test_no_secret_is_left_in_a_run_folder_or_on_the_terminal(tmp_path, monkeypatch, capfd, pwd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REWARD)
    reward = {
        "name": "mine.py:mine",
        "headers": {"X-Api-Key": "head-secret-y", "n": 1},
        "url": "https://me:query-secret-z@host/?token=query-secret-z",
        "pwd": pwd,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_run({"rewards": [reward], "train": {"episodes": 1}})))
    argv = ["train", "run.yaml", "--output", "out", "--verbose", "--set", "rewards.0.api_key=sk-secret-x"]
    monkeypatch.setattr(sys, "argv", ["rlhf", *argv])
    assert rlhf(argv) == (1 if pwd.startswith("raise") else 0)
    for more in (["config", "show"], ["config", "check"]):
        assert rlhf([*more, "run.yaml", "--set", "rewards.0.api_key=sk-secret-x"]) == 0
    for wrong in ("rewards.0.api_kye=sk-secret-x", 'rewards.0.api_key={"a": "sk-secret-x"}'):
        assert rlhf(["train", "run.yaml", "--dry-run", "--set", wrong]) == 2
    shown = "".join(capfd.readouterr())
    assert "asked" in (tmp_path / "out" / "run.log").read_text()
    found = subprocess.run(["grep", "-rlE", r"\w+-secret-\w", str(tmp_path / "out")], capture_output=True, text=True)
    assert found.stdout == ""
    assert "-secret-" not in shown


def test_what_was_hidden_is_asked_for_again():
    run = tiny_run({"rewards": [{"name": "exact-match", "label": "a"}]})
    run["rewards"][0]["api_key"] = "***"
    with pytest.raises(ConfigError, match=r"(?s)rewards\.0\.api_key: was redacted .*--set rewards\.0\.api_key=VALUE"):
        resolve(load_run(run))
