/* A running server: its history, asked for a few times per second, and what is asked of it from this
   page: a load and the completion of a prompt. */

import {layout} from "./drawing.js";
import {describeRuns, sayParts} from "./readout.js";
import {element, escaped, figure, get, tell, visible} from "./text.js";
import {draw, pause, pin, state, view} from "./view.js";

const POLL_MS = 140, RETRY_MS = 1000, HIDDEN_MS = 2000, ANSWER_MS = 15000, MOST_ANSWER = 20000;

class Refused extends Error {}

export const server = {
  key: "",
  cursor: null, // where the run ends; null: ask for all that is known
  ahead: null, // where the server is, while the page is paused and does not take what is new
  load: null, // the id of the load that this page started
  parts: {id: null, at: 0, over: true}, // of which request they are shown, and since when
  answer: null, // an AbortController while one streams
  named: false, // whether the models are those of the server
  failures: 0, // of asking

  async ask(path, options = {}) {
    const headers = {...options.headers};
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    const response = await fetch(path, {...options, headers, cache: "no-store"});
    if (response.status === 401) throw new Refused("the server needs another API key");
    if (response.ok) return response;
    const body = await response.json().catch(() => null);
    throw new Error(visible(body?.error?.message ?? `the server answered ${response.status}`));
  },

  post(path, body, options = {}) {
    const headers = {"Content-Type": "application/json"};
    return this.ask(path, {...options, method: "POST", headers, body: JSON.stringify(body)});
  },

  /** Ask what happened, for as long as the page is there; never twice at once. */
  async watch() {
    for (;;) {
      const began = performance.now();
      let every = POLL_MS;
      try {
        await this.poll();
        await this.askParts();
        if (!this.named) await this.nameModels();
        problem("");
      } catch (error) {
        if (error instanceof Refused) await unlocked();
        else {
          every = RETRY_MS;
          this.failures += 1;
          this.cursor = this.ahead = null; // when it is back, it may be another one
          this.named = false;
          problem("the server does not answer: trying again");
        }
      }
      const left = (document.hidden ? HIDDEN_MS : every) - (performance.now() - began);
      await new Promise((resolve) => setTimeout(resolve, Math.max(20, left)));
    }
  },

  /** Offer the models for a prompt, if there are several, and lengths that fit their context. */
  async nameModels() {
    const {data} = await (await this.ask("v1/models")).json();
    const half = Math.floor(data[0].max_model_len / 2);
    for (const id of ["most", "shortest", "longest", "tokens"]) {
      get(id).value = Math.min(number(id), half);
    }
    const chosen = get("model").value;
    get("model").replaceChildren(...data.map(({id}) =>
      element("option", "", visible(id, 60), {value: id, selected: id === chosen})));
    get("models").hidden = data.length < 2;
    this.named = true;
  },

  /** Ask where the pinned request's time went: each second, until it is over or forgotten. */
  async askParts() {
    const id = state.pinned, at = performance.now();
    if (id === this.parts.id && (this.parts.over || at - this.parts.at < RETRY_MS)) return;
    const found = id === null ? null : await this.request(id);
    const request = found?.id === id ? found : null; // a client may number its own
    const over = !["waiting", "running"].includes(request?.state);
    this.parts = {id, at, over};
    sayParts(request);
  },

  /** What is known of a request, by its number or its X-Request-Id; null if it is forgotten. */
  async request(name) {
    const answer = await this.ask(`requests/${name}`).catch(() => null);
    return answer && (await answer.json()).requests[0];
  },

  async poll() {
    const query = new URLSearchParams(), since = state.paused && this.ahead || this.cursor;
    if (since !== null) query.set("since", since);
    if (this.load) query.set("load", this.load);
    const signal = AbortSignal.timeout(ANSWER_MS);
    const history = await (await this.ask(`live/events?${query}`, {signal})).json();
    sayLoad(history.load);
    const end = history.cursor ?? history.next;
    if (state.paused && state.runs[0].about) this.ahead = end; // asked for again later
    else if (since === this.cursor) { // else the pause ended while this answer was on its way
      this.cursor = take(history) ? end : null;
      this.ahead = null;
    }
  },
};

function problem(text) {
  get("problem").hidden = !text;
  tell(get("problem"), text);
}

