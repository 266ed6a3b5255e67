"""Core asks what a component declares, and never what it is called: a stranger's gets the treatment of ours."""

import pytest

from rlhf_core.config.processes import check_processes
from rlhf_core.config.resolve import resolve
from rlhf_core.entry.train import check_run
from rlhf_core.errors import ConfigError
from rlhf_plan import plan_run
from rlhf_testing.runs import tiny_run

ACME = """
from pydantic import Field
from rlhf_core import Component, Section
from rlhf_core.config import OwnProcesses, TransportConfig
from rlhf_objective import PolicyObjectiveSection
from rlhf_torch.config import SingleConfig

class Fleet(TransportConfig):
    workers: int = Field(2, ge=1)
    helpers: int = Field(3, ge=1)
    lag: int = Field(0, ge=0)
    flies: bool = False

    def own_processes(self):
        return OwnProcesses(trainers=self.workers, makers=self.helpers, option="workers")

    def staleness_bound(self):
        return self.lag

    def updates_in_flight(self):
        return self.flies

class Nothing(Section):
    pass

class Near(TransportConfig):
    pass

class Learns(PolicyObjectiveSection):
    speed: int = 1

fleet = Component("Everywhere.", Fleet, "acme_build:build")
near = Component("Here.", Near, "acme_build:build")
vague = Component("Somewhere.", Nothing, "acme_build:build")
pair = Component("Two at most.", Nothing, "acme_build:build", max_processes=2)
many = Component("Any number.", Nothing, "acme_build:build")
single = Component("As single, of any number.", SingleConfig, "rlhf_torch.single:SingleStrategy")
learns = Component("Learns.", Learns, "acme_build:build")
nimble = Component("Between two steps.", Nothing, "acme_build:build", in_flight=True)
steady = Component("Between two batches.", Nothing, "acme_build:build")
"""


@pytest.fixture
def run(install, fake_plugins, fake_run):
    groups = {
        "rlhf.transports": {"acme-fleet": "fleet", "acme-near": "near", "acme-vague": "vague"},
        "rlhf.strategies": {"acme-pair": "pair", "acme-many": "many", "acme-single": "single"},
        "rlhf.algorithms": {"acme-learns": "learns"},
        "rlhf.engines": {"acme-nimble": "nimble", "acme-steady": "steady"},
    }
    targets = {group: {name: f"acme:{value}" for name, value in each.items()} for group, each in groups.items()}
    install("acme", targets, {"acme": ACME, "acme_build": "def build(config, context):\n    return config\n"})
    sizes = {"prompts_per_episode": 8, "train_batch_size": 8}
    return {**fake_run, "algorithm": "acme-learns", "strategy": "acme-many", "transport": "acme-near", "train": sizes}


def test_processes_go_to_a_transport_that_trains_in_those_it_finds(run):
    check_processes(resolve(run), 3)


def test_a_transport_with_processes_of_its_own_says_by_which_option(run):
    with pytest.raises(ConfigError, match=r"--num-processes 3.*acme-fleet, which starts its own trainers") as caught:
        check_processes(resolve({**run, "transport": "acme-fleet"}), 3)
    assert caught.value.hint == "--set transport.workers=3"


def test_a_strategy_says_across_how_many_processes_it_trains(run):
    resolved = resolve({**run, "strategy": "acme-pair"})
    check_processes(resolved, 2)
    with pytest.raises(ConfigError, match="strategy acme-pair supports at most 2 processes") as caught:
        check_processes(resolved, 3)
    assert "acme-many" in caught.value.hint and "acme-pair" not in caught.value.hint


def test_so_it_does_of_those_a_transport_starts(run):
    run = {**run, "strategy": "acme-pair"}
    resolve({**run, "transport": {"name": "acme-fleet", "workers": 2}})
    with pytest.raises(
        ConfigError, match=r"transport\.workers: strategy acme-pair supports at most 2 processes, not 3"
    ):
        resolve({**run, "transport": {"name": "acme-fleet", "workers": 3}})


@pytest.mark.parametrize(
    ("lag", "algorithm", "cap"),
    [(0, {}, None), (1, {}, 2.0), (1, {"importance_cap": None}, None), (1, {"importance_cap": 5.0}, 5.0)],
)
def test_late_samples_are_weighed_whatever_transport_brings_them(run, lag, algorithm, cap):
    run = {**run, "transport": {"name": "acme-fleet", "lag": lag}, "algorithm": {"name": "acme-learns", **algorithm}}
    assert resolve(run).algorithm.config.importance_cap == cap


def test_weights_in_flight_need_an_engine_that_takes_them(run):
    run = {**run, "transport": {"name": "acme-fleet", "lag": 1, "flies": True}}
    resolve({**run, "engine": "acme-nimble"})
    with pytest.raises(
        ConfigError, match=r"transport\.weights.*acme-steady accepts new weights only between two batches"
    ):
        resolve({**run, "engine": "acme-steady"})
    resolve({**run, "engine": "acme-steady", "transport": {"name": "acme-fleet", "lag": 1}})


def test_a_transport_that_declares_nothing_has_the_capabilities_of_the_default(run):
    assert resolve({**run, "transport": "acme-vague"}).own_processes is None


def test_a_plan_counts_the_processes_a_transport_says_it_starts(run):
    transport = {"name": "acme-fleet", "workers": 2, "helpers": 3}
    resolved = resolve(tiny_run({"transport": transport, "strategy": "acme-single"}))
    found = plan_run(resolved, check_run(resolved))
    assert [(each.kind, each.count) for each in found.processes] == [("trainer", 2), ("maker", 3)]
