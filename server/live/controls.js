/* What moves the view: time, the speed of saved runs, keys, buttons, mouse and fingers. */

import {layout, plots} from "./drawing.js";
import {speakCell} from "./readout.js";
import {clamp, element, get} from "./text.js";
import {current, draw, pause, pin, pointed, size, state, theme, view} from "./view.js";

/** Put the keys' cursor there, and stop. */
function goTo(run, i) {
  if (run.next === run.first) return;
  const iteration = clamp(i, run.first, run.next - 1);
  pause(true);
  const {replay, stepped} = state;
  state.stepped = {run, iteration, line: stepped?.run === run ? stepped.line : null};
  state.pointer = null;
  if (replay) replay.time = Math.max(replay.time, run.atOf(iteration));
  view.head = view.known();
  view.reveal(run, iteration);
  speakCell();
  draw.soon();
}

export function goToNow() {
  const {replay} = state;
  if (replay) replay.time = replay.end;
  pause(replay !== null);
  state.stepped = null;
  view.head = view.known();
  view.moveTo(Infinity);
}

function scrub() {
  const value = Number(get("scrub").value), run = state.runs[state.active];
  goTo(run, state.runs.length > 1 ? run.iterationAt(value / 1000) : value);
}

function pinCell({run, line, iteration}) {
  const id = run.cell(line ?? -1, iteration)?.id ?? -1;
  if (id >= 0 || state.pinned !== null) pin(id >= 0 ? id : state.pinned);
}

function step(by) {
  const run = state.runs[state.active];
  goTo(run, current(run) + by);
}

const KEYS = {
  " ": () => pause(!state.paused),
  arrowleft: () => step(-1),
  arrowright: () => step(1),
  home: () => goTo(state.runs[state.active], 0),
  end: goToNow,
  "+": () => view.show(view.span * Math.SQRT1_2),
  "=": () => KEYS["+"](),
  "-": () => view.show(view.span * Math.SQRT2),
  0: () => view.showAll(),
  t: () => state.runs.length > 1 || view.setByTime(!view.byTime),
  d: () => setTheme(!theme.dark),
  escape: () => state.pinned !== null && pin(state.pinned),
  "?": () => get("help").showModal(),
};
const BUTTONS = {
  pause: " ", back: "arrowleft", forth: "arrowright", oldest: "home", newest: "end", in: "+",
  out: "-", all: "0", theme: "d", keys: "?",
};

function onKey(event) {
  const key = event.key?.toLowerCase(), is = (what) => event.target.matches?.(what);
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (!KEYS[key] || is("input:not(#scrub), textarea, select, dialog, dialog *")) return;
  if (key === " " && is("button")) return;
  event.preventDefault();
  KEYS[key]();
}

/** Up and down to another row of a grid, whose request Enter pins. */
function onGridKey(event, {run, which, n}) {
  const by = {ArrowUp: -1, ArrowDown: 1}[event.key], {stepped} = state;
  if (by) {
    const from = stepped?.run === run ? stepped.line : null;
    state.active = which;
    pause(true);
    const line = clamp((from ?? (by > 0 ? -1 : n)) + by, 0, n - 1);
    state.stepped = {run, iteration: current(run), line};
    speakCell();
    draw.soon();
  } else if (event.key === "Enter" && stepped) pinCell(stepped);
  else return;
  event.preventDefault();
}

