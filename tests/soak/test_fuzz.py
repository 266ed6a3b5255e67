"""Thousands of wrong run files: options made from the schemas, broken bytes. No traceback, no hang, nothing half-made.

`RLHF_FUZZ_INPUTS` says how many (default 2,000). What once failed goes into `corpus/` and stays there.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.main import run as rlhf
from rlhf_core.config.json_schema import run_schema
from rlhf_core.testing.runs import tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.yaml"))
INPUTS = int(os.environ.get("RLHF_FUZZ_INPUTS", "2000"))
LONGEST_SECONDS = 60.0
"""An input that takes longer hangs, for all that a user can tell; most take some ten milliseconds."""
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, 0.5, -0.5, 1e-300, 1e308, float("inf"), float("nan")),
    *("", " ", "x" * 300, "\x1b[2J", "\u202e", "../..", "/dev/zero", "~nobody/x", "builtin:", "builtin:none", "***"),
    *("http://a:b@c", "x.py:f", ".py:", "env:NO_SUCH_NAME", "$(id)", "{}", "null", "1e3", "\U0001f600"),
    *([], {}, [[]], {"name": None}, {"name": "ppo"}, [1, "a"], {"a": {"b": {"c": []}}}),
)


def made(schema: Mapping[str, Any], definitions: Mapping[str, Any], chance: random.Random, depth: int = 0) -> Any:
    """A value that the schema asks for, or nearly."""
    if depth > 6 or chance.random() < 0.06:
        return chance.choice(HOSTILE)
    if "$ref" in schema:
        return made(definitions[schema["$ref"].rpartition("/")[2]], definitions, chance, depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return made(chance.choice(schema[key]), definitions, chance, depth + 1)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else chance.choice(schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        properties = schema.get("properties", {})
        few = [name for name in properties if name in schema.get("required", ()) or chance.random() < 0.2]
        return {name: made(properties[name], definitions, chance, depth + 1) for name in few}
    if kind == "array":
        items = schema.get("items", {})
        return [made(items, definitions, chance, depth + 1) for _ in range(chance.randrange(3))]
    if kind in ("integer", "number"):
        bounds = [
            schema[key] for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if key in schema
        ]
        near = [bound + step for bound in bounds for step in (-1, 0, 1)]
        return chance.choice([*near, 0, 1, 2, 3, 7] if kind == "integer" else [*near, 0.0, 0.5, 1.0, 1e-6])
    return {"boolean": chance.random() < 0.5, "null": None}.get(
        str(kind), chance.choice(("a", "mean", "auto", "x.jsonl"))
    )


def changed(run: Any, document: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
    """A run that is right, with some sections made anew or spoilt."""
    result = json.loads(json.dumps(run))
    for section in chance.sample(sorted(document["properties"]), chance.randrange(1, 4)):
        value = made(document["properties"][section], document["$defs"], chance)
        old = result.get(section)
        is_mixed = isinstance(value, dict) and isinstance(old, dict) and chance.random() < 0.6
        result[section] = {**old, **value} if is_mixed else value
    if chance.random() < 0.1:
        result[chance.choice(("modle", "", "a.b", "eval ", "\u202e"))] = chance.choice(HOSTILE)
    return result


def text_of(run: Mapping[str, Any], chance: random.Random) -> bytes:
    """The run as a file (JSON is YAML), now and then with broken bytes."""
    content = bytearray(json.dumps(run, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass"))
    if chance.random() < 0.2:
        for _ in range(chance.randrange(1, 5)):
            place = chance.randrange(len(content))
            content[place : place + chance.randrange(3)] = bytes(chance.choices(b'{}[]":,&*!|>%@\x00\xff\t#-\n9', k=2))
    return bytes(content)


def check(path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """What is wrong with how the command takes this file; None where nothing is."""
    before = sorted(path.parent.iterdir())
    started = time.monotonic()
    code = rlhf([*command, str(path), *(["--dry-run"] if command == ["train"] else [])])
    seconds = time.monotonic() - started
    shown = capsys.readouterr().err
    if "Traceback" in shown or code not in (0, 2):
        return f"exit code {code}: {shown[-2000:]}"
    if sorted(path.parent.iterdir()) != before:
        return "it left something behind"
    return f"it took {seconds:.0f} s" if seconds > LONGEST_SECONDS else None


@pytest.mark.parametrize("seed", [0, None], ids=["fixed", "fresh"])
def test_wrong_run_files(
    seed: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    document, _ = run_schema()
    run, path = tiny_run(), tmp_path / "run.yaml"
    failed = []
    for number in range(INPUTS // 2):
        chance = random.Random(f"{seed}/{number}")
        path.write_bytes(text_of(changed(run, document, chance), chance))
        command = ["train"] if number % 10 == 0 else ["config", chance.choice(("check", "show"))]
        if problem := check(path, command, capsys):
            failed.append(f"seed {seed}, number {number}, {command}: {problem}\n{path.read_bytes()!r}")
    assert not failed, f"{len(failed)} inputs; put them into {CORPUS}:\n" + "\n\n".join(failed[:5])


@pytest.mark.parametrize("file", CORPUS, ids=lambda path: path.stem)
def test_what_once_failed(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_bytes(file.read_bytes())
    for command in (["config", "check"], ["config", "show"], ["train"]):
        assert check(path, command, capsys) is None
