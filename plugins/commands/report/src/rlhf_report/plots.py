"""Draws the plots as transparent PNG files, in colors that are readable on light and dark pages."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.config import score_name

from .data import Run
from .figures import Figure, figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#e11d48", "#0ea5b7", "#ca8a04", "#64748b")
_SIZE_INCHES = (4.6, 2.5)
"""Small, so that text of 9.5 points is readable when the picture has the width of a phone."""
_DPI = 200
_SMOOTH_ABOVE = 60
"""Curves with more points are drawn pale, with their moving average on top."""
_LEGEND_SHARE = 0.85
"""Maximum width of a legend as a share of the picture's width."""
_MAX_SERIES = 8

STYLE = files(__package__) / "assets" / "plots.mplstyle"


class Series(NamedTuple):
    """One curve."""

    label: str
    color: str
    steps: list[int]
    values: list[float]
    band: tuple[list[float], list[float]] | None = None
    """Lower and upper ends of the values' intervals."""


def draw(runs: Sequence[Run]) -> dict[str, bytes]:
    """Draw the figures. Returns PNG files by figure name.

    A figure is omitted if its metrics are missing, have values only before training, or are always zero.
    """
    plots = {}
    for figure in figures():
        series = collect(figure, runs)
        has_training = any(any(each.steps) for each in series)
        if has_training and (figure.even_if_zero or any(any(each.values) for each in series)):
            plots[figure.name] = _png(figure, series)
    return plots


def collect(figure: Figure, runs: Sequence[Run]) -> list[Series]:
    """Return the curves of a figure: one per metric for one run, or one per run of the first metric for several."""
    series: list[Series] = []
    for run in runs:
        curves = _curves(figure, run)[: _MAX_SERIES if len(runs) == 1 else 1]
        for key, short, steps, values in curves:
            label = short if len(runs) == 1 else f"{run.name}: {short}"
            color = COLORS[len(series) % len(COLORS)]
            band = _band(run, key, steps)
            series.append(Series(label, color, steps, [value * figure.scale for value in values], band))
    return series


def _curves(figure: Figure, run: Run) -> list[tuple[str, str, list[int], list[float]]]:
    """(key, label, steps, values) of each metric. Metrics with the same label are drawn once."""
    names = {"reward/mean": "weighted score", "eval/score": score_name(run.config)}
    keys = {names.get(key) or _short(key, figure): key for key in reversed(figure.select(run.keys()))}
    curves = [(key, label, *run.series(key)) for label, key in reversed(keys.items())]
    return [curve for curve in curves if curve[2]]


def _band(run: Run, key: str, steps: list[int]) -> tuple[list[float], list[float]] | None:
    """The interval of a metric, if the run has one for each of its values."""
    (low_steps, low), (high_steps, high) = run.series(f"{key}_low"), run.series(f"{key}_high")
    return (low, high) if steps and low_steps == high_steps == steps else None


def smooth(values: Sequence[float], span: float) -> list[float]:
    """Exponential moving average over about `span` points, with bias correction at the start.

    Example:
        >>> smooth([1.0, 0.0, 0.0], span=3)
        [1.0, 0.333..., 0.142...]
    """
    keep = 1.0 - 2.0 / (span + 1.0)
    total = weight = 0.0
    averaged = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1.0
        averaged.append(total / weight)
    return averaged


def _short(key: str, figure: Figure) -> str:
    """The key without the prefix that all keys of its figure share."""
    prefixes = {pattern.partition("/")[0] for pattern in figure.keys}
    head, slash, tail = key.partition("/")
    short = tail if slash and len(prefixes) == 1 and head in prefixes else key
    return short.removesuffix("_s") if figure.unit == "s" else short


def _png(figure: Figure, series: Sequence[Series]) -> bytes:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    with as_file(STYLE) as style, rc_context(fname=style):
        canvas = Canvas(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.add_subplot()
        _draw_lines(axes, series, log_scale=figure.log_scale)
        _label(axes, figure, series)
        if len(series) > 1:
            _add_legend(axes, len(series), max_width=_LEGEND_SHARE * canvas.bbox.width)
        buffer = io.BytesIO()
        canvas.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_lines(axes: Axes, series: Sequence[Series], *, log_scale: bool) -> None:
    for index, (label, color, steps, values, band) in enumerate(series):
        if band is not None:
            axes.fill_between(steps, *band, color=color, alpha=0.15, linewidth=0)
        # The first curve is on top. A curve that it covers completely is drawn wider, visible on both sides of it.
        points = set(zip(steps, values, strict=True))
        covered = sum(points <= set(zip(other.steps, other.values, strict=True)) for other in series[:index])
        width, order = 1.8 + 3.2 * covered, 2 + 0.9 * (1 - index / len(series))
        marker = "o" if len(steps) <= 12 else ""
        if len(steps) > _SMOOTH_ABOVE:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.9, zorder=order)
            values = smooth(values, len(values) / 20)
        style: dict[str, Any] = {"linewidth": width, "alpha": 0.5 if covered else 1.0, "zorder": order}
        axes.plot(steps, values, color=color, label=label, marker=marker, markersize=4 + 2 * covered, **style)
    if log_scale and all(value > 0 for each in series for value in each.values):
        from matplotlib.ticker import LogFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())  # the default writes formulas, whose parsing is disabled
        axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))


def _label(axes: Axes, figure: Figure, series: Sequence[Series]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step", loc="right")
    if figure.unit:
        axes.set_ylabel(figure.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if len({step for each in series for step in each.steps}) == 1:
        axes.set_xlim(series[0].steps[0] - 1.5, series[0].steps[0] + 1.5)
    if axes.get_yscale() == "linear":
        _limit(axes, figure, [value for each in series for value in each.values])


def _add_legend(axes: Axes, num_labels: int, *, max_width: float) -> None:
    """Add a legend above the axes, in as many columns as fit `max_width` pixels."""
    for num_columns in range(min(4, num_labels), 0, -1):
        legend = axes.legend(  # on the right, since matplotlib writes a common exponent on the left
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            ncols=num_columns,
            borderaxespad=0.2,
            handlelength=1.2,
        )
        if legend.get_window_extent().width <= max_width:
            return


def _limit(axes: Axes, figure: Figure, values: Sequence[float]) -> None:
    low, high = axes.get_ylim()
    if figure.from_zero and min(values) >= 0:
        low, high = 0.0, max(high, 1.08 * max(values))
    if (figure.from_zero and max(values) == 0) or math.isclose(low, high, abs_tol=1e-12):
        high = low + 1.0
    axes.set_ylim(low, high)
