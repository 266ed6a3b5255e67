"""An environment of verifiers with two agents."""

import verifiers.v1 as vf
from number_game import GameTaskset


class Pair(vf.EnvConfig):
    asker: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[Pair]):
    async def run(self, task, agents):
        raise NotImplementedError


__all__ = ["GameTaskset", "PairEnv"]
