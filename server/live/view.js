/* The state of the page, what is in sight of its runs, and in which colours and textures. */

import {
  ACCEPTED, DECODE, FREE, IDLE, KEPT, NAMES, PADDING, PAUSED, PREFILL, RECOMPUTED, REJECTED,
  UNBUDGETED, adapterOf, adapters,
} from "./history.js";
import {clamp, get, tell} from "./text.js";

export const state = {
  runs: [], // a server's, or one or two saved ones
  replay: null, // of saved runs
  paused: false,
  pinned: null, // a request's id
  pointer: null, // {run, x, line} while a mouse or a finger is on a plot
  stepped: null, // {run, iteration, line}: the cursor that keys move
  active: 0, // the run that keys move in
  zero: 0, // of the clock that is shown: a live server's goes on from something else
};

/** Asks for frames; page.js says what is drawn in one. */
export const draw = {
  asked: false,
  words: true, // whether words are written in the next frame, however short ago they were
  frame: () => {},

  soon(words = false) {
    this.words ||= words;
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame((time) => {
      this.asked = false;
      this.frame(time);
    });
  },
};

export function pause(wanted) {
  if (state.paused === wanted) return;
  state.paused = wanted;
  if (!wanted) {
    state.replay?.goOn();
    state.stepped = null;
  }
  draw.soon();
}

export function pin(id) {
  state.pinned = id === state.pinned ? null : id;
  view.changed();
}

// ---- what is in sight

export const calm = matchMedia("(prefers-reduced-motion: reduce)");
const GLIDE_MS = 120;

/** Which part of the iterations, or of the clock, is between the plots' left and right edges. Both
    are cut into pixels by their own number, from 0 on, so that a pixel goes on to mean the same
    while the view moves. */
export const view = {
  byTime: false,
  span: 240, right: 0, // iterations or seconds
  head: 0, // up to where it is drawn: glides to what is known
  width: 1, // device pixels
  scale: 1, // device pixels for each iteration or second
  fades: false, // all but the pinned request, while that is in sight
  version: 0, // changes when every pixel does

  changed() {
    this.version += 1;
    this.scale = this.width / this.span;
    draw.soon();
  },

  begin(run, i) { return this.byTime ? run.atOf(i) : i; },
  end(run, i) { return this.byTime ? run.endOf(i) : i + 1; },
  pixel(position) { return Math.floor(position * this.scale + 1e-6); },
  origin() { return Math.round(this.right * this.scale) - this.width; },
  edge(run, i) { return this.pixel(this.begin(run, i)); },

  /** Where iteration i ends: at least a pixel on. */
  endEdge(run, i) { return Math.max(this.pixel(this.end(run, i)), this.edge(run, i) + 1); },

  /** The last one before `end` that begins in i's pixel. */
  lastWith(run, i, end) {
    const x = this.edge(run, i);
    while (i + 1 < end && this.edge(run, i + 1) === x) i += 1;
    return i;
  },

  /** The first iteration that is seen in a pixel or right of it. */
  iterationFrom(run, x) {
    const about = this.byTime ? run.iterationAt(x / this.scale) : Math.floor(x / this.scale);
    let i = clamp(about, run.first, run.next);
    while (i > run.first && this.endEdge(run, i - 1) > x) i -= 1;
    while (i < run.next && this.endEdge(run, i) <= x) i += 1;
    return i;
  },

  /** Iterations in sight: from, and the one after the last. */
  range(run) {
    const from = this.iterationFrom(run, this.origin());
    const end = this.iterationFrom(run, this.origin() + this.width);
    return [from, Math.max(from, Math.min(end, shown(run)))];
  },

  start() {
    const {runs} = state;
    if (!this.byTime) return runs[0].first;
    return Math.min(...runs.map((run) => run.next > run.first ? run.atOf(run.first) : run.now));
  },

  /** How far there is something to draw. */
  known() {
    const {replay, runs} = state;
    if (!this.byTime) return shown(runs[0]);
    return replay ? replay.time : runs[0].now;
  },

  longest() {
    const {replay, runs: [run]} = state;
    if (!this.byTime) return Math.max(1, replay ? run.next - run.first : KEPT);
    return Math.max(replay ? 0.001 : 10, (replay ? replay.end : run.now) - this.start());
  },

  /** Come nearer to what is known, `passed` ms later; true while on the way. */
  glide(passed) {
    const known = this.known(), far = known - this.head, {paused, replay} = state;
    const jump = paused || replay || calm.matches || far < 0 || far > this.span;
    const left = jump ? 0 : far * Math.exp(-passed / GLIDE_MS);
    this.head = known - (left * this.scale < 0.5 ? 0 : left);
    if (!paused) this.right = this.followed();
    return this.head !== known;
  },

  /** Where the right edge is while it follows: plots fill from the left, then move on. */
  followed() { return Math.max(this.head, this.start() + this.span); },

  moveTo(right) {
    const least = this.start() + Math.min(this.span, this.longest());
    this.right = clamp(right, least, Math.max(least, this.followed()));
    draw.soon();
  },

  /** Show so much, and keep what is at `part` of the width where it is: the keys' cursor. */
  show(span, part = state.stepped ? 1 - (this.right - this.cursor()) / this.span : 0.5) {
    const kept = this.right - this.span * (1 - part);
    this.span = clamp(span, this.byTime ? 1e-4 : 1, this.longest());
    this.changed();
    this.moveTo(state.paused ? kept + this.span * (1 - part) : this.followed());
  },

  showAll() {
    const [run] = state.runs;
    this.show(this.byTime ? this.longest() : Math.max(20, run.next - run.first));
    this.moveTo(Infinity);
  },

  cursor() { return this.begin(state.stepped.run, state.stepped.iteration); },

  reveal(run, i) {
    const begin = this.begin(run, i), end = this.end(run, i);
    if (end > this.right) this.moveTo(end + this.span * 0.1);
    else if (begin < this.right - this.span) this.moveTo(begin + this.span * 0.9);
  },

  setByTime(byTime) {
    const [run] = state.runs, [from, to] = this.range(run);
    this.byTime = byTime;
    get("x").value = byTime ? "seconds" : "iterations";
    this.head = this.known();
    if (to > from) {
      this.right = this.end(run, to - 1);
      this.span = this.right - this.begin(run, from);
    }
    this.show(this.span, 1);
  },
};

