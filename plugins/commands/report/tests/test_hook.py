"""The hook plugin `report`: a run ends with its page, and nothing about the page changes how it ended."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from rlhf_cli.main import run
from rlhf_core import train
from rlhf_core.hooks import HookRelay
from rlhf_core.hooks.installed import load_hook_plugins
from rlhf_testing.runs import tiny_run


class Late:
    """A hook that writes into the run folder at the run's end, registered before and after the report."""

    def __init__(self, name: str) -> None:
        self.name = name

    def rlhf_run_end(self, run_folder: Path) -> None:
        (run_folder / self.name).write_text("")


def end_run(folder: Path, summary: dict[str, str] | None = None, disable: tuple[str, ...] = ()) -> None:
    relay = HookRelay()
    relay.register(Late("before"), name="before")
    load_hook_plugins(relay, disable)
    relay.register(Late("after"), name="after")
    with relay.span("run", run_folder=folder, config={}) as span:
        span.set("summary", summary)


@pytest.mark.slow
def test_a_run_ends_with_its_page(tmp_path, with_plots):
    with with_plots():
        result = train(tiny_run({"logging": {"tensorboard": False}}), output=tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert result.summary["status"] == "done" and "still running" not in page
    assert (tmp_path / "run" / "plot-reward.png").is_file()


def test_it_is_told_to_be_on(capsys):
    assert run(["plugins", "show", "hooks/report"]) == 0
    said = capsys.readouterr().out
    assert "rlhf_report.hook\n" in said and "enabled once it is installed" in said


def test_the_page_is_written_after_all_other_hooks(tmp_path, monkeypatch):
    seen = []

    def look(folders):
        seen.append(sorted(each.name for each in tmp_path.iterdir()))

    monkeypatch.setattr("rlhf_report.build_report", look)
    end_run(tmp_path, {"status": "done"})
    assert seen == [["after", "before"]]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a broken plot")])
def test_a_failing_report_is_told_and_the_run_stays_done(tmp_path, monkeypatch, caplog, error):
    def fail(folders):
        raise error

    monkeypatch.setattr("rlhf_report.build_report", fail)
    with caplog.at_level(logging.WARNING, "rlhf.report"):
        result = train(tiny_run({"logging": {"tensorboard": False}}), output=tmp_path / "run")
    assert result.summary["status"] == "done"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "done"
    assert str(error) in caplog.text and f"rlhf report {tmp_path / 'run'}" in caplog.text


def test_a_run_without_a_summary_or_with_the_hook_disabled_has_no_page(tmp_path, monkeypatch):
    def fail(folders):
        raise AssertionError("it was called")

    monkeypatch.setattr("rlhf_report.hook.logger.warning", lambda *told: pytest.fail(str(told)))
    monkeypatch.setattr("rlhf_report.build_report", fail)
    end_run(tmp_path, None)
    end_run(tmp_path, {"status": "done"}, disable=("Report",))


@pytest.mark.slow
def test_half_a_page_never_stands_in_the_place_of_a_whole(make_run, tmp_path, monkeypatch, with_plots):
    folder = make_run(tmp_path / "run", episodes=1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("untouched")
    (folder / "report.html").symlink_to(elsewhere)
    with with_plots():
        from rlhf_report import build_report

        build_report([folder])
    assert elsewhere.read_text() == "untouched" and not (folder / "report.html").is_symlink()
    assert not [*folder.glob(".*.tmp")]