/** Mouse and fingers on a grid, or on a curve of a run: point, pin, drag, zoom. */
function listen({canvas}, run, grid = null) {
  const fingers = new Map(); // where each is that is down
  let dragged = 0, apart = 0;
  const on = (type, act, options) => canvas.addEventListener(type, act, options);

  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left) * devicePixelRatio) - size.gutter;
    const line = grid && grid.lineAt((event.clientY - box.top) * devicePixelRatio);
    state.pointer = x >= 0 && x < view.width ? {run, x, line} : null;
    draw.soon(true);
    return clamp(x / view.width, 0, 1);
  };
  const move = (by) => {
    pause(true);
    view.moveTo(view.right + by * devicePixelRatio / view.scale);
  };
  const pinch = (part) => {
    const [a, b] = fingers.values(), now = Math.max(20, Math.abs(a - b));
    if (apart) view.show(view.span * apart / now, part);
    apart = now;
    dragged = Infinity;
  };

  on("pointerdown", (event) => {
    fingers.set(event.pointerId, event.clientX);
    dragged = apart = 0;
    canvas.setPointerCapture(event.pointerId);
    point(event);
  });
  on("pointermove", (event) => {
    const part = point(event), before = fingers.get(event.pointerId);
    if (before === undefined) return;
    fingers.set(event.pointerId, event.clientX);
    if (fingers.size > 1) return pinch(part);
    dragged += Math.abs(event.clientX - before);
    if (dragged > 4) move(before - event.clientX);
  });
  on("pointerup", (event) => {
    const cell = pointed(), clicked = fingers.delete(event.pointerId) && dragged <= 4;
    state.active = state.runs.indexOf(run);
    if (!clicked || !cell) return;
    pinCell(cell);
    if (event.pointerType === "mouse") return;
    pause(true); // a finger that is lifted still points
    state.stepped = cell;
  });
  on("pointercancel", (event) => fingers.delete(event.pointerId));
  on("pointerleave", () => {
    state.pointer = null;
    draw.soon(true);
  });
  on("wheel", (event) => {
    if (!grid && !event.ctrlKey) return; // over curves the page scrolls
    event.preventDefault();
    const {deltaX, deltaY} = event, sideways = Math.abs(deltaX) > Math.abs(deltaY);
    if (sideways || event.shiftKey) move(deltaX || deltaY);
    else view.show(view.span * Math.exp(clamp(deltaY, -60, 60) / 250), point(event));
  }, {passive: false});
}

export function listenToPlots() {
  for (const grid of plots.grids) {
    listen(grid, grid.run, grid);
    grid.canvas.addEventListener("keydown", (event) => onGridKey(event, grid));
  }
  for (const curve of plots.curves) listen(curve, state.runs[0]);
}

function setTheme(dark) {
  theme.set(dark);
  layout();
}

export function listenToControls() {
  let width = 0;
  new ResizeObserver(([{contentRect}]) => { // heights follow from the width
    if (contentRect.width !== width) layout();
    width = contentRect.width;
  }).observe(get("plots"));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => setTheme(dark.matches));
  setTheme(dark.matches);
  addEventListener("resize", layout);
  addEventListener("keydown", onKey);
  for (const id in BUTTONS) get(id).addEventListener("click", KEYS[BUTTONS[id]]);
  get("close").addEventListener("click", () => get("help").close());
  get("scrub").addEventListener("input", scrub);
  get("x").addEventListener("change", () => view.setByTime(get("x").value === "seconds"));
}

// ---- saved runs

const SPEEDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, Infinity];

/** Time that goes on in saved runs. */
export class Replay {
  constructor() {
    this.time = 0;
    this.end = Math.max(...state.runs.map((run) => run.now));
    this.speed = [1, 2, 5].find((speed) => this.end / speed <= 60) ?? 10;
    for (const speed of SPEEDS) {
      const text = speed === Infinity ? "all at once" : `${speed}×`;
      const more = {value: speed, selected: speed === this.speed};
      get("speed").append(element("option", "", text, more));
    }
    get("speeds").hidden = false;
    get("speed").onchange = () => {
      this.speed = Number(get("speed").value);
      if (this.speed === Infinity) goToNow();
    };
  }

  /** From the cursor on, or once more from the beginning. */
  goOn() {
    const {stepped} = state;
    if (stepped) this.time = stepped.run.atOf(stepped.iteration);
    else if (this.time >= this.end) this.time = 0;
  }

  advance(seconds) {
    const time = this.time + seconds * Math.min(this.speed, 1e9);
    this.time = Math.min(this.end, time);
    if (this.time === this.end) goToNow(); // pauses, with the end in sight
  }
}
