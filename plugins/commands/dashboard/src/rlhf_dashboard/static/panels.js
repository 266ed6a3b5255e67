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

  const HEADS = [["", true], ["run", true], ["status", true], ["algorithm", true], ["step", false], ["reward", false],
    ["KL", false], ["before", false], ["after", false], ["wall time", false]];
  const status = (said) => element("span", "status " + (/^[a-z-]+$/.test(said) ? said.replace("rolled-back-and-", "") : ""), said);

  // chosen: id -> colour of those whose curves are shown; shown: the id whose samples are.
  const runs = (rows, chosen, shown, choose, show) => table(HEADS, rows.map((row) => {
    const box = element("input");
    box.type = "checkbox";
    box.checked = chosen.has(row.id);
    box.setAttribute("aria-label", "Show the curves of " + row.name);
    box.addEventListener("change", () => choose(row.id, box.checked));
    const pick = element("span");
    pick.append(box);
    if (chosen.has(row.id)) pick.append(" ", element("span", "key k" + chosen.get(row.id)));
    const name = element("button", "link", row.name);
    name.type = "button";
    name.setAttribute("aria-pressed", String(row.id === shown));
    name.addEventListener("click", () => show(row.id));
    return [pick, name, status(row.status), text(row.algorithm), number(row.last.step), number(row.last["reward/mean"]),
      number(row.last["kl/mean"]), number(row.eval_before), number(row.eval_after), duration(row.wall_s)];
  }));

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
  return { runs, samples, rewards, events, actors, settings };
})();
