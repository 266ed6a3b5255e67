"""What the dashboard answers, and what it refuses."""

import json
import math
import os

import pytest
from dashboard_runs import KEY, add_episode, make_run

from rlhf_pages import picture_path

PNG = b"\x89PNG\r\n\x1a\nrest"
PAGES = ["/", "/static/style.css", "/static/charts.js", "/static/panels.js", "/static/dashboard.js"]


def test_runs_are_listed_the_newest_first(client, runs):
    make_run(runs / "sweep" / "second", status="done")
    os.utime(runs / "first" / "metrics.jsonl", (1, 1))
    for name in ("summary.json", "config.yaml"):
        os.utime(runs / "first" / name, (1, 1))
    rows = client.get("/api/runs").json()["runs"]
    assert [(row["name"], row["status"]) for row in rows] == [("sweep/second", "done"), ("first", "running")]
    assert rows[0]["last"]["reward/mean"] == 0.1
    assert (rows[0]["algorithm"], rows[0]["model"], rows[0]["eval_before"]) == ("grpo", "builtin:tiny-digits", 0.25)


def test_a_run_alone_is_its_own_folder(runs):
    from rlhf_dashboard.runs import Runs

    assert [row["name"] for row in Runs(runs / "first").rows()] == ["first"]


def test_a_run_in_the_folder_of_another_names_its_parent(client, runs, first):
    make_run(runs / "first" / "warm-start")
    make_run(runs / "sweep" / "second")
    rows = {row["name"]: row["parent"] for row in client.get("/api/runs").json()["runs"]}
    assert rows == {"first": None, "first/warm-start": first, "sweep/second": None}


def test_curves_and_samples_grow(client, runs, first):
    seen = client.get(f"/api/runs/{first}/metrics").json()
    assert [line["step"] for line in seen["lines"]] == [1, 2] and seen["from_start"]
    add_episode(runs / "first", 2, completion="later")
    gained = client.get(f"/api/runs/{first}/metrics", params={"mark": seen["mark"]}).json()
    assert [line["step"] for line in gained["lines"]] == [3] and not gained["from_start"]
    nothing = client.get(f"/api/runs/{first}/metrics", params={"mark": gained["mark"]}).json()
    assert nothing["lines"] == [] and nothing["mark"] == gained["mark"]
    assert client.get(f"/api/runs/{first}/samples").json()["lines"][-1]["completion"] == "later"


def test_pictures_need_the_key_and_a_name(client, runs, first):
    path = picture_path(runs / "first", "00112233445566aa")
    path.parent.mkdir()
    path.write_bytes(PNG)
    answer = client.get(f"/api/runs/{first}/images/{path.stem}")
    assert (answer.content, answer.headers["content-type"]) == (PNG, "image/png")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get(f"/api/runs/{first}/images/ffffffffffffffff").status_code == 404
    assert client.get(f"/api/runs/{first}/images/..%2f..%2fconfig").status_code == 404
    assert client.get(f"/api/runs/{first}/images/{path.stem}", headers={"authorization": ""}).status_code == 401


def test_a_run_that_was_cut_by_a_resume_is_read_anew(client, runs, first):
    mark = client.get(f"/api/runs/{first}/metrics").json()["mark"]
    (runs / "first" / "metrics.jsonl").write_text("")
    for episode in range(5, 9):
        add_episode(runs / "first", episode)
    again = client.get(f"/api/runs/{first}/metrics", params={"mark": mark}).json()
    assert again["from_start"] and [line["step"] for line in again["lines"]] == [6, 7, 8, 9]


def test_a_torn_line_comes_when_it_is_whole(client, runs, first):
    metrics = runs / "first" / "metrics.jsonl"
    mark = client.get(f"/api/runs/{first}/metrics").json()["mark"]
    with metrics.open("a") as file:
        file.write('{"step": 3, ')
    torn = client.get(f"/api/runs/{first}/metrics", params={"mark": mark}).json()
    assert torn["lines"] == [] and torn["mark"] == mark
    with metrics.open("a") as file:
        file.write('"reward/mean": 1}\n')
    assert client.get(f"/api/runs/{first}/metrics", params={"mark": mark}).json()["lines"] == [
        {"step": 3, "reward/mean": 1}
    ]


