/* The grid of rows and iterations: its pixels are drawn once, and move along with the view. The
   curves below are plots as well. */

import {
  ACCEPTED, DECODE, FREE, IDLE, NAMES, PADDING, PAUSED, PREFILL, RECOMPUTED, REJECTED, UNBUDGETED,
  adapterOf, adapters,
} from "./history.js";
import {dash, nameOf, settings} from "./readout.js";
import {clamp, element, get, tell, visible} from "./text.js";
import {
  colourOf, css, current, letterOf, marked, pixel, size, state, textures, theme, view,
} from "./view.js";

export const plots = {grids: [], axis: null, curves: []}; // of the runs

/** Sizes, from how wide the plots are now. */
export function layout() {
  const {grids, axis, curves} = plots;
  const width = Math.min(...grids.map((grid) => grid.scroller.clientWidth));
  size.unit = Math.max(1, Math.round(devicePixelRatio));
  size.rem = devicePixelRatio * parseFloat(getComputedStyle(document.documentElement).fontSize);
  size.gutter = Math.round(3 * size.rem);
  view.width = Math.max(50, Math.floor(width * devicePixelRatio) - size.gutter);
  textures.forget();
  for (const plot of [...grids, axis, ...curves]) plot.layout();
  view.changed();
}

// ---- pixels drawn once

/** A picture of a run as a ring of pixel columns: column x is kept at x modulo the width, so that
    a view that moves draws its new columns alone. */
export class Strip {
  constructor(run, paint) {
    this.run = run;
    this.paint = paint; // (strip, iteration a, b, from column, to column, whether a begins there)
    this.context = document.createElement("canvas").getContext("2d");
    this.version = -1;
    this.from = this.to = 0; // columns that are drawn
    this.width = this.height = 0;
  }

  resize(width, height) {
    if (width === this.width && height === this.height) return;
    Object.assign(this.context.canvas, {width, height});
    Object.assign(this, {width, height, version: -1});
    this.image = this.context.createImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  column(x) { return ((x % this.width) + this.width) % this.width; }

  /** Draw what is missing of the columns in sight. */
  update() {
    const {run} = this, left = view.origin(), right = left + this.width;
    if (this.version !== view.version || run.changedFrom < run.first) this.from = this.to = left;
    else if (run.changedFrom < run.next) {
      this.to = Math.min(this.to, view.edge(run, run.changedFrom));
    }
    this.version = view.version;
    if (this.to <= left || this.from >= right || this.to < this.from) this.from = this.to = left;
    if (this.to < right) this.fill(this.to, right);
    if (this.from > left) this.fill(left, this.from);
    this.from = left;
    this.to = right;
  }

  fill(from, to) {
    const {run, width, pixels} = this, ground = pixel(theme.plot);
    for (let x = from; x < to; x++) {
      for (let p = this.column(x); p < pixels.length; p += width) pixels[p] = ground;
    }
    for (let i = view.iterationFrom(run, from), last; i < run.next; i = last + 1) {
      const x = view.edge(run, i);
      if (x >= to) break;
      last = view.lastWith(run, i, run.next);
      const end = view.endEdge(run, last), shared = last > i ? x + 1 : end;
      this.paint(this, i, last, Math.max(x, from), Math.min(shared, to), x >= from);
      if (end > shared) this.paint(this, last, last, shared, Math.min(end, to), false);
    }
    const column = this.column(from), first = Math.min(to - from, width - column);
    this.context.putImageData(this.image, 0, 0, column, 0, first, this.height);
    this.context.putImageData(this.image, 0, 0, 0, 0, to - from - first, this.height);
  }

  show(context) {
    this.update();
    const {run, width, height} = this, {canvas} = this.context;
    const start = this.column(view.origin()), rest = width - start, x = size.gutter;
    context.drawImage(canvas, start, 0, rest, height, x, 0, rest, height);
    if (start) context.drawImage(canvas, 0, 0, start, height, x + rest, 0, start, height);
    // what is no longer kept, and what is to come
    context.fillStyle = css(theme.plot);
    const gone = run.first < run.next ? view.edge(run, run.first) - view.origin() : 0;
    if (gone > 0) context.fillRect(x, 0, Math.min(gone, width), height);
    const ahead = Math.max(0, view.pixel(view.head) - view.origin());
    if (ahead < width) context.fillRect(x + ahead, 0, width - ahead, height);
  }
}

// ---- plots: words on the left, a canvas on the right

/** A canvas whose pixels are the device's, with room for figures left of what is drawn. */
export class Plot {
  constructor(className = "") {
    const row = element("div", `plot ${className}`);
    this.words = element("div", "words");
    this.scroller = element("div", "scroller");
    this.canvas = element("canvas");
    this.context = this.canvas.getContext("2d", {alpha: false});
    this.height = 0;
    this.scroller.append(this.canvas);
    row.append(this.words, this.scroller);
    get("plots").append(row);
  }

