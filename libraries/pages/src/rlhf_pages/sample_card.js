"use strict";
// Makes an element of a sample, for the report and other pages. Text of the run reaches the page only through
// textContent, never as markup. Output of a chat template is split by role. The button "raw" shows the unchanged text.
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
    const created = document.createElement(tag);
    if (className) created.className = className;
    if (text !== undefined) created.textContent = text;
    return created;
  };
  // Values below the resolution of float32 near 1 are rounding errors and shown as 0 on all pages.
  const isNothing = (value) => Math.abs(value) < 1e-7;
  const short = (value) => (isNothing(value) ? "0" : Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3))));

  // Split the output of a chat template into parts with their roles. Text without roles is one part.
  const parts = (text) => {
    const pieces = [];
    let role = null;
    let start = 0;
    const end = (to) => {
      const piece = text.slice(start, to);
      const bare = role === null && pieces.length === 0 && to < text.length ? piece.replace(STARTING, "") : piece;
      if (bare.trim() || role !== null) pieces.push({ role, text: bare.replace(CLOSING, "") });
    };
    for (const match of text.matchAll(OPENING)) {
      end(match.index);
      role = match.slice(1).find((each) => each !== undefined);
      role = Object.hasOwn(NAMES, role) ? NAMES[role] : role;
      start = match.index + match[0].length;
    }
    if (role === null) return [{ role: null, text: text.replace(CLOSING, "") }];
    const rest = text.slice(start);
    if (rest.trim()) pieces.push({ role, text: rest.replace(CLOSING, "") });
    return pieces;
  };
  // A page with pictures of its runs sets `pictureOf`: name -> promise of an address, or of null if it is missing.
  let pictureOf = null;
  const showPictures = (source) => { pictureOf = source; };
  const MARKER = /<image:([0-9a-f]{16})>/g;
  const MAX_PICTURES = 16;
  const picture = (name, marker) => {
    const box = element("span", "picture", marker);
    pictureOf(name).then((address) => {
      if (!address) return;
      const image = element("img");
      image.alt = marker;
      image.title = marker;
      image.src = address;
      box.replaceChildren(image);
    }, () => {});
    return box;
  };
  const textBox = (className, text) => {
    const markers = pictureOf === null ? [] : [...text.matchAll(MARKER)].slice(0, MAX_PICTURES);
    if (!markers.length) return element("div", className, text);
    const box = element("div", className);
    let start = 0;
    for (const marker of markers) {
      box.append(text.slice(start, marker.index), picture(marker[1], marker[0]));
      start = marker.index + marker[0].length;
    }
    box.append(text.slice(start));
    return box;
  };
  const rendered = (className, text) => {
    const pieces = parts(text);
    if (pieces.length === 1 && pieces[0].role === null) return [textBox("text " + className, pieces[0].text)];
    return pieces.map((part) => {
      const box = element("div", "turn");
      box.append(element("div", "who", part.role === null ? "text" : part.role));
      box.append(textBox("text " + className, part.text));
      return box;
    });
  };

  const callText = (call) => (call.error ? "bad call: " + call.error : call.name + " " + JSON.stringify(call.arguments));
  const turn = (each, show) => {
    const ofPolicy = each.role === "policy";
    const box = element("div", "turn " + (ofPolicy ? "by-policy" : "by-environment"));
    const reward = typeof each.reward === "number" ? ", reward " + short(each.reward) : "";
    box.append(element("div", "who", (ofPolicy ? "policy" : "environment") + reward));
    box.append(...show(ofPolicy ? "completion" : "prompt", String(each.text)));
    for (const call of each.tool_calls || []) box.append(element("div", "text call", callText(call)));
    return box;
  };
  const conversation = (sample, show) => [
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
    const body = element("div", "conversation");
    const button = element("button", "raw-button", "raw");
    button.type = "button";
    const show = (isRaw) => {
      button.setAttribute("aria-pressed", String(isRaw));
      body.replaceChildren(...conversation(sample, isRaw ? raw : rendered));
    };
    button.addEventListener("click", () => show(button.getAttribute("aria-pressed") !== "true"));
    show(false);
    const foot = chips(sample);
    foot.append(button);
    box.append(body, foot);
    return box;
  };
  return { make, element, short, isNothing, showPictures };
})();
