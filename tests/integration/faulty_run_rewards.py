"""Rewards that misbehave from the second episode on, as files that a run names.

Until then, and for every other sample, the score is the last digit of the sample's id.
"""

import ctypes
import itertools
import threading
import time

_CALLS = itertools.count()


def right(rollouts):
    return [float(each.sample_id % 10) for each in rollouts]


def _late(rollouts):
    return rollouts[0].policy_version >= 1


def raises(rollouts) -> list[float]:
    if _late(rollouts):
        raise KeyError("no such model")
    return right(rollouts)


def wrong_count(rollouts) -> list[float]:
    return right(rollouts)[1:] if _late(rollouts) else right(rollouts)


def _each_other(rollouts, value):
    wrong = [each.policy_version >= 1 and each.sample_id % 2 == 1 for each in rollouts]
    return [value if bad else score for bad, score in zip(wrong, right(rollouts), strict=True)]


def nan(rollouts) -> list[float]:
    return _each_other(rollouts, float("nan"))


def infinity(rollouts) -> list[float]:
    return _each_other(rollouts, float("-inf"))


def strings(rollouts) -> list[float]:
    return _each_other(rollouts, "good")


def hangs(rollouts) -> list[float]:
    if _late(rollouts):
        threading.Event().wait()
    return right(rollouts)


def slow(rollouts) -> list[float]:
    time.sleep(0.05)
    return right(rollouts)


def segfaults(rollouts) -> list[float]:
    if _late(rollouts):
        ctypes.string_at(0)
    return right(rollouts)


def allocates_without_end(rollouts) -> list[float]:
    kept = []
    while _late(rollouts):
        kept.append(bytearray(b"x" * 20_000_000))
        time.sleep(0.005)
    return right(rollouts)


def never_the_same(rollouts) -> list[float]:
    return [float(next(_CALLS)) for _ in rollouts]
