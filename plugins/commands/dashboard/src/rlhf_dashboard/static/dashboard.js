"use strict";
// Polls the server and draws changes. The key is in the URL's fragment `#key=`, which browsers do not send to servers.
(() => {
  const { element } = SampleCard;
  const at = (id) => document.getElementById(id);
  const POLL_MS = 2000, MAX_CHOSEN = 6, SHOWN_SAMPLES = 24, KEPT_SAMPLES = 200;
  const state = { key: "", rows: [], chosen: new Map(), shown: null, touched: false, open: new Map(),
    search: "", sort: { column: "changed", down: true } };
  const curves = new Map(); // id -> { lines, mark }
  let kept = { id: null, samples: [], mark: "" };
  let details = null;

  const readKey = () => {
    const key = new URLSearchParams(location.hash.slice(1)).get("key");
    if (key) {
      sessionStorage.setItem("key", key);
      history.replaceState(null, "", location.pathname);
    }
    state.key = sessionStorage.getItem("key") || "";
  };
  class WrongKey extends Error {}
  const get = async (path) => {
    const answer = await fetch("/api/" + path, { headers: { Authorization: "Bearer " + state.key } });
    if (answer.status === 401) throw new WrongKey();
    if (!answer.ok) throw new Error("the server returned status " + answer.status);
    return answer.json();
  };

  // Images in pages cannot send the key, so their bytes are fetched. Each is kept as a data address.
  const MAX_KEPT_PICTURES = 300;
  const pictures = new Map(); // run and name -> promise of an address, or of null
  const fetchPicture = async (path) => {
    const answer = await fetch("/api/" + path, { headers: { Authorization: "Bearer " + state.key } });
    if (!answer.ok) return null;
    const bytes = new Uint8Array(await answer.arrayBuffer());
    return "data:image/png;base64," + btoa(bytes.reduce((text, byte) => text + String.fromCharCode(byte), ""));
  };
  SampleCard.showPictures((name) => {
    const path = `runs/${state.shown}/images/${name}`;
    if (!pictures.has(path)) {
      if (pictures.size >= MAX_KEPT_PICTURES) pictures.delete(pictures.keys().next().value);
      pictures.set(path, fetchPicture(path));
    }
    return pictures.get(path);
  });

  const getNewLines = async (id, file, mark) => {
    const all = { lines: [], fromStart: false, mark };
    for (let more = true; more; ) {
      const part = await get(`runs/${id}/${file}?mark=${encodeURIComponent(all.mark)}`);
      if (part.from_start) [all.lines, all.fromStart] = [[], true];
      all.lines.push(...part.lines);
      all.mark = part.mark;
      more = part.more;
    }
    return all;
  };

  const freeColor = () => [...Array(MAX_CHOSEN).keys()].find((color) => ![...state.chosen.values()].includes(color));
  const choose = (id, on) => {
    state.touched = true;
    if (on && state.chosen.size < MAX_CHOSEN) state.chosen.set(id, freeColor());
    if (!on) { state.chosen.delete(id); curves.delete(id); }
    refresh();
  };
  const show = (id) => {
    state.touched = true;
    state.shown = id;
    if (!state.chosen.has(id)) choose(id, true);
    else refresh();
  };

  const order = (column) => {
    const again = state.sort.column === column;
    state.sort = { column, down: again ? !state.sort.down : column !== "run" };
    drawRuns();
  };
  const drawRuns = () => {
    at("tools").hidden = state.rows.length < 2;
    at("runs").replaceChildren(Panels.runs(state.rows, state, { choose, show, order }));
  };

  const drawCurves = () => {
    const runs = state.rows.filter((row) => curves.has(row.id) && state.chosen.has(row.id)).map((row) => {
      const before = Charts.isNumber(row.eval_before) ? [{ step: 0, "eval/score": row.eval_before }] : [];
      return { name: row.name, color: state.chosen.get(row.id), lines: [...before, ...curves.get(row.id).lines] };
    });
    const sections = Charts.groups(runs).map(([group, metrics]) => {
      const box = element("details");
      box.open = state.open.has(group) ? state.open.get(group) : Charts.opened(group);
      box.append(element("summary", "", group));
      const charts = element("div", "charts");
      const draw = () => charts.replaceChildren(...metrics.map(([metric, series]) => Charts.chart(metric, series)));
      if (box.open) draw();
      box.addEventListener("toggle", () => { state.open.set(group, box.open); if (box.open && !charts.firstChild) draw(); });
      box.append(charts);
      return box;
    });
    at("curves").replaceChildren(...sections);
  };

  const drawRun = () => {
    const row = state.rows.find((each) => each.id === state.shown);
    if (!row || !details) { at("run").replaceChildren(); return; }
    const newest = kept.samples.slice(-SHOWN_SAMPLES).reverse();
    const actors = Panels.actors(details.actors);
    at("run").replaceChildren(
      element("h2", "", row.name),
      ...(actors ? [element("h3", "", "Actors"), actors] : []),
      element("h3", "", "Rewards by name"), Panels.rewards(kept.samples),
      element("h3", "", "Events"), Panels.events(details.events),
      element("h3", "", "Newest samples"), Panels.samples(newest),
      element("h3", "", "Settings"), ...Panels.settings(details),
    );
  };

  const refreshCurves = async () => {
    let changed = curves.size !== state.chosen.size;
    for (const id of [...state.chosen.keys()]) {
      const before = curves.get(id);
      const { lines, fromStart, mark } = await getNewLines(id, "metrics", before ? before.mark : "");
      changed ||= fromStart || lines.length > 0 || !before;
      curves.set(id, { lines: fromStart || !before ? lines : [...before.lines, ...lines], mark });
    }
    return changed;
  };
  const refreshRun = async () => {
    if (!state.shown) return false;
    if (kept.id !== state.shown) kept = { id: state.shown, samples: [], mark: "" };
    const { lines, fromStart, mark } = await getNewLines(state.shown, "samples", kept.mark);
    const all = fromStart ? lines : [...kept.samples, ...lines];
    kept = { id: state.shown, samples: all.slice(-KEPT_SAMPLES), mark };
    const newDetails = await get("runs/" + state.shown);
    const changed = lines.length > 0 || JSON.stringify(newDetails) !== JSON.stringify(details);
    details = newDetails;
    return changed;
  };

  let busy = false;
  let drawn = "";
  const refresh = async () => {
    if (busy) return;
    busy = true;
    try {
      state.rows = (await get("runs")).runs;
      at("ask").hidden = true;
      if (!state.touched && state.rows.length && !state.shown) {
        const running = state.rows.find((row) => row.status === "running");
        state.shown = (running || Panels.best(state.rows) || state.rows[0]).id;
        state.chosen.set(state.shown, freeColor());
      }
      at("status").textContent = state.rows.length ? `${state.rows.length} runs, read at ${new Date().toLocaleTimeString()}` : "No runs yet.";
      const shape = JSON.stringify([state.rows, [...state.chosen], state.shown]);
      const other = shape !== drawn;
      drawn = ""; // until everything is drawn, so that the next refresh repeats what fails below
      if (other) drawRuns();
      if ((await refreshCurves()) || other) drawCurves();
      if ((await refreshRun()) || other) drawRun();
      drawn = shape;
      document.body.dataset.state = "ready";
    } catch (error) {
      const wantsKey = error instanceof WrongKey;
      at("ask").hidden = !wantsKey;
      at("status").textContent = wantsKey ? "The server requires its key." : `Not up to date: ${error.message}`;
      document.body.dataset.state = wantsKey ? "locked" : "lost";
    } finally {
      busy = false;
    }
  };

  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("key", at("key").value);
    readKey();
    refresh();
  });
  at("search").addEventListener("input", () => { state.search = at("search").value; drawRuns(); });
  at("best").addEventListener("click", () => {
    const best = Panels.best(state.rows);
    if (best) show(best.id);
  });
  addEventListener("hashchange", () => { readKey(); refresh(); });
  readKey();
  refresh();
  setInterval(refresh, POLL_MS);
})();
