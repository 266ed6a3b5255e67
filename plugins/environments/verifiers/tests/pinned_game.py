"""An environment of verifiers that says what its agent is."""

import verifiers.v1 as vf
from number_game import GameTaskset


class Pinned(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "bash"}, runtime=vf.DockerConfig(image="games"))


class PinnedEnv(vf.Env[Pinned]):
    async def run(self, task, agents):
        raise NotImplementedError


__all__ = ["GameTaskset", "PinnedEnv"]
