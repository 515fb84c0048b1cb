/* What is known of one server: its iterations, rows and requests, put together again from the
   histories that docs/live.md describes. It knows no page. */

import {clamp} from "./text.js";

export const FREE = 0, DECODE = 1, PREFILL = 2, RECOMPUTED = 3, IDLE = 4, PADDING = 5, PAUSED = 6;
export const UNBUDGETED = 7, ACCEPTED = 8, REJECTED = 9; // the last two: parts of a decode
export const NAMES = [
  "free", "decode", "prefill", "recomputed", "idle", "padding", "paused", "no token budget left",
  "draft, accepted", "draft, rejected",
];
const LETTERS = ["", "d", "p", "r", "i", "padding", "s", "w"];
// Where iterations share a pixel, the highest rank is drawn: what is rare is not lost.
const RANK = [0, 2, 6, 7, 5, 1, 4, 3];
export const KEPT = 2000;
const MOST_CELLS = 16e6, STEP = 6; // values of a change

// numbers of adapters, in the order in which requests name them; the base model is the first
export const adapters = new Map([["", 0]]);
export const adapterOf = (run, id) => adapters.get(run.requests.get(id)?.adapter ?? "");

/** The first of n numbers from `low` on that is beyond: of a sorted list, by halves. */
function firstBeyond(low, high, isBeyond) {
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if (isBeyond(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

const COLUMNS = [ // of an iteration; some are given, and others follow from them
  "at", "seconds", "waiting", "blocks",
  "tokens", "allTokens", // that came in it, and since the run is known
  "rate", // tokens per second
  "gap", "gaps", // time per token, mean of so many
  "ttft", // mean of the first tokens that came; NaN without
];

/** The last iterations of a server in rings of typed arrays: iteration i is in slot i % size. */
export class Run {
  constructor(kept = KEPT) {
    this.size = kept;
    this.about = null;
    this.room = 0; // lines that there is memory for
    this.lines = []; // of each what it does now: {kind, id, n, start, rejected, request}
    this.first = this.next = 0; // iterations first … next − 1 are known
    this.now = 0;
    this.changedFrom = Infinity; // the oldest iteration that is not drawn yet
    this.requests = new Map();
    this.snapshots = [];
    for (const name of COLUMNS) this[name] = new Float64Array(kept);
    this.rows = NAMES.map(() => new Int32Array(kept)); // by kind; and draft tokens
  }

  slot(i) { return i % this.size; }
  atOf(i) { return this.at[i % this.size]; }
  endOf(i) { return this.at[i % this.size] + this.seconds[i % this.size]; }
  live(slot) { return this.rows[DECODE][slot] + this.rows[PREFILL][slot]; }
  useful(slot) { return this.live(slot) + this.rows[ACCEPTED][slot]; }

  computed(slot) {
    const rows = this.rows;
    return this.useful(slot) + rows[REJECTED][slot] + rows[RECOMPUTED][slot] + rows[IDLE][slot] +
      rows[PADDING][slot];
  }

  /** Take a history; false if it does not go on where this run ends: ask for all then. */
  take(history) {
    const fits = this.makeRoom(history);
    if (history.restart) this.begin(history);
    else if (!fits || !this.about || history.first > this.next) return false;
    for (const values of history.requests) this.learn(values);
    for (const values of history.restart ? history.lines : []) {
      this.change(...values, NaN);
      if (this.lines[values[0]].request) this.lines[values[0]].request.tokens = -1;
    }
    for (const values of history.iterations.slice(this.next - history.first)) this.append(values);
    for (const values of history.ended) this.end(values);
    for (const values of history.snapshots) this.keepSnapshot(values);
    this.now = Math.max(history.now, this.next > this.first ? this.endOf(this.next - 1) : 0);
    return true;
  }

  /** Whoever pauses rows has more lines than rows. False: more than there is memory for. */
  makeRoom(history) {
    let most = 0;
    for (const [line] of history.lines ?? []) most = Math.max(most, line + 1);
    for (const values of history.iterations) {
      for (let i = 0; i < values[6].length; i += STEP) most = Math.max(most, values[6][i] + 1);
    }
    if (most <= this.room) return true;
    this.room = most + 16;
    return false;
  }

  begin(history) {
    this.about = history.about;
    this.first = this.next = this.rateFrom = history.first;
    this.changedFrom = -Infinity;
    this.requests.clear();
    this.snapshots = [];
    const lines = history.about.max_batch_size ?? 1; // not known of every engine
    this.room = Math.max(this.room, lines + 16);
    this.lines = [];
    this.addLines(lines);
    const cells = this.size * this.room;
    this.kinds = new Uint8Array(cells);
    for (const name of ["ids", "ns", "starts", "rejected", "counts"]) {
      this[name] = new Int32Array(cells);
    }
  }

  addLines(n) {
    while (this.lines.length < Math.min(n, this.room)) {
      this.lines.push({kind: FREE, id: -1, n: 0, start: 0, rejected: 0, request: undefined});
    }
  }

  learn([id, arrivedAt, promptTokens, numTokens, user, priority, prompt, adapter = ""]) {
    if (this.requests.has(id)) return;
    if (!adapters.has(adapter)) {
      adapters.set(adapter, adapters.size);
      this.changedFrom = -Infinity; // requests get the colours of their adapters
    }
    this.requests.set(id, {
      id, arrivedAt, promptTokens, numTokens, user, priority, prompt, adapter,
      admittedAt: undefined, // NaN: not known, it was before what this page saw
      tokens: 0, // so far; -1: not known
      firstIn: -1, ttft: NaN, lastAt: NaN, endedAt: NaN, outcome: null,
      leftIn: Infinity, // the iteration before which it left its line
    });
  }

  change(line, id, letter, n, start, rejected, at) {
    if (line >= this.lines.length) this.addLines(line + 1);
    const now = this.lines[line], kind = Math.max(FREE, LETTERS.indexOf(letter));
    const request = kind === FREE ? undefined : this.requests.get(id);
    if (now.request && now.request !== request) now.request.leftIn = this.next;
    if (request) {
      request.leftIn = Infinity;
      if (request.admittedAt === undefined) request.admittedAt = kind === RECOMPUTED ? NaN : at;
    }
    Object.assign(now, {kind, id, n, start, rejected, request});
  }

  append([at, seconds, waiting, running, blocks, padding, changes]) {
    for (let i = 0; i < changes.length; i += STEP) this.change(...changes.slice(i, i + STEP), at);
    if (this.next - this.first === this.size) this.first += 1;
    const s = this.slot(this.next);
    const known = (n) => n < 0 ? NaN : n; // a recording need not say it
    const given = {at, seconds, waiting: known(waiting), blocks: known(blocks)};
    for (const name of COLUMNS) this[name][s] = given[name] ?? 0;
    for (const rows of this.rows) rows[s] = 0;
    let firsts = 0, below = 0;
    this.lines.forEach((now, line) => {
      const {kind} = now, cell = s * this.room + line;
      if (kind !== FREE) below = line + 1;
      if ([DECODE, PREFILL, RECOMPUTED].includes(kind)) {
        firsts += this.compute(now, s, at + seconds);
      }
      this.kinds[cell] = kind;
      this.ids[cell] = now.id;
      this.ns[cell] = now.n;
      this.starts[cell] = now.start;
      this.rejected[cell] = now.rejected;
      this.counts[cell] = now.request ? now.request.tokens : -1;
      this.rows[kind][s] += 1;
      if (kind !== DECODE) return;
      this.rows[ACCEPTED][s] += now.n - 1;
      this.rows[REJECTED][s] += now.rejected;
      now.start += now.n; // and so on, until a change
    });
    this.pad(s, below, padding);
    this.gap[s] /= this.gaps[s]; // NaN without
    this.ttft[s] /= firsts;
    this.allTokens[s] = this.tokens[s] +
      (this.next > this.first ? this.allTokens[this.slot(this.next - 1)] : 0);
    this.changedFrom = Math.min(this.changedFrom, this.next);
    this.next += 1;
    this.measureRate(s);
    if (this.next % 512 === 0) this.forget();
  }

  /** A row is computed; it gets tokens if that was the last one of it not computed before.
      Returns 1 if it is the request's first, else 0. */
  compute({kind, n, start, request}, s, end) {
    if (!request) return 0;
    if (kind === DECODE) request.tokens = start + 1 - request.promptTokens;
    else if (kind === PREFILL) request.tokens = Math.max(0, request.tokens);
    if (request.tokens < 0 || start + n < request.promptTokens + request.tokens) return 0;
    const made = kind === DECODE ? n : 1; // with accepted draft tokens
    request.tokens += made;
    this.tokens[s] += made;
    if (!Number.isNaN(request.lastAt)) {
      this.gap[s] += end - request.lastAt;
      this.gaps[s] += made;
    }
    request.lastAt = end;
    if (request.tokens > 1) return 0;
    request.firstIn = this.next;
    request.ttft = end - request.arrivedAt;
    this.ttft[s] += request.ttft;
    return 1;
  }

  /** Padding rows have no line: draw them below the others, then where lines are free. */
  pad(s, below, padding) {
    this.rows[PADDING][s] = padding;
    const n = this.lines.length;
    for (let i = 0; i < n && padding > 0; i++) {
      const cell = s * this.room + (below + i) % n;
      if (this.kinds[cell] !== FREE) continue;
      this.kinds[cell] = PADDING;
      padding -= 1;
    }
  }

  /** Of the iterations that ended in the last second. */
  measureRate(s) {
    const last = this.next - 1, end = this.endOf(last);
    this.rateFrom = Math.max(this.rateFrom, this.first);
    while (this.rateFrom < last && this.endOf(this.rateFrom) <= end - 1) this.rateFrom += 1;
    const from = this.slot(this.rateFrom);
    const tokens = this.allTokens[s] - this.allTokens[from] + this.tokens[from];
    this.rate[s] = tokens / Math.max(this.seconds[s], Math.min(1, end - this.atOf(this.first)));
  }

  /** Requests that are over and of which no iteration is kept, and snapshots as old. */
  forget() {
    for (const [id, request] of this.requests) {
      const late = request.outcome === null ? 20 * this.size : 0; // its end is not known
      if (request.leftIn < this.first - late) this.requests.delete(id);
    }
    const later = this.snapshots.findIndex((snapshot) => snapshot.iteration > this.first);
    if (later > 1) this.snapshots.splice(0, later - 1);
  }

  end([id, at, outcome, ttft, tokens]) {
    const request = this.requests.get(id);
    if (!request) return;
    Object.assign(request, {endedAt: at, outcome, tokens, ttft: ttft ?? request.ttft});
    if (!this.lines.some((now) => now.request === request)) {
      request.leftIn = Math.min(request.leftIn, this.next);
    }
  }

  keepSnapshot([iteration, free, shared, cached, queue]) {
    const {snapshots} = this;
    if (snapshots.at(-1)?.iteration >= iteration) snapshots.pop();
    snapshots.push({iteration, free, shared, cached, queue});
  }

  /** The last snapshot not after the iteration; the newest one for the newest iteration. */
  snapshotAt(iteration) {
    const {snapshots} = this;
    if (iteration >= this.next - 1) return snapshots.at(-1);
    const later = firstBeyond(0, snapshots.length, (i) => snapshots[i].iteration > iteration);
    return snapshots[later - 1];
  }

  /** The last iteration that began by then; first − 1 if none has. */
  iterationAt(time) {
    return firstBeyond(this.first, this.next, (i) => this.atOf(i) > time) - 1;
  }

  /** Of iterations a … b the one whose kind on a line is drawn where they share a pixel. */
  telling(line, a, b) {
    const rank = (i) => RANK[this.kinds[this.slot(i) * this.room + line]];
    let best = a;
    for (let i = a + 1; i <= b; i++) if (rank(i) > rank(best)) best = i;
    return best;
  }

  cell(line, i) {
    if (line < 0 || line >= this.lines.length || i < this.first || i >= this.next) return null;
    const cell = this.slot(i) * this.room + line, kind = this.kinds[cell];
    if (kind === FREE) return null;
    const id = kind === PADDING ? -1 : this.ids[cell];
    const [n, start, rejected, tokens] = [this.ns, this.starts, this.rejected, this.counts].map(
      (values) => values[cell]);
    return {id, kind, n, start, rejected, tokens};
  }

  /** Where a request is then, or null. */
  lineWith(id, i) {
    const from = this.slot(i) * this.room;
    const line = id === null ? -1 : this.ids.subarray(from, from + this.lines.length).indexOf(id);
    return line < 0 ? null : line;
  }

  /** Requests whose first token came in iterations from … to − 1. */
  *firstTokens(from, to) {
    for (const request of this.requests.values()) {
      if (request.firstIn >= from && request.firstIn < to) yield request;
    }
  }

  /** Sums over iterations from … to − 1: what "window" says beside the curves. */
  summary(from, to) {
    const sum = {useful: 0, computed: 0, tokens: 0, gap: 0, gaps: 0, seconds: 0, rows: 0, queue: 0};
    for (let i = from; i < to; i++) {
      const s = this.slot(i), live = this.live(s), seconds = this.seconds[s];
      sum.useful += this.useful(s);
      sum.computed += this.computed(s);
      sum.tokens += this.tokens[s];
      sum.gap += this.gaps[s] && this.gap[s] * this.gaps[s];
      sum.gaps += this.gaps[s];
      sum.seconds += seconds;
      sum.rows += live * seconds;
      sum.queue += this.waiting[s] * seconds;
    }
    sum.clock = to > from ? this.endOf(to - 1) - this.atOf(from) : 0;
    const firsts = [...this.firstTokens(from, to)].map((request) => request.ttft);
    sum.ttft = firsts.sort((a, b) => a - b)[firsts.length >> 1];
    return sum;
  }
}

/** A saved run, whole unless it is larger than a browser's memory should be. */
export function savedRun(history) {
  const most = Math.floor(MOST_CELLS / ((history.about.max_batch_size ?? 0) + 16));
  const run = new Run(clamp(history.iterations.length, 1, Math.max(KEPT, most)));
  run.take(history);
  return run;
}
