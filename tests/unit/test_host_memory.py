"""Memory of a CPU that is kept between passes."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

MEASURE = """
    import resource
    from rlhf_core.util.host_memory import set_up_host_memory

    if {asked}:
        set_up_host_memory()
    import torch

    def one_pass():
        kept = [torch.ones(300_000) for _ in range(60)]  # 1.2 MB each, freed together

    one_pass()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        one_pass()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(asked: bool, **environment: str) -> int:
    """Pages touched for the first time in five passes over 72 MB, in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(MEASURE.format(asked=asked))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, env=environment)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc")
def test_what_a_pass_freed_serves_the_next():
    plain, kept = faults(asked=False), faults(asked=True)
    assert kept < plain / 10
    # What the user says stays: here, to give everything back at once.
    assert faults(asked=True, MALLOC_TRIM_THRESHOLD_="0") > 10 * kept


STARTED_BY_A_LARGE_ONE = """
    import subprocess, sys
    held = bytearray(600 << 20)
    inner = "from rlhf_core.util.host_memory import peak_resident_bytes; print(peak_resident_bytes())"
    print(subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True, check=True).stdout)
    from rlhf_core.util.host_memory import peak_resident_bytes
    print(peak_resident_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process does not inherit it")
def test_the_peak_of_a_process_is_its_own():
    command = [sys.executable, "-c", textwrap.dedent(STARTED_BY_A_LARGE_ONE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    inner, outer = map(int, done.stdout.split())
    assert 1 << 20 < inner < 300 << 20
    assert outer > 600 << 20
