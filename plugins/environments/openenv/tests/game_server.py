"""A real OpenEnv server, on a thread: find a number; one session an episode."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from running import PATIENCE_SECONDS


class Guess(Action):
    """A guess."""

    number: int


class Word(Action):
    """A guess as a word."""

    word: str


class Told(Observation):
    """What is said of a guess."""

    hint: str = ""
    guesses: int = 0


class Game(Environment):
    """The number is the seed modulo 5. The guess 13 fails, 14 hangs, and 15 is answered with what is no text."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    closed = 0

    def reset(self, seed=None, episode_id=None, highest=5, **options):
        self.goal, self.guesses = seed % highest, 0
        return Told(hint=f"0 to {highest - 1}?")

    def step(self, action, timeout_s=None, **options):
        number = action.number if isinstance(action, Guess) else int(action.word)
        self.guesses += 1
        if number == 13:
            raise ArithmeticError("out of luck")
        if number == 14:
            threading.Event().wait(5)
        if number == self.goal:
            return Told(hint="yes", guesses=self.guesses, done=True, reward=1)
        return Told(hint="higher" if number < self.goal else "lower", guesses=self.guesses, reward=-0.5)

    @property
    def state(self):
        return State()

    def close(self):
        Game.closed += 1


@contextmanager
def serving(*, action=Guess, sessions=32):
    """The address of a server that runs meanwhile."""
    app = create_fastapi_app(Game, action, Told, max_concurrent_envs=sessions)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="websockets-sansio", lifespan="off"))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(PATIENCE_SECONDS)
        listening.close()