  resize(height) {
    const width = size.gutter + view.width;
    if (this.canvas.width === width && this.height === height) return;
    Object.assign(this.canvas, {width, height});
    this.height = height;
    this.canvas.style.height = `${height / devicePixelRatio}px`;
  }

  clear() {
    const {context} = this;
    context.fillStyle = css(theme.back);
    context.fillRect(0, 0, size.gutter, this.height);
    context.fillStyle = css(theme.plot);
    context.fillRect(size.gutter, 0, view.width, this.height);
    context.font = `${Math.round(0.6875 * size.rem)}px system-ui, sans-serif`;
  }

  write(text, x, y, align, baseline, colour = theme.quiet) {
    Object.assign(this.context, {
      fillStyle: css(colour), textAlign: align, textBaseline: baseline,
    });
    this.context.fillText(text, x, y);
  }

  /** A figure in the gutter. */
  figure(text, y, baseline) {
    this.write(text, size.gutter - 4 * size.unit, y, "right", baseline);
  }

  /** The current iteration through every plot, if one is marked; around the cell, if one is. */
  mark(run, lineHeight = 0) {
    const mark = marked(), i = current(run), {context} = this;
    if (!mark || i < run.first) return;
    const left = view.edge(run, i) - view.origin(), right = view.endEdge(run, i) - view.origin();
    const from = Math.max(0, left), width = Math.min(view.width, right) - from;
    if (width <= 0) return;
    context.globalAlpha = width > 3 * size.unit ? 0.16 : 0.6;
    context.fillStyle = context.strokeStyle = css(theme.ink);
    context.fillRect(size.gutter + from, 0, width, this.height);
    context.globalAlpha = 1;
    if (mark.run !== run || mark.line === null || !lineHeight) return;
    context.lineWidth = 1.5 * size.unit;
    context.strokeRect(size.gutter + left - 1, mark.line * lineHeight - 1, right - left + 2,
      lineHeight + 1);
  }
}

const LEGEND = [
  PREFILL, DECODE, ACCEPTED, REJECTED, IDLE, PADDING, RECOMPUTED, PAUSED, UNBUDGETED,
];

export class Grid extends Plot {
  constructor(run, which) {
    super();
    this.run = run;
    this.which = which;
    this.hint = element("p", "hint");
    this.hint.hidden = true;
    this.scroller.append(this.hint);
    this.strip = new Strip(run, paintCells);
    this.describe();
    const {canvas} = this;
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    canvas.setAttribute("aria-label", `grid of rows and iterations${nameOf(run)}: arrow keys ` +
      "point at a cell, Enter pins its request");
  }

  /** Beside a saved run's grid its name, and what the reader must not take for a measurement. */
  describe() {
    const {about} = this.run, {words} = this;
    const name = element("p", "name line");
    words.append(name);
    if (state.runs.length < 2) name.append("rows");
    else {
      name.append(dash(this.which), element("span", "text", visible(about.name, 60)));
      if (about.simulated) words.append(element("p", "mark text", visible(about.simulated, 80)));
      words.append(element("p", "quiet text", settings(about, state.runs).join(" · ")));
    }
    if (this.which) return;
    this.legend = element("ul", "legend");
    this.legend.setAttribute("aria-label", "textures");
    for (const kind of LEGEND) {
      const item = element("li");
      item.append(element("canvas"), NAMES[kind]);
      this.legend.append(item);
    }
    words.append(this.legend);
    words.append(element("ul", "legend adapters"));
  }

  /** As high as there is room for; two pixels at least for each line, and scrolled beyond that. */
  layout() {
    this.n = this.run.lines.length; // 0 until something is known
    const n = Math.max(1, this.n), most = state.runs.length > 1 ? 0.25 : 0.46;
    const high = innerHeight * devicePixelRatio, least = 2 * size.unit;
    const room = Math.max(9 * size.rem, most * high, Math.min(0.6 * high, n * least));
    this.lineHeight = Math.floor(clamp(room / n, least, 2.25 * size.rem));
    this.resize(n * this.lineHeight);
    this.strip.resize(view.width, this.height);
    this.scroller.style.maxHeight = `${Math.ceil(room / devicePixelRatio)}px`;
    this.legend?.querySelectorAll("canvas").forEach((canvas, i) => {
      const width = canvas.width = Math.round(1.75 * size.rem);
      const height = canvas.height = Math.round(0.75 * size.rem);
      const tile = textures.make(LEGEND[i], 14, false, height), context = canvas.getContext("2d");
      const image = context.createImageData(width, height);
      new Uint32Array(image.data.buffer).forEach((_, p, pixels) => {
        pixels[p] = tile[(p / width | 0) * textures.width + p % width % textures.width];
      });
      context.putImageData(image, 0, 0);
    });
  }

