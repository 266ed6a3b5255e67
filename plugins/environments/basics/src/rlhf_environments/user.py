"""`user`: another model plays the user, with a persona and a goal from the prompt's record."""

from __future__ import annotations

from typing import Any

from rlhf_core.components import TaskContext
from rlhf_core.util import derive_seed
from rlhf_episodes import shares_resources

from . import user_models
from .config import UserConfig
from .user_models import Message, UserModel


class User:
    """One conversation. Its reward is 0: use `rewards` to judge the rollout."""

    def __init__(self, config: UserConfig, model: UserModel) -> None:
        self._config = config
        self._model = model
        self._messages: list[Message] = []
        self._num_tokens = 0
        self._seed = 0
        self.metrics = {"ended_by_user": 0.0}

    def reset(self, task: Any) -> str | None:
        """Start from the prompt or, if it is empty, from a message of the user.

        All samples of a prompt start from the same message. Raises `ValueError` if the record lacks a goal.
        """
        config, prompt = self._config, task.prompt
        goal, persona = prompt.metadata.get(config.goal_key), prompt.metadata.get(config.persona_key, "")
        if not isinstance(goal, str) or not goal or not isinstance(persona, str):
            wrong = config.goal_key if isinstance(persona, str) else config.persona_key
            raise ValueError(
                f"metadata {wrong!r} of prompt {prompt.position} is {prompt.metadata.get(wrong)!r:.80}, not text: "
                f"add it to the record, or set environment.{'goal' if wrong == config.goal_key else 'persona'}_key"
            )
        instructions = config.instructions.format(persona=persona, goal=goal, end=config.end_text)
        self._messages = [{"role": "system", "content": instructions}]
        self._seed = task.sample_seed
        if prompt.messages is None and not prompt.text:
            return self._say(task.seed)
        self._messages += (
            [{"role": "assistant", "content": prompt.text}]
            if prompt.messages is None
            else [
                {"role": _OTHER_SIDE[message["role"]], "content": str(message.get("content") or "")}
                for message in prompt.messages
                if message["role"] in _OTHER_SIDE
            ]
        )
        return None

    def step(self, reply: Any) -> tuple[str | None, float, bool]:
        """Return the user's answer to a reply, or end the episode if the user ends the conversation."""
        self._messages.append({"role": "user", "content": reply.text})
        text = self._say(self._seed)
        if self._config.end_text in text:
            self.metrics["ended_by_user"] = 1.0
            return None, 0.0, True
        return text, 0.0, False

    def state(self) -> dict[str, Any]:
        """Return the conversation so far, as the user's model sees it."""
        return {"messages": self._messages, "num_tokens": self._num_tokens, "metrics": self.metrics}

    def restore(self, task: Any, state: dict[str, Any]) -> None:
        """Continue a conversation without calling the user's model again."""
        self._messages, self._num_tokens = state["messages"], state["num_tokens"]
        self.metrics, self._seed = state["metrics"], task.sample_seed

    def _say(self, seed: int) -> str:
        said = self._model.say(self._messages, seed=seed, offset=self._num_tokens)
        self._num_tokens += said.num_tokens
        self._messages.append({"role": "assistant", "content": said.text})
        return said.text


_OTHER_SIDE = {"user": "assistant", "assistant": "user"}


class Users:
    """Conversations with one model."""

    def __init__(self, config: UserConfig, model: UserModel) -> None:
        self._config = config
        self._model = model

    def new_episode(self) -> User:
        """Return the environment of one episode."""
        return User(self._config, self._model)

    def close(self) -> None:
        """Close the model."""
        self._model.close()


@shares_resources
def build(config: UserConfig, context: TaskContext) -> Users:
    """Load the model, or prepare the connection to its server."""
    if config.url is not None:
        return Users(config, user_models.RemoteUser(config))
    return Users(config, user_models.LocalUser(config, derive_seed(context.seed, "simulated-user")))
