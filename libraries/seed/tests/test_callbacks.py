from __future__ import annotations

import pytest

from rlhf_core.hooks.relay import HookRelay
from rlhf_core.hookspecs import FitInfo
from rlhf_seed.callbacks import SEED_METHODS, adapt_callback


class Everything:
    """Records each seed-style call with its positional arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str):
        if name not in SEED_METHODS:
            raise AttributeError(name)
        return lambda *arguments: self.calls.append((name, *arguments))


def run_one_episode(relay: HookRelay) -> None:
    info = FitInfo(algorithm="ppo", num_episodes=1)
    with relay.span("maker_loop", maker=0):
        with relay.span("make_experience", num_prompts=1, num_samples=1) as made:
            made.set("groups", ())
        with relay.span("send", num_groups=1):
            pass
    with relay.span("fit", info=info), relay.span("episode", episode=5):
        batch_arguments = {"episode": 5, "epoch": 1, "batch": 0, "experience": "batch"}
        with relay.span("epoch", episode=5, epoch=1), relay.span("batch", **batch_arguments) as batch:
            batch.set("metrics", {"loss/policy": 0.5})
        with relay.span("sync", version=6):
            pass


def test_all_seed_methods_are_called_in_order_with_their_arguments():
    callback, relay = Everything(), HookRelay()
    relay.register(adapt_callback(callback))
    run_one_episode(relay)
    assert callback.calls == [
        ("on_loop_start",),
        ("on_make_experience_start",),
        ("on_make_experience_end", None),
        ("on_send_start",),
        ("on_send_end",),
        ("on_loop_end",),
        ("on_fit_start",),
        ("on_episode_start", 5),
        ("on_epoch_start", 1),
        ("on_learn_epoch_start", 1),
        ("on_batch_start",),
        ("on_learn_batch_start",),
        ("on_batch_end", {"loss/policy": 0.5}, "batch"),
        ("on_learn_batch_end", "batch"),
        ("on_epoch_end", 1),
        ("on_learn_epoch_end", 1),
        ("on_update_start",),
        ("on_update_end",),
        ("on_episode_end", 5),
        ("on_fit_end",),
    ]


def test_parameters_may_have_any_name_and_methods_may_be_missing():
    seen = []

    class Callback:
        def on_batch_end(self, m, exp):
            seen.append((m, exp))

        def on_learn_batch_end(self, metrics, experience):
            seen.append((metrics, experience))

    relay = HookRelay()
    relay.register(adapt_callback(Callback()))
    run_one_episode(relay)
    assert seen == [({"loss/policy": 0.5}, "batch")] * 2


def test_ends_are_called_after_an_error():
    callback, relay = Everything(), HookRelay()
    relay.register(adapt_callback(callback))
    with pytest.raises(ZeroDivisionError), relay.span("episode", episode=1):
        raise ZeroDivisionError
    assert callback.calls == [("on_episode_start", 1), ("on_episode_end", 1)]


def test_an_object_with_hooks_stays_itself():
    class Both:
        def on_fit_start(self):
            raise AssertionError("hooks go first")

        def rlhf_fit_start(self):
            pass

    both = Both()
    assert adapt_callback(both) is both
