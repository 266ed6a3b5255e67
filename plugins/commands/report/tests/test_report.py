from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure as MatplotlibFigure
from running import PATIENCE_SECONDS

from rlhf_core.errors import DataError, UserInputError
from rlhf_report import build_report, plots
from rlhf_report.data import read_run
from rlhf_report.plots import Series, _add_legend, _draw_lines

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\u2028&amp;"


class Page(HTMLParser):
    """What a browser would make of the page: elements with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._script = tag == "script"

    def handle_endtag(self, tag):
        self._script = False

    def handle_data(self, data):
        (self.scripts if self._script else self.text).append(data)

    def tags(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def samples(self) -> list[dict]:
        return json.loads(self.scripts[0])


def build(*folders: Path, output: Path | None = None) -> Page:
    return Page(build_report(folders, output).read_text(encoding="utf-8"))


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


@pytest.fixture
def one_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have one plot, for tests of their other parts."""
    first = plots.figures()[:1]
    monkeypatch.setattr(plots, "figures", lambda: first)


def test_one_run_has_its_numbers_all_plots_and_samples(tmp_path: Path, make_run):
    folder = make_run(tmp_path / "run")
    page = build(folder)
    names = {path.stem for path in folder.glob("plot-*.png")}
    expected = "reward eval kl loss clip entropy value gradient length truncated logprob-gap time reward-calls memory"
    assert names == {f"plot-{name}" for name in (*expected.split(), "throughput", "lr", "approx-kl")}
    assert all(width > 600 and height > 300 for width, height in map(png_size, folder.glob("plot-*.png")))
    assert len(page.tags("figure")) == len(names)
    text = " ".join(page.text)
    for shown in ("0.455", "0.923", "2 min 11 s", "clip_eps: 0.2", "2.13.0"):
        assert shown in text
    assert set(page.samples[0]["groups"]) == {"best", "worst", "random", "first", "last"}
    assert {sample["policy_version"] for sample in page.samples[0]["groups"]["first"]} == {0}
    assert {sample["policy_version"] for sample in page.samples[0]["groups"]["last"]} == {59}


def test_a_plot_of_zeros_is_left_out_unless_it_is_of_the_score(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "reward/mean": 0.0, "staleness/mean": 0.0, "kl/mean": 0.1 * step}) + "\n"
            for step in (1, 2)
        )
    )
    assert {figure["id"] for figure in build(tmp_path).tags("figure")} == {"reward", "kl"}


def test_the_evaluation_before_training_is_the_first_point_of_its_plot(tmp_path: Path, make_run):
    run = read_run(make_run(tmp_path / "run", episodes=20))
    steps, values = run.series("eval/score")
    assert (steps[0], values[0]) == (0, 0.455)
    assert len(steps) == 3
    assert run.series("reward/mean")[0][0] == 1


