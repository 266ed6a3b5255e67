"use strict";
// The sample browser. Text of the run reaches the page through textContent only, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("sample-data").textContent);
  const root = document.getElementById("sample-list");
  const tools = document.getElementById("sample-tools");
  const titles = {
    best: "Best", worst: "Worst", random: "Random", pair: "First vs last policy", first: "First", last: "Last",
  };
  const state = { run: 0, group: null, query: "" };

  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const short = (value) => (Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3))));

  const said = (call) => (call.error ? "bad call: " + call.error : call.name + " " + JSON.stringify(call.arguments));
  const turn = (each) => {
    const ofPolicy = each.role === "policy";
    const box = element("div", "turn " + (ofPolicy ? "by-policy" : "by-environment"));
    const rewarded = typeof each.reward === "number" ? ", reward " + short(each.reward) : "";
    box.append(element("div", "who", (ofPolicy ? "policy" : "environment") + rewarded));
    box.append(element("div", "text " + (ofPolicy ? "completion" : "prompt"), each.text));
    for (const call of each.tool_calls || []) box.append(element("div", "text call", said(call)));
    return box;
  };
  const card = (sample) => {
    const box = element("article", "sample");
    box.append(element("div", "text prompt", sample.prompt));
    if (Array.isArray(sample.turns)) box.append(...sample.turns.map(turn));
    else box.append(element("div", "text completion", sample.completion));
    const chips = element("div", "chips");
    if (typeof sample.score === "number") chips.append(element("span", "chip score", "score " + short(sample.score)));
    for (const [name, value] of Object.entries(sample.rewards || {})) {
      if (typeof value === "number") chips.append(element("span", "chip", name + " " + short(value)));
    }
    if ("policy_version" in sample) chips.append(element("span", "chip", "policy " + sample.policy_version));
    if ("num_tokens" in sample) chips.append(element("span", "chip", sample.num_tokens + " tokens"));
    if (sample.finish_reason === "length") chips.append(element("span", "chip", "cut"));
    if (sample.branch) chips.append(element("span", "chip", "branch " + sample.branch));
    if ("sample_id" in sample) chips.append(element("span", "chip", "#" + sample.sample_id));
    box.append(chips);
    return box;
  };
  const whole = (sample) =>
    [sample.prompt, sample.completion, ...(sample.turns || []).map((each) => each.text)].join("\n").toLowerCase();
  const matches = (sample) => !state.query || whole(sample).includes(state.query);
  const list = (samples) => {
    const found = (samples || []).filter(matches);
    const box = element("div", "samples");
    if (found.length) box.append(...found.map(card));
    else box.append(element("p", "empty", "No sample here."));
    return box;
  };
  const version = (samples) => (samples && samples.length ? " (policy " + samples[0].policy_version + ")" : "");

  const show = () => {
    const groups = data[state.run].groups;
    root.replaceChildren();
    if (state.group === "pair") {
      const pair = element("div", "pair");
      for (const name of ["first", "last"]) {
        const side = element("div");
        side.append(element("h3", "", titles[name] + " policy" + version(groups[name])));
        side.append(list(groups[name]));
        pair.append(side);
      }
      root.append(pair);
    } else {
      root.append(list(groups[state.group]));
    }
  };

  const build = () => {
    tools.replaceChildren();
    if (data.length > 1) {
      const select = element("select");
      select.setAttribute("aria-label", "Run");
      data.forEach((run, index) => {
        const option = element("option", "", run.name);
        option.value = index;
        option.selected = index === state.run;
        select.append(option);
      });
      select.addEventListener("change", () => { state.run = Number(select.value); build(); });
      tools.append(select);
    }
    const groups = data[state.run].groups;
    const names = ["best", "worst", "random"].filter((name) => groups[name]);
    if (groups.first && groups.last) names.push("pair");
    if (!names.includes(state.group)) state.group = names[0];
    for (const name of names) {
      const button = element("button", "", titles[name]);
      button.type = "button";
      button.setAttribute("aria-pressed", String(name === state.group));
      button.addEventListener("click", () => { state.group = name; build(); });
      tools.append(button);
    }
    const search = element("input");
    search.type = "search";
    search.placeholder = "Find in prompt or answer";
    search.setAttribute("aria-label", "Find in prompt or answer");
    search.value = state.query;
    search.addEventListener("input", () => { state.query = search.value.toLowerCase(); show(); });
    tools.append(search);
    show();
  };
  build();
})();
