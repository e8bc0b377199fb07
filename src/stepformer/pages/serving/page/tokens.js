// Tokens in a row, to point at or to walk through with the arrow keys, and the tables about one of them.

import { CLASSES, LETTERS, make, nats, percent, sideName } from "./dom.js";

// What a token is called in a table: blanks made visible.
export function label(token) {
  if (token.special) return token.special;
  return token.text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

export class TokenRow {
  // `show` is called with the data of the token pointed at.
  constructor(name, show) {
    this.data = new Map();
    this.show = show;
    this.held = null; // the token that has the keyboard's focus
    this.box = make("div", { class: "tokens", role: "listbox", "aria-label": name, "aria-orientation": "horizontal" });
    this.box.addEventListener("pointerover", (event) => this.point(event.target));
    this.box.addEventListener("pointerleave", () => this.held && this.point(this.held));
    this.box.addEventListener("focusin", (event) => { this.held = event.target; this.point(event.target); });
    this.box.addEventListener("keydown", (event) => this.walk(event));
  }

  clear(given = "") {
    this.data.clear();
    this.held = null;
    this.box.replaceChildren(...(given ? [make("span", { class: "given" }, given)] : []));
  }

  add(token, extra = "", title = "") {
    const kind = token.special ? " special" : token.escaped ? " escaped" : "";
    const shown = token.special || token.text.replaceAll("\n", "↵\n");
    const heard = { role: "option", "aria-selected": "false", "aria-label": `${label(token)} ${title}` };
    const place = { tabindex: this.data.size ? "-1" : "0" }; // one stop for the Tab key, arrows from there
    const element = make("span", { class: `token${kind} ${extra}`, ...heard, ...place }, shown);
    this.data.set(element, token);
    this.box.append(element);
    return element;
  }

  point(element) {
    const token = this.data.get(element);
    if (!token) return;
    this.box.querySelector(".shown")?.classList.remove("shown");
    this.box.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    element.classList.add("shown");
    element.setAttribute("aria-selected", "true");
    this.show(token);
  }

  walk(event) {
    const all = [...this.data.keys()];
    const at = all.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || to === undefined || !all[to]) return;
    event.preventDefault();
    all[at].tabIndex = -1;
    all[to].tabIndex = 0;
    all[to].focus();
  }
}

function heads(runs, indices) {
  return make("tr", {}, make("th", {}, ""), ...indices.map((i) => make("th", { scope: "col" }, sideName(runs, i))));
}

function facts(sides) {
  const row = (name, value) =>
    make("tr", {}, make("th", { scope: "row" }, name), ...sides.map((side) => make("td", {}, value(side))));
  return [
    row("probability", (side) => percent(side.probability)),
    row("nats", (side) => nats(-side.logprob)),
    row("rank", (side) => side.rank.toLocaleString("en")),
    row("entropy", (side) => nats(side.entropy)),
  ];
}

// The likeliest tokens of each side; the one that stands in the text is bold.
function alternatives(token, sides, indices) {
  const count = Math.max(...sides.map((side) => side.alternatives.length));
  const cell = (other, i) => {
    if (!other) return make("td", {});
    const bar = make("span", { class: `bar ${CLASSES[indices[i]]}` });
    bar.style.width = `${100 * other.probability}%`;
    const name = make("span", { class: "piece" }, label(other));
    const pair = make("span", { class: "pair" }, name, make("span", {}, percent(other.probability)));
    return make("td", { class: other.id === token.id ? "own" : "" }, pair, bar);
  };
  return Array.from({ length: count }, (_, k) => make("tr", {},
    k ? null : make("th", { scope: "rowgroup", rowspan: count }, "likeliest"),
    ...sides.map((side, i) => cell(side.alternatives[k], i))));
}

function attention(sides) {
  if (!sides.some((side) => side.attention?.some((value) => value !== null))) return [];
  const count = Math.max(...sides.map((side) => side.attention.length));
  const cell = (side, layer) => {
    const value = typeof side.attention[layer] === "number" ? nats(side.attention[layer]) : "-";
    const name = make("span", { class: "quiet" }, `layer ${layer}`);
    return make("td", {}, make("span", { class: "pair" }, name, make("span", {}, value)));
  };
  return Array.from({ length: count }, (_, layer) => make("tr", {},
    layer ? null : make("th", { scope: "rowgroup", rowspan: count }, "attention entropy"),
    ...sides.map((side) => cell(side, layer))));
}

function about(runs, indices, token, sides) {
  const group = (...rows) => (rows.length ? make("tbody", {}, ...rows) : null);
  const head = runs.length > 1 ? make("thead", {}, heads(runs, indices)) : null;
  const groups = [facts(sides), alternatives(token, sides, indices), attention(sides)];
  return make("table", { class: "about" }, head, ...groups.map((rows) => group(...rows)));
}

// Of a new token: how likely it was.
export function generated(runs, index, token) {
  return [make("p", { class: "named" }, label(token)), about(runs, [index], token, [token.side])];
}

// Of a token of a text: how each model predicted it.
export function predicted(runs, token) {
  const parts = [make("p", { class: "named" }, label(token))];
  if (token.difference !== undefined) {
    const side = token.difference > 0 ? 0 : 1;
    const surer = `${LETTERS[side]} ${runs[side].name}`; // best and last of one run have one name
    const size = nats(Math.abs(token.difference));
    const unlike = `${surer} is more certain, by ${size} nats.`;
    parts.push(make("p", {}, token.difference === 0 ? "Both are equally certain." : unlike));
  }
  return [...parts, about(runs, token.sides.map((_, i) => i), token, token.sides)];
}
