/* The words and figures beside the plots: which runs these are, the cell that is pointed at and the
   story of its request, KV blocks, the waiting queue, the time. */

import {
  DECODE, IDLE, NAMES, PADDING, PAUSED, UNBUDGETED, adapters,
} from "./history.js";
import {clamp, count, duration, element, figure, get, tell, visible} from "./text.js";
import {
  PALETTE, colourOf, css, current, letterOf, marked, pin, shown, state, theme,
} from "./view.js";

const clockTime = (seconds) => `${(seconds - state.zero).toFixed(3)} s`;

/** How a run's curves are drawn where there are two. */
export const dash = (which) => element("span", which ? "dash second" : "dash");
export const nameOf = (run) => state.runs.length > 1 ? ` of ${visible(run.about.name, 40)}` : "";

/** What a run is, in words; of several, what is not the same in all. */
export function settings(about, others = []) {
  const facts = (one) => [
    one.mode && `mode ${one.mode}`, one.model && `model ${one.model}`,
    one.order && `order ${one.order}`,
    one.max_batch_size && `at most ${count(one.max_batch_size, "row")}`,
    one.token_budget && `token budget ${figure(one.token_budget)}`,
    one.token_budget === null && "no token budget",
    one.n_blocks && `${count(one.n_blocks, "KV block")} of ${count(one.block_size, "token")}`,
  ].filter(Boolean).map((part) => visible(part, 80));
  const all = others.map((run) => facts(run.about));
  return facts(about).filter((part) => !all.length || all.some((one) => !one.includes(part)));
}

export function describeRuns() {
  const abouts = state.runs.map((run) => run.about).filter(Boolean);
  if (!abouts.length) return;
  const differ = abouts.length > 1 ? settings(abouts[0], state.runs) : [];
  const {simulated} = abouts[0];
  const notes = new Set(abouts.flatMap(({note, missing}) => [note, missing]).filter(Boolean));
  tell(get("name"), abouts.map((about) => visible(about.name, 60)).join(" and "));
  tell(get("facts"), settings(abouts[0]).filter((part) => !differ.includes(part)).join(" · "));
  tell(get("note"), [...notes].map((note) => visible(note)).join(" · "));
  get("simulated").hidden = !simulated || abouts.length > 1;
  tell(get("simulated"), visible(simulated ?? ""));
}

function computed({kind, id, n, start, rejected}) {
  const name = NAMES[kind];
  if (kind === IDLE) return `${name}: its request is over, its batch is not`;
  if (kind === PADDING) return `${name}: no request's row`;
  if (kind === PAUSED || kind === UNBUDGETED) return `${name}: nothing is computed`;
  const where = n === 1 ? `position ${start}` : `positions ${start}–${start + n - 1}`;
  if (kind !== DECODE) return `${name}: ${count(n, "token")}, ${where}`;
  const drafts = n - 1 + rejected;
  return `${name}: ${where}` +
    (drafts ? `, ${n - 1} of ${count(drafts, "draft token")} accepted` : "");
}

/** A cell, and the story of its request, as [name, text]. */
function story(run, cell) {
  const facts = [["computed", computed(cell)]], request = run.requests.get(cell.id);
  if (!request) return facts;
  const {user, adapter, priority, prompt, arrivedAt} = request;
  const {promptTokens, numTokens, endedAt, outcome} = request;
  if (user !== null) facts.push(["user", visible(user, 60)]);
  const letter = letterOf(adapters.get(adapter));
  if (adapter) facts.push(["adapter", `${letter} ${visible(adapter, 60)}`]);
  if (priority) facts.push(["priority", figure(priority)]);
  if (prompt !== null) facts.push(["prompt", visible(prompt, 80)]);
  const tokens = cell.tokens < 0 ? "?" : figure(cell.tokens);
  return [
    ...facts,
    ["tokens", `${tokens} of ${figure(numTokens)}, prompt ${figure(promptTokens)}`],
    ["arrived", clockTime(arrivedAt)],
    ["queue time", duration(request.admittedAt - arrivedAt)],
    ["TTFT", duration(request.ttft)],
    ["ended", outcome === null ? "not yet" : `${clockTime(endedAt)}, ${visible(outcome, 20)}`],
  ];
}

