"use strict";
// Draws the data of the page. Texts of the data may be anything, so they are only ever text nodes
// and attributes; names that come from files are keys of Maps, never of objects.
const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const MOST_BLOCKS = 1024; // a picture with more cells could not be read
const FAR = 6; // a limit above this multiple of the memory makes the parts of the memory too small
const VERDICTS = { fits: "good", close: "warn", "does not fit": "bad" };
const KINDS = ["parameters", "optimizer", "cache", "inputs", "temporary", "loops", "results"];

const modes = [...new Set(data.candidates.flatMap((each) => Object.keys(each.modes)))];
const state = { mode: modes[0], shown: [0], tensor: null, device: 0, open: new Set() };
const panes = [];

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null));
  return node;
}

// Texts of numbers are those of Python, which rounds a tie to an even digit.
function fixed(value, digits) {
  const scale = 10 ** digits;
  const down = Math.floor(value * scale);
  const tie = value * scale - down === 0.5 && down % 2 === 0;
  return (tie ? down / scale : value).toFixed(digits);
}

function bytesText(count) {
  let unit = 0;
  while (unit < UNITS.length - 1 && count >= 1024 ** (unit + 1)) unit += 1;
  return unit ? `${fixed(count / 1024 ** unit, 1)} ${UNITS[unit]}` : `${count} B`;
}

function secondsText(seconds) {
  if (seconds >= 1) return `${fixed(seconds, 2)} s`;
  return seconds >= 1e-3 ? `${fixed(seconds / 1e-3, 2)} ms` : `${fixed(seconds / 1e-6, 2)} µs`;
}

const rangeText = (text, low, high) => `${text(low)} to ${text(high)}`;
const percentText = (share) => `${fixed(100 * share, 1)}%`;
const planOf = (candidate) => candidate.modes[state.mode];
const listed = () => data.candidates.filter((each) => state.mode in each.modes);

function meshText(candidate) {
  const axes = candidate.mesh.filter(([, size]) => size > 1);
  return axes.map(([axis, size]) => `${axis}:${size}`).join(",") || "one device";
}

function strategyText(candidate) {
  const settings = candidate.settings.map(([key, text]) => `${key} = "${text}"`).join(", ");
  return [candidate.strategy, settings && `with ${settings}`, candidate.variant && `(${candidate.variant})`]
    .filter(Boolean).join(" ");
}

// Return the candidate whose mesh is nearest to the wanted sizes. The distance is the number of
// doublings of mesh axes. Of candidates at equal distance, return the first, which is the best.
function nearest(candidates, wanted) {
  const sizes = new Map(wanted);
  const distance = (candidate) => candidate.mesh.reduce(
    (sum, [axis, size]) => sum + Math.abs(Math.log2(size / (sizes.get(axis) || 1))), 0);
  return candidates.reduce((best, each) => (distance(each) < distance(best) ? each : best));
}

function section(title, ...children) {
  return el("section", {}, el("h3", {}, title), children);
}

// What a reader has opened stays open when other numbers are drawn.
function details(title, child) {
  return el("details", { open: state.open.has(title), ontoggle: ({ target }) => {
    if (target.open) state.open.add(title);
    else state.open.delete(title);
  } }, el("summary", {}, title), child);
}

function table(head, rows, numbers) {
  const cell = (tag, child, at) => el(tag, { class: numbers.includes(at) ? "number" : null }, child);
  return el("div", { class: "wide", tabindex: 0 }, el("table", {},
    el("thead", {}, el("tr", {}, head.map((child, at) => cell("th", child, at)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((child, at) => cell("td", child, at)))))));
}

// Draw one bar per row, from its low to its high value; `most` is the value of a full bar.
function bars(rows, most) {
  const width = (value) => `${(100 * value) / (most || 1)}%`;
  return el("div", { class: "bars" }, rows.flatMap(([name, low, high, text]) => [
    el("span", {}, name),
    el("b", {}, el("i", { style: `left: ${width(low)}; width: ${width(high - low)}` })),
    el("span", {}, text),
  ]));
}