  lineAt(y) { return clamp(Math.floor(y / this.lineHeight), 0, this.run.lines.length - 1); }

  /** Say, in an empty grid, that nothing is computed. */
  hintAt(run) {
    const nothing = run.next === run.first;
    const quiet = nothing || run.now - run.endOf(run.next - 1) > 5;
    this.hint.hidden = Boolean(state.replay || state.paused || !quiet);
    const what = nothing ? "has been" : "is being";
    tell(this.hint, `Nothing ${what} computed: send some load to see rows`);
  }

  draw(still) {
    const {run, lineHeight} = this;
    this.clear();
    this.strip.show(this.context);
    let step = 1;
    while (step * lineHeight < 0.875 * size.rem) step *= 2;
    for (let line = 0; line < this.n; line += step) {
      const y = Math.max((line + 0.5) * lineHeight, 0.4 * size.rem);
      this.figure(String(line), y, "middle");
    }
    if (lineHeight > 0.8 * size.rem) this.spell(still);
    this.mark(run, lineHeight);
  }

  /** In wide columns that stand still, positions as figures; where a row begins, its adapter. */
  spell(still) {
    const {run, lineHeight, context} = this, [from, to] = view.range(run);
    const figures = still && (to - from) * 3 * size.rem <= view.width;
    for (let line = 0; line < this.n && (figures || adapters.size > 1); line++) {
      for (let i = from, before = -1, free = 0; i < to; i++) {
        const at = run.slot(i) * run.room + line, kind = run.kinds[at], id = run.ids[at];
        const begins = id !== before && id >= 0, left = view.edge(run, i) - view.origin();
        before = id;
        if (!begins && !figures) continue;
        let text = begins ? letterOf(adapterOf(run, id)) : "";
        if (figures && left >= 0 && kind !== FREE && kind <= RECOMPUTED) {
          const start = run.starts[at], n = run.ns[at];
          text += (text && " ") + (n > 1 ? `${start}–${start + n - 1}` : start);
        }
        const x = Math.max(left, 0) + (figures ? 4 : 1) * size.unit;
        if (!text || x < free) continue;
        const width = context.measureText(text).width + 4 * size.unit;
        const most = figures ? view.endEdge(run, i) - view.origin() - 4 * size.unit : view.width;
        if (x + width > most) continue;
        context.fillStyle = css(theme.plot);
        context.fillRect(size.gutter + x, (line + 0.15) * lineHeight, width, 0.7 * lineHeight);
        const middle = (line + 0.5) * lineHeight;
        this.write(text, size.gutter + x + 2 * size.unit, middle, "left", "middle", theme.ink);
        free = x + width + size.unit;
      }
    }
  }
}

/** Columns `from` … `to` − 1 of the cells of iterations a … b (which share a pixel if b > a). */
function paintCells(strip, a, b, from, to, begins) {
  const {run, pixels, width} = strip, {unit} = size, n = run.lines.length;
  const lineHeight = strip.height / n | 0, tileWidth = textures.width;
  // lines, columns and requests are a thin line apart where there is room
  const height = lineHeight - (lineHeight >= 3 * unit ? unit : 0);
  const apart = begins && to - from >= 8 * unit ? unit : 0, ground = pixel(theme.plot);
  const before = a > run.first ? run.slot(a - 1) * run.room : -1;
  for (let line = 0; line < n; line++) {
    const cell = run.slot(b > a ? run.telling(line, a, b) : a) * run.room + line;
    const kind = run.kinds[cell], id = run.ids[cell];
    const bands = kind === DECODE ? [run.ns[cell], run.rejected[cell]] : [];
    const colour = colourOf(run, id), faded = view.fades && id !== state.pinned;
    const tile = textures.tile(kind, colour, faded, height, ...bands);
    const fresh = begins && before >= 0 && to - from > 1 && run.ids[before + line] !== id;
    const gap = kind === FREE ? 0 : fresh ? unit : apart;
    for (let x = from; x < to; x++) {
      const open = x - from >= gap;
      let p = strip.column(x) + line * lineHeight * width;
      let t = ((x % tileWidth) + tileWidth) % tileWidth;
      for (let y = 0; y < height; y++, p += width, t += tileWidth) {
        pixels[p] = open ? tile[t] : ground;
      }
    }
  }
}
