"""`rlhf report`: which page is written for which folders."""

from rlhf_cli.main import run


def test_report_of_one_run_and_of_several(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("rlhf_report.build_report", lambda folders, output: output or folders[0] / "report.html")
    assert run(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert run(["report", str(tmp_path), str(tmp_path)]) == 0
    assert capsys.readouterr().out == "report.html\n", "a comparison does not overwrite a run's own page"
    assert run(["report", str(tmp_path), "--output", "x.html"]) == 0
    assert capsys.readouterr().out == "x.html\n"


def test_without_the_distribution_it_is_said_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("rlhf_core.plugins.discovery._installed", dict)
    for command in ("report", "samples"):
        assert run([command, "runs/first"]) == 2
        assert "pip install rlhf-report" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_the_users_mistake(make_run, tmp_path, capsys, with_plots):
    folder = make_run(tmp_path / "run", episodes=1)
    with with_plots():
        assert run(["report", str(folder), "--output", str(folder / "metrics.jsonl" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