def test_a_run_tells_its_events_and_hides_its_secrets(client, first):
    details = client.get(f"/api/runs/{first}")
    assert "s3cret" not in details.text
    assert [(event["kind"], event.get("guard")) for event in details.json()["events"]] == [
        ("rollback", "kl"),
        ("guard", None),
    ]
    assert details.json()["config"]["algorithm"] == {"name": "grpo"}


def test_what_ended_a_run_is_told_without_its_traceback(tmp_path):
    from rlhf_dashboard.runs import log_events

    (tmp_path / "run.log").write_text(
        "2026-11-23 05:53:07,835 DEBUG rlhf: the run failed\nTraceback (most recent call last):\n"
        '  File "a.py", line 1, in f\n    return 1 / 0\n           ^\n'
        'rlhf_core.errors.RewardError: reward "x": gone\n  -> mend the reward\n'
        "2026-11-23 05:53:08,835 DEBUG rlhf: a word\n"
    )
    said = 'the run failed: rlhf_core.errors.RewardError: reward "x": gone -> mend the reward'
    assert log_events(tmp_path / "run.log") == [{"kind": "error", "time": "2026-11-23 05:53:07", "text": said}]


def test_actors_of_a_detached_run_are_told(client, runs, first):
    state = {"makers": [{"name": "maker-0", "pid": 7, "doing": "generates", "for_s": 1.5}], "updated": math.nan}
    (runs / "first" / "ray.json").write_text(json.dumps(state))
    assert client.get(f"/api/runs/{first}").json()["actors"] == state | {"updated": None}


@pytest.mark.parametrize("pid", [2**22 + 1, 2**70, -1])
def test_a_run_whose_process_is_gone_is_not_running(runs, pid):
    from rlhf_dashboard.runs import Runs

    folder = make_run(runs / "lost")
    summary = json.loads((folder / "summary.json").read_text())
    gone = {"pid": pid, "host": os.uname().nodename}
    (folder / "summary.json").write_text(json.dumps(summary | gone))
    assert {row["name"]: row["status"] for row in Runs(runs).rows()} == {"first": "running", "lost": "killed"}


@pytest.mark.parametrize("path", ["/api/runs", "/api/runs/x", "/api/runs/x/metrics", "/api/none"])
@pytest.mark.parametrize("given", [None, "Bearer", "Bearer wrong", f"Basic {KEY}", "Bearer ä"])
def test_without_the_key_nothing_of_a_run_is_told(client, path, given):
    client.headers.pop("authorization")
    headers = {} if given is None else {"authorization": given.encode()}
    answer = client.get(path, headers=headers)
    assert answer.status_code == 401 and "first" not in answer.text


