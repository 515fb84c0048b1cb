/* Below the grids: the axis, and a curve for each measure. */

import {DECODE, IDLE, PADDING, PAUSED, RECOMPUTED} from "./history.js";
import {Plot, Strip} from "./drawing.js";
import {dash} from "./readout.js";
import {duration, element, figure, tell} from "./text.js";
import {ACCENT, TILE, css, current, size, state, textures, theme, view} from "./view.js";

/** Below the grids: numbers of iterations, or seconds. */
export class Axis extends Plot {
  constructor() {
    super("axis");
    this.words.className += " quiet";
    this.canvas.setAttribute("aria-hidden", "true");
  }

  layout() { this.resize(Math.round(1.125 * size.rem)); }

  draw() {
    this.clear();
    tell(this.words, view.byTime ? "seconds" : "iteration");
    const step = Math.max(view.byTime ? 0 : 1, round(5 * size.rem / view.scale));
    const digits = Math.max(0, -Math.floor(Math.log10(step))), origin = view.origin();
    const from = view.byTime ? state.zero : 0;
    for (let n = Math.ceil((Math.max(origin / view.scale, view.start()) - from) / step); ; n++) {
      const x = view.pixel(from + n * step) - origin;
      if (x >= view.width) break;
      this.write((n * step).toFixed(digits), size.gutter + x + 3 * size.unit, 3 * size.unit,
        "left", "top");
      this.context.fillRect(size.gutter + x, 0, size.unit, 4 * size.unit);
    }
  }
}

/** 1, 2 or 5 times a power of ten, and no less than x. */
function round(x) {
  const power = 10 ** Math.floor(Math.log10(x));
  return power * [1, 2, 5, 10].find((n) => n * power >= x * 0.999999);
}

/** Rows by kind, one upon the other; of iterations that share a pixel their mean. */
function paintRows(strip, a, b, from, to) {
  const {run, pixels, width, height} = strip, tileWidth = textures.width, high = TILE * size.unit;
  let floor = height, sum = 0;
  for (const kind of [DECODE, RECOMPUTED, IDLE, PADDING, PAUSED]) {
    for (let i = a; i <= b; i++) {
      sum += kind === DECODE ? run.live(run.slot(i)) : run.rows[kind][run.slot(i)];
    }
    const top = Math.round(height * Math.max(0, 1 - sum / (b - a + 1) / run.lines.length));
    const tile = textures.tile(kind, ACCENT, false, high);
    for (let x = from; x < to; x++) {
      const column = strip.column(x), t = ((x % tileWidth) + tileWidth) % tileWidth;
      for (let y = top; y < floor; y++) {
        pixels[y * width + column] = tile[y % high * tileWidth + t];
      }
    }
    floor = top;
  }
}

/** `value` of an iteration's slot is drawn, up to `most` or what is in sight, and written by
    `format`; `window` is of a summary. */
export const CURVES = [
  {
    name: "rows", unit: "live", painted: paintRows, value: (run, s) => run.live(s),
    most: (run) => run.lines.length, format: figure, window: (sum) => sum.rows / sum.seconds,
  },
  {
    name: "throughput", unit: "tokens/s", value: (run, s) => run.rate[s],
    format: figure, window: (sum) => sum.tokens / sum.clock,
  },
  {
    name: "TTFT", dots: true, value: (run, s) => run.ttft[s],
    format: duration, window: (sum) => sum.ttft,
  },
  {
    name: "time per token", value: (run, s) => run.gap[s],
    format: duration, window: (sum) => sum.gap / sum.gaps,
  },
  {
    name: "useful fraction", value: (run, s) => run.useful(s) / run.computed(s),
    most: () => 1, format: figure, window: (sum) => sum.useful / sum.computed,
  },
  {
    name: "waiting", value: (run, s) => run.waiting[s],
    format: figure, window: (sum) => sum.queue / sum.seconds,
  },
];

