"use strict";
// The sample browser. Requires sample_card.js.
(() => {
  const data = JSON.parse(document.getElementById("sample-data").textContent);
  const root = document.getElementById("sample-list");
  const tools = document.getElementById("sample-tools");
  const titles = {
    best: "Best", worst: "Worst", random: "Random", pair: "First vs last policy", first: "First", last: "Last",
  };
  const state = { run: 0, group: null, query: "" };

  const { make: card, element } = SampleCard;

  const address = (png) => "data:image/png;base64," + png;
  SampleCard.showPictures(async (name) => {
    const pictures = data[state.run].pictures;
    return Object.hasOwn(pictures, name) ? address(pictures[name]) : null;
  });

  const fullText = (sample) =>
    [sample.prompt, sample.completion, ...(sample.turns || []).map((each) => each.text)].join("\n").toLowerCase();
  const matches = (sample) => !state.query || fullText(sample).includes(state.query);
  const list = (samples) => {
    const shown = (samples || []).filter(matches);
    const box = element("div", "samples");
    if (shown.length) box.append(...shown.map(card));
    else box.append(element("p", "empty", "No matching samples."));
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