@pytest.mark.parametrize("page", PAGES)
def test_the_page_itself_needs_no_key_and_allows_its_own_files_only(client, page):
    client.headers.pop("authorization")
    answer = client.get(page)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    assert "frame-ancestors 'none'" in policy and answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8123",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
        "a@127.0.0.1",
        "[::1",
    ],
)
def test_a_host_name_of_others_is_refused(client, host):
    """A site whose name was made to point at this machine (DNS rebinding) asks under its own name."""
    for path in ("/", "/api/runs"):
        assert client.get(path, headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:8123", "127.0.0.1", "[::1]:8123", "10.0.0.7:80"])
def test_this_machine_may_be_named(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(client, method):
    assert client.request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize("run", ["..", "%2e%2e", "../first", "..%2f..%2fetc", "first", "%00", "/etc"])
def test_a_path_is_no_run(client, run):
    for what in ("", "/metrics", "/samples"):
        assert client.get(f"/api/runs/{run}{what}").status_code in {401, 404}


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/app.py", "/metrics.jsonl"])
def test_files_are_not_served(client, path):
    assert client.get(path).status_code == 404


def test_links_lead_nowhere(client, runs, tmp_path):
    make_run(tmp_path / "elsewhere")
    (runs / "link").symlink_to(tmp_path / "elsewhere")
    swapped = make_run(runs / "swapped")
    (swapped / "samples.jsonl").unlink()
    (swapped / "samples.jsonl").symlink_to(tmp_path / "elsewhere" / "samples.jsonl")
    assert [row["name"] for row in client.get("/api/runs").json()["runs"]] == ["first"]


def test_a_link_that_comes_later_is_not_followed(client, runs, first, tmp_path):
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    (tmp_path / "secret.jsonl").write_text('{"step": 1, "secret": 1, "completion": "secret"}\n')
    for name, target in (("samples.jsonl", "secret.jsonl"), ("metrics.jsonl", "secret.jsonl")):
        (runs / "first" / name).unlink()
        (runs / "first" / name).symlink_to(tmp_path / target)
    (runs / "first" / "ray.json").symlink_to(tmp_path / "secret.json")
    for what in ("", "/metrics", "/samples"):
        assert "secret" not in client.get(f"/api/runs/{first}{what}").text


def test_broken_files_take_nothing_else_away(client, runs, first):
    (runs / "first" / "summary.json").write_text("[" * 100_000)
    (runs / "first" / "manifest.json").write_text('{"events": 3}')
    (runs / "first" / "config.yaml").write_text("- [")
    (runs / "first" / "metrics.jsonl").write_text('\xff\n{"step": 1, "a": NaN, "b": 2}\n{"step": 1e999}\nnull\n')
    (row,) = client.get("/api/runs").json()["runs"]
    assert row["status"] == "unfinished"
    assert client.get(f"/api/runs/{first}").json()["events"][0]["kind"] == "guard"
    assert client.get(f"/api/runs/{first}/metrics").json()["lines"] == [{"step": 1, "b": 2}]


def test_a_number_that_json_has_no_word_for_takes_nothing_away(client, runs):
    (runs / "first" / "summary.json").write_text('{"status": "done", "eval_before": NaN, "wall_s": Infinity}')
    (row,) = client.get("/api/runs").json()["runs"]
    assert (row["status"], row["eval_before"], row["wall_s"]) == ("done", None, None)


def test_half_of_a_surrogate_pair_takes_nothing_away(client, runs, first):
    odd = make_run(runs / os.fsdecode(b"odd-\xff"))
    for name in ("metrics", "samples"):
        with (odd / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps({"step": 9, "\ud800": 1.0, "completion": "\udfff"}) + "\n")
    (odd / "summary.json").write_text('{"status": "\\ud800", "eval_before": 0.5}')
    rows = {row["name"]: row for row in client.get("/api/runs").json()["runs"]}
    assert rows["first"]["status"] == "running" and rows["odd-\udcff"]["last"]["\ud800"] == 1.0
    found = rows["odd-\udcff"]["id"]
    for what in ("", "/metrics", "/samples"):
        assert client.get(f"/api/runs/{found}{what}").status_code == 200


def test_a_line_longer_than_a_look_is_passed(tmp_path):
    from rlhf_pages import read_new_lines

    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "x" * 5000}) + "\n" + json.dumps({"n": 1}) + "\n")
    lines, mark = [], None
    for _ in range(10):
        found = read_new_lines(path, mark, dict, max_bytes=1000)
        lines, mark = [*lines, *found.lines], found.mark
    assert lines == [{"n": 1}]


def test_a_pipe_in_the_place_of_a_file_does_not_hold_it_up(client, runs, first):
    (runs / "first" / "samples.jsonl").unlink()
    os.mkfifo(runs / "first" / "samples.jsonl")
    assert client.get(f"/api/runs/{first}/samples").json()["lines"] == []