def test_a_score_before_training_alone_is_no_plot(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (tmp_path / "summary.json").write_text('{"status": "failed", "eval_before": 0.25}')
    page = build(tmp_path)
    assert {figure["id"] for figure in page.tags("figure")} == {"reward"}
    assert "0.25" in page.text


def test_a_curve_that_another_one_covers_is_seen():
    lines = []
    axes = SimpleNamespace(plot=lambda *_, label, linewidth, zorder, **__: lines.append((label, linewidth, zorder)))
    series = [
        Series("score", "#000", [0, 1, 2], [0.1, 0.2, 0.4]),
        Series("exact-match", "#00f", [1, 2], [0.2, 0.4]),
        Series("other", "#f00", [1, 2], [0.2, 0.3]),
    ]
    _draw_lines(axes, series, log_scale=False)
    (_, width, order), (_, wide, below), (_, other, _) = lines
    assert order > below and wide > width == other


def test_a_legend_of_many_long_names_stays_inside_the_picture():
    canvas = MatplotlibFigure(figsize=(6.2, 3.0))
    axes = canvas.add_subplot()
    for number in range(8):
        axes.plot([0, 1], [number, 1], label=f"grpo-sums-seed-{number}-with-a-long-name")
    _add_legend(axes, 8, max_width=canvas.bbox.width)
    legend = axes.get_legend()
    assert legend is not None and legend.get_window_extent().width <= canvas.bbox.width


@pytest.mark.usefixtures("one_plot")
def test_it_asks_nothing_of_any_network(tmp_path: Path, make_run):
    page = build(make_run(tmp_path / "run", episodes=2))
    assert not page.tags("link") and not page.tags("iframe")
    assert all("src" not in script for script in page.tags("script"))
    assert all((image["src"] or "").startswith("data:image/png;base64,") for image in page.tags("img"))
    styles = (Path(__file__).parents[1] / "src/rlhf_report/assets/style.css").read_text()
    assert "url(" not in styles and "@import" not in styles


@pytest.mark.usefixtures("one_plot")
def test_text_of_the_run_cannot_become_markup(tmp_path: Path, make_run):
    folder = make_run(tmp_path / "<b>run", episodes=2, completion=EVIL)
    (folder / "config.yaml").write_text(json.dumps({"algorithm": {"name": EVIL}}))
    (folder / "summary.json").write_text(json.dumps({"status": EVIL}))
    (folder / "manifest.json").write_text(json.dumps({"command": [EVIL], "seed": EVIL}))
    raw = build_report([folder]).read_text(encoding="utf-8")
    page = Page(raw)
    assert "<script>document.title" not in raw and "<img src=x" not in raw
    assert len(page.tags("script")) == 2
    assert not [image for image in page.tags("img") if image.get("onerror")]
    assert page.samples[0]["groups"]["best"][0]["completion"] == EVIL  # and it is all there
    assert EVIL in "".join(page.text)


@pytest.mark.usefixtures("one_plot")
def test_secrets_of_the_run_file_are_not_shown(tmp_path: Path, make_run):
    assert "hidden-value" not in build_report([make_run(tmp_path / "run", episodes=1)]).read_text()


@pytest.mark.slow
def test_several_runs_are_compared(tmp_path: Path, make_run):
    folders = [make_run(tmp_path / name / "run", episodes=4, seed=seed) for seed, name in enumerate("ab")]
    page = build(*folders, output=tmp_path / "both" / "report.html")
    text = " ".join(page.text)
    assert "a/run and b/run compared" in text and "a/run" in text and "b/run" in text
    assert [run["name"] for run in page.samples] == ["a/run", "b/run"]
    assert (tmp_path / "both" / "plot-reward.png").exists()
    assert not (folders[0] / "report.html").exists()


@pytest.mark.parametrize(
    "lines", ["", '{"step": 1}\n', '{"step": 1, "loss/policy": null}\n', '{"step": 1, "reward/mean": 0.5}\n{"st']
)
def test_short_and_torn_runs_have_a_page(tmp_path: Path, lines: str):
    (tmp_path / "metrics.jsonl").write_text(lines)
    page = build(tmp_path)
    assert "unfinished" in page.text
    assert len(page.tags("figure")) == ("reward" in lines)


def test_wrong_folders_and_files_are_named(tmp_path: Path):
    with pytest.raises(UserInputError, match="does not contain a run"):
        build_report([tmp_path])
    with pytest.raises(UserInputError, match="no run folder"):
        build_report([])
    (tmp_path / "metrics.jsonl").write_text("x\n{}\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:1"):
        build_report([tmp_path])


@pytest.mark.slow
def test_a_report_needs_neither_torch_nor_transformers(tmp_path: Path, make_run):
    folder = make_run(tmp_path / "run", episodes=1)
    code = (
        "import sys; from pathlib import Path; from rlhf_report import build_report\n"
        "assert 'matplotlib' not in sys.modules\n"
        "build_report([Path(sys.argv[1])]); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def dumped(page: Path, folder: Path) -> str:
    """What a browser makes of the page."""
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
    command += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
def test_in_a_browser_the_samples_appear_as_text_and_nothing_of_theirs_runs(tmp_path: Path, make_run):
    shown = dumped(build_report([make_run(tmp_path / "run", episodes=2, completion=EVIL)]), tmp_path)
    assert "<title>PPO run: run · rlhf report</title>" in shown
    assert re.search(r'class="text completion">&lt;/script&gt;&lt;script&gt;', shown)
    assert shown.count('<article class="sample">') == 8


CHAT = "<|im_start|>system\nBe <b>brief</b>.<|im_end|>\n<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
def test_in_a_browser_chat_markup_is_shown_by_its_roles(tmp_path: Path, make_run):
    folder = make_run(tmp_path / "run", episodes=1, completion="hi<|im_end|>")
    lines = [json.loads(line) | {"prompt": CHAT} for line in folder.joinpath("samples.jsonl").read_text().splitlines()]
    folder.joinpath("samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = dumped(build_report([folder]), tmp_path)
    assert '<div class="who">system</div><div class="text prompt">Be &lt;b&gt;brief&lt;/b&gt;.</div>' in shown
    assert '<div class="who">user</div><div class="text prompt">Say hi</div>' in shown
    assert '<div class="text completion">hi</div>' in shown
    assert shown.count('class="raw-button"') == 4


@pytest.mark.parametrize("highest", [1.7e3, 40.0, 6.0])
def test_a_logarithmic_axis_has_plain_numbers(highest):
    canvas = MatplotlibFigure()
    axes = canvas.add_subplot()
    _draw_lines(axes, [Series("norm", "#000", [0, 1], [0.9, highest])], log_scale=True)
    canvas.draw_without_rendering()
    labels = [text.get_text() for minor in (False, True) for text in axes.get_yticklabels(minor=minor)]
    shown = [float(label.replace("\N{MINUS SIGN}", "-")) for label in labels if label]
    assert len([value for value in shown if 0.9 <= value <= highest]) >= 2
