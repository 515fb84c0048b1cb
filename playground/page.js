/* The page of the playground: sliders and variants are a state, which the link holds; a worker runs
   it; charts and the live page show what came of it. What a link says is text until it is checked,
   and its policy is run by a click alone.

   In reading order: state · controls · variants · results · the editor · the worker · start. */

import {Distribution, Scatter, Shares, duration} from "./charts.js";

const get = (id) => document.getElementById(id);

function element(tag, className = "", text = "") {
  return Object.assign(document.createElement(tag), {className, textContent: text});
}

// ---- state

const EXAMPLE = `from scheduling.policies.base import Plan, Policy, setting, share_budget, start, whole_groups
from scheduling.policies.orders import Order


class ShortFirst(Order):
    """Short answers first; a second of waiting makes up for \`patience\` tokens."""

    in_order = False  # later requests may go before earlier ones
    patience: float = setting(100.0, "tokens that a second of waiting is worth", ge=0)

    def key(self, inference):  # the smallest goes first
        return inference.num_tokens + self.patience * inference.arrived_at


class Fours(Policy):
    """Batches of up to four requests; the next begins when all are finished."""

    request_level = True

    def plan(self, view):
        if view.running:
            return Plan(run=share_budget(view.running, view))
        return start(whole_groups(view, 4), view, "four")
`;

/** Numbers that are easy to say, from `low` to `high`: so many in a decade. */
function steps(low, high, of = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8]) {
  const all = [];
  for (let power = -3; power < 6; power++) {
    for (const step of of) all.push(Number((step * 10 ** power).toPrecision(3)));
  }
  return all.filter((value) => value >= low && value <= high);
}

const powers = (low, high) => {
  const all = [];
  for (let n = low; n <= high; n *= 2) all.push(n, 1.5 * n);
  return all.filter((n) => Number.isInteger(n) && n <= high);
};

const SLIDERS = [
  {name: "rate", of: "load", label: "load", unit: "requests/s", values: steps(0.05, 2000),
    help: "Requests come at random instants (a Poisson process), so many a second on average."},
  {name: "tokens", of: "load", label: "answers", unit: "tokens on average", values: steps(2, 400),
    help: "Completion tokens: each costs its request a row in one iteration."},
  {name: "prompt", of: "load", label: "prompts", unit: "tokens on average", values: steps(1, 400),
    help: "Prompt tokens are computed at the beginning, many in one iteration (prefill)."},
  {name: "spread", of: "load", label: "lengths differ by", unit: "× their mean",
    values: [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1, 1.2, 1.5, 2],
    help: "Standard deviation of prompt and answer lengths, divided by their mean; 0: all are alike."},
  {name: "requests", of: "load", label: "how many", unit: "requests", values: steps(20, 1000),
    help: "Requests of the whole run. More take longer to simulate."},
  {name: "rows", of: "server", label: "rows", unit: "in a batch at most", values: powers(1, 256),
    help: "Requests that are computed together (max_batch_size)."},
  {name: "blocks", of: "server", label: "memory", unit: "KV blocks", values: powers(64, 16384),
    help: "Keys and values of 16 tokens each. A request joins only when blocks for all its tokens are free; “on demand” gives them one by one, and takes them back (preemption) when none is left."},
  {name: "budget", of: "server", label: "prompt tokens", unit: "in an iteration", values: powers(16, 2048),
    help: "Token budget: longer prompts are computed in chunks, so that rows that decode need not wait long."},
];
const MODES = {
  nobatch: "one at a time", static: "static batches", windowed: "windowed batches",
  dynamic: "dynamic (continuous)", "dynamic --kv-reservation demand": "dynamic, memory on demand",
  multibin: "bins by length",
};
const ORDERS = {
  fcfs: "first come", sjf: "short answers first", srpt: "least work left", mlfq: "least served first",
  hrrn: "longest relative wait",
};
const MODE_HELP = "When requests join a batch. Static: none joins until all are finished. Windowed: the same, and a batch waits for 4 requests or 10 ms. Dynamic: requests join and leave between any two iterations.";
const ONLY_DYNAMIC = ["srpt", "mlfq"]; // orders that pause rows
const OWN = /^yours\.py:[A-Za-z_]\w{0,40}$/;
const MOST = 4;
const state = {
  costs: "demo", rate: 80, tokens: 100, prompt: 20, spread: 0.8, requests: 300, rows: 32,
  blocks: 2048, budget: 256, seed: 0, stream: false, variants: ["static", "dynamic"],
};
let costs = {}; // by name: rate and words
let shown = [0, 1]; // variants in the grid
let code = EXAMPLE, trusted = true, own = {modes: [], orders: []};

