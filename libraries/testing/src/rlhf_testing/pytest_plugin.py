"""The pytest plugin `rlhf`. It is active wherever rlhf-core is installed, so it imports only pytest.

It adds `--rlhf-device`, the device of the contract suites' models, and the fixture `rlhf_device`. Tests marked `gpu`
are skipped without a GPU. The suites are in `rlhf_testing.contracts`.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--rlhf-device`."""
    group = parser.getgroup("rlhf", "plugins of the rlhf framework")
    group.addoption(
        "--rlhf-device",
        default="cpu",
        metavar="cpu|cuda",
        help="Device of the models in the contract suites of rlhf_testing (default: cpu).",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `gpu` for `--strict-markers`."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU if CUDA is not available."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def rlhf_device(request: pytest.FixtureRequest) -> str:
    """The device set by `--rlhf-device`."""
    return str(request.config.getoption("--rlhf-device"))
