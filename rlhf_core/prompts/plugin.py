"""Core's own prompt sources, registered by entry points like any plugin's."""

from __future__ import annotations

from ..components import Component
from .config import HfDatasetConfig, JsonlConfig, MixtureConfig, TasksConfig

jsonl = Component(
    summary="A JSON Lines file: prompt (text or chat messages), optional answer, any metadata.",
    config=JsonlConfig,
    build="rlhf_core.prompts.jsonl:build",
)
hf_dataset = Component(
    summary="A Hugging Face dataset: a saved folder, Parquet, JSONL or CSV files, or a hub name.",
    config=HfDatasetConfig,
    build="rlhf_core.prompts.hf_dataset:build",
)
tasks = Component(
    summary="Tasks without a prompt, for an environment that brings its own.",
    config=TasksConfig,
    build="rlhf_core.prompts.tasks:build",
)
mixture = Component(
    summary="Several sources, each with a share of the stream.",
    config=MixtureConfig,
    build="rlhf_core.prompts.mixture:build",
)