const nearest = (values, x) =>
  values.reduce((best, value) => Math.abs(value - x) < Math.abs(best - x) ? value : best);

/** "dynamic --order sjf" as [mode, order]; null for what is neither known nor the reader's own. */
function parted(variant) {
  const [mode, order = "fcfs"] = String(variant).split(" --order ");
  const isMode = mode in MODES || OWN.test(mode), isOrder = order in ORDERS || OWN.test(order);
  return isMode && isOrder ? [mode, order] : null;
}

const joined = (mode, order) => order === "fcfs" ? mode : `${mode} --order ${order}`;
const named = (variant) => {
  const [mode, order] = parted(variant), short = (word) => word.replace("yours.py:", "");
  const by = mode.endsWith("demand") ? "dynamic on demand" : short(mode);
  return order === "fcfs" ? by : `${by}, ${short(order)}`;
};
const isOwn = (variant) => variant.includes("yours.py:");

function fromLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  if (Object.hasOwn(costs, link.get("costs"))) state.costs = link.get("costs");
  state.rate = costs[state.costs].rate;
  for (const {name, values} of SLIDERS) {
    const given = Number(link.get(name) ?? state[name]);
    state[name] = nearest(values, Number.isFinite(given) ? given : state[name]);
  }
  state.seed = Math.abs(Math.trunc(Number(link.get("seed")))) % 1e6 || 0;
  state.stream = link.get("stream") === "1";
  const variants = link.getAll("v").filter(parted).slice(0, MOST);
  if (variants.length) state.variants = variants;
  shown = state.variants.map((_, i) => i).slice(0, 2);
  if (link.has("code") && link.get("code") !== EXAMPLE) {
    code = link.get("code").slice(0, 20000);
    trusted = false;
  }
}

function toLink() {
  const link = new URLSearchParams({costs: state.costs});
  for (const {name} of SLIDERS) link.set(name, state[name]);
  if (state.seed) link.set("seed", state.seed);
  if (state.stream) link.set("stream", "1");
  for (const variant of state.variants) link.append("v", variant);
  if (code !== EXAMPLE) link.set("code", code);
  history.replaceState(null, "", `#${link}`);
}

let due = 0;

/** The state has changed. */
function changed() {
  clearTimeout(due);
  due = setTimeout(toLink, 300);
  worker.want();
}

// ---- controls

function term(text, help) {
  const made = element("span", "term", text);
  made.tabIndex = 0;
  const show = () => {
    const box = made.getBoundingClientRect(), tip = get("tip");
    tip.textContent = help;
    tip.hidden = false;
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    const below = box.bottom + 6, room = innerHeight - tip.offsetHeight - 8;
    tip.style.top = `${below > room ? box.top - tip.offsetHeight - 6 : below}px`;
  };
  const hide = () => { get("tip").hidden = true; };
  for (const type of ["pointerenter", "focus"]) made.addEventListener(type, show);
  for (const type of ["pointerleave", "blur"]) made.addEventListener(type, hide);
  return made;
}

