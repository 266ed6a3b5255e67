"""A traced episode has the regions of a run."""

import json

import pytest

from rlhf_core import train
from rlhf_core.errors import ConfigError
from rlhf_testing.contracts import HooksContract
from rlhf_testing.runs import tiny_run


@pytest.mark.usefixtures("no_plots")
class TestContract(HooksContract):
    """What core relies on."""

    plugin = "profiler"
    options = {"episodes": [0]}


def test_a_chosen_episode_leaves_a_trace_with_named_regions(tmp_path, no_plots):
    run = tiny_run({"hooks": {"profiler": {"episodes": [1], "memory": True}}, "eval": {"num_prompts": 2}})
    result = train(run, output=tmp_path / "run")
    assert result.summary["status"] == "done"
    traces = list((tmp_path / "run" / "profile").iterdir())
    assert [trace.name for trace in traces] == ["episode-1.json"]
    events = json.loads(traces[0].read_text())["traceEvents"]
    regions = {event["name"] for event in events if str(event.get("name", "")).startswith("rlhf/")}
    assert regions == {f"rlhf/{name}" for name in ("rollout", "scoring", "update", "sync")}
    updates = [
        event for event in events if event.get("name") == "rlhf/update" and event.get("cat") == "user_annotation"
    ]
    assert len(updates) == 2
    assert any(event.get("name") == "[memory]" for event in events)


def test_its_options_are_checked(tmp_path):
    with pytest.raises(ConfigError, match=r'hooks\.profiler\.episode: unknown key; did you mean "episodes"'):
        train(tiny_run({"hooks": {"profiler": {"episode": 1}}}), output=tmp_path / "run")
