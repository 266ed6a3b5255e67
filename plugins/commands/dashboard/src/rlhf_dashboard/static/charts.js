"use strict";
// Draws metrics as SVG, with one chart per metric and one curve per run. Text of runs never becomes markup.
const Charts = (() => {
  const { element, short, isNothing } = SampleCard;
  const WIDTH = 400, HEIGHT = 150, LEFT = 54, RIGHT = 8, TOP = 8, BOTTOM = 18;
  const MAX_POINTS = 1500;
  const svg = (tag, attributes, text) => {
    const created = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) created.setAttribute(name, String(value));
    if (text !== undefined) created.textContent = text;
    return created;
  };
  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

  // The points of a metric, thinned evenly. The last one is always kept.
  const points = (lines, metric) => {
    const all = lines.filter((line) => isNumber(line[metric]) && isNumber(line.step)).map((line) => [line.step, line[metric]]);
    const every = Math.ceil(all.length / MAX_POINTS);
    return every <= 1 ? all : all.filter((_, index) => index % every === 0 || index === all.length - 1);
  };
  const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  // scale: the largest value of the chart. Values that are negligible relative to it are shown as 0.
  const label = (value, scale = 0) => (isNothing(value) || Math.abs(value) < 1e-6 * scale ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(1) : short(value));

  // series: [{ name, color, points }].
  const chart = (metric, series) => {
    const box = element("div", "chart");
    box.dataset.metric = metric;
    box.append(element("div", "name", metric));
    const value = element("div", "value");
    const drawn = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "Curve of " + metric });
    box.append(value, drawn);
    const all = series.flatMap((each) => each.points);
    let [left, right] = extent(all.map(([step]) => step));
    let [low, high] = extent(all.map(([, y]) => y));
    const scale = Math.max(Math.abs(low), Math.abs(high));
    if (left === right) [left, right] = [left - 1, right + 1];
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5];
    const x = (step) => LEFT + ((step - left) / (right - left)) * (WIDTH - LEFT - RIGHT);
    const y = (each) => TOP + ((high - each) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    for (const at of [low, (low + high) / 2, high]) {
      drawn.append(svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }));
      drawn.append(svg("text", { x: LEFT - 5, y: y(at) + 4, "text-anchor": "end" }, label(at, scale)));
    }
    drawn.append(svg("text", { x: LEFT, y: HEIGHT - 4 }, "step " + short(left)));
    drawn.append(svg("text", { x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, short(right)));
    for (const each of [...series].reverse()) {
      const path = each.points.map(([step, at], index) => `${index ? "L" : "M"}${x(step).toFixed(1)} ${y(at).toFixed(1)}`);
      drawn.append(svg("path", { d: path.join(""), class: "s" + each.color }));
      if (each.points.length <= 12) {
        for (const [step, at] of each.points) drawn.append(svg("circle", { cx: x(step), cy: y(at), r: 2.6, class: "f" + each.color }));
      }
    }
    const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, x1: 0, x2: 0, visibility: "hidden" });
    drawn.append(cursor);
    const showValues = (near) => {
      const texts = series.map((each) => {
        const at = near === null ? each.points.at(-1)
          : each.points.reduce((best, point) => (Math.abs(point[0] - near) < Math.abs(best[0] - near) ? point : best));
        return (series.length > 1 ? each.name + " " : "") + label(at[1], scale) + (near === null ? "" : ` at ${at[0]}`);
      });
      value.textContent = texts.join(" · ");
    };
    showValues(null);
    drawn.addEventListener("pointermove", (event) => {
      const area = drawn.getBoundingClientRect();
      const at = ((event.clientX - area.left) / area.width) * WIDTH;
      if (at < LEFT || at > WIDTH - RIGHT) return;
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      cursor.setAttribute("visibility", "visible");
      showValues(left + ((at - LEFT) / (WIDTH - LEFT - RIGHT)) * (right - left));
    });
    drawn.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); showValues(null); });
    return box;
  };

  const FIRST = ["reward", "eval", "kl", "loss", "policy", "response", "environment"];
  const HIDDEN = new Set(["step", "episode", "policy_version"]);
  const ALWAYS = new Set(["reward/mean", "eval/score"]);
  const rank = (group) => (FIRST.includes(group) ? FIRST.indexOf(group) : FIRST.length);

  // runs: [{ name, color, lines }] -> [[group, [[metric, series]]]], without metrics that are always zero up to rounding.
  const groups = (runs) => {
    const names = new Set(runs.flatMap((run) => run.lines.flatMap((line) => Object.keys(line))));
    const grouped = new Map();
    const ordered = [...names].filter((name) => !HIDDEN.has(name)).sort();
    for (const metric of [...ordered.filter((name) => ALWAYS.has(name)), ...ordered.filter((name) => !ALWAYS.has(name))]) {
      const series = runs.map((run) => ({ name: run.name, color: run.color, points: points(run.lines, metric) }))
        .filter((each) => each.points.length);
      if (!series.length || (!ALWAYS.has(metric) && series.every((each) => each.points.every(([, value]) => isNothing(value))))) continue;
      const group = metric.split("/")[0];
      grouped.set(group, [...(grouped.get(group) || []), [metric, series]]);
    }
    return [...grouped].sort(([one], [other]) => rank(one) - rank(other) || (one < other ? -1 : 1));
  };
  return { groups, chart, isNumber, opened: (group) => rank(group) < FIRST.length };
})();