function makeSlider({name, of, label, unit, values, help}) {
  const box = element("div", "slider"), head = element("label"), said = element("output");
  const input = Object.assign(element("input"), {
    type: "range", id: name, min: 0, max: values.length - 1,
  });
  const left = element("span"), right = element("span");
  left.append(term(label, help));
  right.append(said, element("span", "unit", ` ${unit}`));
  head.htmlFor = name;
  head.append(left, right);
  box.append(head, input);
  get(of).append(box);
  input.addEventListener("input", () => {
    state[name] = values[input.value];
    say();
    changed();
  });
  function say() {
    input.value = values.indexOf(nearest(values, state[name]));
    said.textContent = state[name].toLocaleString("en");
    input.setAttribute("aria-valuetext", `${state[name]} ${unit}`);
  }
  say();
  return say;
}

function select(options, chosen, act, label) {
  const made = element("select");
  made.setAttribute("aria-label", label);
  for (const [value, text] of options) {
    made.append(Object.assign(element("option", "", text), {value, selected: value === chosen}));
  }
  made.addEventListener("change", () => act(made.value));
  return made;
}

function makeControls() {
  const says = SLIDERS.map(makeSlider), pick = element("div", "pick");
  const again = Object.assign(element("button", "", "Another draw"), {type: "button"});
  again.addEventListener("click", () => {
    state.seed = (state.seed + 1) % 1e6;
    changed();
  });
  get("load").append(again);
  pick.append(term("costs", "How long an iteration takes: a line fitted to a real server's iterations."),
    select(Object.keys(costs).map((name) => [name, name]), state.costs, (name) => {
      state.costs = name;
      state.rate = nearest(SLIDERS[0].values, costs[name].rate);
      says.forEach((say) => say());
      sayOrigin();
      changed();
    }, "costs"));
  const check = element("label", "check");
  const box = Object.assign(element("input"), {type: "checkbox", checked: state.stream});
  box.addEventListener("change", () => {
    state.stream = box.checked;
    changed();
  });
  check.append(box, term("answers are streamed", "Each token is sent as it comes. Otherwise an answer is sent as a whole, and in static batches when the batch is finished."));
  get("server").append(pick, check);
  sayOrigin();
}

function sayOrigin() {
  get("origin").textContent = `Costs ${state.costs}: ${costs[state.costs].words}`;
}

// ---- variants

const COLUMNS = [
  {head: "tokens/s", help: "Completion tokens of all answers, divided by the time from the first request to the last answer.", of: (m) => m.throughput, say: (x) => Math.round(x).toLocaleString("en"), more: true},
  {head: "latency, mean", help: "From a request's sending to its whole answer.", of: (m) => m.mean, say: duration},
  {head: "latency, p99", help: "99 of 100 requests have their answers after this time.", of: (m) => m.p99, say: duration},
  {head: "first token, median", help: "Time to first token (TTFT). Without streaming it is counted back from the answer.", of: (m) => m.ttft, say: duration},
  {head: "gap, p99", help: "From one token of an answer to the next (inter-token latency), at the server.", of: (m) => m.gap, say: duration},
  {head: "useful rows", help: "Share of computed rows that gave a request something new. The others are idle (their request is finished, its batch is not), or were computed again after a preemption.", of: (m) => m.useful, say: (x) => `${(100 * x).toFixed(1)}%`, more: true},
];

function makeHeads() {
  const first = element("th");
  first.append(term("variant", MODE_HELP));
  get("heads").append(first, ...COLUMNS.map(({head, help}) => {
    const cell = element("th");
    cell.append(term(head, help));
    return cell;
  }));
}

function swatch(i) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  made.setAttribute("class", "swatch");
  made.setAttribute("viewBox", "0 0 24 12");
  line.setAttribute("class", `line v${i}`);
  line.setAttribute("d", "M0 6h24");
  made.append(line);
  return made;
}

function makeVariants() {
  get("variants").tBodies[0].replaceChildren(...state.variants.map(makeVariant));
  get("add").disabled = state.variants.length === MOST;
  get("file").hidden = !state.variants.some(isOwn);
}

