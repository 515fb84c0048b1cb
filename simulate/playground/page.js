/* The page of the playground: sliders and variants are a state, which the link holds; a worker runs
   it; charts and the live page show what came of it. What a link says is checked or shown as text,
   and its policy runs by a click alone.

   In reading order: state · controls · variants · results · the editor · the worker · start. */

import {Distribution, Scatter, Shares, duration, swatch} from "./charts.js";
import {count, element, figure, get, percent} from "./live/text.js";

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

/** Numbers from low to high that are easy to say: so many in each decade, or octave. */
function steps(low, high, each = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8], power = 10) {
  const all = [];
  for (let unit = power ** -3; unit <= high; unit *= power) {
    for (const step of each) all.push(Number((step * unit).toPrecision(6)));
  }
  return all.filter((value) => value >= low && value <= high);
}

const octaves = (low, high) => steps(low, high, [1, 1.5], 2).filter(Number.isInteger);

const SLIDERS = [ // name, group, label, unit, values in a range that the costs may give, help
  ["rate", "load", "load", "requests/s", () => steps(0.05, 2000),
    "Requests come at random instants (a Poisson process), so many per second on average."],
  ["tokens", "load", "answers", "tokens on average", steps,
    "Completion tokens: each costs its request a row in one iteration."],
  ["prompt", "load", "prompts", "tokens on average", steps,
    "Prompt tokens are computed first, many in one iteration (prefill)."],
  ["spread", "load", "lengths differ by", "× their mean",
    () => [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1, 1.2, 1.5, 2],
    "Standard deviation of prompt and answer lengths, divided by their mean; 0: all are alike. " +
    "None has more than 8,192 tokens, nor more than half the context: with large means they differ " +
    "less and are shorter."],
  ["requests", "load", "how many", "requests", () => steps(20, 1000),
    "Requests of the whole run. More take longer to simulate."],
  ["rows", "server", "rows", "in a batch at most", octaves,
    "Requests that are computed together (max_batch_size)."],
  ["blocks", "server", "memory", "KV blocks", octaves,
    "Keys and values of 16 tokens each, or as many as your vLLM's have. A request joins only when " +
    "blocks for all its tokens are free; “on demand”, as vLLM, gives them one by one, and takes " +
    "them back (preemption) when none is left."],
  ["budget", "server", "token budget", "in an iteration", octaves,
    "Longer prompts are computed in chunks, so that other rows go on meanwhile. vLLM's budget has " +
    "the tokens of these rows, too."],
].map(([name, group, label, unit, values, help]) => ({name, group, label, unit, values, help}));
const MODES = {
  nobatch: "nobatch: one by one", static: "static: whole batches",
  windowed: "windowed: waits first", dynamic: "dynamic: any time",
  "dynamic --kv-reservation demand": "dynamic, on demand",
  "dynamic --prefill first": "dynamic, prompts first", multibin: "multibin: by length",
};
const ORDERS = {
  fcfs: "fcfs: first come", sjf: "sjf: short answers", hrrn: "hrrn: relative wait",
  srpt: "srpt: least left", mlfq: "mlfq: least served",
};
const PAUSE = ["srpt", "mlfq"]; // orders that pause rows, in dynamic alone
const OWN = /^(dynamic --kv-reservation demand --victim )?yours\.py:[A-Za-z_]\w{0,40}$/,
  MOST = 4, MOST_CODE = 20_000;
const state = {
  costs: "h100-llama-3.1-8b", requests: 300, seed: 0, stream: false, variants: ["static", "dynamic"],
}; // and where the sliders are
let costs = {}; // by name: model, gpu; words and doubts; where sliders begin, and their ranges
let shown = [0, 1]; // variants in the grid
let code = EXAMPLE, trusted = true, own = {modes: [], orders: [], error: ""};

const nearest = (values, x) =>
  values.reduce((best, value) => Math.abs(value - x) < Math.abs(best - x) ? value : best);

/** "dynamic --order sjf" as [mode, order]; null if they are neither known nor the reader's own. */
function parted(variant) {
  const [mode, order = "fcfs"] = variant.split(" --order ");
  const fits = Object.hasOwn(ORDERS, order) && (mode.startsWith("dynamic") || !PAUSE.includes(order));
  return (Object.hasOwn(MODES, mode) || OWN.test(mode)) && (fits || OWN.test(order))
    ? [mode, order] : null;
}

