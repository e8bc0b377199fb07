"use strict";

/* Line charts on SVG: axes, hover, zoom by dragging, logarithmic axes. Text enters the page as text only. */

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 54, right: 14, top: 8, bottom: 38 };
const COLOURS = 7;
const DASHES = 3;
const MOST_SEED_COLUMNS = 6;

function make(name, attributes = {}, parent = null, content = null) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (content !== null) node.textContent = content;
  if (parent) parent.append(node);
  return node;
}

function draw(name, attributes, parent, content = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (content !== null) node.textContent = content;
  parent.append(node);
  return node;
}

/* The baseline is black and solid; the others go through colours and dashes, and what lies below shows in the gaps. */
function looks(group) {
  if (group === 0) return "s0";
  const place = (group - 1) % (COLOURS - 1);
  const cycle = Math.floor((group - 1) / (COLOURS - 1));
  return `s${1 + place} d${1 + ((place + cycle) % DASHES)}`;
}

function swatch(group, parent) {
  const svg = draw("svg", { class: "swatch", viewBox: "0 0 20 8", "aria-hidden": "true" }, parent);
  draw("line", { x1: 0, x2: 20, y1: 4, y2: 4, class: `line ${looks(group)}`, "stroke-width": group ? 2.5 : 3 }, svg);
  return svg;
}

function niceStep(span, count) {
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 2.5, 5, 10].find((f) => f * power >= rough * 0.999);
  return (factor || 10) * power;
}

function linearTicks(low, high, count, whole) {
  let step = niceStep(high - low, count);
  if (whole && step < 10) step = [1, 2, 5, 10].find((s) => s >= step * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 0.8) return linearTicks(low, high, count, false).filter((v) => v > 0);
  const every = Math.max(1, Math.ceil(decades / count));
  const factors = decades > 3.2 ? [1] : decades > 1.6 ? [1, 3] : [1, 2, 5];
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
    if (factors.length === 1 && e % every) continue;
    for (const f of factors) {
      const value = f * 10 ** e;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found;
}

/* Digits after the point that tell multiples of a step apart. */
function decimals(step) {
  for (let digits = 0; digits < 7; digits++) {
    const scaled = step * 10 ** digits;
    if (Math.abs(scaled - Math.round(scaled)) < 1e-6 * scaled) return digits;
  }
  return 7;
}

function shown(value, step = 0) {
  if (Math.abs(value) < step * 1e-6 || value === 0) return "0";
  const size = Math.abs(value);
  let text;
  if (size >= 1e15 || size < 1e-4) text = value.toExponential(1);
  else if (size >= 1e9) text = `${+(value / 1e9).toPrecision(4)}B`;
  else if (size >= 1e6) text = `${+(value / 1e6).toPrecision(4)}M`;
  else if (size >= 1e4) text = `${+(value / 1e3).toPrecision(4)}k`;
  else if (step) text = value.toFixed(decimals(step));
  else text = String(+value.toPrecision(4));
  return text.replace("-", "\u2212");
}

class Scale {
  constructor(low, high, log, from, to) {
    Object.assign(this, { low, high, log, from, to });
    this.a = log ? Math.log(low) : low;
    this.b = log ? Math.log(high) : high;
  }
  place(value) {
    const v = this.log ? Math.log(value) : value;
    return this.from + ((v - this.a) / (this.b - this.a)) * (this.to - this.from);
  }
  value(place) {
    const v = this.a + ((place - this.from) / (this.to - this.from)) * (this.b - this.a);
    return this.log ? Math.exp(v) : v;
  }
}

function nearest(values, wanted) {
  let low = 0;
  let high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle;
    else high = middle;
  }
  return wanted - values[low] <= values[high] - wanted ? low : high;
}

/* lines: [{group, seed (null for a mean), x, y}], x ascending. options: title, unit, xLabel, xName, xFormat, digits,
   height, whole, scattered (points, not lines), focus, reference, names (of the groups), hidden (a Set of groups, shared by all charts). */
