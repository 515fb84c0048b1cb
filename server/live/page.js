/* The live page: what a server's batches look like, iteration by iteration.

   It shows the history of a server, which it asks 7 times per second, or histories that are saved in
   the page itself. Each file imports only files before it: text.js · history.js (what is known) ·
   view.js (what is in sight) · readout.js (the words) · drawing.js and curves.js (the pixels) ·
   controls.js (time, keys, mouse) · server.js · this one, which puts them together. */

import {Replay, goToNow, listenToControls, listenToPlots} from "./controls.js";
import {Axis, CURVES, Curve} from "./curves.js";
import {Grid, layout, plots} from "./drawing.js";
import {IDLE, NAMES, PADDING, PAUSED, RECOMPUTED, REJECTED, Run, savedRun} from "./history.js";
import {describeRuns, makeChips, sayAll, speak} from "./readout.js";
import {askServer, server} from "./server.js";
import {get} from "./text.js";
import {calm, draw, marked, size, state, view} from "./view.js";

const SAY_MS = 120, SPEAK_MS = 5000;

const frames = {
  n: 0,
  last: 0, // when the last one was drawn
  said: 0, // when words were last written

  draw(time) {
    const passed = Math.min(100, time - this.last), {runs, replay, pinned} = state;
    this.last = time;
    this.n += 1;
    if (replay && !state.paused) replay.advance(passed / 1000);
    const moves = view.glide(passed);
    const fades = runs.some((run) => run.requests.get(pinned)?.leftIn > view.range(run)[0]);
    if (fades !== view.fades) view.changed();
    view.fades = fades;
    if (plots.grids.some((grid) => grid.n !== grid.run.lines.length)) layout();
    for (const grid of plots.grids) grid.draw(!moves && (state.paused || !replay));
    for (const plot of [plots.axis, ...plots.curves]) plot.draw();
    for (const run of runs) run.changedFrom = Infinity;
    if (state.paused || draw.words || time - this.said >= SAY_MS) this.say(time);
    if (moves || replay && !state.paused) draw.soon();
  },

  /** Write all words and figures; a few times per second, which is as fast as they are read. */
  say(time) {
    this.said = time;
    draw.words = false;
    sayAll();
    const summaries = state.runs.map((run) => run.summary(...view.range(run)));
    for (const curve of plots.curves) curve.say(summaries);
    plots.grids[0].hintAt(marked()?.run ?? state.runs[state.active]);
  },
};

function makePlots() {
  plots.grids = state.runs.map((run, which) => new Grid(run, which));
  plots.axis = new Axis();
  plots.curves = CURVES.map((kind) => new Curve(kind));
  listenToPlots();
  describeRuns();
}

function openSaved(histories) {
  state.runs = histories.slice(0, 2).map(savedRun);
  state.replay = new Replay();
  view.byTime = get("x").disabled = state.runs.length > 1;
  get("x").value = view.byTime ? "seconds" : "iterations";
  view.span = view.longest();
  if (calm.matches) goToNow();
}

/** Other saved runs, whole, in place of those before: the playground shows its own so. */
window.showRuns = (histories) => {
  get("plots").replaceChildren();
  get("speed").replaceChildren();
  Object.assign(state, {pointer: null, stepped: null, active: 0});
  openSaved(histories);
  makePlots();
  layout();
  goToNow();
};

let errors = 0;
for (const type of ["error", "unhandledrejection"]) {
  addEventListener(type, () => { errors += 1; });
}

/** For tests in a browser; nothing on the page uses it. */
window.liveForTests = {
  state() {
    const {paused, runs: [{first, next, lines, requests}]} = state;
    const {failures} = server, counts = {lines: lines.length, requests: requests.size};
    return {first, next, paused, ...counts, frames: frames.n, errors, failures};
  },

  /** Rows of each kind, of iterations from … to − 1 that are kept. */
  counts(from, to, run = state.runs[0]) {
    const sum = {live: 0, idle: 0, padding: 0, recomputed: 0, rejected: 0, paused: 0};
    for (let i = Math.max(from, run.first); i < Math.min(to, run.next); i++) {
      const slot = run.slot(i);
      sum.live += run.useful(slot);
      sum.rejected += run.rows[REJECTED][slot];
      for (const kind of [IDLE, PADDING, RECOMPUTED, PAUSED]) {
        sum[NAMES[kind]] += run.rows[kind][slot];
      }
    }
    return sum;
  },

  /** Where an iteration is drawn: [x, width]. */
  column(iteration, run = state.runs[0]) {
    const x = view.edge(run, iteration);
    return [x - view.origin() + size.gutter, view.endEdge(run, iteration) - x];
  },
};

function start() {
  const histories = JSON.parse(get("runs").textContent); // null: `showRuns` will be called
  draw.frame = (time) => frames.draw(time);
  if (histories?.length) openSaved(histories);
  else state.runs = [new Run()];
  makePlots();
  makeChips();
  listenToControls();
  setInterval(speak, SPEAK_MS);
  if (!state.replay && histories) askServer();
}

start();