const joined = (mode, order) => order === "fcfs" ? mode : `${mode} --order ${order}`;
const isOwn = (variant) => variant.includes("yours.py");
const named = (variant) => variant.replaceAll("yours.py:", "").replace(" --order ", ", ")
  .replace(" --prefill first", ", prompts first")
  .replace(" --kv-reservation", " on").replace(" --victim ", ", ");

/** The values of a slider; the server's own settings are among them. */
function valuesOf({name, group, values}) {
  const {usual, ranges} = costs[state.costs], own = group === "server" ? [usual[name]] : [];
  return [...new Set([...values(...ranges[name] ?? []), ...own])].sort((a, b) => a - b);
}

function fromLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  if (Object.hasOwn(costs, link.get("costs") ?? "")) state.costs = link.get("costs");
  Object.assign(state, costs[state.costs].usual);
  for (const slider of SLIDERS) {
    const {name} = slider;
    state[name] = nearest(valuesOf(slider), Number(link.get(name) ?? state[name]) || 0);
  }
  state.seed = Math.abs(Math.trunc(Number(link.get("seed")))) % 1e6 || 0;
  state.stream = link.get("stream") === "1";
  const variants = link.getAll("v").filter(parted).slice(0, MOST);
  if (variants.length) state.variants = variants;
  shown = [...state.variants.keys()].slice(0, 2);
  code = (link.get("code") ?? EXAMPLE).slice(0, MOST_CODE);
  trusted = code === EXAMPLE;
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

let linking = 0;

/** The state is another one: run it, and put it into the address. */
function changed() {
  clearTimeout(linking);
  linking = setTimeout(toLink, 300);
  worker.want();
}

// ---- controls

