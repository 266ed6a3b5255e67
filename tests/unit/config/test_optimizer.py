"""The section `optimizer`: which plugin it names, whose options are whose, and what a strategy can hold."""

import pytest

from rlhf_cli.run_schema import run_schema
from rlhf_core.config.fitting import config_changes
from rlhf_core.config.load import load_run
from rlhf_core.config.resolve import resolve
from rlhf_core.entry.train import check_run
from rlhf_core.errors import ConfigError
from rlhf_plan import plan_run
from rlhf_testing.runs import tiny_run

ACME = """
    import torch
    from pydantic import Field
    from rlhf_core import Component, Section
    from rlhf_core.config.sections import OptimizerConfig
    class Options(Section):
        momentum: float = Field(0.9, ge=0, lt=1, description="Decay.")
    class Whole(OptimizerConfig):
        schedule: dict = {"name": "fall"}
    class Power(Section):
        power: float = Field(1.0, gt=0, description="Of the falling rate.")
    def build(config, context):
        return torch.optim.SGD(context.parameters.values(), lr=context.lr, momentum=config.momentum)
    def falling(config, context):
        return lambda update: (1 - update / (context.total_updates + 1)) ** config.power
    sgd = Component("Steps along the gradient.", Options, "acme_optim:build", optimizer_bytes=4.0)
    exact = Component("Survives rounding.", Options, "acme_optim:build", trains_16_bit=True)
    whole = Component("Has core's options.", Whole, "acme_optim:build")
    fall = Component("Falls.", Power, "acme_optim:falling")
"""


@pytest.fixture
def run(install):
    names = {f"acme-{name}": f"acme_optim:{name}" for name in ("sgd", "exact", "whole")}
    groups = {"rlhf.optimizers": names, "rlhf.schedules": {"fall": "acme_optim:fall"}}
    install("acme-optim", groups, {"acme_optim": ACME})

    def make(changes, *overrides):
        return resolve(load_run(tiny_run(changes), overrides))

    return make


def test_adamw_is_the_default_and_has_its_options_beside_cores(run):
    resolved = run({"optimizer": {"lr": 1e-3, "betas": [0.8, 0.9]}})
    section = resolved.to_mapping()["optimizer"]
    assert (section["name"], section["lr"], section["betas"]) == ("adamw", 1e-3, [0.8, 0.9])
    assert resolve(resolved.to_mapping()).to_mapping() == resolved.to_mapping()


def test_a_strangers_optimizer_and_schedule_are_checked_with_the_run(run):
    resolved = run({"optimizer": {"name": "acme-sgd", "momentum": 0.5, "schedule": "fall"}}, "optimizer.lr=0.5")
    assert resolved.optimizer.config.momentum == 0.5 and resolved.optimizer.config.lr == 0.5
    set_below = run({"optimizer": {"schedule": "fall"}}, "optimizer.schedule.power=2")
    assert set_below.to_mapping()["optimizer"]["schedule"] == {"name": "fall", "power": 2.0}
    bad = {"name": "acme-sgd", "betas": [0.9, 0.9], "momentun": 0.5, "lr": -1, "schedule": {"name": "fall", "pwer": 2}}
    with pytest.raises(ConfigError) as caught:
        run({"optimizer": bad})
    for line in (
        "optimizer.lr: should be greater than or equal to 0",
        "optimizer.betas: unknown key",
        'optimizer.momentun: unknown key; did you mean "momentum"?',
    ):
        assert line in str(caught.value)
    with pytest.raises(ConfigError, match=r'optimizer\.schedule\.pwer: unknown key; did you mean "power"'):
        run({"optimizer": {"schedule": bad["schedule"]}})


def test_an_optimizer_with_core_s_options_may_have_another_default_schedule(run):
    resolved = run({"optimizer": {"name": "acme-whole"}})
    assert resolved.schedule.name == "fall" and resolved.optimizer.config.schedule == {"name": "fall"}
    assert resolved.to_mapping()["optimizer"]["schedule"] == {"name": "fall", "power": 1.0}
    assert resolve(resolved.to_mapping()).to_mapping() == resolved.to_mapping()


@pytest.mark.parametrize("strategy", ["gemini", "low-level-zero"])
def test_a_strategy_refuses_what_it_cannot_hold_and_the_error_names_those_that_can(run, strategy):
    pytest.importorskip("rlhf_colossalai", reason="the strategy is not installed")
    with pytest.raises(ConfigError) as caught:
        run({"strategy": strategy, "optimizer": {"name": "acme-sgd"}})
    assert f"optimizer.name: strategy {strategy} supports only adamw, not acme-sgd" in str(caught.value)
    hint = str(caught.value).partition("add --strategy")[2]
    assert "single" in hint and "fsdp" in hint and strategy not in hint
    assert run({"strategy": strategy}).optimizer.name == "adamw"


def test_16_bit_weights_need_an_optimizer_for_them(run):
    model = {"dtype": "bfloat16"}
    with pytest.raises(ConfigError, match=r"model\.dtype: acme-sgd does not keep float32 master weights"):
        run({"model": model, "optimizer": {"name": "acme-sgd"}})
    for name in ("adamw", "acme-exact"):
        assert run({"model": model, "optimizer": {"name": name}}).optimizer.name == name


def test_plan_counts_the_optimizers_own_bytes(run):
    def optimizer_bytes(name):
        resolved = run({"algorithm": {"name": "grpo", "kl_coef": 0}, "optimizer": {"name": name}})
        (process,) = plan_run(resolved, check_run(resolved)).processes
        return process.bytes_by_part["policy optimizer"]

    assert optimizer_bytes("acme-sgd") * 2 == optimizer_bytes("adamw")


def test_the_schema_has_the_options_of_optimizers_and_schedules(run):
    schema, _ = run_schema()
    options = choices(schema, schema["properties"]["optimizer"])
    assert {"lr", "momentum", "schedule"} <= options["acme-sgd"]["properties"].keys()
    assert "betas" not in options["acme-sgd"]["properties"]
    schedules = choices(schema, options["adamw"]["properties"]["schedule"])
    assert {"constant", "linear", "cosine", "fall"} <= schedules.keys()


def choices(schema, section):
    """Title -> each mapping that a section may be."""
    found = [schema["$defs"][each["$ref"].rpartition("/")[2]] for each in section["anyOf"] if "$ref" in each]
    return {each["title"]: each for each in found}


def test_a_run_folder_from_before_optimizers_had_names_is_not_changed(run):
    new = run({}).to_mapping()
    old = {**new, "optimizer": {**new["optimizer"], "schedule": "constant"}}
    del old["optimizer"]["name"]
    assert config_changes(old, new) == []