/** The iteration after the last that is shown: of a saved run those that have begun by now. */
export function shown(run) {
  return state.replay ? run.iterationAt(state.replay.time) + 1 : run.next;
}

/** The cell under the pointer, which changes when the plots move below it. */
export function pointed() {
  if (!state.pointer) return null;
  const {run, line, x: offset} = state.pointer, x = offset + view.origin(), end = shown(run);
  const from = view.iterationFrom(run, x);
  if (from >= end || view.edge(run, from) > x) return null; // a gap
  const to = view.lastWith(run, from, end);
  return {run, line, iteration: line === null ? to : run.telling(line, from, to)};
}

/** Where figures and words are taken: what is pointed at, else the keys' cursor, else null. */
export const marked = () => pointed() ?? state.stepped;

/** The iteration that they are about: if nothing is marked, now. */
export function current(run) {
  const last = shown(run) - 1, mark = marked();
  if (!mark) return last;
  if (mark.run === run) return Math.min(mark.iteration, last);
  return clamp(run.iterationAt(mark.run.atOf(mark.iteration)), run.first, last);
}

// ---- colours and textures

// Hues of one lightness (OKLCH 0.68 ± 0.03), so that lightness tells kinds apart and not requests;
// in the order of requests' numbers, so that neighbours in time have hues far apart.
export const PALETTE = [
  "#d16e8f", "#52bd84", "#b078c9", "#a6ad41", "#738de2", "#da933f", "#00a2ce", "#eb827f",
  "#00ab95", "#d883c1", "#6ea44e", "#a794ef", "#b18e15", "#5babf1", "#d2764a", "#00bcc8",
];
export const ACCENT = PALETTE.length; // a colour that is not of a request
const NONE = ACCENT + 1; // of what is no request's, such as padding
export const TILE = 8; // thin lines: how often a texture repeats
// in device pixels: a thin line, the size of letters, and the room for figures left of a plot
export const size = {unit: 1, rem: 16, gutter: 48};