/** A word with its explanation, for mouse, keys and fingers. */
function term(text, help) {
  const made = element("span", "term", text, {tabIndex: 0}), tip = get("tip");
  const show = () => {
    const box = made.getBoundingClientRect();
    tip.textContent = help;
    tip.hidden = false;
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    const above = box.top - tip.offsetHeight - 6, below = box.bottom + 6;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? above : below}px`;
  };
  for (const type of ["pointerenter", "focus"]) made.addEventListener(type, show);
  for (const type of ["pointerleave", "blur"]) made.addEventListener(type, () => { tip.hidden = true; });
  return made;
}

function on(id, type, act) {
  (typeof id === "string" ? get(id) : id).addEventListener(type, act);
}

function makeSlider(slider) {
  const {name, group, label, unit, help} = slider;
  const box = element("div", "slider"), head = element("label", "", "", {htmlFor: name});
  const input = element("input", "", "", {type: "range", id: name});
  const said = element("output"), value = element("span");
  const say = () => {
    const values = valuesOf(slider);
    state[name] = nearest(values, state[name]);
    input.max = values.length - 1;
    input.value = values.indexOf(state[name]);
    said.textContent = state[name].toLocaleString("en");
    input.setAttribute("aria-valuetext", `${said.textContent} ${unit}`);
  };
  value.append(said, element("span", "quiet", ` ${unit}`));
  head.append(term(label, help), value);
  box.append(head, input);
  get(group).append(box);
  on(input, "input", () => {
    state[name] = valuesOf(slider)[input.value];
    say();
    changed();
  });
  say();
  return say;
}

/** Replace what is in a box; a reader who uses keys goes on from the same control. */
function refill(box, ...content) {
  const all = () => [...box.querySelectorAll("input, select, button")];
  const at = all().indexOf(document.activeElement);
  box.replaceChildren(...content);
  all()[at]?.focus();
}

function select(options, chosen, label, act) {
  const made = element("select");
  made.setAttribute("aria-label", label);
  for (const [value, text] of options) {
    made.append(element("option", "", text, {value, selected: value === chosen}));
  }
  on(made, "change", () => act(made.value));
  return made;
}

/** The menus of models and GPUs, of pairs that have costs. */
function makeMenu() {
  const all = Object.entries(costs), now = costs[state.costs];
  const of = (model) => all.filter(([, each]) => each.model === model);
  const menu = (label, help, options, chosen, act) => {
    const made = element("label", "pick");
    made.append(term(label, help), select(options, chosen, label, act));
    return made;
  };
  refill(get("menu"),
    menu("model", "In vLLM, with its default settings; demo, gpt2 and fake: in this project's server.",
      [...new Set(all.map(([, {model}]) => model))].map((model) => [model, model]), now.model,
      (model) => choose((of(model).find(([, {gpu}]) => gpu === now.gpu) ?? of(model)[0])[0])),
    menu("on", "How long an iteration takes: by NVIDIA's measurements of kernels, or, for machines " +
      "with this project's server, fitted to it.",
      of(now.model).map(([name, {gpu}]) => [name, gpu]), state.costs, choose));
  get("origin").textContent = `Costs ${state.costs}: ${now.words}.`;
  get("doubts").textContent = now.doubts;
}

/** Take other costs and the settings of their server; another model's requests have other lengths. */
function choose(name) {
  const {rate, prompt, tokens, spread} = state, {model} = costs[state.costs];
  state.costs = name;
  Object.assign(state, costs[name].usual, model === costs[name].model && {rate, prompt, tokens, spread});
  makeMenu();
  for (const say of says) say();
  changed();
}

let says = []; // what shows each slider's value

function makeControls() {
  const check = element("label", "pick");
  const box = element("input", "", "", {type: "checkbox", checked: state.stream});
  const again = element("button", "", "Another draw", {type: "button"});
  says = SLIDERS.map(makeSlider);
  on(again, "click", () => {
    state.seed = (state.seed + 1) % 1e6;
    changed();
  });
  on(box, "change", () => {
    state.stream = box.checked;
    changed();
  });
  check.append(box, term("answers are streamed", "Each token is sent as it comes. Otherwise an " +
    "answer is sent as a whole, and in a static batch when the whole batch is finished."));
  get("load").append(again);
  get("server").append(check);
}

// ---- variants

const COLUMNS = [ // head, field of what is measured, format, whether more is better, help
  ["tokens/s", "throughput", figure, true,
    "Tokens of all answers, divided by the time from the first request to the last answer."],
  ["latency, mean", "mean", duration, false, "From a request's sending to its whole answer."],
  ["latency, p99", "p99", duration, false, "99 of 100 requests have their answer within this time."],
  ["first token, p99", "ttft", duration, false, "Time to first token (TTFT) of 99 of 100 requests; " +
    "where answers are not streamed, until the server has computed it."],
  ["gap, p99", "gap", duration, false,
    "From one token of an answer to the next, at the server; 99 of 100 gaps are shorter."],
  ["useful rows", "useful", (x) => percent(x, 1), true,
    "Share of the computed rows that gave a request something new. The others are idle (their " +
    "request is finished, its batch is not), or compute again what a preemption has cost."],
];

function makeHeads() {
  const heads = [["variant", , , , "A mode: when requests join a batch. And an order: which waiting " +
    "request goes first."], ...COLUMNS];
  for (const [head, , , , help] of heads) {
    const cell = element("th");
    cell.append(term(head, help));
    get("heads").append(cell);
  }
}

function makeVariants() {
  const [body] = get("variants").tBodies;
  refill(body, ...state.variants.map(makeVariant));
  get("add").disabled = state.variants.length === MOST;
  get("file").hidden = !state.variants.some(isOwn);
  sayUnused();
  showResults();
}

/** Name the reader's classes that no variant has, each with a button that adds it. */
function sayUnused() {
  const used = state.variants.flatMap(parted), unused = [...own.orders, ...own.modes]
    .filter((word) => !used.includes(word));
  get("unused").replaceChildren(...unused.flatMap((word) => {
    const disabled = state.variants.length === MOST;
    const button = element("button", "", "add it", {type: "button", disabled});
    on(button, "click", () => add(own.modes.includes(word) ? word : joined("dynamic", word)));
    return [`${named(word)} is in no variant yet: `, button, " "];
  }));
}

function makeVariant(variant, i) {
  const row = element("tr"), cell = element("td"), actions = element("div", "actions");
  const [mode, order] = parted(variant), dynamic = mode.startsWith("dynamic");
  const options = (known, mine, now) => [...Object.entries(known),
    ...[...new Set([...mine, now].filter((word) => OWN.test(word)))].map((word) => [word, word])];
  const orders = Object.entries(ORDERS).filter(([name]) => dynamic || !PAUSE.includes(name));
  const set = (...words) => {
    state.variants[i] = parted(joined(...words)) ? joined(...words) : words[0];
    results[i] = undefined;
    makeVariants();
    changed();
  };
  const tick = element("input", "", "", {
    type: "checkbox", checked: shown.includes(i), title: "show its rows below",
  });
  const remove = element("button", "", "×", {
    type: "button", title: "remove it", disabled: state.variants.length === 1,
  });
  on(tick, "change", () => {
    shown = (tick.checked ? [...shown, i].slice(-2) : shown.filter((each) => each !== i)).sort();
    makeVariants();
    changed();
  });
  on(remove, "click", () => {
    state.variants.splice(i, 1);
    results.splice(i, 1);
    shown = shown.filter((each) => each !== i).map((each) => each > i ? each - 1 : each);
    makeVariants();
    changed();
  });
  actions.append(tick, swatch(i),
    select(options(MODES, own.modes, mode), mode, "mode", (to) => set(to, order)),
    select(options(Object.fromEntries(orders), own.orders, order), order, "order",
      (to) => set(mode, to)), remove);
  cell.append(actions);
  row.append(cell);
  return row;
}

/** Add a variant, and show its rows beside the first one's. */
function add(variant) {
  state.variants = [...state.variants.slice(0, MOST - 1), variant];
  shown = [...new Set([shown[0] ?? 0, state.variants.length - 1])];
  results.length = state.variants.length - 1;
  makeVariants();
  changed();
}

// ---- results

let charts = null;
const results = []; // of each variant

function makeCharts() {
  const at = get("charts");
  charts = {
    points: new Scatter(at, "Latency", "of each request", "tokens of its answer"),
    firsts: new Distribution(at, "First token", "requests that have it", "time to first token"),
    gaps: new Distribution(at, "Gaps", "tokens that come within", "from one token to the next"),
    rows: new Shares(at, "Useful rows", "of all that are computed"),
  };
}

function showResults() {
  const known = state.variants.map((variant, i) => ({name: named(variant), colour: i, result: results[i]}))
    .filter(({result}) => result && !result.error);
  for (const name in charts) {
    charts[name].show(known.map(({result, ...look}) => ({...look, values: result[name]})));
  }
  const best = COLUMNS.map(([, name, , more]) =>
    known.length > 1 && (more ? Math.max : Math.min)(...known.map(({result}) => result[name] ?? NaN)));
  [...get("variants").tBodies[0].rows].forEach((row, i) => {
    while (row.cells.length > 1) row.lastChild.remove();
    const result = results[i];
    if (result?.error) {
      return row.append(element("td", "wide bad text", result.error, {colSpan: COLUMNS.length}));
    }
    COLUMNS.forEach(([head, name, say], k) => {
      const value = result?.[name] ?? NaN, text = Number.isNaN(value) ? "–" : say(value);
      row.append(element("td", value === best[k] ? "name" : "", text));
      row.lastChild.dataset.head = head;
    });
  });
}

/** Give histories to the live page in its frame. */
function showGrid(histories) {
  const frame = get("live"), page = frame.contentWindow;
  const known = Boolean(page.showRuns && histories.length); // else it is loading, or none is ticked
  frame.classList.toggle("known", known);
  if (!known) return;
  page.showRuns(histories.map(([variant, history]) => {
    const parsed = JSON.parse(history);
    parsed.about.name = named(variant);
    return parsed;
  }));
}

function openGrid() {
  const frame = get("live");
  on(frame, "load", () => {
    frame.contentDocument.querySelector("header").hidden = true;
    frame.contentDocument.body.style.padding = "0";
    new ResizeObserver(() => { // as high as its grids need, which grow with it up to a limit
      const high = frame.contentDocument.documentElement.scrollHeight;
      if (high > frame.clientHeight) frame.style.height = `${high}px`;
    }).observe(frame.contentDocument.body);
    setTheme(document.documentElement.dataset.theme === "dark");
  });
  frame.src = "live.html";
}

function setTheme(dark) {
  const page = get("live").contentDocument, {dataset} = document.documentElement;
  dataset.theme = dark ? "dark" : "light";
  get("theme").textContent = dark ? "Light" : "Dark";
  if ((page?.documentElement.dataset.theme ?? dataset.theme) !== dataset.theme) {
    page.getElementById("theme").click();
  }
}

// ---- the editor

/** Say an error beside the editor, and mark its line. */
function sayWrong(text) {
  const line = Number(/\(yours\.py, line (\d+)\)/.exec(text)?.[1] ?? 0);
  const n = get("code").value.split("\n").length;
  get("wrong").textContent = text;
  get("code").rows = Math.max(8, n);
  get("lines").replaceChildren(...Array.from({length: n}, (_, i) =>
    element("b", i + 1 === line ? "at" : "", String(i + 1))));
}

function trust(text) {
  trusted = true;
  get("foreign").hidden = true;
  get("code").value = code = text;
  worker.again();
}

function makeEditor() {
  let typing = 0;
  get("code").value = code;
  get("foreign").hidden = trusted;
  sayWrong("");
  on("code", "input", () => {
    code = get("code").value;
    sayWrong("");
    clearTimeout(typing);
    typing = setTimeout(changed, 400);
  });
  on("run", "click", () => trust(code));
  on("reset", "click", () => trust(EXAMPLE));
}

// ---- the worker

const PATIENCE_MS = 10_000; // with a policy of the reader's
const CLICK = "Click “Run it” below to run your policy.";

const worker = {
  port: null, id: 0, timer: 0, adds: false,

  begin() {
    this.port = new Worker("worker.js", {type: "module"});
    on(this.port, "message", ({data}) => this[data.kind](data));
    on(this.port, "error", (event) => this.failed({message: event.message}));
  },

  /** Run the state as it is now. */
  want() {
    this.id += 1;
    const runs = state.variants.map((variant) => trusted || !isOwn(variant));
    runs.forEach((may, i) => { if (!may) results[i] = {error: CLICK}; });
    this.port.postMessage({id: this.id, state, runs, shown, code: trusted ? code : null});
    get("variants").classList.add("old");
  },

  /** Take the reader's text once more, and add a variant of it if there is none. */
  again() {
    this.adds = true;
    this.port.postMessage({again: true});
    changed();
  },

  loading({percent}) {
    get("state").textContent =
      percent < 100 ? `loading Python: ${percent}% of 14 MB` : "starting Python …";
  },

  begun(data) {
    clearTimeout(this.timer);
    if (data.own) this.timer = setTimeout(() => this.stop(), PATIENCE_MS);
  },

  learnt({modes, orders, error}) {
    clearTimeout(this.timer);
    own = {modes, orders, error};
    sayWrong(error);
    const [variant] = [...orders.map((order) => joined("dynamic", order)), ...modes];
    if (this.adds && variant && !state.variants.some(isOwn)) add(variant);
    else makeVariants();
    this.adds = false;
  },

  facts({command}) { get("command").textContent = command; },

  served({index, variant, result}) {
    clearTimeout(this.timer);
    if (variant !== state.variants[index]) return;
    results[index] = result;
    showResults();
  },

  done({id, ms}) {
    if (id !== this.id) return;
    get("variants").classList.remove("old");
    get("trace").disabled = false;
    navigator.serviceWorker?.register("offline.js"); // by now it competes with nothing
    get("state").textContent = `${count(state.requests, "request")}, ` +
      `${count(state.variants.length, "variant")}: simulated in ${duration(ms / 1000)}`;
    sayWrong(own.error || results.find((result) => result?.error?.includes("yours.py"))?.error || "");
  },

  rows({id, histories}) {
    if (id === this.id) showGrid(histories);
  },

  trace({text}) {
    const href = URL.createObjectURL(new Blob([text]));
    element("a", "", "", {href, download: "trace.jsonl"}).click();
    URL.revokeObjectURL(href);
  },

  failed({message}) {
    get("problem").hidden = false;
    get("problem").textContent = `Python does not run here: ${message}`;
  },

  /** A policy failed where no error is expected, as in a second run alone. */
  broke({message}) {
    clearTimeout(this.timer);
    get("variants").classList.remove("old");
    sayWrong(`Python was stopped by ${message}`);
  },

  /** A policy does not come back. */
  stop() {
    this.port.terminate();
    trusted = false;
    get("trace").disabled = true; // until Python is there again
    own.error = `Your policy took longer than ${PATIENCE_MS / 1000} s, and was stopped.`;
    this.begin();
    changed();
    showResults();
    sayWrong(own.error);
  },
};

// ---- start

function copies(id, text) {
  const {textContent: name} = get(id);
  get(id).hidden = !navigator.clipboard; // it is there for https and localhost alone
  on(id, "click", async () => {
    await navigator.clipboard.writeText(text());
    get(id).textContent = "Copied";
    setTimeout(() => { get(id).textContent = name; }, 1200);
  });
}

async function start() {
  worker.begin();
  costs = await (await fetch("costs.json")).json();
  fromLink();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches);
  on(dark, "change", () => setTheme(dark.matches));
  on("theme", "click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
  makeMenu();
  makeControls();
  makeHeads();
  makeCharts();
  makeEditor();
  openGrid();
  makeVariants();
  worker.want();
  const next = ["dynamic --order sjf", "windowed", "nobatch", "dynamic", "static"];
  on("add", "click", () => add(next.find((one) => !state.variants.includes(one))));
  on("trace", "click", () => worker.port.postMessage({trace: state}));
  copies("copy", () => get("command").textContent);
  copies("link", () => (toLink(), location.href));
  on(window, "hashchange", () => location.reload()); // another link in the same tab
}

/** For tests in a browser; nothing on the page uses it. */
window.playgroundForTests = {state, results, worker};

start();