function makeVariant(variant, i) {
  const row = element("tr"), cell = element("td"), actions = element("div", "actions");
  const [mode, order] = parted(variant);
  const options = (known, mine, now) => [
    ...Object.entries(known),
    ...[...new Set(OWN.test(now) ? [...mine, now] : mine)].map((word) => [word, word]),
  ];
  const set = (to) => {
    state.variants[i] = to;
    makeVariants();
    changed();
  };
  const orders = Object.fromEntries(Object.entries(ORDERS).filter(([name]) =>
    mode.startsWith("dynamic") || !ONLY_DYNAMIC.includes(name)));
  const tick = Object.assign(element("input"), {type: "checkbox", checked: shown.includes(i)});
  tick.setAttribute("aria-label", "show its rows below");
  tick.title = "show its rows below";
  tick.addEventListener("change", () => {
    shown = tick.checked ? [...shown, i].slice(-2) : shown.filter((each) => each !== i);
    shown.sort();
    makeVariants();
    changed();
  });
  const remove = Object.assign(element("button", "", "×"), {
    type: "button", title: "remove it", disabled: state.variants.length === 1,
  });
  remove.addEventListener("click", () => {
    state.variants.splice(i, 1);
    shown = shown.filter((each) => each !== i).map((each) => each > i ? each - 1 : each);
    if (!shown.length) shown = [0];
    makeVariants();
    changed();
  });
  actions.append(tick, swatch(i),
    select(options(MODES, own.modes, mode), mode, (to) => set(joined(to,
      to.startsWith("dynamic") || !ONLY_DYNAMIC.includes(order) ? order : "fcfs")), "mode"),
    select(options(orders, own.orders, order), order, (to) => set(joined(mode, to)), "order"), remove);
  cell.append(actions);
  row.append(cell);
  return row;
}

// ---- results

let charts, requests = [], results = [];

function makeCharts() {
  const at = get("charts");
  charts = {
    latency: new Scatter(at, "Latency", "of each request, by the tokens of its answer"),
    ttft: new Distribution(at, "First token", "share of requests that have it", "time to first token"),
    gaps: new Distribution(at, "Gaps", "share of tokens that come within", "from one token to the next"),
    rows: new Shares(at, "Useful rows", "of all that were computed"),
  };
}

/** What the charts and the table say of a variant. */
function measured({answers, token_times: encoded, rows, history}) {
  const bytes = Uint8Array.from(atob(encoded), (c) => c.charCodeAt(0));
  const times = new Float64Array(bytes.buffer), points = [], ttft = [], latency = [], gaps = [];
  let k = 0, tokens = 0, last = 0;
  for (const [id, first, , ended] of answers) {
    const [at, , n] = requests[id];
    points.push([n, ended - at]);
    latency.push(ended - at);
    ttft.push(first - at);
    for (let i = 1; i < n; i++) gaps.push(times[k + i] - times[k + i - 1]);
    k += n;
    tokens += n;
    last = Math.max(last, ended);
  }
  for (const values of [latency, ttft]) values.sort((a, b) => a - b);
  const sorted = Float64Array.from(gaps).sort(), all = Object.values(rows).reduce((a, b) => a + b, 0);
  const rank = (values, part) => values[Math.min(values.length - 1, Math.floor(part * values.length))];
  return {
    points, ttftSorted: ttft, gaps: sorted, rows, history,
    throughput: tokens / (last - requests[0][0]), useful: rows.live / all,
    mean: latency.reduce((a, b) => a + b, 0) / latency.length, p99: rank(latency, 0.99),
    ttft: rank(ttft, 0.5), gap: rank(sorted, 0.99),
  };
}

