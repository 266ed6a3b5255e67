"use strict";
// The table of runs, and the samples, events, actors and settings of one run. Text of runs never becomes markup.
const Panels = (() => {
  const { element, short } = SampleCard;
  const { isNumber } = Charts;

  const duration = (seconds) => {
    if (!isNumber(seconds)) return "–";
    if (seconds < 60) return seconds.toFixed(1) + " s";
    const minutes = Math.round(seconds / 60);
    return minutes < 60 ? minutes + " min" : Math.floor(minutes / 60) + " h " + String(minutes % 60).padStart(2, "0") + " min";
  };
  const number = (value) => (isNumber(value) ? short(value) : "–");
  const ago = (seconds) => {
    const age = Date.now() / 1000 - seconds;
    return age < 86400 ? new Date(1000 * seconds).toLocaleTimeString() : new Date(1000 * seconds).toLocaleDateString();
  };
  const percent = (share) => (isNumber(share) ? Math.round(100 * share) + "%" : "–");
  const text = (value) => (typeof value === "string" ? value : value === undefined || value === null ? "–" : JSON.stringify(value));

  const table = (heads, rows) => {
    const created = element("table");
    const head = element("tr");
    for (const [name, isText] of heads) head.append(element("th", isText ? "text" : "", name));
    created.append(element("thead"), element("tbody"));
    created.firstChild.append(head);
    for (const cells of rows) {
      const row = element("tr");
      cells.forEach((cell, index) => {
        const box = element("td", heads[index][1] ? "text" : "");
        box.append(cell instanceof Node ? cell : document.createTextNode(cell));
        row.append(box);
      });
      created.lastChild.append(row);
    }
    return created;
  };

  // Heading, whether the column is text, and the value that rows are sorted by.
  const COLUMNS = [["run", true, (row) => row.name], ["status", true, (row) => row.status],
    ["algorithm", true, (row) => row.algorithm], ["step", false, (row) => row.last.step],
    ["reward", false, (row) => row.last["reward/mean"]], ["KL", false, (row) => row.last["kl/mean"]],
    ["before", false, (row) => row.eval_before], ["after", false, (row) => row.eval_after],
    ["wall time", false, (row) => row.wall_s], ["changed", false, (row) => row.changed]];
  const status = (name) => element("span", "status " + (/^[a-z-]+$/.test(name) ? name.replace("rolled-back-and-", "") : ""), name);
  const compare = (one, other) => (isNumber(one) && isNumber(other) ? one - other : String(one) < String(other) ? -1 : Number(one !== other));

  // sort: { column, down }. Rows without a value come last in both directions.
  const sorted = (rows, sort) => {
    const value = COLUMNS.find(([name]) => name === sort.column)[2];
    const lacks = (row) => value(row) === undefined || value(row) === null;
    return [...rows].sort((one, other) => lacks(one) - lacks(other) || (sort.down ? -1 : 1) * compare(value(one), value(other)));
  };
  const matches = (row, words) => words.every((word) => [row.name, row.status, row.algorithm, row.model].some((value) => text(value).toLowerCase().includes(word)));

  // [row, depth] of the rows that match the search. Children follow their parent, which is then shown, too.
  const arranged = (rows, sort, search) => {
    const ids = new Set(rows.map((row) => row.id));
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const under = (parent, depth) => sorted(rows.filter((row) => (ids.has(row.parent) ? row.parent : null) === parent), sort).flatMap((row) => {
      const below = under(row.id, depth + 1);
      return below.length || matches(row, words) ? [[row, depth], ...below] : [];
    });
    return under(null, 0);
  };

  // The run with the highest held-out score after training, or with the highest reward if none has such a score.
  const best = (rows) => {
    const highest = (value) => rows.filter((row) => isNumber(value(row))).reduce((top, row) => (top && value(top) >= value(row) ? top : row), null);
    return highest((row) => row.eval_after) || highest((row) => row.last["reward/mean"]);
  };

  // state.chosen: id -> color of the runs whose curves are shown. state.shown: id of the run whose samples are shown.
  const runs = (rows, state, { choose, show, order }) => {
    const names = new Map(rows.map((row) => [row.id, row.name]));
    const first = best(rows);
    const created = table([["", true], ...COLUMNS], arranged(rows, state.sort, state.search).map(([row, depth]) => {
      const box = element("input");
      box.type = "checkbox";
      box.checked = state.chosen.has(row.id);
      box.setAttribute("aria-label", "Show the curves of " + row.name);
      box.addEventListener("change", () => choose(row.id, box.checked));
      const pick = element("span");
      pick.append(box);
      if (state.chosen.has(row.id)) pick.append(" ", element("span", "key k" + state.chosen.get(row.id)));
      const outside = depth ? names.get(row.parent) + "/" : "";
      const name = element("button", "link", outside && row.name.startsWith(outside) ? row.name.slice(outside.length) : row.name);
      name.type = "button";
      name.setAttribute("aria-pressed", String(row.id === state.shown));
      name.addEventListener("click", () => show(row.id));
      const title = element("span", "depth" + Math.min(depth, 3));
      if (depth) title.append("└ ");
      title.append(name);
      if (rows.length > 1 && row === first) title.append(" ", element("span", "chip", "best"));
      return [pick, title, status(row.status), text(row.algorithm), number(row.last.step), number(row.last["reward/mean"]),
        number(row.last["kl/mean"]), number(row.eval_before), number(row.eval_after), duration(row.wall_s), ago(row.changed)];
    }));
    created.querySelectorAll("th").forEach((head, index) => {
      if (index === 0) return;
      const [column] = COLUMNS[index - 1];
      const button = element("button", "link", column + (state.sort.column === column ? (state.sort.down ? " ↓" : " ↑") : ""));
      button.type = "button";
      button.addEventListener("click", () => order(column));
      head.setAttribute("aria-sort", state.sort.column !== column ? "none" : state.sort.down ? "descending" : "ascending");
      head.replaceChildren(button);
    });
    return created;
  };

  const samples = (newest) => {
    const box = element("div", "samples");
    if (newest.length) box.append(...newest.map(SampleCard.make));
    else box.append(element("p", "hint", "No samples yet."));
    return box;
  };

  const rewards = (newest) => {
    const names = [...new Set(newest.flatMap((sample) => Object.keys(sample.rewards || {})))].sort();
    if (!names.length) return element("p", "hint", "No rewards yet.");
    const rows = names.map((name) => {
      const values = newest.map((sample) => (sample.rewards || {})[name]).filter(isNumber);
      const sum = values.reduce((total, value) => total + value, 0);
      return [name, short(sum / values.length), short(Math.min(...values)), short(Math.max(...values)), String(values.length)];
    });
    return table([["reward", true], ["mean", false], ["min", false], ["max", false], ["newest samples", false]], rows);
  };

  const eventText = (event) => {
    if (typeof event.text === "string") return event.text;
    return Object.entries(event).filter(([name]) => name !== "kind" && name !== "time")
      .map(([name, value]) => name + " " + text(value)).join(", ");
  };
  const events = (all) => {
    if (!all.length) return element("p", "hint", "No guard, rollback, resume or warning so far.");
    const created = table([["time", true], ["kind", true], ["", true]],
      [...all].reverse().map((event) => [text(event.time), text(event.kind), eventText(event)]));
    created.className = "events";
    return created;
  };

  const list = (value) => (Array.isArray(value) ? value.filter((each) => each && typeof each === "object") : []);
  const actors = (ray) => {
    const all = [...list(ray.trainers), ...list(ray.makers)];
    if (!all.length) return null;
    const box = element("div");
    const age = isNumber(ray.updated) ? "updated " + duration(Math.max(0, Date.now() / 1000 - ray.updated)) + " ago" : "";
    box.append(element("p", "hint", `Ray ${text(ray.address)}, driver pid ${text(ray.driver_pid)} on ${text(ray.host)}, ${age}. ${text(ray.progress)}`));
    box.append(table([["actor", true], ["pid", false], ["does", true], ["for", false], ["busy", false], ["weights", false], ["made", false], ["wait", false], ["restarts", false]],
      all.map((each) => [text(each.name), number(each.pid), text(each.doing), duration(each.for_s), percent(each.busy),
        number(each.version), number(each.groups), number(each.waiting), number(each.restarts)])));
    return box;
  };

  const settings = (details) => ["config", "summary", "manifest"].map((name) => {
    const box = element("details", "panel");
    box.append(element("summary", "", name), element("pre", "", JSON.stringify(details[name], null, 2)));
    return box;
  });
  return { runs, best, samples, rewards, events, actors, settings };
})();
