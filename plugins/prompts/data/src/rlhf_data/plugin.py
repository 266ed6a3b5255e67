"""Prompt sources of this distribution, referenced by its entry points."""

from __future__ import annotations

from rlhf_core import Component

from .config import HfDatasetConfig, MixtureConfig, SortDigitsConfig

hf_dataset = Component(
    summary="Hugging Face dataset: a saved folder, Parquet, JSONL or CSV files, or a hub name.",
    config=HfDatasetConfig,
    build="rlhf_data.hf_dataset:build",
)
mixture = Component(
    summary="Several sources, each with a share of the stream.",
    config=MixtureConfig,
    build="rlhf_data.mixture:build",
)
sort_digits = Component(
    summary="Generated problems: sort the digits of a number (the quickstart's task).",
    config=SortDigitsConfig,
    build="rlhf_data.sort_digits:build",
)