function sayCell(run, i) {
  const mark = marked(), known = i >= run.first;
  const line = mark ? mark.line : known ? run.lineWith(state.pinned, i) : null;
  const cell = known && line !== null ? run.cell(line, i) : null;
  const entries = known ? [
    ["iteration", `${figure(i)}, ${duration(run.seconds[run.slot(i)])}`],
    ["began at", clockTime(run.atOf(i))],
    ...(cell ? story(run, cell) : []),
  ] : [];
  const who = [cell && cell.id >= 0 ? `request ${cell.id}` : "", line === null ? "" : `row ${line}`,
    state.pinned === null ? "" : `${state.pinned} is pinned (Esc)`];
  const all = who.filter(Boolean).join(" · ");
  tell(get("where"), all || "Point at a cell; click to pin its request");
  get("reader").classList.toggle("pointed", mark !== null && cell !== null);
  const list = get("cell");
  while (list.children.length > 2 * entries.length) list.lastChild.remove();
  entries.forEach(([name, text], n) => {
    if (list.children.length <= 2 * n) list.append(element("dt"), element("dd", "text"));
    tell(list.children[2 * n], name);
    tell(list.children[2 * n + 1], text);
  });
}

export function speakCell() {
  const {run, line, iteration} = state.stepped, cell = run.cell(line ?? -1, iteration);
  const what = cell ? `request ${cell.id}, ${computed(cell)}` : "free";
  tell(get("spoken"), `iteration ${iteration}${line === null ? "" : `, row ${line}: ${what}`}`);
}

/** Used KV blocks (of these shared), cached ones, which are free, too, and the others. */
function sayBlocks(run, i, snapshot) {
  if (i < run.first || !snapshot) return tell(get("blocks"), "–");
  const total = run.about.n_blocks, now = !state.replay && i >= run.next - 1;
  const used = now ? total - snapshot.free : run.blocks[run.slot(i)];
  const shared = clamp(snapshot.shared, 0, used), cached = clamp(snapshot.cached, 0, total - used);
  [used - shared, shared, cached].forEach((blocks, part) => {
    get("pool").children[part].style.width = `${100 * (blocks || 0) / total}%`;
  });
  tell(get("blocks"), snapshot.shared < 0
    ? `${figure(used)} used, ${figure(total - used)} free; shared and cached unknown`
    : `${figure(used)} used (${figure(shared)} shared), ` +
      `${figure(cached)} cached, ${figure(total - used - cached)} free`);
}

const PARTS = {
  batch: "waited", blocks: "for blocks", prefill: "prefill", decode: "decode",
  preempted: "preempted", recompute: "again", paused: "paused", held: "held",
};

/** Where the time of the pinned request went, as GET /requests/NAME answers; nothing: hide it. */
export function sayParts(request) {
  get("why").hidden = !request;
  if (!request) return;
  const {id, state: outcome, latency_s, parts, neighbours} = request, lines = [];
  tell(get("latency"), `Request ${id}: ${duration(latency_s)}, ${outcome}`);
  let begun = 0;
  for (const [part, word] of Object.entries(PARTS)) {
    if (!parts[part]) continue;
    const bar = element("span", "part"), line = element("dd", "", duration(parts[part]));
    bar.style.marginLeft = `${100 * begun / latency_s}%`;
    bar.style.width = `${100 * parts[part] / latency_s}%`;
    line.append(bar);
    lines.push(element("dt", "", word), line);
    begun += parts[part];
  }
  get("parts").replaceChildren(...lines);
  const {ran_before, ran_beside, mean_rows, long_prompts} = neighbours;
  const prompts = Object.entries(long_prompts).map(([id, n]) => `${figure(n)} of ${id}`);
  tell(get("beside"), `${figure(ran_before)} ran while it waited, ${figure(ran_beside)} beside it` +
    (ran_beside ? ` (${figure(mean_rows)} at a time)` : "") +
    (prompts.length ? `; longest prompts meanwhile, tokens: ${prompts.join(", ")}` : ""));
}

