"use strict";
// One sample as an element, for the report and for other pages. Text of the run reaches the page through textContent
// only, never as markup. What a chat template wrote is shown by its roles; the button "raw" shows the text as it is.
const SampleCard = (() => {
  const OPENING = new RegExp(
    [
      "<\\|im_start\\|>(\\w+)\\n?",
      "<\\|start_header_id\\|>(\\w+)<\\|end_header_id\\|>\\n*",
      "<start_of_turn>(\\w+)\\n?",
      "<\\|(system|user|assistant|tool)\\|>\\n?",
      "(\\[INST\\]) ?",
    ].join("|"),
    "g",
  );
  const NAMES = { "[INST]": "user", model: "assistant" };
  const CLOSING = /(?:<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|end\|>|<\|endoftext\|>|<\|end_of_text\|>|<\/s>|\[\/INST\]|\s)+$/;
  const STARTING = /^(?:<\|begin_of_text\|>|<bos>|<s>|\s)+/;

  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  // What is below the resolution of float32 next to 1 is rounding, and shown as 0, in all pages.
  const isNothing = (value) => Math.abs(value) < 1e-7;
  const short = (value) => (isNothing(value) ? "0" : Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3))));

  // The parts that a chat template wrote, each with the role it names; one part without a role where there is none.
  const parts = (text) => {
    const found = [];
    let role = null;
    let start = 0;
    const end = (to) => {
      const said = text.slice(start, to);
      const bare = role === null && found.length === 0 && to < text.length ? said.replace(STARTING, "") : said;
      if (bare.trim() || role !== null) found.push({ role, text: bare.replace(CLOSING, "") });
    };
    for (const match of text.matchAll(OPENING)) {
      end(match.index);
      role = match.slice(1).find((each) => each !== undefined);
      role = Object.hasOwn(NAMES, role) ? NAMES[role] : role;
      start = match.index + match[0].length;
    }
    if (role === null) return [{ role: null, text: text.replace(CLOSING, "") }];
    const rest = text.slice(start);
    if (rest.trim()) found.push({ role, text: rest.replace(CLOSING, "") });
    return found;
  };
  const rendered = (className, text) => {
    const said = parts(text);
    if (said.length === 1 && said[0].role === null) return [element("div", "text " + className, said[0].text)];
    return said.map((part) => {
      const box = element("div", "turn");
      box.append(element("div", "who", part.role === null ? "text" : part.role));
      box.append(element("div", "text " + className, part.text));
      return box;
    });
  };

  const called = (call) => (call.error ? "bad call: " + call.error : call.name + " " + JSON.stringify(call.arguments));
  const turn = (each, show) => {
    const ofPolicy = each.role === "policy";
    const box = element("div", "turn " + (ofPolicy ? "by-policy" : "by-environment"));
    const rewarded = typeof each.reward === "number" ? ", reward " + short(each.reward) : "";
    box.append(element("div", "who", (ofPolicy ? "policy" : "environment") + rewarded));
    box.append(...show(ofPolicy ? "completion" : "prompt", String(each.text)));
    for (const call of each.tool_calls || []) box.append(element("div", "text call", called(call)));
    return box;
  };
  const said = (sample, show) => [
    ...show("prompt", sample.prompt === undefined ? "" : sample.prompt),
    ...(Array.isArray(sample.turns)
      ? sample.turns.map((each) => turn(each, show))
      : show("completion", sample.completion)),
  ];
  const raw = (className, text) => [element("div", "text raw " + className, JSON.stringify(text))];

  const chips = (sample) => {
    const box = element("div", "chips");
    if (typeof sample.score === "number") box.append(element("span", "chip score", "score " + short(sample.score)));
    for (const [name, value] of Object.entries(sample.rewards || {})) {
      if (typeof value === "number") box.append(element("span", "chip", name + " " + short(value)));
    }
    if ("policy_version" in sample) box.append(element("span", "chip", "policy " + sample.policy_version));
    if ("num_tokens" in sample) box.append(element("span", "chip", sample.num_tokens + " tokens"));
    if (sample.finish_reason === "length") box.append(element("span", "chip", "cut"));
    if (sample.branch) box.append(element("span", "chip", "branch " + sample.branch));
    if ("sample_id" in sample) box.append(element("span", "chip", "#" + sample.sample_id));
    return box;
  };

  const make = (sample) => {
    const box = element("article", "sample");
    const body = element("div", "said");
    const button = element("button", "raw-button", "raw");
    button.type = "button";
    const show = (isRaw) => {
      button.setAttribute("aria-pressed", String(isRaw));
      body.replaceChildren(...said(sample, isRaw ? raw : rendered));
    };
    button.addEventListener("click", () => show(button.getAttribute("aria-pressed") !== "true"));
    show(false);
    const foot = chips(sample);
    foot.append(button);
    box.append(body, foot);
    return box;
  };
  return { make, element, short, isNothing };
})();
