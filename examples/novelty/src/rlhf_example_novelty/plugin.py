"""The entry points. This module and those that it imports need pydantic and core only, so that checking is quick."""

from rlhf_core import Component

from .config import NovelConfig, NoveltyGoalConfig, RestartsConfig, SignumConfig
from .section import NoveltyConfig

PACKAGE = "rlhf_example_novelty"

novelty = Component("How new answers should be.", NoveltyConfig)
novel = Component("Learns more from tokens that a witness finds unlikely.", NovelConfig, f"{PACKAGE}.algorithm:Novel")
novelty_goal = Component("Ends the run once answers are new.", NoveltyGoalConfig, f"{PACKAGE}.decision:NoveltyGoal")
signum = Component("Steps of the momentum's sign.", SignumConfig, f"{PACKAGE}.optimizer:build", optimizer_bytes=4.0)
restarts = Component("Cosines from the peak rate to 0.", RestartsConfig, f"{PACKAGE}.schedule:build")