function showResults() {
  const known = state.variants.map((variant, i) => ({result: results[i], name: named(variant), colour: i}))
    .filter(({result}) => result && !result.error);
  const series = (of) => known.map(({result, name, colour}) => ({...of(result), name, colour}));
  charts.latency.show(series(({points}) => ({points})));
  charts.ttft.show(series(({ttftSorted}) => ({sorted: ttftSorted})));
  charts.gaps.show(series(({gaps}) => ({sorted: gaps})));
  charts.rows.show(series(({rows}) => ({rows})));
  const best = COLUMNS.map(({of, more}) => {
    const values = known.map(({result}) => of(result)).filter(Number.isFinite);
    return known.length > 1 && (more ? Math.max : Math.min)(...values);
  });
  [...get("variants").tBodies[0].rows].forEach((row, i) => {
    while (row.cells.length > 1) row.lastChild.remove();
    const result = results[i];
    if (result?.error) {
      const cell = element("td", "wide bad text", result.error);
      cell.colSpan = COLUMNS.length;
      return row.append(cell);
    }
    COLUMNS.forEach(({head, of, say}, k) => {
      const cell = element("td", "", result ? say(of(result)) : "–");
      cell.dataset.head = head;
      if (result && of(result) === best[k]) cell.className = "best";
      row.append(cell);
    });
  });
}

let framed = "";

/** Give the histories of the ticked variants to the live page in its frame. */
function showGrid() {
  const histories = shown.map((i) => results[i]?.history).filter(Boolean), frame = get("live");
  const page = frame.contentWindow, all = histories.join();
  if (!page?.showRuns || all === framed || !histories.length) return;
  framed = all;
  frame.hidden = false;
  page.showRuns(histories.map(JSON.parse));
}

function openGrid() {
  const frame = get("live");
  frame.addEventListener("load", () => {
    frame.contentDocument.querySelector("header").hidden = true;
    setTheme(document.documentElement.dataset.theme === "dark");
    showGrid();
  });
  frame.hidden = false; // a frame that is not shown has no width to draw for
  frame.src = "live.html";
}

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  get("theme").textContent = dark ? "Light" : "Dark";
  const page = get("live").contentDocument, its = page?.documentElement.dataset.theme;
  if (its && its !== document.documentElement.dataset.theme) page.getElementById("theme").click();
}

// ---- the editor

function numberLines(at = 0) {
  const n = get("code").value.split("\n").length, lines = get("lines");
  get("code").rows = Math.max(8, n);
  lines.replaceChildren(...Array.from({length: n}, (_, i) =>
    element("b", i + 1 === at ? "at" : "", String(i + 1))));
}

/** Say an error beside the editor, and mark its line. */
function sayWrong(text) {
  const [, line] = /\(yours\.py, line (\d+)\)/.exec(text) ?? [];
  get("wrong").textContent = text;
  numberLines(Number(line ?? 0));
}

let typed = 0;

function makeEditor() {
  get("code").value = code;
  get("foreign").hidden = trusted;
  numberLines();
  get("code").addEventListener("input", () => {
    code = get("code").value;
    numberLines();
    clearTimeout(typed);
    typed = setTimeout(changed, 400);
  });
  get("code").addEventListener("keydown", (event) => {
    if (event.key !== "Tab" || event.shiftKey) return;
    event.preventDefault();
    document.execCommand("insertText", false, "    ");
  });
  get("run").addEventListener("click", () => {
    trusted = true;
    get("foreign").hidden = true;
    worker.addsOwn = true;
    worker.forget();
    changed();
  });
  get("reset").addEventListener("click", () => {
    get("code").value = code = EXAMPLE;
    trusted = true;
    get("foreign").hidden = true;
    changed();
  });
}

/** The worker has loaded the editor's text. */
function learnt({modes, orders, error}) {
  own = {modes, orders};
  sayWrong(error);
  if (worker.addsOwn && !state.variants.some(isOwn) && !error) {
    const variant = orders.length ? joined("dynamic", orders[0]) : modes[0];
    if (variant) {
      if (state.variants.length === MOST) state.variants.pop();
      state.variants.push(variant);
      shown = [shown[0] ?? 0, state.variants.length - 1];
      changed();
    }
  }
  worker.addsOwn = false;
  makeVariants();
  showResults();
}

