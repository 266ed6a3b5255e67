"""Writes model cards: a README.md with the metadata of the Hugging Face hub, made from the files of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from rlhf_core.runfolder import RunFolder

from .card_facts import CardFacts, read_card_facts
from .public_values import hub_name, last_part, plugin_name, public_options

CARD = "README.md"
_TAG = re.compile(r"[a-z0-9][a-z0-9+._-]*")
_OPTIONS = {
    "model": ("dtype", "lora"),
    "engine": ("name", "max_new_tokens", "temperature", "top_k", "top_p"),
    "strategy": ("name",),
    "environment": ("name", "max_turns", "max_tokens", "history"),
}
"""Sections of which a card lists only these options. It lists all public options of the `_WHOLE` sections."""
_WHOLE = ("algorithm", "optimizer", "reward_scaling", "train")
_TASKS = {"ForCausalLM": "text-generation", "ForSequenceClassification": "text-classification"}
_AUTO_CLASSES = {"text-classification": "AutoModelForSequenceClassification"}


def write_run_cards(run_folder: Path) -> None:
    """Write the cards of `model/` and, for a LoRA run, `adapter/`."""
    folder = RunFolder.read(run_folder)
    facts = read_card_facts(folder)
    for path in (folder.model, folder.adapter):
        if path.is_dir() and not path.is_symlink():
            write_card(path, facts)


def write_card(folder: Path, facts: CardFacts) -> None:
    """Write the card of a model folder, or of an adapter's. An existing one is replaced.

    Args:
        folder: folder with `config.json` or `adapter_config.json`.
        facts: of the run that trained the model.
    """
    text = render_card(folder, facts)
    (folder / CARD).unlink(missing_ok=True)  # a link would be followed
    (folder / CARD).write_text(text, encoding="utf-8")


def render_card(folder: Path, facts: CardFacts) -> str:
    """Return the text of the card of a model folder. Arguments as for `write_card`."""
    is_adapter = (folder / "adapter_config.json").is_file()
    task = _task(folder, facts)
    with as_file(files(__package__) / "assets" / "card.md") as template:
        card = ModelCard.from_template(
            _metadata(facts, task=task, is_adapter=is_adapter),
            template_path=str(template),
            title=_code(facts.run_name),
            kind="A LoRA adapter" if is_adapter else "A model" if task != "text-classification" else "A reward model",
            algorithm=_code(plugin_name(facts.algorithm)),
            base=_base(facts),
            facts=list(_facts(facts)),
            example=_example(task, is_adapter=is_adapter),
            scores=[(_code(name), _number(before), _number(after)) for name, before, after in facts.scores()],
            options=yaml.safe_dump(_options(facts.config), sort_keys=False, default_flow_style=None, width=100).strip(),
            versions=", ".join(f"{_code(name)} {version}" for name, version in facts.versions().items()),
        )
    return str(card) + "\n"


def _metadata(facts: CardFacts, *, task: str | None, is_adapter: bool) -> ModelCardData:
    algorithm = plugin_name(facts.algorithm)
    tags = ["rlhf", *([algorithm] if _TAG.fullmatch(algorithm) else []), *(["lora"] if is_adapter else [])]
    score, value = facts.score_name, facts.score_after
    dataset = hub_name(str(facts.prompts.get("path") or ""), facts.working_folder)
    results: list[EvalResult] | None = None
    if score is not None and value is not None and task is not None:
        results = [
            EvalResult(
                task_type=task,
                dataset_type=dataset or _code_free(facts.prompts.get("name")) or "prompts",
                dataset_name=f"held-out prompts of {facts.data_text()}",
                metric_type=score,
                metric_name=f"{score} (greedy)",
                metric_value=value,
            )
        ]
    return ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        base_model=facts.base_model,
        license=facts.license,
        pipeline_tag=task,
        tags=tags,
        datasets=dataset,
        metrics=[score] if score is not None and results else None,
        model_name=facts.run_name if results else None,
        eval_results=results,
    )


def _facts(facts: CardFacts) -> Iterator[tuple[str, str]]:
    yield "algorithm", _code(plugin_name(facts.algorithm))
    yield "base model", _base(facts)
    yield "data", _code(facts.data_text())
    if facts.data_digest is not None:
        yield "digest of the data", _code(facts.data_digest)
    if rewards := [f"{_code(label)} (weight {weight:g})" for label, weight in facts.rewards()]:
        yield "rewards", ", ".join(rewards)
    if (environment := facts.option("environment", "name")) is not None:
        yield "environment", _code(plugin_name(str(environment)))
    yield "episodes", str(facts.num_episodes)
    yield "updates", str(facts.num_updates)
    if (reward := facts.last.get("reward/mean")) is not None:
        yield "weighted score of the last episode", _number(reward)
    if facts.seed is not None:
        yield "seed", str(facts.seed)


def _base(facts: CardFacts) -> str:
    path = facts.model_path
    if path.startswith("builtin:"):
        return f"{_code(path)}, which has random weights"
    if hub_name(path, facts.working_folder) is not None:
        return _code(path)
    derived = f", which is based on {_code(facts.base_model)}" if facts.base_model else ""
    return f"{_code(last_part(path))}, a local folder{derived}"


def _example(task: str | None, *, is_adapter: bool) -> str:
    library, auto_class = "transformers", _AUTO_CLASSES.get(task or "", "AutoModelForCausalLM")
    if is_adapter:
        library, auto_class = "peft", auto_class.replace("AutoModel", "AutoPeftModel")
    imports = [f"from {library} import {auto_class}", "from transformers import AutoTokenizer"]
    if not is_adapter:
        imports = [f"from {library} import {auto_class}, AutoTokenizer"]
    return "\n".join(
        [
            *imports,
            "",
            'name = "."  # this folder, or its name on the hub',
            "tokenizer = AutoTokenizer.from_pretrained(name)",
            f"model = {auto_class}.from_pretrained(name)",
        ]
    )


def _task(folder: Path, facts: CardFacts) -> str | None:
    """Return the hub's name of the task, None for a model that does not name a known class."""
    if (folder / "adapter_config.json").is_file():
        kinds = {"CAUSAL_LM": "text-generation", "SEQ_CLS": "text-classification"}
        return kinds.get(str(_json(folder / "adapter_config.json").get("task_type")))
    names = _json(folder / "config.json").get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    return next((task for ending, task in _TASKS.items() if name.endswith(ending)), None)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for name, section in config.items():
        if name in _OPTIONS and isinstance(section, Mapping):
            section = {key: section[key] for key in _OPTIONS[name] if key in section}
        elif name not in _WHOLE:
            continue
        if (public := public_options(section)) is not None:
            chosen[name] = public
    return chosen


def _code(value: Any) -> str:
    """Return a value as a code span in one line, which renders as plain text whatever it contains."""
    return f"`{_code_free(value)}`"


def _code_free(value: Any) -> str:
    text = "" if value is None else str(value)
    return re.sub(r"[`|\s]+", " ", text).strip()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