const CHIPS = 64;

export function makeChips() {
  for (let i = 0; i < CHIPS; i++) {
    const tabIndex = i ? -1 : 0; // one stop for Tab
    const chip = element("button", "", "", {type: "button", hidden: true, tabIndex});
    chip.addEventListener("click", () => pin(Number(chip.textContent)));
    get("queue").append(chip);
  }
  get("queue").addEventListener("keydown", (event) => {
    const next = {ArrowLeft: "previousSibling", ArrowRight: "nextSibling"}[event.key];
    if (next) event.preventDefault();
    document.activeElement[next]?.focus();
  });
}

function sayQueue(run, i, snapshot) {
  const queue = snapshot ? snapshot.queue : [], now = !state.replay && i >= run.next - 1;
  const all = i < run.first || now && queue.length < CHIPS; // no others wait
  const waiting = all ? queue.length : run.waiting[run.slot(i)];
  const n = waiting < queue.length ? waiting : queue.length; // a snapshot may be older
  tell(get("waiting"), `Waiting${nameOf(run)}: ${figure(waiting)}`);
  tell(get("more"), waiting > n ? `and ${figure(waiting - n)} more` : "");
  [...get("queue").children].forEach((chip, place) => {
    chip.hidden = place >= n;
    if (chip.hidden) return;
    const id = queue[place];
    tell(chip, String(id));
    chip.style.backgroundColor = css(theme.fills[colourOf(run, id)]);
    chip.setAttribute("aria-pressed", String(id === state.pinned));
  });
}

function sayTime() {
  const {replay, runs, paused} = state, run = runs[state.active], scrub = get("scrub");
  const i = current(run), known = i >= run.first;
  tell(get("clock"), known ? `iteration ${figure(i)} · ${clockTime(run.atOf(i))}` : "");
  tell(get("pause"), paused ? (replay ? "Play" : "Go on") : "Pause");
  if (runs.length > 1) { // milliseconds of their clock
    scrub.max = Math.ceil(replay.end * 1000);
    scrub.value = (state.stepped ? run.atOf(i) : replay.time) * 1000;
  } else {
    scrub.min = run.first;
    scrub.max = Math.max(run.first, run.next - 1);
    scrub.value = i;
  }
  scrub.setAttribute("aria-valuetext", get("clock").textContent);
}

/** Colours and letters of adapters, once there are any. */
function sayAdapters() {
  const list = document.querySelector(".adapters");
  for (const [name, number] of [...adapters].slice(adapters.size > 1 ? list.children.length : 1)) {
    const item = element("li"), mark = element("span", "", letterOf(number));
    mark.style.backgroundColor = css(theme.fills[number % PALETTE.length]);
    item.append(mark, name ? visible(name, 60) : "base model");
    list.append(item);
  }
}

/** All of it; a few times per second, which is as fast as it is read. */
export function sayAll() {
  const run = marked()?.run ?? state.runs[state.active], i = current(run);
  const snapshot = run.snapshotAt(i);
  sayTime();
  sayCell(run, i);
  sayBlocks(run, i, snapshot);
  sayQueue(run, i, snapshot);
  sayAdapters();
}

/** A summary in words, for those who do not see the plots. */
export function speak() {
  if (state.paused || document.hidden) return;
  tell(get("spoken"), state.runs.map((run) => {
    const i = shown(run) - 1, s = run.slot(Math.max(0, i));
    if (i < run.first) return "no iteration yet";
    return `${count(run.live(s), "live row")}${nameOf(run)}, ${figure(run.waiting[s])} waiting, ` +
      `${count(Math.round(run.rate[s]), "token")} per second`;
  }).join("; "));
}
