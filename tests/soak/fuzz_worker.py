"""Takes inputs one after the other in a process of its own, and says of each what it began and what was wrong.

The process is killed from outside where an input does not come to an end.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import shutil
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from fuzz_inputs import HOSTILE, answer, changed, spoilt, text_of

from rlhf_containment.rewards.isolate import IsolatedCalls
from rlhf_core.config import RewardCallOptions
from rlhf_core.rewards import RewardSpec

_KINDS = ("run file",) * 10 + ("prompts", "run folder", "run folder", "model", "reward", "answers", "answers")
_PACKAGE = "rlhf_reward_rules"
_RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "exact-match": (f"{_PACKAGE}.exact_match:exact_match", {}),
    "regex": (f"{_PACKAGE}.regex:regex", {"pattern": r"(a|a)*\\boxed\{([^}]*)\}$"}),
    "format-tags": (f"{_PACKAGE}.format_tags:format_tags", {}),
    "math-equivalence": (f"{_PACKAGE}.math_equivalence:math_equivalence", {}),
    "json-schema": (f"{_PACKAGE}.json_schema:json_schema", {"json_schema": {"type": "object"}}),
    "repetition-penalty": (f"{_PACKAGE}.repetition_penalty:repetition_penalty", {}),
}
_RULE_SECONDS = 5.0
_RECORDS = ('{"prompt": "12>", "answer": "12"}\n', '{"prompt": [{"role": "user", "content": "12"}]}\n')


def work(folder: str, seed: int, first: int, end: int, report: str) -> None:
    """Inputs `first` to `end` of a seed; a line each to `report` before, and after one that was wrong."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True  # read from the environment by the process that this one was forked from
    os.chdir(folder)
    with open(report, "a", buffering=1) as lines:
        for number in range(first, end):
            lines.write(json.dumps({"number": number}) + "\n")
            if problem := try_input(Path(folder), seed, number):
                lines.write(json.dumps({"number": number, "problem": problem}) + "\n")
        lines.write(json.dumps({"number": end}) + "\n")


def try_input(folder: Path, seed: int, number: int) -> str | None:
    """What is wrong with how an input is taken; None where nothing is."""
    chance = random.Random(f"{seed}/{number}")
    kind = chance.choice(_KINDS)
    place = folder / "input"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    os.chdir(place)
    try:
        problem = _TRIALS[kind](place, folder, chance)
    except Exception:
        problem = traceback.format_exc()[-3000:]
    return f"{kind}: {problem}" if problem else None


def try_command(arguments: Sequence[str], place: Path) -> str | None:
    """A command that reads what it is given, and writes nothing."""
    from rlhf_cli.main import run as rlhf

    before = sorted(place.rglob("*"))
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(said):
        code = rlhf(list(arguments))
    failed = code == 1 and "\nerror: environment " in said.getvalue()  # it cannot play a record: a run would fail
    if "Traceback" in said.getvalue() or not (code in (0, 2) or failed):
        return f"rlhf {' '.join(arguments)}: exit code {code}: {said.getvalue()[-2500:]}"
    left = [str(path) for path in sorted(place.rglob("*")) if path not in before and not path.name.startswith("report")]
    left = [each for each in left if not each.endswith(".png")]
    return f"rlhf {' '.join(arguments)}: left {left}" if left else None


def _run_file(place: Path, folder: Path, chance: random.Random) -> str | None:
    from rlhf_testing.runs import tiny_run

    path = place / "run.yaml"
    path.write_bytes(text_of(changed(tiny_run(), _schema(), chance), chance))
    command = chance.choice((["config", "check"], ["config", "show"], ["plan"], ["train", "--dry-run"]))
    return _with_content(try_command([*command, str(path)], place), path)


def _prompts(place: Path, folder: Path, chance: random.Random) -> str | None:
    from rlhf_testing.runs import tiny_run

    data, run = place / "data.jsonl", place / "run.yaml"
    data.write_bytes(spoilt("".join(chance.choices(_RECORDS, k=4)).encode(), chance))
    prompts = {"name": "jsonl", "path": str(data)}
    run.write_text(json.dumps(tiny_run({"prompts": prompts, "rewards": ["length"]})))
    return _with_content(try_command(["train", str(run), "--dry-run"], place), data)


