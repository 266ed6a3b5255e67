"""Memory of a CPU that is kept between passes."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from running import PATIENCE_SECONDS

MEASURE = """
    import ctypes
    from rlhf_core.util.host_memory import set_up_host_memory

    if {asked}:
        set_up_host_memory()
    import torch

    # struct mallinfo2 of malloc.h: the first is what the heap holds, free or not, without what is mapped apart.
    class Said(ctypes.Structure):
        _fields_ = [(f"place_{{number}}", ctypes.c_size_t) for number in range(10)]

    said = ctypes.CDLL(None).mallinfo2
    said.restype = Said
    before = said().place_0
    kept = [torch.ones(300_000) for _ in range(60)]  # 1.2 MB each, freed together
    del kept
    print(said().place_0 - before)
"""


def kept_bytes(asked: bool, **environment: str) -> int:
    """What glibc's heap still holds of a pass over 72 MB when it is over, in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(MEASURE.format(asked=asked))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True, env=environment
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc")
@pytest.mark.slow
def test_what_a_pass_freed_serves_the_next():
    """What the heap keeps needs no new page: counted by the heap itself, whatever else the machine does."""
    assert kept_bytes(asked=True) > 60e6
    assert kept_bytes(asked=False) < 10e6
    # What the user says stays: here, to give everything back at once.
    assert kept_bytes(asked=True, MALLOC_TRIM_THRESHOLD_="0") < 10e6


STARTED_BY_A_LARGE_ONE = """
    import subprocess, sys
    held = bytearray(200 << 20)
    inner = "from rlhf_core.util.host_memory import peak_resident_bytes; print(peak_resident_bytes())"
    print(subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True, check=True).stdout)
    from rlhf_core.util.host_memory import peak_resident_bytes
    print(peak_resident_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process does not inherit it")
def test_the_peak_of_a_process_is_its_own():
    command = [sys.executable, "-c", textwrap.dedent(STARTED_BY_A_LARGE_ONE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    inner, outer = map(int, done.stdout.split())
    assert 1 << 20 < inner < 100 << 20
    assert outer > 200 << 20


RELEASED = """
    from rlhf_core.util.host_memory import release_freed_memory, set_up_host_memory

    set_up_host_memory()
    import torch

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    small, large = zip(*((torch.ones(2_000), torch.ones(300_000)) for _ in range(60)))
    del large  # 72 MB, between what stays
    before = resident()
    release_freed_memory()
    print(before - resident(), sum(float(each.sum()) for each in small))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc")
@pytest.mark.slow
def test_what_is_free_between_tensors_is_given_back():
    command = [sys.executable, "-c", textwrap.dedent(RELEASED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True, env={})
    given_back, kept = map(float, done.stdout.split())
    assert given_back > 60e6 and kept == 60 * 2_000
