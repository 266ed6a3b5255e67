"""The entry points except that of the section. Imports only pydantic and core, so that checking is fast."""

from collections.abc import Mapping
from typing import Any

from rlhf_core import Component, Section

from .config import (
    VARIED_PATH,
    VARIED_TYPE,
    HotStartConfig,
    NovelConfig,
    NoveltyGoalConfig,
    RestartsConfig,
    SignumConfig,
)

PACKAGE = "rlhf_example_novelty"


def is_varied(path: str, config: Mapping[str, Any]) -> bool:
    """Whether a model is of the kind `varied`. config: `config.json` of its folder, empty for other paths."""
    return path == VARIED_PATH or config.get("model_type") == VARIED_TYPE


novel = Component("Learns more from tokens that a witness finds unlikely.", NovelConfig, f"{PACKAGE}.algorithm:Novel")
novelty_goal = Component("Ends the run once answers are new.", NoveltyGoalConfig, f"{PACKAGE}.decision:NoveltyGoal")
signum = Component("Steps of the momentum's sign.", SignumConfig, f"{PACKAGE}.optimizer:build", optimizer_bytes=4.0)
restarts = Component("Cosines from the peak rate to 0.", RestartsConfig, f"{PACKAGE}.schedule:build")
hot_start = Component("Samples first tokens hotter.", HotStartConfig, f"{PACKAGE}.engine:build", model_inputs=True)
varied = Component("A Llama that sees the variety of its prompt.", Section, f"{PACKAGE}.kind:Varied", claims=is_varied)
