"""An option of an earlier version: refused in a run file with what replaces it, dropped and shown in a resume."""

import pytest

from rlhf_core.config.fitting import config_changes
from rlhf_core.config.resolve import resolve, without_removed
from rlhf_core.errors import ConfigError
from rlhf_testing.runs import tiny_run

OLD = {"compile": True, "episodes": 2}


def test_a_run_file_that_sets_one_is_refused_with_what_replaces_it():
    with pytest.raises(ConfigError, match=r"train\.compile: was removed: .*Remove the option"):
        resolve(tiny_run({"train": OLD}))


def test_the_config_of_an_older_run_resolves_without_it_and_the_change_is_shown():
    before = tiny_run({"train": OLD})
    after = without_removed(before)
    assert "compile" not in after["train"] and after["train"]["episodes"] == 2
    (change,) = config_changes(before, after)
    assert (change.key, change.before, change.after) == ("train.compile", True, None)
    assert resolve(after).run.train.episodes == 2


def test_unknown_keys_stay_errors():
    with pytest.raises(ConfigError, match="unknown key"):
        resolve(without_removed(tiny_run({"train": {"epizodes": 2}})))