class Chart {
  constructor(host, options) {
    Object.assign(this, { height: 250, digits: 4, logX: false, logY: false, focus: false, lines: [] }, options);
    this.host = host;
    this.zoom = { x: null, y: null };
    this.onZoom = null;
    this.plot = make("div", { class: "plot" }, host);
    this.svg = draw("svg", { role: "img", tabindex: "0" }, this.plot);
    this.tip = make("div", { class: "tip", "aria-live": "polite", hidden: "" }, this.plot);
    this.width = 0;
    new ResizeObserver(() => {
      if (this.plot.clientWidth !== this.width) this.redraw();
    }).observe(this.plot);
    this.listen();
  }

  get visible() {
    return this.lines.filter((line) => !this.hidden.has(line.group));
  }

  /* Points that the axes can show; a logarithm needs them above zero. */
  points(line) {
    const found = [];
    for (let i = 0; i < line.x.length; i++) {
      const x = line.x[i];
      const y = line.y[i];
      if (x === null || y === null || (this.logX && x <= 0) || (this.logY && y <= 0)) continue;
      found.push([x, y]);
    }
    return found;
  }

  domain(all) {
    const xs = all.flat().map((p) => p[0]);
    if (!xs.length) return null;
    let [x0, x1] = this.zoom.x || [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))];
    if (x0 === x1) [x0, x1] = this.logX ? [x0 / 2, x1 * 2] : [x0 - 0.5, x1 + 0.5];
    else if (this.scattered && !this.zoom.x) [x0, x1] = [x0 - 0.06 * (x1 - x0), x1 + 0.06 * (x1 - x0)];
    if (this.zoom.y) return { x: [x0, x1], y: this.zoom.y };
    let from = x0;
    if (this.focus && !this.zoom.x && !this.logX) {
      const late = x0 + 0.2 * (x1 - x0); /* the fall from chance would flatten everything after it */
      if (all.every((line) => line.filter((p) => p[0] >= late).length >= 4)) from = late;
    }
    let y0 = Infinity;
    let y1 = -Infinity;
    for (const [x, y] of all.flat()) {
      if (x >= from && x <= x1) {
        y0 = Math.min(y0, y);
        y1 = Math.max(y1, y);
      }
    }
    if (y0 > y1) return null;
    if (this.logY) {
      const room = y1 > y0 ? (y1 / y0) ** 0.06 : 1.5;
      return { x: [x0, x1], y: [y0 / room, y1 * room] };
    }
    const room = y1 > y0 ? 0.06 * (y1 - y0) : Math.abs(y1) * 0.1 || 0.5;
    return { x: [x0, x1], y: [y0 - room, y1 + room] };
  }

  redraw() {
    this.width = this.plot.clientWidth;
    if (!this.width) return;
    this.clear();
    const { svg, width, height } = this;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const lines = this.visible;
    const all = lines.map((line) => this.points(line));
    const domain = this.domain(all.filter((points) => points.length));
    svg.setAttribute("aria-label", this.describe(lines));
    this.scales = null;
    if (!domain) {
      const words = lines.length ? "nothing to show on this axis" : "all hidden";
      draw("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "empty" }, svg, words);
      return;
    }
    const right = width - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    const sx = new Scale(...domain.x, this.logX, MARGIN.left, right);
    const sy = new Scale(...domain.y, this.logY, bottom, MARGIN.top);
    this.scales = { sx, sy };
    this.axes(sx, sy, right, bottom);
    const id = `clip-${(Chart.count = (Chart.count || 0) + 1)}`;
    const clip = draw("clipPath", { id }, draw("defs", {}, svg));
    draw("rect", { x: MARGIN.left - 4, y: MARGIN.top - 3, width: right - MARGIN.left + 8, height: bottom - MARGIN.top + 6 }, clip);
    const body = draw("g", { "clip-path": `url(#${id})` }, svg);
    const means = new Set(lines.filter((line) => line.seed === null).map((line) => line.group));
    lines.forEach((line, i) => this.line(line, all[i], means.has(line.group) && line.seed !== null, body));
    this.overlay = draw("g", {}, svg);
  }

  axes(sx, sy, right, bottom) {
    const { svg } = this;
    const xs = this.logX ? logTicks(sx.low, sx.high, this.width / 90) : linearTicks(sx.low, sx.high, this.width / 95, this.whole);
    const ys = this.logY ? logTicks(sy.low, sy.high, this.height / 45) : linearTicks(sy.low, sy.high, this.height / 50, false);
    const step = ys.length > 1 && !this.logY ? ys[1] - ys[0] : 0;
    for (const value of ys) {
      const y = sy.place(value);
      draw("line", { x1: MARGIN.left, x2: right, y1: y, y2: y, class: "gridline" }, svg);
      draw("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end", class: "ytick" }, svg, shown(value, step));
    }
    draw("line", { x1: MARGIN.left, x2: right, y1: bottom, y2: bottom, class: "axisline" }, svg);
    for (const value of xs) {
      const x = sx.place(value);
      const anchor = x > right - 12 ? "end" : "middle";
      draw("line", { x1: x, x2: x, y1: bottom, y2: bottom + 4, class: "axisline" }, svg);
      draw("text", { x, y: bottom + 16, "text-anchor": anchor, class: "xtick" }, svg, (this.xFormat || shown)(value));
    }
    draw("text", { x: right, y: bottom + 33, "text-anchor": "end", class: "xlabel" }, svg, this.xLabel);
    const at = this.reference;
    if (at && at.y > sy.low && at.y < sy.high) {
      const y = sy.place(at.y);
      draw("line", { x1: MARGIN.left, x2: right, y1: y, y2: y, class: "reference" }, svg);
      draw("text", { x: right, y: y - 4, "text-anchor": "end" }, svg, at.text);
    }
  }

  line(line, points, thin, parent) {
    const { sx, sy } = this.scales;
    if (!points.length) return;
    const places = points.map(([x, y]) => `${sx.place(x).toFixed(1)} ${sy.place(y).toFixed(1)}`);
    const look = { class: `line ${looks(line.group)}`, "data-group": line.group, d: `M${places.join("L")}` };
    if (line.group) look["stroke-dashoffset"] = 4 * line.group; /* two lines of one pattern do not hide each other */
    look["stroke-width"] = thin ? 1 : Math.max(1.6, 2.8 - 0.4 * line.group); /* what lies below stays visible */
    if (thin) look["stroke-opacity"] = 0.45;
    draw("path", look, parent);
    if (!thin && points.length <= 40) {
      for (const [x, y] of points) {
        draw("circle", { class: `dot ${looks(line.group)}`, cx: sx.place(x), cy: sy.place(y), r: this.scattered ? 4.5 : 2.4 }, parent);
      }
    }
  }

  describe(lines) {
    const ends = lines
      .filter((line) => line.y.length && (line.seed === null || !lines.some((o) => o.group === line.group && o.seed === null)))
      .slice(0, 12)
      .map((line) => `${this.names[line.group]} ${line.y[line.y.length - 1]}`);
    return `${this.title}: lines over ${this.xLabel}. Last values: ${ends.join(", ") || "none"}.`;
  }

  /* Hover */

  clear() {
    this.tip.hidden = true;
    this.at = null;
    if (this.overlay) this.overlay.replaceChildren();
  }

  hover(wanted, place) {
    if (!this.scales) return;
    const { sx, sy } = this.scales;
    const lines = this.visible.filter((line) => line.x.length);
    if (!lines.length) return;
    const near = lines.map((line) => line.x[nearest(line.x, wanted)]);
    const at = near.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
    if (at < sx.low || at > sx.high || (this.logX && at <= 0)) return;
    this.at = at;
    this.overlay.replaceChildren();
    const x = sx.place(at);
    draw("line", { x1: x, x2: x, y1: MARGIN.top, y2: this.height - MARGIN.bottom, class: "cursor" }, this.overlay);
    const rows = new Map();
    const reach = (sx.high - sx.low) * 0.05;
    for (const line of lines) {
      const i = nearest(line.x, at);
      const value = line.y[i];
      if (!rows.has(line.group)) rows.set(line.group, new Map());
      if (Math.abs(line.x[i] - at) > reach && (line.x.length > 1 || this.scattered) && (at > line.x[line.x.length - 1] || at < line.x[0])) continue;
      rows.get(line.group).set(line.seed, value);
      const y = value > 0 || !this.logY ? sy.place(value) : NaN;
      if (y >= MARGIN.top - 2 && y <= this.height - MARGIN.bottom + 2) {
        draw("circle", { class: `dot ${looks(line.group)}`, cx: sx.place(line.x[i]), cy: y, r: line.seed === null ? 4 : 3 }, this.overlay);
      }
    }
    this.fillTip(rows, at);
    this.placeTip(place === undefined ? x : place);
  }

  fillTip(rows, at) {
    const seeds = [...new Set([...rows.values()].flatMap((row) => [...row.keys()]))].filter((s) => s !== null).sort((a, b) => a - b);
    const several = [...rows.values()].some((row) => row.has(null));
    const listed = seeds.length <= MOST_SEED_COLUMNS ? seeds : [];
    const single = seeds.length === 1 && !several;
    const table = make("table");
    make("caption", {}, table, `${this.xName || this.xLabel} ${(this.xFull || this.xFormat || shown)(at)}`);
    if (!single) {
      const head = make("tr", {}, make("thead", {}, table));
      make("th", {}, head, "");
      if (several) make("th", { scope: "col" }, head, "mean");
      for (const seed of listed) make("th", { scope: "col" }, head, `s${seed}`);
    }
    const body = make("tbody", {}, table);
    const first = (row) => (row.has(null) ? row.get(null) : [...row.values()][0]);
    const order = [...rows].filter(([, row]) => row.size).sort((a, b) => first(a[1]) - first(b[1]));
    for (const [group, row] of order.slice(0, 24)) {
      const line = make("tr", {}, body);
      const name = make("th", { scope: "row" }, line);
      swatch(group, name);
      name.append(this.names[group]);
      const keys = single ? seeds : [...(several ? [null] : []), ...listed];
      for (const key of keys) {
        const value = key === null && !row.has(null) && row.size === 1 ? [...row.values()][0] : row.get(key);
        make("td", {}, line, value === undefined ? "" : this.value(value));
      }
    }
    if (order.length > 24) make("td", { colspan: "9" }, make("tr", {}, body), `and ${order.length - 24} more`);
    this.tip.replaceChildren(table);
  }

  value(value) {
    const size = Math.abs(value);
    const text = size && (size < 1e-3 || size >= 1e5) ? value.toExponential(3) : value.toFixed(this.digits);
    return text.replace("-", "\u2212");
  }

  placeTip(x) {
    this.tip.hidden = false;
    const wide = this.tip.offsetWidth;
    const left = x + 14 + wide <= this.width ? x + 14 : Math.max(0, x - 14 - wide);
    this.tip.style.left = `${Math.min(left, Math.max(0, this.width - wide))}px`;
    this.tip.style.top = `${MARGIN.top}px`;
  }

  /* Pointer and keyboard */

  listen() {
    const place = (event) => {
      const box = this.svg.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    let start = null;
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.scales) return;
      start = place(event);
      if (event.pointerType !== "touch") this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointermove", (event) => {
      if (!this.scales) return;
      const [x, y] = place(event);
      if (start && event.pointerType !== "touch" && Math.abs(x - start[0]) > 4) return this.select(start, [x, y]);
      return this.hover(this.scales.sx.value(x), x);
    });
    this.svg.addEventListener("pointerup", (event) => {
      const from = start;
      start = null;
      if (from && this.scales && event.pointerType !== "touch") this.finish(from, place(event));
    });
    this.svg.addEventListener("pointercancel", () => { start = null; this.clear(); });
    this.svg.addEventListener("pointerleave", () => { if (!start) this.clear(); });
    this.svg.addEventListener("blur", () => this.clear());
    this.svg.addEventListener("dblclick", () => this.setZoom(null, null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  box(from, to) {
    const right = this.width - MARGIN.right;
    const bottom = this.height - MARGIN.bottom;
    const keep = (v, low, high) => Math.min(high, Math.max(low, v));
    const xs = [from[0], to[0]].map((v) => keep(v, MARGIN.left, right)).sort((a, b) => a - b);
    const flat = Math.abs(from[1] - to[1]) < 16; /* a level drag chooses a range of x only */
    const ys = flat ? [MARGIN.top, bottom] : [from[1], to[1]].map((v) => keep(v, MARGIN.top, bottom)).sort((a, b) => a - b);
    return { xs, ys, flat };
  }

  select(from, to) {
    this.clear();
    const { xs, ys } = this.box(from, to);
    draw("rect", { class: "selection", x: xs[0], y: ys[0], width: xs[1] - xs[0], height: ys[1] - ys[0] }, this.overlay);
  }

  finish(from, to) {
    const { xs, ys, flat } = this.box(from, to);
    if (xs[1] - xs[0] < 6) return;
    const { sx, sy } = this.scales;
    this.setZoom([sx.value(xs[0]), sx.value(xs[1])], flat ? null : [sy.value(ys[1]), sy.value(ys[0])]);
  }

  setZoom(x, y) {
    this.zoom = { x, y };
    this.redraw();
    if (this.onZoom) this.onZoom(this);
  }

  key(event) {
    if (!this.scales) return;
    const { sx } = this.scales;
    const line = this.visible.filter((l) => l.x.length).reduce((a, b) => (b.x.length > a.x.length ? b : a));
    const inView = line.x.filter((x) => x >= sx.low && x <= sx.high && (!this.logX || x > 0));
    const i = this.at === null ? -1 : nearest(inView, this.at);
    if (event.key === "ArrowRight") this.hover(inView[Math.min(inView.length - 1, i + 1)]);
    else if (event.key === "ArrowLeft") this.hover(inView[i < 0 ? inView.length - 1 : Math.max(0, i - 1)]);
    else if (event.key === "Home") this.hover(inView[0]);
    else if (event.key === "End") this.hover(inView[inView.length - 1]);
    else if (event.key === "Escape") this.setZoom(null, null);
    else if (event.key === "+" || event.key === "-") this.keyZoom(event.key === "+" ? 0.5 : 2);
    else return;
    event.preventDefault();
  }

  keyZoom(factor) {
    const { sx } = this.scales;
    const middle = sx.place(this.at === null ? sx.value((sx.from + sx.to) / 2) : this.at);
    const half = ((sx.to - sx.from) / 2) * factor;
    const whole = new Chart.Range(this.lines, this.logX);
    const low = Math.max(whole.low, sx.value(middle - half));
    const high = Math.min(whole.high, sx.value(middle + half));
    this.setZoom(low <= whole.low && high >= whole.high ? null : [low, high], null);
  }
}

/* The range of x over all lines. */
Chart.Range = class {
  constructor(lines, log) {
    const xs = lines.flatMap((line) => line.x).filter((x) => x !== null && (!log || x > 0));
    this.low = xs.reduce((a, b) => Math.min(a, b), Infinity);
    this.high = xs.reduce((a, b) => Math.max(a, b), -Infinity);
  }
};