const mix = (a, b, part) => a.map((x, i) => Math.round(x + (b[i] - x) * part));
/** As little-endian RGBA. */
export const pixel = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;
export const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;
const hex = (text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));

/** Of a request: its own, or its adapter's where there are any. */
export function colourOf(run, id) {
  if (id < 0) return NONE;
  return (adapters.size > 1 ? adapterOf(run, id) : id) % PALETTE.length;
}

/** A, B, … Z, A2 … of an adapter; nothing of the base model. */
export function letterOf(number) {
  if (!number) return "";
  const times = Math.ceil(number / 26);
  return String.fromCharCode(65 + (number - 1) % 26) + (times > 1 ? times : "");
}

export const theme = {
  dark: true, // back, ink, … as [r, g, b]; fills, strongs: of each colour, ACCENT and NONE

  set(dark) {
    this.dark = dark;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    tell(get("theme"), dark ? "Light" : "Dark");
    const style = getComputedStyle(document.documentElement);
    for (const name of ["back", "ink", "quiet", "plot", "track", "accent", "second"]) {
      this[name] = hex(style.getPropertyValue("--" + name).trim());
    }
    this.fills = [...PALETTE.map(hex), this.accent, this.quiet];
    this.strongs = this.fills.map((fill) => mix(fill, this.ink, dark ? 0.8 : 0.6));
  },
};

/** What a thin pixel of a cell is: 0 the plot's ground, 1 its colour, 2 strong, 3 dim. */
function texture(kind, x, y, height) {
  switch (kind) {
    case DECODE: return 1;
    case PREFILL: return (x + y) % 4 < 2 ? 2 : 1;
    case RECOMPUTED: return (x + 3 * y) % 4 < 2 ? 2 : 0;
    case IDLE: return x % 4 === 1 && y % 4 === Math.min(1, height - 1) ? 1 : 3;
    case PADDING: return x % 4 === 0 || y % 4 === 3 ? 3 : 0;
    case PAUSED: return y === 0 || y === height - 1 ? 1 : 0;
    case UNBUDGETED: return y === height >> 1 && x % 8 < 4 ? 1 : 0;
    case ACCEPTED: return x % 4 < 2 ? 2 : 1;
    case REJECTED: return y % 2 === 0 && (x + y) % 4 === 0 ? 1 : 0;
    default: return 3;
  }
}

/** Tiles `width` pixels wide, one for each kind, colour and height, made when first asked for. */
export const textures = {
  width: TILE,
  tiles: [], // of each height

  forget() {
    this.width = TILE * size.unit;
    this.tiles = [];
  },

  /** n, rejected: of a decode, which is a band for each of its tokens from below. */
  tile(kind, colour, faded, height, n = 1, rejected = 0) {
    const bands = 1e6 * (n - 1) + 1000 * rejected, tiles = this.tiles[height] ??= [];
    return tiles[bands + 2 * (colour * NAMES.length + kind) + faded] ??=
      this.make(kind, colour, faded, height, n, rejected);
  },

  make(kind, colour, faded, height, n = 1, rejected = 0) {
    const u = size.unit, tile = new Uint32Array(this.width * height), ground = theme.plot;
    const named = kind === PADDING ? theme.quiet : theme.fills[colour];
    const dim = kind === FREE ? theme.track : mix(ground, named, kind === PADDING ? 0.5 : 0.28);
    const shades = [ground, named, theme.strongs[colour], dim].map((ink) =>
      pixel(faded && kind !== FREE ? mix(ink, ground, 0.85) : ink));
    for (let p = 0; p < tile.length; p++) {
      const x = p % this.width / u | 0, y = p / this.width / u | 0;
      const high = Math.ceil(height / u), part = (n + rejected) / high;
      const band = Math.floor((high - 1 - y) * part), isEdge = Math.floor((high - y) * part) > band;
      const of = band === 0 ? kind : band < n ? ACCEPTED : REJECTED;
      tile[p] = shades[y && isEdge && part < 0.4 ? 0 : texture(of, x, y, high)];
    }
    return tile;
  },
};
