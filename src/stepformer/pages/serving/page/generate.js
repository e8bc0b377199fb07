// A prompt goes in, text comes out of every run, token by token.

import { $, lines, make, post, sideName } from "./dom.js";
import { TokenRow, generated } from "./tokens.js";

const ENDS = { stop: "the document ended", length: "as many tokens as asked for", context: "the context is full" };
const aside = $("generate").querySelector("aside");
let outputs = [];
let running = null;

export function prepare(runs) {
  outputs = runs.map((run, i) => {
    const status = make("span", { class: "quiet", role: "status" });
    const copy = make("button", { class: "small", hidden: true }, "Copy");
    const row = new TokenRow(`Text of ${run.name}`, (token) => aside.replaceChildren(...generated(runs, i, token)));
    const output = { status, row, copy, text: "" };
    copy.addEventListener("click", () => navigator.clipboard.writeText(output.text));
    const head = make("header", {}, sideName(runs, i), make("span", {}, status, " ", copy));
    $("outputs").append(make("article", { class: "output" }, head, row.box));
    return output;
  });
}

// Runs without weights cannot be asked.
export function update(runs) {
  runs.forEach((run, i) => {
    if (!run.loaded) say(outputs[i], "no checkpoint yet; the first one is taken as soon as it is there");
    else if (outputs[i].waiting) say(outputs[i], "");
    outputs[i].waiting = !run.loaded;
  });
  $("start").disabled = running !== null || runs.every((run) => !run.loaded);
}

function say(output, sentence, bad = false) {
  output.status.textContent = sentence;
  output.status.className = bad ? "bad" : "quiet";
}

function number(id) {
  const input = $(id);
  const name = input.parentElement.textContent.trim();
  if (input.validity.badInput) throw new Error(`${name} should be a number.`);
  return input.value === "" ? null : Number(input.value);
}

function settings() {
  const seed = number("seed") ?? Math.floor(Math.random() * 2 ** 31); // one for both, so that only the models differ
  const drawing = { temperature: number("temperature"), top_k: number("top_k"), top_p: number("top_p"), seed };
  return { prompt: $("prompt").value, tokens: number("max"), ...drawing };
}

async function one(side, asked, signal) {
  const output = outputs[side];
  if (output.waiting) return;
  output.row.clear(asked.prompt);
  output.copy.hidden = true;
  say(output, "…");
  let count = 0;
  let note = "";
  try {
    for await (const event of lines(await post("/api/generate", { ...asked, side }, signal))) {
      if (event.error) throw new Error(event.error);
      if (event.note) note = `. ${event.note}`;
      if (event.token) {
        output.row.add(event.token);
        say(output, `${(count += 1)} tokens${note}`);
      }
      if (event.end) {
        say(output, `${count} tokens: ${ENDS[event.end]}${note}`);
        output.text = asked.prompt + event.text;
        output.copy.hidden = false;
      }
    }
  } catch (error) {
    if (signal.aborted) say(output, `stopped after ${count} tokens${note}`);
    else say(output, error.message, true);
  }
}

async function start() {
  if (running || $("start").disabled) return;
  let asked;
  try {
    asked = settings();
  } catch (error) {
    $("used").textContent = error.message;
    return;
  }
  running = new AbortController();
  $("start").disabled = true;
  $("stop").disabled = false;
  $("used").textContent = `seed ${asked.seed}`;
  await Promise.all(outputs.map((_, side) => one(side, asked, running.signal)));
  running = null;
  $("start").disabled = outputs.every((output) => output.waiting);
  $("stop").disabled = true;
}

$("start").addEventListener("click", start);
$("stop").addEventListener("click", () => running?.abort());
$("generate").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) start();
});