function sums(plan, keysOf) {
  const found = new Map();
  for (const [number, , , sent] of plan.events) {
    for (const key of keysOf(data.collectives[number])) found.set(key, (found.get(key) || 0) + sent);
  }
  return [...found].sort((one, other) => other[1] - one[1]);
}

const TRAFFIC = [
  ["because of each semantic axis", (each) => (each.axes.length ? each.axes : ["written by hand"])],
  ["over mesh axes", (each) => [each.over.join("+")]],
  ["by each line of the program", (each) => [each.where || "no line"]],
];

function drawSummary(plan) {
  const rows = [
    ["verdict", plan.verdict || "no chip given", VERDICTS[plan.verdict]],
    ["memory per device", rangeText(bytesText, ...plan.memory)],
    ["time of one run", plan.time.length ? rangeText(secondsText, ...plan.time[0].slice(1)) : "no chip given"],
    ["sent per device", bytesText(plan.sent)],
    plan.between ? [`of it to other ${plan.group}s`, bytesText(plan.between)] : null,
    ["copies in the state", percentText(plan.copies)],
  ];
  return section("Summary", el("dl", { class: "tiles" }, rows.filter(Boolean).map(([name, text, style]) =>
    el("div", {}, el("dt", {}, name), el("dd", { class: style || null, "data-name": name }, text)))));
}

function drawMemory(plan, plans) {
  const [low, high] = plan.memory;
  const most = Math.max(...plans.map((each) => each.memory[1]), 1);
  const limit = data.usable && data.usable <= FAR * most ? data.usable : null;
  const whole = Math.max(most, limit || 0) * 1.005;
  const share = (size) => `${(100 * size) / whole}%`;
  const color = (kind) => `background: var(--c${KINDS.includes(kind) ? KINDS.indexOf(kind) : 7})`;
  const of = data.usable
    ? ` of ${bytesText(data.usable)} usable on ${data.chip} (${percentText(high / data.usable)}${limit ? ", solid line" : ", thin bar"})` : "";
  const text = `At least ${bytesText(low)} (dotted line), at most ${bytesText(high)}${of}.`;
  return section("Memory of one device",
    el("div", { class: "bar", role: "img", "aria-label": `${text} ${plan.kinds.map(([kind, size]) => `${kind} ${bytesText(size)}`).join(", ")}` },
      plan.kinds.map(([kind, size]) => el("span", { style: `width: ${share(size)}; ${color(kind)}` })),
      el("i", { class: "low", style: `left: ${share(low)}` }),
      limit && el("i", { style: `left: ${share(limit)}` })),
    // If the limit is too far to be in the bar of parts, a thin bar shows all usable memory.
    data.usable && !limit ? el("div", { class: "bar thin", "aria-hidden": "true" },
      el("span", { style: `width: ${(100 * high) / data.usable}%; background: var(--mark)` })) : null,
    el("div", { class: "key" }, plan.kinds.map(([kind, size]) =>
      el("span", { "data-name": kind }, el("i", { style: color(kind) }), `${kind} ${bytesText(size)}`))),
    el("p", {}, text),
    plan.live.length ? details("Largest values at the peak",
      table(["bytes", "values", "of each", "for", "line"],
        plan.live.map((row) => row.map((text) => data.texts[text])), [0, 1])) : null);
}

function drawTime(plan, plans) {
  if (!plan.time.length) return section("Time of one run", el("p", {}, "Give a chip with --topology."));
  const most = Math.max(...plans.flatMap((each) => each.time.map(([, , high]) => high)));
  return section("Time of one run",
    bars(plan.time.map(([name, low, high]) => [name, low, high, rangeText(secondsText, low, high)]), most),
    el("p", {}, "From full overlap to none. The estimate is not calibrated with measured steps."));
}

function drawTraffic(plan, plans) {
  if (!plan.events.length) return section("What one device sends", el("p", {}, "Nothing is sent."));
  const charts = TRAFFIC.map(([title, keysOf]) => {
    const most = Math.max(...plans.flatMap((each) => sums(each, keysOf).map(([, sent]) => sent)), 1);
    return [el("p", {}, `Bytes sent ${title}:`),
      bars(sums(plan, keysOf).map(([name, sent]) => [name, 0, sent, bytesText(sent)]), most)];
  });
  const rows = plan.events.map(([number, times, size, sent]) => {
    const each = data.collectives[number];
    return [`${each.maybe ? "≤" : ""}${times}`, each.kind, each.over.join("+"), each.axes.join(", ") || "-",
      bytesText(size), bytesText(sent), each.where];
  });
  return section("What one device sends", charts, details("All collectives",
    table(["times", "collective", "over", "axis", "bytes", "sent", "line"], rows, [0, 4, 5])));
}

