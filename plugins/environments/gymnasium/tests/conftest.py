"""A library of one environment, in place of the real one."""

import sys

import pytest

FAKE = '''
class UnregisteredEnv(Exception): ...
class error:
    UnregisteredEnv = UnregisteredEnv
class Line:
    """Walk from 0 to `goal`: 1 is a step to the right; time is up after `limit` steps. The seed is the start."""
    closed = 0
    def __init__(self, goal=3, limit=5, render_mode=None, box=False):
        from gymnasium.spaces import Box, Discrete
        self.goal, self.limit, self.render_mode = goal, limit, render_mode
        self.action_space = Box() if box else Discrete(2, start=0)
    def reset(self, *, seed):
        self.place, self.steps = seed % 2, 0
        return self.place, {"steps": 0}
    def step(self, action):
        assert isinstance(action, int)
        self.place, self.steps = self.place + action, self.steps + 1
        done = self.place == self.goal
        return self.place, float(done), done, self.steps == self.limit, {"steps": self.steps}
    def render(self):
        assert self.render_mode == "ansi"
        return "\\n" + "_" * self.place + "\\x1b[41mX\\x1b[0m\\n"
    def close(self):
        Line.closed += 1
def make(env_id, **options):
    if env_id != "Line-v0":
        raise UnregisteredEnv(f"Environment `{env_id}` doesn't exist.")
    return Line(**options)
'''
SPACES = """
class Discrete:
    def __init__(self, n, start=0):
        self.n, self.start = n, start
class Box:
    def __str__(self):
        return "Box(2,)"
"""


@pytest.fixture
def fake_library(tmp_path, monkeypatch):
    """`gymnasium` is a module with the environment Line-v0; gives its class."""
    folder = tmp_path / "fake" / "gymnasium"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(FAKE)
    (folder / "spaces.py").write_text(SPACES)
    for name in [name for name in sys.modules if name.partition(".")[0] == "gymnasium"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder.parent)
    import gymnasium

    yield gymnasium.Line
    for name in [name for name in sys.modules if name.partition(".")[0] == "gymnasium"]:
        del sys.modules[name]
