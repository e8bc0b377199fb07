// A text as one or two models read it.

import { $, CLASSES, LETTERS, make, nats, post, sideName } from "./dom.js";
import { TokenRow, predicted } from "./tokens.js";

const STRONG = 3; // nats of difference at which the colour is full
const SLIGHT = 0.15; // and below which a token has no underline
const SURPRISING = 8; // nats: the same for one run alone
const aside = $("compare").querySelector("aside");
let runs = [];
let apart = "";
let samples = Math.floor(Math.random() * 1e6);
let busy = false;

export function prepare(given) {
  $("ask").textContent = given.length > 1 ? "Compare" : "Read";
}

export function update(given, reason) {
  runs = given;
  const waiting = runs.filter((run) => !run.loaded).map((run) => run.name);
  const before = apart;
  apart = reason || (waiting.length ? `No checkpoint yet: ${waiting.join(" and ")}.` : "");
  if (apart || before) $("answer").textContent = apart;
  $("ask").disabled = $("sample").disabled = Boolean(apart) || busy;
}

function row(name, ...values) {
  return make("tr", {}, name, ...values.map((value) => make("td", { class: "number" }, value)));
}

function table(summary, steps) {
  const two = runs.length > 1;
  const head = ["", "step", "nats per token", "bits per byte", ...(two ? ["more certain"] : [])];
  const body = summary.sides.map((side, i) => row(make("td", {}, sideName(runs, i)), steps[i].toLocaleString("en"),
    side.nats_per_token.toFixed(4), side.bits_per_byte.toFixed(4), ...(two ? [summary.surer[i]] : [])));
  const even = summary.even ? `; equally certain of ${summary.even}` : "";
  return make("table", {}, make("caption", {}, `${summary.tokens} tokens, ${summary.bytes} bytes${even}`),
    make("thead", {}, make("tr", {}, ...head.map((text, i) => make("th", { class: i ? "number" : "" }, text)))),
    make("tbody", {}, ...body));
}

function look(token) {
  if (token.difference === undefined) return { kind: "a slight", share: -token.sides[0].logprob / SURPRISING };
  const size = Math.abs(token.difference);
  const side = CLASSES[token.difference > 0 ? 0 : 1];
  return { kind: size < SLIGHT ? `${side} slight` : side, share: size / STRONG };
}

function paint(element, share) {
  element.style.setProperty("--strength", `${Math.round(5 + 50 * Math.min(1, share))}%`);
  return element;
}

function legend() {
  if (runs.length < 2) return make("p", { class: "legend quiet" }, "The stronger the colour, the greater the surprise.");
  const entry = (i, line) => {
    const token = paint(make("span", { class: `token ${CLASSES[i]}` }, LETTERS[i]), 0.6);
    return make("span", {}, token, ` ${runs[i].name} is more certain (${line} line)`);
  };
  return make("p", { class: "legend" }, entry(0, "solid"), entry(1, "dashed"));
}

function title(token) {
  if (token.difference === undefined) return "";
  return `${LETTERS[token.difference > 0 ? 0 : 1]} more certain by ${nats(Math.abs(token.difference))}`;
}

async function working(task) {
  if (busy || apart) return;
  busy = true;
  $("answer").className = "quiet";
  $("answer").textContent = "…";
  $("ask").disabled = $("sample").disabled = true;
  try {
    await task();
    $("answer").textContent = "";
  } catch (error) {
    $("answer").className = "bad";
    $("answer").textContent = error.message;
  }
  busy = false;
  $("ask").disabled = $("sample").disabled = Boolean(apart);
}

async function compare() {
  const found = await (await post("/api/compare", { text: $("text").value })).json();
  const tokens = new TokenRow("Tokens of the text", (token) => aside.replaceChildren(...predicted(runs, token)));
  for (const token of found.tokens) {
    const { kind, share } = look(token);
    paint(tokens.add(token, kind, title(token)), share);
  }
  $("summary").replaceChildren(table(found.summary, found.steps));
  $("read").replaceChildren(legend(), tokens.box);
}

$("ask").addEventListener("click", () => working(compare));
$("sample").addEventListener("click", () => working(async () => {
  $("text").value = (await (await post("/api/sample", { number: (samples += 1) })).json()).text;
  await compare();
}));
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) working(compare);
});