// A dim is a button, so that a reader reaches it by the keyboard. Hovering or focus shows its rule.
const decisions = new WeakMap();

function drawTensors(plan, pane) {
  const rows = plan.tensors.map(([number, count, size, dims]) => {
    const tensor = data.tensors[number];
    const name = el("button", {
      type: "button", class: "tensor", "aria-pressed": String(number === state.tensor),
      onclick: () => { state.tensor = number; drawBlocks(); },
    }, tensor.path || "the argument");
    name.dataset.tensor = number;
    const chips = dims.map((decision, at) => {
      const found = data.decisions[decision];
      const chip = el("button", { type: "button", class: "dim", "aria-describedby": "why" },
        `${found.axis || "-"} ${tensor.shape[at]} `, el("b", {}, found.over.join("+") || "-"));
      decisions.set(chip, found);
      return chip;
    });
    return [name, count > 1 ? String(count) : "", tensor.category, el("div", { class: "dims" }, chips),
      tensor.dtype, bytesText(size * count)];
  });
  const list = table(["tensor", "arrays", "for", "dims: axis, size, mesh axes", "type", "per device"], rows, [1, 5]);
  // The table is one stop of the Tab key. Arrow keys move inside the table.
  const stops = [...list.querySelectorAll("button")];
  const move = (stop) => {
    stops.forEach((each) => { each.tabIndex = each === stop ? 0 : -1; });
  };
  move(stops[0]);
  list.removeAttribute("tabindex");
  list.addEventListener("focusin", (event) => move(event.target));
  list.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    const same = [...row.querySelectorAll("button")];
    const beside = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const others = beside ? [...beside.querySelectorAll("button")] : [];
    const next = beside
      ? others[Math.min(same.indexOf(event.target), others.length - 1)]
      : step && stops[stops.indexOf(event.target) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
  const held = section("Tensors", el("p", {},
    "Hover or focus a dim to see its rule. Choose a tensor to see its blocks below. Arrow keys move in the table."), list);
  held.className = "whole tensors";
  return held;
}

const why = el("div", { id: "why", role: "tooltip", hidden: true });
let told = null; // the dim whose rule is shown

function showWhy(chip) {
  told = chip;
  why.hidden = !chip;
  if (!chip) return;
  const found = decisions.get(chip);
  why.replaceChildren(
    el("div", {}, el("code", {}, found.rule || "no rule")),
    found.place ? el("div", {}, found.place) : "",
    el("div", {}, found.why));
  const at = chip.getBoundingClientRect();
  const below = at.bottom + why.offsetHeight + 8 < innerHeight;
  why.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - why.offsetWidth - 8))}px`;
  why.style.top = `${below ? at.bottom + 6 : at.top - why.offsetHeight - 6}px`;
}

for (const [event, shows] of [["pointerover", true], ["focusin", true], ["pointerout", false], ["focusout", false]]) {
  document.addEventListener(event, ({ target }) => {
    const chip = target.closest(".dim");
    if (chip) showWhy(shows ? chip : null);
  });
}
document.addEventListener("keydown", ({ key }) => { if (key === "Escape") showWhy(null); });
// Focusing a dim may scroll the page, so move the text instead of hiding it.
document.addEventListener("scroll", () => showWhy(told), true);

// Return the position of a device along each mesh axis. The last mesh axis is fastest, as in
// `Mesh.devices.flat`.
function position(device, mesh) {
  const at = new Map();
  let rest = device;
  for (const [axis, size] of [...mesh].reverse()) {
    at.set(axis, rest % size);
    rest = Math.floor(rest / size);
  }
  return at;
}

// Return the number of the part of a dim that is at a position. The first mesh axis is slowest.
const partAt = (over, at, sizes) => over.reduce((index, axis) => index * sizes.get(axis) + at.get(axis), 0);

function drawPaneBlocks(pane) {
  const { mesh } = pane.candidate;
  const rows = planOf(pane.candidate).tensors;
  const wanted = data.tensors[state.tensor];
  const [number, , size, chosen] = rows.find(([each]) => each === state.tensor)
    || rows.find(([each]) => wanted && data.tensors[each].path === wanted.path) || rows[0] || [];
  if (number === undefined) return pane.blocks.replaceChildren(el("h3", {}, "Blocks"), el("p", {}, "The program has no arguments."));
  const tensor = data.tensors[number];
  const sizes = new Map(mesh);
  const devices = mesh.reduce((count, [, each]) => count * each, 1);
  const dims = chosen.map((decision, at) => {
    const { axis, over } = data.decisions[decision];
    const parts = over.reduce((count, each) => count * sizes.get(each), 1);
    return { name: axis || `dim ${at}`, over, parts, size: tensor.shape[at], step: Math.ceil(tensor.shape[at] / parts) };
  });
  const sharded = dims.filter((dim) => dim.parts > 1);
  const across = sharded.slice(-1);
  const dense = across.length && across[0].parts > 8;
  const count = (some) => some.reduce((product, dim) => product * dim.parts, 1);
  const holders = new Map();
  const blockOf = (device) => {
    const at = position(device, mesh);
    return sharded.reduce((index, dim) => index * dim.parts + partAt(dim.over, at, sizes), 0);
  };
  for (let device = 0; device < devices; device += 1) {
    const block = blockOf(device);
    if (!holders.has(block)) holders.set(block, []);
    holders.get(block).push(device);
  }
  const blocks = count(sharded);
  const words = (some) => some.map((dim) => `${dim.name} ${dim.size} in ${dim.parts} over ${dim.over.join("+")}`).join(", ");
  const cells = blocks > MOST_BLOCKS ? [] : Array.from({ length: blocks }, (_, block) => {
    const held = holders.get(block);
    const text = held.length === devices ? "every device" : held.slice(0, 2).join(", ") + (held.length > 2 ? " …" : "");
    const cell = el("div", { onclick: () => hold(held[0]) }, text);
    cell.style.setProperty("--hue", Math.floor((360 * block) / blocks));
    return cell;
  });
  const slider = el("input", { type: "range", min: 0, max: devices - 1, oninput: () => hold(Number(slider.value)) });
  const shown = el("output", {});
  const text = el("p", { class: "block", "aria-live": "polite" });
  const hold = (device) => {
    state.device = device;
    panes.forEach((each) => each.mark && each.mark());
  };
  pane.mark = () => {
    const device = Math.min(state.device, devices - 1);
    const at = position(device, mesh);
    const block = blockOf(device);
    const ranges = dims.map((dim) => {
      const part = partAt(dim.over, at, sizes);
      return dim.parts > 1 ? `${part * dim.step}:${Math.min((part + 1) * dim.step, dim.size)}` : ":";
    });
    cells.forEach((cell, each) => cell.classList.toggle("held", each === block));
    slider.value = device;
    shown.value = String(device);
    const others = holders.get(block).length - 1;
    text.textContent = `It holds [${ranges.join(", ")}], ${bytesText(size)}. `
      + (others ? `${others} other device${others > 1 ? "s hold" : " holds"} the same.` : "No other device holds it.");
  };
  pane.blocks.replaceChildren(
    el("h3", {}, `Blocks of ${tensor.path || "the argument"}`),
    el("div", { class: "sliders" }, el("label", {}, "device", slider, shown)), text,
    cells.length
      ? el("div", { class: `blocks${dense ? " dense" : ""}`, "aria-hidden": "true", style: `grid-template-columns: repeat(${count(across)}, 1fr)` }, cells)
      : el("p", {}, `${blocks} blocks are too many to draw.`),
    el("p", {}, sharded.length > 1 ? `Rows: ${words(sharded.slice(0, -1))}. ` : "",
      across.length ? `Columns: ${words(across)}. ` : "Every device holds all of it. ",
      dense ? "Click a cell to choose its device." : "A cell has the numbers of its devices.",
      " The last mesh axis varies fastest."));
  pane.mark();
}

function drawBlocks() {
  panes.forEach(drawPaneBlocks);
  for (const button of page.querySelectorAll(".tensor")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.tensor) === state.tensor));
  }
}

function drawRemarks(plan) {
  const lines = plan.remarks.map((text) => el("li", {}, data.texts[text]));
  const drawn = section("Remarks of the plan", lines.length ? el("ul", {}, lines) : el("p", {}, "None."));
  drawn.className = "whole";
  return drawn;
}

// The controls of a pane stay when its numbers change, so that a slider keeps its focus.
function makePane(index) {
  const letter = "AB"[index];
  const pane = { candidate: null, blocks: el("section", { class: "whole" }) };
  const title = el("h2", { id: `title-${letter}` });
  const strategies = el("select", { onchange: () => {
    const same = listed().filter((each) => strategyText(each) === strategies.value);
    choose(index, nearest(same, pane.candidate.mesh));
  } });
  const rank = el("input", { type: "range", min: 0, oninput: () => choose(index, listed()[rank.value]) });
  const rankText = el("output", {});
  const axes = el("div");
  let drawnFor = null;
  const controls = el("section", { class: "whole" }, title,
    el("div", { class: "sliders" },
      el("label", {}, "strategy", strategies), el("label", {}, "candidate", rank, rankText), axes));
  pane.node = el("article", { class: "pane", "aria-labelledby": `title-${letter}` });

  function drawAxes(same) {
    const names = pane.candidate.mesh.map(([axis]) => axis);
    pane.axes = names.flatMap((axis) => {
      const sizeOf = (candidate) => new Map(candidate.mesh).get(axis);
      const values = [...new Set(same.map(sizeOf))].sort((one, other) => one - other);
      if (values.length < 2) return [];
      const slider = el("input", { type: "range", min: 0, max: values.length - 1, "data-axis": axis, oninput: () => {
        const some = same.filter((each) => sizeOf(each) === values[slider.value]);
        choose(index, nearest(some, pane.candidate.mesh));
      } });
      const shown = el("output", {});
      return [{ slider, shown, label: el("label", {}, axis, slider, shown), set: () => {
        const size = sizeOf(pane.candidate);
        slider.value = values.indexOf(size);
        slider.setAttribute("aria-valuetext", `${size} devices`);
        shown.value = String(size);
      } }];
    });
    axes.replaceChildren(...pane.axes.map((each) => each.label));
  }

  pane.draw = (plans) => {
    const all = listed();
    pane.candidate = all[state.shown[index]];
    const plan = planOf(pane.candidate);
    const same = all.filter((each) => strategyText(each) === strategyText(pane.candidate));
    const names = [...new Set(all.map(strategyText))];
    strategies.replaceChildren(...names.map((name) => el("option", {}, name)));
    strategies.value = strategyText(pane.candidate);
    rank.max = all.length - 1;
    rank.value = state.shown[index];
    rankText.value = `${state.shown[index] + 1} of ${all.length}`;
    rank.setAttribute("aria-valuetext", rankText.value);
    const key = `${state.mode} ${strategies.value}`;
    if (key !== drawnFor) drawAxes(same);
    drawnFor = key;
    pane.axes.forEach((each) => each.set());
    title.textContent = `${state.shown.length > 1 ? `${letter}: ` : ""}${strategyText(pane.candidate)} on ${meshText(pane.candidate)}`;
    const parts = [drawSummary(plan), drawMemory(plan, plans), drawTime(plan, plans), drawTraffic(plan, plans),
      drawTensors(plan, pane), pane.blocks, drawRemarks(plan)];
    if (controls.parentNode !== pane.node) pane.node.replaceChildren(controls);
    while (pane.node.lastChild !== controls) pane.node.lastChild.remove();
    pane.node.append(...parts);
  };
  return pane;
}

function choose(index, candidate) {
  state.shown[index] = listed().indexOf(candidate);
  draw();
}

const comparison = el("section", { class: "card", hidden: true });
const every = el("details", { class: "card" });
const holder = el("div", { class: "panes" });

function drawComparison(plans) {
  comparison.hidden = plans.length < 2;
  if (comparison.hidden) return;
  const [one, other] = plans;
  const change = (from, to) => (from ? `${to >= from ? "+" : "−"}${percentText(Math.abs(to - from) / from)}` : "");
  const row = (name, text, of) => [name, text(of(one)), text(of(other)), change(of(one), of(other))];
  comparison.replaceChildren(el("h3", {}, "A and B"), table(["", "A", "B", "change"], [
    ["verdict", one.verdict || "-", other.verdict || "-", ""],
    row("memory at most", bytesText, (plan) => plan.memory[1]),
    ...(one.time.length && other.time.length ? [row("time at most", secondsText, (plan) => plan.time[0][2])] : []),
    row("sent", bytesText, (plan) => plan.sent),
  ], [1, 2, 3]));
}

function drawEvery() {
  const rows = listed().map((each, at) => {
    const plan = planOf(each);
    const buttons = state.shown.map((_, index) => el("button", {
      type: "button", "aria-label": `show candidate ${at + 1} as ${"AB"[index]}`, onclick: () => choose(index, each),
    }, state.shown.length > 1 ? "AB"[index] : "show"));
    return [el("span", {}, buttons), String(at + 1), strategyText(each), meshText(each),
      plan.time.length ? secondsText(plan.time[0][2]) : "-", bytesText(plan.memory[1]), bytesText(plan.sent), plan.verdict || "-"];
  });
  const list = table(["", "", "strategy", "mesh", "time at most", "memory at most", "sent", "verdict"], rows, [1, 4, 5, 6]);
  list.querySelectorAll("tbody tr").forEach((row, at) => {
    if (state.shown.includes(at)) row.setAttribute("aria-current", "true");
  });
  const focused = every.contains(document.activeElement) && document.activeElement.getAttribute("aria-label");
  every.replaceChildren(el("summary", {}, `All ${rows.length} candidates`), list);
  const again = [...every.querySelectorAll("button")].find((each) => each.getAttribute("aria-label") === focused);
  if (again) again.focus();
}

function draw() {
  const plans = state.shown.map((at) => planOf(listed()[at]));
  while (panes.length < plans.length) {
    panes.push(makePane(panes.length));
    holder.append(panes[panes.length - 1].node);
  }
  while (panes.length > plans.length) panes.pop().node.remove();
  holder.className = plans.length > 1 ? "panes two" : "panes";
  if (state.tensor === null && plans[0].tensors.length) [[state.tensor]] = plans[0].tensors;
  panes.forEach((pane) => pane.draw(plans));
  drawComparison(plans);
  drawBlocks();
  drawEvery();
  showWhy(null);
}

function start() {
  const mode = el("select", { id: "mode", onchange: () => {
    const before = panes.map((pane) => pane.candidate);
    state.mode = mode.value;
    // Modes of one search share their candidates; other modes may have other strategies.
    state.shown = before.map((candidate) => {
      const same = listed().filter((each) => strategyText(each) === strategyText(candidate));
      return same.length ? listed().indexOf(nearest(same, candidate.mesh)) : 0;
    });
    state.tensor = null;
    draw();
  } }, modes.map((name) => el("option", {}, name)));
  const compare = el("input", { type: "checkbox", id: "compare", onchange: () => {
    const [first] = state.shown;
    // Two presets often have equal plans on one mesh, so the second candidate has another mesh.
    const mesh = meshText(listed()[first]);
    const other = Math.max(0, listed().findIndex((each) => meshText(each) !== mesh));
    state.shown = compare.checked ? [first, other] : [first];
    draw();
  } });
  const chip = data.usable ? `On ${data.topology}, with ${bytesText(data.usable)} usable on each device. ` : "";
  page.append(
    el("p", {}, `${chip}All numbers are of one device and one run. They are planned: the program was not run.`),
    data.notes.length ? details("What is assumed, and what is not on this page",
      el("ul", {}, data.notes.map((note) => el("li", {}, note)))) : "",
    el("div", { class: "options" },
      modes.length > 1 ? el("label", {}, "mode ", mode) : null,
      el("label", {}, compare, " compare two candidates")),
    comparison, holder, every, why);
  draw();
}

if (data.candidates.length) start();
