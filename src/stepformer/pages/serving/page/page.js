// The frame: which runs there are, which of their weights are loaded, and which tab is open.

import { $, get, make, post, sideName, titled } from "./dom.js";
import * as compare from "./compare.js";
import * as generate from "./generate.js";
import * as watch from "./watch.js";

const EVERY = 3000; // milliseconds
const TABS = ["generate", "compare", "watch"];
const tried = []; // by run: the checkpoint that was taken on its own accord last, so that a bad one is not tried again
let prepared = false;
let unloadable = ""; // what was wrong with the checkpoint that was to be taken

function open(name) {
  for (const tab of TABS) {
    const chosen = tab === name;
    $(tab).hidden = !chosen;
    $(`tab-${tab}`).setAttribute("aria-selected", String(chosen));
    $(`tab-${tab}`).tabIndex = chosen ? 0 : -1;
  }
  if (name === "watch") watch.start();
  else watch.stop();
  history.replaceState(null, "", `${location.pathname}#${name}`); // without the token: the cookie has it now
}

function problem(sentence) {
  $("problem").hidden = !sentence;
  $("problem").textContent = sentence;
}

async function load(side) {
  try {
    await post("/api/load", { side });
    unloadable = "";
    await look();
  } catch (error) {
    unloadable = error.message;
  }
  problem(unloadable);
}

const words = (checkpoint) => `${checkpoint.kind}, step ${checkpoint.step.toLocaleString("en")}`;

function chip(runs, i) {
  const run = runs[i];
  const about = [titled(run), run.loaded ? words(run.loaded) : "no checkpoint yet"].filter(Boolean).join(", ");
  const state = make("span", { class: "quiet" }, ` ${about} `);
  const item = make("li", {}, sideName(runs, i), state);
  if (run.newer && run.loaded) {
    const button = make("button", { class: "small" }, `Load ${words(run.newer)}`);
    button.addEventListener("click", () => load(i));
    item.append(button);
    $("following").hidden = false;
  }
  return item;
}

// The first checkpoint is taken as soon as it is there; later ones when asked.
function takeNew(runs) {
  runs.forEach((run, i) => {
    const name = run.newer && words(run.newer);
    if (name && ($("follow").checked || !run.loaded) && tried[i] !== name) {
      tried[i] = name;
      load(i);
    }
  });
}

let last = "";

async function look() {
  const { runs, apart } = await get("/api/state");
  if (!prepared) {
    prepared = true;
    document.title = `stepformer: ${runs.map((run) => run.name).join(", ")}`;
    generate.prepare(runs);
    compare.prepare(runs);
    const asked = location.hash.slice(1);
    open(TABS.includes(asked) ? asked : runs.some((run) => run.loaded) ? "generate" : "watch");
  }
  const now = JSON.stringify(runs);
  if (now !== last) { // else a button would be exchanged under the pointer
    last = now;
    $("runs").replaceChildren(...runs.map((_, i) => chip(runs, i)));
  }
  generate.update(runs);
  compare.update(runs, apart);
  takeNew(runs);
}

async function keepLooking() {
  try {
    if (!document.hidden) {
      await look();
      problem(unloadable);
    }
  } catch (error) {
    problem(error.message);
  }
  setTimeout(keepLooking, EVERY);
}

$("follow").addEventListener("change", look);
for (const tab of TABS) $(`tab-${tab}`).addEventListener("click", () => open(tab));
$("tabs").addEventListener("keydown", (event) => {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!move) return;
  const at = TABS.findIndex((tab) => !$(tab).hidden);
  const next = TABS[(at + move + TABS.length) % TABS.length];
  open(next);
  $(`tab-${next}`).focus();
});
keepLooking();
