/* Charts by hand: SVG of a few paths on logarithmic axes. A variant is a colour and a dash. */

import {percent} from "./live/text.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 34;

/** An SVG element; `text` is what it says. */
function draw(parent, tag, attributes, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const name in attributes) made.setAttribute(name, attributes[name]);
  made.textContent = text;
  parent?.append(made);
  return made;
}

/** How a variant's lines look. */
export function swatch(colour) {
  const made = draw(null, "svg", {class: "swatch", viewBox: "0 0 24 12"});
  draw(made, "path", {class: `line v${colour}`, d: "M0 6h24"});
  return made;
}

const number = (x) => Number(x.toPrecision(3)).toLocaleString("en");

export function duration(s) {
  if (s < 1e-3) return `${number(s * 1e6)} µs`;
  return s < 1 ? `${number(s * 1e3)} ms` : `${number(s)} s`;
}

/** `to` of a value is 0 … 1, and `of` its inverse. */
function logarithmic(values) {
  let low = Infinity, high = 0;
  for (const value of values) {
    if (value > 0) [low, high] = [Math.min(low, value), Math.max(high, value)];
  }
  if (low > high) [low, high] = [0.001, 1];
  const more = high / low < 4 ? 2 : 1.15, from = Math.log10(low / more);
  const span = Math.log10(high * more) - from, to = (x) => (Math.log10(x) - from) / span;
  const ticks = [], steps = span > 5 ? [1] : span > 2 ? [1, 3] : [1, 2, 5];
  for (let power = Math.floor(from); power <= from + span; power++) {
    for (const step of steps) ticks.push(step * 10 ** power);
  }
  return {to, of: (part) => 10 ** (from + part * span), ticks: ticks.filter((x) => to(x) >= 0 && to(x) <= 1)};
}

const parts = {to: (x) => x, ticks: [0, 0.25, 0.5, 0.75, 1]};

/** A figure that is painted when its series are given, and when its width changes. */
class Chart {
  constructor(parent, title, about, axis = "") {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    this.said = document.createElement("span");
    this.said.className = "quiet";
    this.said.textContent = about;
    caption.append(title, this.said);
    figure.append(caption);
    this.svg = draw(figure, "svg", {role: "img", height: HEIGHT, "aria-label": `${title}, ${about}`});
    parent.append(figure);
    Object.assign(this, {figure, about, axis, series: []}); // of {name, colour, values}
    new ResizeObserver(() => this.begin()).observe(figure);
  }

  show(series) {
    this.series = series;
    this.begin();
  }

  begin() {
    this.width = Math.max(160, this.figure.clientWidth);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.replaceChildren();
    this.paint();
  }

  frame(x, y, sayX, sayY) {
    const {svg} = this, width = this.width - LEFT - RIGHT, height = HEIGHT - TOP - BOTTOM;
    this.x = (value) => Number((LEFT + width * x.to(value)).toFixed(1));
    this.y = (value) => Number((TOP + height * (1 - y.to(value))).toFixed(1));
    this.valueAt = (at) => at < LEFT || at > LEFT + width ? null : x.of((at - LEFT) / width);
    draw(svg, "rect", {class: "plot-back", x: LEFT, y: TOP, width, height});
    let free = 0;
    for (const tick of x.ticks) {
      const at = this.x(tick), text = sayX(tick), half = 3.2 * text.length;
      draw(svg, "path", {class: "grid", d: `M${at} ${TOP}v${height + 4}`});
      if (at - half < free || at + half > this.width) continue;
      free = at + half + 4;
      draw(svg, "text", {x: at, y: HEIGHT - 18, "text-anchor": "middle"}, text);
    }
    for (const tick of y.ticks) {
      const at = this.y(tick);
      draw(svg, "path", {class: "grid", d: `M${LEFT - 4} ${at}h${width + 4}`});
      draw(svg, "text", {x: LEFT - 6, y: at + 4, "text-anchor": "end"}, sayY(tick));
    }
    draw(svg, "text", {x: LEFT + width / 2, y: HEIGHT - 3, "text-anchor": "middle"}, this.axis);
  }
}

/** Latency of each request by its tokens. values: [tokens, seconds] of each. */
export class Scatter extends Chart {
  paint() {
    const all = this.series.flatMap(({values}) => values);
    const [x, y] = [0, 1].map((which) => logarithmic(all.map((point) => point[which])));
    this.frame(x, y, number, duration);
    for (const {values, colour} of this.series) {
      const d = values.map(([n, s]) => `M${this.x(n)} ${this.y(s)}h0`).join("");
      draw(this.svg, "path", {class: `dots v${colour}`, d});
    }
  }
}

/** The share of values that are no larger. values: sorted seconds. */
export class Distribution extends Chart {
  constructor(...words) {
    super(...words);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(-1));
  }

  paint() {
    const ends = this.series.flatMap(({values}) => [values[0], values.at(-1)]);
    this.frame(logarithmic(ends), parts, duration, (part) => `${100 * part}%`);
    for (const {values, colour} of this.series) {
      const n = values.length, steps = Math.min(n - 1, 240);
      let d = `M${this.x(values[0])} ${this.y(0)}`;
      for (let k = 0; k <= steps; k++) {
        const i = Math.round((n - 1) * k / Math.max(1, steps));
        d += `L${this.x(values[i])} ${this.y((i + 1) / n)}`;
      }
      if (n) draw(this.svg, "path", {class: `line v${colour}`, d: `${d}H${this.width - RIGHT}`});
    }
    this.cursor = draw(this.svg, "path", {class: "cursor"});
  }

  /** Say the shares where a pointer is. */
  point(at) {
    const value = this.valueAt(at);
    this.cursor.setAttribute("d", value === null ? "" : `M${at} ${TOP}V${HEIGHT - BOTTOM}`);
    const shares = this.series.map(({name, values}) =>
      `${name} ${percent(values.filter((each) => each <= value).length / values.length)}`);
    this.said.textContent = value === null ? this.about : `within ${duration(value)}: ${shares.join(", ")}`;
  }
}

/** What computed rows were for. values: their number by kind. */
export class Shares extends Chart {
  paint() {
    const slot = Math.min(60, HEIGHT / Math.max(1, this.series.length));
    this.series.forEach(({name, values, colour}, i) => {
      const kinds = Object.entries(values).filter(([, n]) => n);
      const all = kinds.reduce((sum, [, n]) => sum + n, 0), y = TOP + slot * i;
      const said = kinds.map(([kind, n]) =>
        `${kind === "live" ? "useful" : kind} ${percent(n / all, 1)}`);
      draw(this.svg, "text", {x: 0, y: y + 10}, `${name}: ${said.join(", ")}`);
      let x = 0;
      for (const [kind, n] of kinds) {
        const width = Math.max(1, this.width * n / all - 1), height = slot - 30;
        draw(this.svg, "rect", {class: kind === "live" ? `f${colour}` : "fidle", x, y: y + 15, width, height});
        x += this.width * n / all;
      }
    });
  }
}
