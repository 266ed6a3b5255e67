"use strict";
// The table of runs, and what is shown of one: samples, events, actors, settings. Text enters as text only.
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
    const made = element("table");
    const head = element("tr");
    for (const [name, isText] of heads) head.append(element("th", isText ? "text" : "", name));
    made.append(element("thead"), element("tbody"));
    made.firstChild.append(head);
    for (const cells of rows) {
      const row = element("tr");
      cells.forEach((cell, index) => {
        const place = element("td", heads[index][1] ? "text" : "");
        place.append(cell instanceof Node ? cell : document.createTextNode(cell));
        row.append(place);
      });
      made.lastChild.append(row);
    }
    return made;
  };

  // Heading, whether it is text, and the value that rows are sorted by.
  const COLUMNS = [["run", true, (row) => row.name], ["status", true, (row) => row.status],
    ["algorithm", true, (row) => row.algorithm], ["step", false, (row) => row.last.step],
    ["reward", false, (row) => row.last["reward/mean"]], ["KL", false, (row) => row.last["kl/mean"]],
    ["before", false, (row) => row.eval_before], ["after", false, (row) => row.eval_after],
    ["wall time", false, (row) => row.wall_s], ["changed", false, (row) => row.changed]];
  const status = (said) => element("span", "status " + (/^[a-z-]+$/.test(said) ? said.replace("rolled-back-and-", "") : ""), said);
  const compare = (one, other) => (isNumber(one) && isNumber(other) ? one - other : String(one) < String(other) ? -1 : Number(one !== other));

  // sort: { column, down }. Rows without a value come last, whichever way.
  const sorted = (rows, sort) => {
    const value = COLUMNS.find(([name]) => name === sort.column)[2];
    const lacks = (row) => value(row) === undefined || value(row) === null;
    return [...rows].sort((one, other) => lacks(one) - lacks(other) || (sort.down ? -1 : 1) * compare(value(one), value(other)));
  };
  const matches = (row, words) => words.every((word) => [row.name, row.status, row.algorithm, row.model].some((said) => text(said).toLowerCase().includes(word)));

  // [row, depth] of those that match the search: children under their parent, which is shown with them.
  const arranged = (rows, sort, search) => {
    const ids = new Set(rows.map((row) => row.id));
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const under = (parent, depth) => sorted(rows.filter((row) => (ids.has(row.parent) ? row.parent : null) === parent), sort).flatMap((row) => {
      const below = under(row.id, depth + 1);
      return below.length || matches(row, words) ? [[row, depth], ...below] : [];
    });
    return under(null, 0);
  };

  // The run with the highest held-out score after training; where none has one, with the highest reward.
  const best = (rows) => {
    const highest = (value) => rows.filter((row) => isNumber(value(row))).reduce((found, row) => (found && value(found) >= value(row) ? found : row), null);
    return highest((row) => row.eval_after) || highest((row) => row.last["reward/mean"]);
  };

  // chosen: id -> colour of those whose curves are shown; shown: the id whose samples are.
  const runs = (rows, state, { choose, show, order }) => {
    const names = new Map(rows.map((row) => [row.id, row.name]));
    const first = best(rows);
    const made = table([["", true], ...COLUMNS], arranged(rows, state.sort, state.search).map(([row, depth]) => {
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
      const place = element("span", "depth" + Math.min(depth, 3));
      if (depth) place.append("└ ");
      place.append(name);
      if (rows.length > 1 && row === first) place.append(" ", element("span", "chip", "best"));
      return [pick, place, status(row.status), text(row.algorithm), number(row.last.step), number(row.last["reward/mean"]),
        number(row.last["kl/mean"]), number(row.eval_before), number(row.eval_after), duration(row.wall_s), ago(row.changed)];
    }));
    made.querySelectorAll("th").forEach((head, index) => {
      if (index === 0) return;
      const [column] = COLUMNS[index - 1];
      const button = element("button", "link", column + (state.sort.column === column ? (state.sort.down ? " ↓" : " ↑") : ""));
      button.type = "button";
      button.addEventListener("click", () => order(column));
      head.setAttribute("aria-sort", state.sort.column !== column ? "none" : state.sort.down ? "descending" : "ascending");
      head.replaceChildren(button);
    });
    return made;
  };

  const samples = (found) => {
    const box = element("div", "samples");
    if (found.length) box.append(...found.map(SampleCard.make));
    else box.append(element("p", "hint", "No samples yet."));
    return box;
  };

  const rewards = (found) => {
    const names = [...new Set(found.flatMap((sample) => Object.keys(sample.rewards || {})))].sort();
    if (!names.length) return element("p", "hint", "No rewards yet.");
    const rows = names.map((name) => {
      const values = found.map((sample) => (sample.rewards || {})[name]).filter(isNumber);
      const sum = values.reduce((total, value) => total + value, 0);
      return [name, short(sum / values.length), short(Math.min(...values)), short(Math.max(...values)), String(values.length)];
    });
    return table([["reward", true], ["mean", false], ["least", false], ["most", false], ["of newest samples", false]], rows);
  };

  const told = (event) => {
    if (typeof event.said === "string") return event.said;
    return Object.entries(event).filter(([name]) => name !== "kind" && name !== "time")
      .map(([name, value]) => name + " " + text(value)).join(", ");
  };
  const events = (found) => {
    if (!found.length) return element("p", "hint", "No guard, rollback, resume or warning so far.");
    const made = table([["time", true], ["what", true], ["", true]],
      [...found].reverse().map((event) => [text(event.time), text(event.kind), told(event)]));
    made.className = "told";
    return made;
  };

  const list = (value) => (Array.isArray(value) ? value.filter((each) => each && typeof each === "object") : []);
  const actors = (found) => {
    const all = [...list(found.trainers), ...list(found.makers)];
    if (!all.length) return null;
    const box = element("div");
    const age = isNumber(found.updated) ? "heard of " + duration(Math.max(0, Date.now() / 1000 - found.updated)) + " ago" : "";
    box.append(element("p", "hint", `Ray ${text(found.address)}, driver pid ${text(found.driver_pid)} on ${text(found.host)}, ${age}. ${text(found.progress)}`));
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
