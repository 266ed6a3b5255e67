"use strict";
// The dashboard's scripts in node, over the smallest document that they need. Takes {scripts, rows, html_ids, do} from
// stdin; prints, for the start and after each action, the table's runs and which of them are chosen.
const vm = require("node:vm");

class Node {
  constructor(tag) { Object.assign(this, { tag, children: [], attributes: {}, listeners: {}, dataset: {}, className: "", hidden: false, value: "" }); }
  append(...nodes) { this.children.push(...nodes.map((each) => (each instanceof Node ? each : document.createTextNode(each)))); }
  replaceChildren(...nodes) { this.children = []; this.append(...nodes); }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  fire(name) { this.listeners[name]({ preventDefault() {} }); }
  get firstChild() { return this.children[0]; }
  get lastChild() { return this.children.at(-1); }
  get textContent() { return this.text === undefined ? this.children.map((each) => each.textContent).join("") : this.text; }
  set textContent(text) { this.children = []; this.text = String(text); }
  all(tag) { return this.children.flatMap((each) => [...(each.tag === tag ? [each] : []), ...each.all(tag)]); }
  querySelectorAll(tag) { return this.all(tag); }
}

const given = JSON.parse(require("node:fs").readFileSync(0, "utf8"));
const ids = Object.fromEntries(given.ids.map((id) => [id, new Node(id)]));
globalThis.Node = Node;
globalThis.document = {
  body: new Node("body"),
  createElement: (tag) => new Node(tag),
  createElementNS: (_, tag) => new Node(tag),
  createTextNode: (text) => Object.assign(new Node("#text"), { text: String(text) }),
  getElementById: (id) => ids[id],
};
globalThis.location = { hash: "#key=KEY", pathname: "/" };
globalThis.history = { replaceState() {} };
globalThis.sessionStorage = { getItem: () => "KEY", setItem() {} };
globalThis.addEventListener = () => {};
globalThis.setInterval = () => {};
globalThis.fetch = async (path) => {
  const answer = path === "/api/runs" ? { runs: given.rows }
    : path.includes("?mark=") ? { lines: [], from_start: false, more: false, mark: "" } : { actors: {}, events: [] };
  return { ok: true, status: 200, json: async () => answer };
};
const settled = () => new Promise((resolve) => setImmediate(resolve));

const table = () => {
  const [head, ...rows] = ids.runs.all("tr");
  return {
    heads: head.all("th").map((each) => each.textContent),
    sorted: Object.fromEntries(head.all("th").filter((each) => (each.attributes["aria-sort"] || "none") !== "none")
      .map((each) => [each.textContent.split(" ")[0], each.attributes["aria-sort"]])),
    rows: rows.map((row) => row.all("td").map((cell) => cell.textContent)),
    chosen: rows.filter((row) => row.all("input")[0].checked).map((row) => row.all("button")[0].textContent),
    shown: rows.filter((row) => row.all("button")[0].attributes["aria-pressed"] === "true").map((row) => row.all("button")[0].textContent),
    best: rows.filter((row) => row.all("span").some((each) => each.textContent === "best")).map((row) => row.all("button")[0].textContent),
    tools: !ids.tools.hidden,
  };
};
const actions = {
  sort: (name) => ids.runs.all("th").find((each) => each.textContent.split(" ")[0] === name).all("button")[0].fire("click"),
  search: (text) => { ids.search.value = text; ids.search.fire("input"); },
  click: (id) => ids[id].fire("click"),
};

(async () => {
  for (const script of given.scripts) vm.runInThisContext(script);
  const seen = [];
  for (const [action, argument] of [["wait"], ...given.do]) {
    if (action !== "wait") actions[action](argument);
    for (let turn = 0; turn < 50; turn++) await settled();
    if (document.body.dataset.state !== "ready") throw new Error(ids.status.textContent);
    seen.push(table());
  }
  process.stdout.write(JSON.stringify(seen));
})();
