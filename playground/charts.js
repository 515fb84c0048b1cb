/* Charts by hand: SVG of a few paths, with logarithmic axes. A variant is a colour and a dash. */

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 34;

/** An SVG element; `text` is what it says. */
function draw(parent, tag, attributes, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const name in attributes) made.setAttribute(name, attributes[name]);
  if (text) made.textContent = text;
  parent.append(made);
  return made;
}

const digits = (x) => Number(x.toPrecision(3));

export function duration(s) {
  if (!Number.isFinite(s)) return "–";
  if (s < 1e-3) return `${digits(s * 1e6)} µs`;
  if (s < 1) return `${digits(s * 1e3)} ms`;
  return s < 1e4 ? `${digits(s)} s` : `${Math.round(s).toLocaleString("en")} s`;
}

const number = (n) => digits(n).toLocaleString("en");

/** A logarithmic axis over values: `to` of a value is 0 … 1. */
function logarithmic(values) {
  let low = Infinity, high = 0;
  for (const value of values) {
    if (!(value > 0)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) [low, high] = [0.001, 1];
  if (high / low < 4) [low, high] = [low / 2, high * 2];
  const from = Math.log10(low) - 0.03, span = Math.log10(high) + 0.03 - from;
  const ticks = [], steps = span > 5 ? [1] : span > 2 ? [1, 3] : [1, 2, 5];
  for (let power = Math.floor(from); power <= from + span; power++) {
    for (const step of steps) ticks.push(step * 10 ** power);
  }
  const to = (x) => (Math.log10(x) - from) / span;
  return {
    to, of: (part) => 10 ** (from + part * span),
    ticks: ticks.filter((tick) => to(tick) >= 0 && to(tick) <= 1),
  };
}

const parts = {to: (x) => x, of: (x) => x, ticks: [0, 0.25, 0.5, 0.75, 1]};

/** A figure with a caption; `paint` draws into it, and again when its width changes. */
class Chart {
  constructor(parent, title, unit) {
    this.figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    this.said = document.createElement("span");
    this.said.className = "quiet";
    this.said.textContent = this.unit = unit;
    caption.append(title, this.said);
    this.svg = draw(this.figure, "svg", {role: "img", height: HEIGHT});
    this.svg.setAttribute("aria-label", `${title}: ${unit}`);
    this.figure.prepend(caption);
    parent.append(this.figure);
    this.series = [];
    new ResizeObserver(() => this.paint()).observe(this.figure);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  show(series) {
    this.series = series;
    this.paint();
  }

  frame(x, y, sayX, sayY) {
    const width = Math.max(160, this.figure.clientWidth), {svg} = this;
    this.box = {width: width - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM};
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren();
    draw(svg, "rect", {
      class: "plot-back", x: LEFT, y: TOP, width: this.box.width, height: this.box.height,
    });
    this.x = (value) => LEFT + this.box.width * x.to(value);
    this.y = (value) => TOP + this.box.height * (1 - y.to(value));
    this.valueAt = (at) => x.of((at - LEFT) / this.box.width);
    let free = -Infinity;
    for (const tick of x.ticks) {
      const at = this.x(tick), text = sayX(tick), half = 3.2 * text.length;
      draw(svg, "path", {class: "grid", d: `M${at} ${TOP}v${this.box.height + 4}`});
      if (at - half < free || at + half > width) continue;
      free = at + half + 4;
      draw(svg, "text", {x: at, y: HEIGHT - BOTTOM + 16, "text-anchor": "middle"}, text);
    }
    for (const tick of y.ticks) {
      const at = this.y(tick);
      draw(svg, "path", {class: "grid", d: `M${LEFT - 4} ${at}h${this.box.width + 4}`});
      draw(svg, "text", {x: LEFT - 6, y: at + 4, "text-anchor": "end"}, sayY(tick));
    }
  }

  axis(text) {
    draw(this.svg, "text", {x: LEFT + this.box.width / 2, y: HEIGHT - 3, "text-anchor": "middle"}, text);
  }

  point() {}
}

/** Latency of each request against the tokens of its answer. */
export class Scatter extends Chart {
  paint() {
    const all = this.series.flatMap(({points}) => points);
    this.frame(logarithmic(all.map(([x]) => x)), logarithmic(all.map(([, y]) => y)), number, duration);
    this.axis("tokens of the answer");
    this.series.forEach(({points, colour}) => draw(this.svg, "path", {
      class: `dots v${colour}`,
      d: points.map(([x, y]) => `M${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}h0`).join(""),
    }));
  }
}

/** The share of values that are no larger, for each variant. */
export class Distribution extends Chart {
  constructor(parent, title, unit, axisText) {
    super(parent, title, unit);
    this.axisText = axisText;
  }

  paint() {
    const ends = this.series.flatMap(({sorted}) => [sorted[0], sorted.at(-1)]);
    this.frame(logarithmic(ends), parts, duration, (part) => `${100 * part}%`);
    this.axis(this.axisText);
    for (const {sorted, colour} of this.series) {
      if (!sorted.length) continue;
      const n = sorted.length, steps = Math.min(n, 240), points = [`M${this.x(sorted[0])} ${this.y(0)}`];
      for (let k = 0; k <= steps; k++) {
        const i = Math.round((n - 1) * k / steps);
        points.push(`L${this.x(sorted[i]).toFixed(1)} ${this.y((i + 1) / n).toFixed(1)}`);
      }
      draw(this.svg, "path", {
        class: `line v${colour}`, d: `${points.join("")}H${LEFT + this.box.width}`,
      });
    }
    this.cursor = draw(this.svg, "path", {class: "cursor"});
  }

  /** Say the shares at a point. */
  point(event) {
    const box = this.svg.getBoundingClientRect(), at = event ? event.clientX - box.left : -1;
    const inside = at >= LEFT && at <= LEFT + this.box.width;
    this.cursor?.setAttribute("d", inside ? `M${at} ${TOP}v${this.box.height}` : "");
    if (!inside) return void (this.said.textContent = this.unit);
    const value = this.valueAt(at);
    const shares = this.series.map(({sorted, name}) => {
      let low = 0, high = sorted.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (sorted[middle] > value) high = middle;
        else low = middle + 1;
      }
      return `${name} ${Math.round(100 * low / Math.max(1, sorted.length))}%`;
    });
    this.said.textContent = `within ${duration(value)}: ${shares.join(", ")}`;
  }
}

/** What became of the computed rows. */
export class Shares extends Chart {
  paint() {
    const width = Math.max(160, this.figure.clientWidth), {svg} = this;
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren();
    this.series.forEach(({name, rows, colour}, i) => {
      const all = Object.values(rows).reduce((a, b) => a + b, 0), y = TOP + 44 * i;
      let x = 0;
      for (const [kind, n] of Object.entries(rows)) {
        if (!n) continue;
        const part = width * n / all;
        const fill = kind === "live" ? `f${colour}` : "fidle";
        draw(svg, "rect", {class: fill, x, y: y + 16, width: Math.max(1, part - 1), height: 16});
        x += part;
      }
      const others = Object.entries(rows).filter(([kind, n]) => n && kind !== "live")
        .map(([kind, n]) => `${kind} ${(100 * n / all).toFixed(1)}%`);
      const said = [`useful ${(100 * rows.live / all).toFixed(1)}%`, ...others].join(", ");
      draw(svg, "text", {x: 0, y: y + 11}, `${name}: ${said}`);
    });
  }
}
