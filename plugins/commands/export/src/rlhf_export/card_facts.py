"""Reads the facts of a model card from the files of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config import score_name
from rlhf_core.runfolder import RunFolder
from rlhf_core.util import read_lines, redact_mapping, redact_text

from .public_values import hub_name, last_part, plugin_name

_HIDDEN_SCORES = ("_low", "_high", "length_mean", "truncated_fraction", "num_prompts", "num_scored")
"""Endings of evaluation metrics that are not results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """Facts about the run that trained a model, without secrets."""

    run_name: str
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    last: Mapping[str, Any]
    """The line of `metrics.jsonl` after which the model was written, {} before the first update."""
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    """Metrics `eval/…` before training, and of the last evaluation up to the model."""
    base_model: str | None
    """Hub name of the model that the run started from, or of the one that it was made from."""
    license: str | None
    """License of that model, if its folder has a card that names it."""

    def option(self, section: str, name: str) -> Any:
        """Return an option of the run file, None if it is missing."""
        options = self.config.get(section)
        return options.get(name) if isinstance(options, Mapping) else None

    @property
    def algorithm(self) -> str:
        return str(self.option("algorithm", "name") or "unknown")

    @property
    def model_path(self) -> str:
        return str(self.option("model", "path") or "unknown")

    @property
    def working_folder(self) -> str | None:
        """Folder in which the run was started."""
        folder = self.manifest.get("working_folder")
        return folder if isinstance(folder, str) else None

    @property
    def prompts(self) -> Mapping[str, Any]:
        section = self.config.get("prompts")
        return section if isinstance(section, Mapping) else {}

    @property
    def data_digest(self) -> str | None:
        digest = self.manifest.get("data_digest")
        return digest if isinstance(digest, str) else None

    @property
    def seed(self) -> int | None:
        seed = self.manifest.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def num_episodes(self) -> int:
        episode = self.last.get("episode")
        return episode + 1 if isinstance(episode, int) else 0

    @property
    def num_updates(self) -> int:
        step = self.last.get("step")
        return step if isinstance(step, int) else 0

    @property
    def score_name(self) -> str | None:
        """Name of the reward that the held-out score is the mean of."""
        name = score_name(self.config)
        return None if name is None else plugin_name(name)

    @property
    def score_after(self) -> float | None:
        return _finite(self.after.get("eval/score"))

    def data_text(self) -> str:
        """Return the source of the prompts, and the hub name or the last part of the path of its data."""
        name, path = plugin_name(str(self.prompts.get("name") or "environment")), self.prompts.get("path")
        if not isinstance(path, str):
            return name
        return f"{name}: {hub_name(path, self.working_folder) or last_part(path)}"

    def rewards(self) -> Iterator[tuple[str, float]]:
        """Yield label and weight of each reward."""
        entries = self.config.get("rewards")
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, Mapping):
                yield plugin_name(str(entry.get("label") or entry.get("name"))), _finite(entry.get("weight")) or 0.0

    def scores(self) -> Iterator[tuple[str, float | None, float | None]]:
        """Yield name, value before training and value after for each held-out result, the score first."""
        keys = [key for key in dict.fromkeys((*self.after, *self.before)) if key.startswith("eval/")]
        keys.sort(key=lambda key: key != "eval/score")
        for key in keys:
            name = key.removeprefix("eval/")
            is_repeated = name == self.score_name and "eval/score" in keys
            before, after = _finite(self.before.get(key)), _finite(self.after.get(key))
            if not is_repeated and not name.endswith(_HIDDEN_SCORES) and (before, after) != (None, None):
                yield (self.score_name or name if name == "score" else name), before, after

    def versions(self) -> dict[str, str]:
        """Return the versions of Python, of libraries, and of the distributions whose plugins the run used."""
        kinds = [_mapping(each) for each in _mapping(self.manifest.get("owners")).values()]
        owners = sorted({str(owner) for each in kinds for owner in each.values()})
        used = dict(owner.rpartition(" ")[::2] for owner in owners)
        named = {"Python": self.manifest.get("python"), **_mapping(self.manifest.get("libraries")), **used}
        return {str(name): str(version) for name, version in named.items() if version is not None}


def read_card_facts(folder: RunFolder, step: int | None = None) -> CardFacts:
    """Read the facts of a run.

    Args:
        folder: the run's folder.
        step: update after which the model was written. None is the last one.

    Returns:
        The facts.

    Raises:
        DataError: a file of the run is damaged.
    """
    config = redact_mapping(folder.read_config())
    manifest = redact_mapping(folder.read_json(folder.manifest))
    lines = [line for line in read_lines(folder.metrics) if step is None or _is_up_to(line, step)]
    evaluated = [line for line in lines if any(key.startswith("eval/") for key in line)]
    summary = folder.read_json(folder.summary)
    before = {"eval/score": summary.get("eval_before"), **folder.read_json(folder.evaluation_before)}
    path = str(_mapping(config.get("model")).get("path") or "")
    working_folder = manifest.get("working_folder")
    base, license_name = _origin(path, working_folder if isinstance(working_folder, str) else None)
    return CardFacts(
        run_name=redact_text(folder.path.resolve().name),
        config=config,
        manifest=manifest,
        last=lines[-1] if lines else {},
        before=before,
        after=_evaluation(evaluated),
        base_model=base,
        license=license_name,
    )


def _evaluation(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in lines[-1].items() if key.startswith("eval/")} if lines else {}


def _origin(path: str, working_folder: str | None) -> tuple[str | None, str | None]:
    """Return the hub name and the license of a base model. A local folder's card names those that it was made from."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    name = hub_name(path, working_folder)
    if name is not None:
        cached = try_to_load_from_cache(name, "README.md")
        card = Path(cached) if isinstance(cached, str) else None
    else:
        folders = [Path(path), *([Path(working_folder, path)] if working_folder is not None else [])]
        card = next((each / "README.md" for each in folders if (each / "README.md").is_file()), None)
    data: Any = None
    if card is not None:
        try:
            data = ModelCard.load(card, ignore_metadata_errors=True).data
        except (OSError, ValueError):  # not a card
            data = None
    base, license_name = (getattr(data, key, None) for key in ("base_model", "license"))
    is_usable = isinstance(base, str) and hub_name(base, None) is not None
    known = license_name if isinstance(license_name, str) and license_name.isascii() else None
    return name or (base if is_usable else None), known


def _is_up_to(line: Mapping[str, Any], step: int) -> bool:
    number = line.get("step")
    return isinstance(number, int) and number <= step


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e100 else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