def _run_folder(place: Path, folder: Path, chance: random.Random) -> str | None:
    """A run that is done, of which one file is broken."""
    run = place / "run"
    shutil.copytree(folder / "done", run)
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size < 100_000]
    path = chance.choice([path for path in files if path.parent == run] if chance.random() < 0.8 else files)
    path.write_bytes(spoilt(path.read_bytes(), chance))
    commands = (
        ["report", str(run)],
        ["samples", str(run)],
        ["train", "--output", str(run), "--resume", "auto", "--dry-run"],
        ["train", "--from", str(run), "--dry-run"],
        ["control", str(run), "pause"],
    )
    return _with_content(try_command(chance.choice(commands), place), path)


def _model(place: Path, folder: Path, chance: random.Random) -> str | None:
    from rlhf_testing.runs import tiny_run

    model = place / "model"
    shutil.copytree(folder / "done/model", model)
    path = chance.choice(sorted(path for path in model.iterdir() if path.suffix == ".json"))
    path.write_bytes(spoilt(path.read_bytes(), chance))
    run = place / "run.yaml"
    run.write_text(json.dumps(tiny_run({"model": {"path": str(model)}})))
    return _with_content(try_command(["train", str(run), "--dry-run"], place), path)


def _reward(place: Path, folder: Path, chance: random.Random) -> str | None:
    from rlhf_testing.runs import tiny_run

    reward, run = place / "reward.py", place / "run.yaml"
    source = b"import os\n\n\ndef good(rollouts, *, word: str = 'a', few: int = 1) -> list[float]:\n    return [1.0]\n"
    reward.write_bytes(spoilt(source, chance))
    run.write_text(json.dumps(tiny_run({"rewards": [{"name": f"{reward}:good", "few": chance.choice((1, "a"))}]})))
    return _with_content(try_command(["config", chance.choice(("check", "show")), str(run)], place), reward)


def _answers(place: Path, folder: Path, chance: random.Random) -> str | None:
    """Rules that score what a model wrote, in this process: none of them may hang or break."""
    from rlhf_core.errors import RlhfError
    from rlhf_core.rewards.values import RewardFault, read_scores
    from rlhf_testing.rollouts import make_rollout

    if chance.random() < 0.3:  # what somebody's reward gives back
        given = chance.choice(HOSTILE)
        scores = given if chance.random() < 0.3 else [chance.choice(HOSTILE) for _ in range(chance.randrange(4))]
        with suppress(RewardFault):
            read_scores(scores, 2)
        return None
    rule = chance.choice(sorted(_RULES))
    rollouts = [make_rollout(completion=answer(chance), answer=chance.choice((answer(chance), "12", "{}")))]
    try:
        scores = asyncio.run(_rule(rule).call(rollouts, _RULE_SECONDS, lambda *_: []))
    except (RewardFault, RlhfError) as refused:  # past its deadline, or an answer of the user's that is none
        if "ended by" in str(refused):
            return f"{rule}: {refused}: {rollouts[0].completion[:300]!r}"
        return None
    if [type(score) for score in scores] != [float]:
        return f"{rule} gave {scores!r} to {rollouts[0].completion[:300]!r}"
    return None


_TRIALS: dict[str, Callable[[Path, Path, random.Random], str | None]] = {
    "run file": _run_file,
    "prompts": _prompts,
    "run folder": _run_folder,
    "model": _model,
    "reward": _reward,
    "answers": _answers,
}


@cache
def _schema() -> Any:
    from rlhf_cli.run_schema import run_schema

    return run_schema()[0]


def _with_content(problem: str | None, path: Path) -> str | None:
    return f"{problem}\n{path.name}: {path.read_bytes()[:1500]!r}" if problem else None


@cache
def _rule(name: str) -> IsolatedCalls:
    """In its own process, as in a training run: one that hangs there is ended."""
    spec = RewardSpec(name=name, recipe=partial(loaded, name), call_options=RewardCallOptions(isolate=True))
    return IsolatedCalls(spec)


def loaded(name: str) -> Callable[[Any], Any]:
    module, _, function = _RULES[name][0].partition(":")
    return partial(getattr(import_module(module), function), **_RULES[name][1])