/** Take a history as a Run does, and draw it. */
function take(history) {
  const taken = state.runs[0].take(history), {now, iterations, restart} = history;
  if (!state.zero || now < state.zero) state.zero = iterations[0]?.[0] ?? now;
  if (restart) {
    state.stepped = null;
    describeRuns();
    layout();
    view.show(view.span);
  }
  draw.soon();
  return taken;
}

/** Resolves when the user has given a key. */
function unlocked() {
  tell(get("refused"), server.key ? "That was not the key." : "");
  if (!get("key-dialog").open) get("key-dialog").showModal();
  return new Promise((resolve) => {
    get("unlock").addEventListener("submit", (event) => {
      event.preventDefault();
      server.key = kept("key", get("key").value);
      get("key").value = "";
      get("key-dialog").close();
      resolve();
    }, {once: true});
  });
}

/** In this tab's storage, which may be forbidden. */
function kept(name, value) {
  try {
    if (value !== undefined) sessionStorage.setItem(name, value);
    return sessionStorage.getItem(name) ?? "";
  } catch {
    return value ?? "";
  }
}

/** 0.5 … 500 requests per second, each step as many percent more. */
const rate = () => Number((0.5 * 1000 ** (get("rate").value / 300)).toPrecision(2));
const number = (id) => Math.max(1, Math.round(get(id).value) || 1);
const range = (least, most) => [number(least), Math.max(number(least), number(most))];

async function startLoad() {
  try {
    const response = await server.post("live/load", {
      rate: rate(), num_tokens: range("least", "most"),
      prompt_tokens: range("shortest", "longest"), seconds: Math.min(60, number("seconds")),
    });
    server.load = (await response.json()).id;
    pause(false);
  } catch (error) {
    tell(get("loaded"), error.message);
  }
}

function stopLoad() {
  server.load = null;
  server.post("live/load", {rate: 0}).catch((error) => tell(get("loaded"), error.message));
}

function sayLoad(load) {
  const ran = !get("unload").disabled;
  get("unload").disabled = !load;
  if (load) {
    const whose = load.id === server.load ? "" : " of another page";
    tell(get("loaded"), `${figure(load.rate)}/s${whose} · ${Math.ceil(load.left_s)} s left · ` +
      `${figure(load.in_flight)} in flight`);
  } else if (ran) {
    server.load = null;
    tell(get("loaded"), "over");
  }
}

/** Send the prompt, show its completion as it comes, and pin its row. */
async function ask() {
  server.answer?.abort();
  const answer = get("answer"), control = server.answer = new AbortController();
  get("stop").disabled = answer.hidden = false;
  answer.textContent = "";
  const body = {
    prompt: get("prompt").value, max_tokens: number("tokens"), temperature: 1.0, stream: true,
    model: get("model").value || undefined,
  };
  try {
    const response = await server.post("v1/completions", body, {signal: control.signal});
    const mine = await server.request(response.headers.get("X-Request-Id"));
    if (mine && mine.id !== state.pinned) pin(mine.id);
    for await (const event of serverSentEvents(response.body)) {
      if (event.error) throw new Error(visible(event.error.message));
      // a new line is itself
      const lines = String(event.choices?.[0]?.text ?? "").split("\n").map(escaped).join("\n");
      if (answer.textContent.length < MOST_ANSWER) answer.append(lines);
    }
  } catch (error) {
    if (server.answer !== control) return; // the next one is shown by now
    answer.append(control.signal.aborted ? " (stopped)" : ` (${error.message})`);
  }
  if (server.answer === control) get("stop").disabled = true;
}

/** The JSON of each `data:` line until [DONE]. */
async function* serverSentEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((one) => one.startsWith("data:"))) {
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function onSubmit(id, act) {
  get(id).addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}

/** Show the forms of a server's page, and begin to ask it. */
export function askServer() {
  get("loading").hidden = get("asking").hidden = false;
  const showRate = () => tell(get("rate-shown"), `${rate()}/s`);
  get("rate").addEventListener("input", showRate);
  get("rate").addEventListener("change", () => server.load && startLoad());
  showRate();
  onSubmit("load", startLoad);
  onSubmit("ask", ask);
  get("unload").addEventListener("click", stopLoad);
  get("stop").addEventListener("click", () => server.answer.abort());
  get("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
  server.key = kept("key");
  server.watch();
}
