"""Rollouts, and faulty rewards, in a module that another process can import or run."""

import ctypes
import os
import pickle
import re
import stat
import struct
import sys
import threading
import time

from rlhf_core.types import Rollout


def make_rollout(sample_id, completion=None, **fields):
    values = {
        "prompt": "1+1=",
        "messages": None,
        "prompt_ids": (1, 2, 3, 4),
        "completion": str(sample_id) if completion is None else completion,
        "completion_ids": (5,),
        "logprobs": (-0.5,),
        "answer": None,
        "metadata": {},
        "policy_version": 0,
        "finish_reason": "stop",
    }
    return Rollout(sample_id=sample_id, **(values | fields))


def right(rollouts, *, bonus: float = 0.0):
    return [float(each.completion) + bonus for each in rollouts]


async def right_async(rollouts):
    return right(rollouts)


def raises(rollouts):
    raise KeyError("no such model")


def wrong_count(rollouts):
    return [1.0]


def not_numbers(rollouts):
    return ["good"] * len(rollouts)


def exits(rollouts):
    sys.exit(3)


def dies(rollouts):
    os._exit(7)


def segfaults(rollouts):
    ctypes.string_at(0)


def segfaults_on_two(rollouts):
    if any(each.completion == "2" for each in rollouts):
        ctypes.string_at(0)
    return right(rollouts)


def hangs_on_two(rollouts):
    if any(each.completion == "2" for each in rollouts):
        hangs(rollouts)
    return right(rollouts)


SEEN = set()


def hangs_or_crashes_after_a_look(rollouts):
    """Score -1 for an answer that this process has scored before. Sample 1 hangs, sample 4 crashes."""
    scores = []
    for each in rollouts:
        scores.append(-1.0 if each.completion in SEEN else float(each.completion))
        SEEN.add(each.completion)
        if each.completion == "1":
            hangs(rollouts)
        if each.completion == "4":
            os.kill(os.getpid(), 9)
    return scores


def hangs(rollouts):
    threading.Event().wait()


def hangs_with_the_lock_held(rollouts):
    # C code that never releases the lock, so that nothing in this process could end it.
    while True:
        ctypes.PyDLL(None).usleep(100_000)


def allocates_without_end(rollouts):
    kept = []
    while True:
        kept.append(bytearray(b"x" * 20_000_000))
        time.sleep(0.005)


KEPT = []


def leaks(rollouts):
    block = bytearray(300_000_000)
    block[::4096] = b"x" * len(block[::4096])  # memory that is never written to is not resident
    KEPT.append(block)
    return [float(len(KEPT))] * len(rollouts)


class Touches:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def writes_a_pickle_in_place_of_an_answer(rollouts):
    data = pickle.dumps(Touches(os.environ["RLHF_TEST_TOUCHED"]))
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, struct.pack("!i", len(data)) + data)
        except OSError:
            continue
    time.sleep(600)


def process_id(rollouts):
    return [float(os.getpid())] * len(rollouts)


class Recipe:
    """Loads one of the functions here, in the process that calls it."""

    def __init__(self, path, name):
        self.path = path
        self.name = name

    def __call__(self):
        from rlhf_core.plugins.functions import load_function_file

        return load_function_file(f"{self.path}:{self.name}", where="reward")[1]


def never_lets_go_of_the_lock(rollouts):
    re.match("(a|aa)+$", "a" * 100 + "b")  # takes years


def says_who_and_never_lets_go_of_the_lock(rollouts):
    print(os.getpid(), file=sys.stderr, flush=True)
    never_lets_go_of_the_lock(rollouts)


def interrupts(rollouts):
    raise KeyboardInterrupt("from a reward")


async def interrupts_async(rollouts):
    raise KeyboardInterrupt("from a reward")


def answers_a_batch_and_then_holds_the_lock(rollouts):
    if len(rollouts) > 1:
        timer = threading.Timer(0.05, never_lets_go_of_the_lock, [rollouts])
        timer.daemon = True
        timer.start()
    return [1.0] * len(rollouts)


class HangsAtClose:
    """A reward whose `close` never returns."""

    def __call__(self, rollouts):
        return right(rollouts)

    def close(self):
        threading.Event().wait()
