"""The section `environment` of a run file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.components import Component

from .options import EnvironmentOptions

if TYPE_CHECKING:
    from rlhf_core.rollout.player import Player, PlayerContext
    from rlhf_core.wiring.inputs import RunInputs


class EnvironmentConfig(EnvironmentOptions):
    """How core plays the episodes of an environment, whoever wrote it."""

    def player(self, context: PlayerContext) -> Player:
        from .player import build

        return build(context)

    def check_inputs(self, inputs: RunInputs) -> None:
        from .chat import chat_format

        chat_format(inputs.tokenizer, self)

    def rehearse(self, inputs: RunInputs) -> None:
        from .rehearsal import play_one_turn

        play_one_turn(inputs, self)


environment = Component(summary="Episodes of several turns, in an environment.", config=EnvironmentConfig, build="")