export class Curve extends Plot {
  constructor(kind) {
    super();
    this.kind = kind;
    const name = element("p", "name line", kind.name);
    name.append(element("span", "quiet", kind.unit));
    if (kind === CURVES[0]) name.append(element("span", "quiet small window", "window"));
    this.words.append(name);
    this.figures = state.runs.map((_, which) => {
      const line = element("p", "line"), value = element("span", "value");
      const window = element("span", "quiet small window");
      if (state.runs.length > 1) line.append(dash(which));
      line.append(value, window);
      this.words.append(line);
      return {value, window};
    });
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${kind.name} over the iterations in sight`);
    const [run, other] = state.runs;
    if (kind.painted && !other) this.strip = new Strip(run, kind.painted);
  }

  layout() {
    this.resize(Math.round((state.runs.length > 1 ? 3.75 : 3) * size.rem));
    this.strip?.resize(view.width, this.height);
  }

  /** The value at the upper edge. */
  top() {
    const {most, value, dots} = this.kind;
    if (most) return Math.max(...state.runs.map(most));
    let highest = 0;
    for (const run of state.runs) {
      const [from, to] = view.range(run);
      for (let i = from; i < to; i++) highest = Math.max(highest, value(run, run.slot(i)) || 0);
      for (const {ttft} of dots ? run.firstTokens(from, to) : []) highest = Math.max(highest, ttft);
    }
    return highest ? round(highest) : 1;
  }

  draw() {
    const top = this.top(), {unit} = size;
    this.clear();
    if (this.strip) this.strip.show(this.context);
    else state.runs.forEach((run, which) => this.trace(run, which, top));
    this.figure(this.kind.format(top), 3 * unit, "top");
    this.figure("0", this.height - 2 * unit, "bottom");
    this.mark(state.runs[0]);
  }

  trace(run, which, top) {
    const {context, height} = this, {unit} = size, [from, to] = view.range(run);
    const left = size.gutter - view.origin();
    const y = (value) => height - unit - (height - 3 * unit) * value / top;
    context.save();
    context.beginPath();
    context.rect(size.gutter, 0, view.width, height);
    context.clip();
    context.strokeStyle = context.fillStyle = css(which ? theme.second : theme.accent);
    context.lineWidth = 1.5 * unit;
    if (this.kind.dots) {
      const drawn = new Set(); // where another dot would not be seen
      for (const {firstIn, ttft} of run.firstTokens(from, to)) {
        const x = left + view.edge(run, firstIn), high = Math.round(y(ttft));
        if (drawn.has(x * height + high)) continue;
        drawn.add(x * height + high);
        context[which ? "strokeRect" : "fillRect"](
          x - 1.5 * unit, high - 2 * unit, 3 * unit, 3 * unit);
      }
    } else {
      if (which) context.setLineDash([5 * unit, 3 * unit]);
      context.beginPath();
      this.steps(run, from, to, left, y);
      context.stroke();
    }
    context.restore();
  }

  /** An iteration's value holds as long as it lasts; those that share a pixel are one stroke. */
  steps(run, from, to, left, y) {
    let pen = -Infinity;
    for (let i = from, last; i < to; i = last + 1) {
      last = view.lastWith(run, i, to);
      const x = left + view.edge(run, i), apart = x > pen + 2 * size.unit;
      let low = Infinity, high = -Infinity, value;
      for (let k = i; k <= last; k++) {
        value = this.kind.value(run, run.slot(k));
        if (value < low) low = value;
        if (value > high) high = value;
      }
      pen = left + view.endEdge(run, last);
      if (high < low) continue; // NaN: there is no row that it is about
      this.context[apart ? "moveTo" : "lineTo"](x, y(low));
      this.context.lineTo(x, y(high));
      this.context.lineTo(pen, y(value));
    }
  }

  say(summaries) {
    const {kind} = this;
    state.runs.forEach((run, which) => {
      let i = current(run);
      const at = () => kind.value(run, run.slot(i));
      if (kind.dots) while (i > run.first && Number.isNaN(at())) i -= 1; // the last that there was
      tell(this.figures[which].value, i < run.first ? "–" : kind.format(at()));
      tell(this.figures[which].window, kind.format(kind.window(summaries[which])));
    });
  }
}