// ---- the worker

const PATIENCE_MS = 10_000; // of one variant

const worker = {
  port: null, id: 0, timer: 0, addsOwn: false, sent: "",

  begin() {
    this.port = new Worker("worker.js", {type: "module"});
    this.port.addEventListener("message", ({data}) => this[data.kind](data));
    this.port.addEventListener("error", (event) => this.failed({message: event.message}));
  },

  /** Run the state as it is now. */
  want() {
    this.id += 1;
    const runs = state.variants.map((variant) => trusted || !isOwn(variant));
    const words = {id: this.id, shown, code: trusted ? code : null};
    this.port.postMessage({...words, runs, state});
    runs.forEach((may, i) => {
      if (!may) results[i] = {error: "This policy came with the link. Read it below, and click Run it."};
    });
    get("variants").classList.add("old");
  },

  /** Load the editor's text again, even if it has not changed. */
  forget() { this.port.postMessage(null); },

  ready() { get("state").textContent = "running …"; },
  learnt(data) { learnt(data); },

  facts({id, command, trace, requests: drawn}) {
    if (id !== this.id) return;
    requests = drawn;
    get("command").textContent = command;
    this.trace = trace;
  },

  begun({id}) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.stop(), PATIENCE_MS);
  },

  served({id, index, result}) {
    clearTimeout(this.timer);
    if (id !== this.id) return;
    results[index] = result.error ? result : measured(result);
    results.length = state.variants.length;
    showResults();
  },

  done({id, ms}) {
    if (id !== this.id) return;
    get("variants").classList.remove("old");
    get("state").textContent = `${requests.length} requests × ${state.variants.length}: simulated in ${duration(ms / 1000)}`;
    const wrong = results.find((result) => result?.error?.includes("yours.py"));
    if (wrong) sayWrong(wrong.error);
    showGrid();
  },

  failed({message}) {
    get("problem").hidden = false;
    get("problem").textContent = `Python could not be loaded: ${message}`;
  },

  /** A policy that does not come back. */
  stop() {
    this.port.terminate();
    trusted = false;
    this.begin();
    this.want();
    sayWrong(`It took longer than ${PATIENCE_MS / 1000} s, and was stopped. Change it, and click Run.`);
  },
};

// ---- start

async function start() {
  costs = await (await fetch("costs.json")).json();
  worker.begin();
  fromLink();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches);
  dark.addEventListener("change", () => setTheme(dark.matches));
  get("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
  makeControls();
  makeHeads();
  makeVariants();
  makeCharts();
  makeEditor();
  openGrid();
  showResults();
  worker.want();
  get("add").addEventListener("click", () => {
    const wanted = ["dynamic --order sjf", "windowed", "nobatch", "static", "dynamic"];
    state.variants.push(wanted.find((variant) => !state.variants.includes(variant)) ?? "dynamic");
    makeVariants();
    showResults();
    changed();
  });
  const copies = (id, text) => get(id).addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    const said = get(id).textContent;
    get(id).textContent = "Copied";
    setTimeout(() => { get(id).textContent = said; }, 1200);
  });
  copies("link", () => {
    toLink();
    return location.href;
  });
  copies("copy", () => get("command").textContent);
  get("trace").addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([worker.trace ?? ""], {type: "application/jsonl"}));
    Object.assign(element("a"), {href: url, download: "trace.jsonl"}).click();
    URL.revokeObjectURL(url);
  });
  if ("serviceWorker" in navigator) navigator.serviceWorker.register("offline.js");
}

/** For tests in a browser; nothing on the page uses it. */
window.playgroundForTests = {state, worker, results: () => results};

start();
