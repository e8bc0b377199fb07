// Curves, speed and checkpoints of the runs, as their folders say now.

import { $, CLASSES, LETTERS, drawing, duration, get, make, sideName, titled, whole } from "./dom.js";

const EVERY = 2000; // milliseconds
const HEIGHT = 320, LEFT = 48, RIGHT = 22, TOP = 10, BOTTOM = 28;
let watching = 0; // the number of the present watch; 0: none
let watches = 0;
let latest = []; // what was drawn last
let shown = []; // its points on the screen, to read off

export function start() {
  watching = watches += 1;
  tick(watching);
}

export function stop() {
  watching = 0;
}

async function tick(mine) {
  if (mine !== watching) return;
  if (!document.hidden) {
    try {
      draw((await get("/api/watch")).runs);
    } catch (error) {
      $("reading").textContent = error.message;
    }
  }
  setTimeout(() => tick(mine), EVERY);
}

function draw(runs) {
  latest = runs;
  $("curves").replaceChildren(curves(runs));
  $("trainings").replaceChildren(...runs.map((run, i) => training(runs, i)));
}

// Round numbers that divide a range into about `count` parts.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((s) => s >= raw);
  const first = Math.ceil(low / step);
  const length = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

function range(runs, steps) {
  const points = runs.flatMap((run) => [...run.train, ...run.evals]);
  // the fall from chance may leave the picture once there is something to see after it
  const late = points.filter(([step]) => step >= 0.1 * steps);
  const losses = (late.length >= 20 ? late : points).map(([, loss]) => loss);
  const low = Math.min(...losses), high = Math.max(...losses);
  const margin = 0.06 * (high - low) || 0.1;
  return [low - margin, high + margin];
}

function curves(runs) {
  const width = Math.max(240, $("curves").clientWidth);
  const heard = { role: "img", "aria-label": "Loss against steps; the numbers are in the tables below" };
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, ...heard });
  shown = [];
  if (!runs.some((run) => run.train.length || run.evals.length)) {
    svg.append(drawing("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "Nothing measured yet."));
    return svg;
  }
  const steps = Math.max(...runs.map((run) => run.step), 1);
  const [low, high] = range(runs, steps);
  const x = (step) => LEFT + (step / steps) * (width - LEFT - RIGHT);
  const y = (loss) => TOP + ((high - loss) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  for (const value of ticks(low, high, 5)) {
    svg.append(drawing("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(drawing("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, value));
  }
  for (const value of ticks(0, steps, Math.min(8, width / 90))) {
    svg.append(drawing("text", { x: x(value), y: HEIGHT - 8, "text-anchor": "middle" }, value.toLocaleString("en")));
  }
  const clip = drawing("clipPath", { id: "inside" });
  clip.append(drawing("rect", { x: LEFT, y: TOP, width: width - LEFT, height: HEIGHT - TOP - BOTTOM }));
  const inside = drawing("g", { "clip-path": "url(#inside)" });
  svg.append(clip, inside);
  runs.forEach((run, i) => {
    const path = (points) => points.map(([step, loss]) => `${x(step).toFixed(1)},${y(loss).toFixed(1)}`).join(" ");
    inside.append(drawing("polyline", { class: CLASSES[i], points: path(run.train) }));
    inside.append(drawing("polyline", { class: `${CLASSES[i]} eval`, points: path(run.evals) }));
    for (const [step, loss] of run.evals) {
      inside.append(drawing("circle", { class: CLASSES[i], cx: x(step), cy: y(loss), r: 3.5 }));
    }
    const named = (what) => ([step, loss]) => ({ at: x(step), step, loss, what, name: run.name, side: i });
    shown.push(...run.train.map(named("training")), ...run.evals.map(named("validation")));
  });
  svg.addEventListener("pointermove", (event) => readOff(svg, event));
  return svg;
}

function readOff(svg, event) {
  const box = svg.getBoundingClientRect();
  const at = event.clientX - box.left;
  const nearest = new Map();
  for (const point of shown) {
    const key = `${point.side} ${point.what}`; // two runs may have folders of one name
    if (!nearest.has(key) || Math.abs(point.at - at) < Math.abs(nearest.get(key).at - at)) nearest.set(key, point);
  }
  const letter = (p) => (latest.length > 1 ? `${LETTERS[p.side]} ` : "");
  const words = (p) => `${letter(p)}${p.name}, ${p.what}: ${p.loss.toFixed(4)} at step ${whole(p.step)}`;
  $("reading").replaceChildren(...[...nearest.values()].map((point) => make("span", {}, words(point))));
}

function fact(name, value) {
  return make("tr", {}, make("th", {}, name), make("td", {}, value));
}

function evaluation(found) {
  return found ? `${found.loss.toFixed(4)} at step ${whole(found.step)}` : "none yet";
}

function checkpoints(run) {
  if (!run.checkpoints.length) return make("p", { class: "quiet" }, "No checkpoint yet.");
  const number = (value) => make("td", { class: "number" }, value);
  const rows = run.checkpoints.map((c) => make("tr", {}, make("td", {}, c.kind === "best" ? "best" : "to continue"),
    number(whole(c.step)), number(c.loss === null ? "-" : c.loss.toFixed(4)), make("td", {}, `${duration(c.age)} ago`)));
  const names = ["checkpoint", "step", "loss", "written"];
  const head = make("tr", {}, ...names.map((name, i) => make("th", { class: i % 3 ? "number" : "" }, name)));
  return make("table", {}, make("caption", {}, "kept now"), make("thead", {}, head), make("tbody", {}, ...rows));
}

function training(runs, i) {
  const run = runs[i];
  const left = !run.seconds_left ? "-" : `about ${duration(run.seconds_left)} of training`;
  const facts = make("table", {}, make("tbody", {},
    fact("step", `${whole(run.step)} of ${whole(run.steps)}, ${whole(run.tokens)} tokens`),
    fact("training loss", run.loss === null ? "-" : run.loss.toFixed(4)),
    fact("last evaluation", evaluation(run.last_eval)),
    fact("best evaluation", evaluation(run.best_eval)),
    fact("speed", run.tokens_per_second === null ? "-" : `${whole(run.tokens_per_second)} tokens/s`),
    fact("trained for", duration(run.seconds)),
    fact("left", left),
    fact("last line", run.age === null ? "-" : `${duration(run.age)} ago`)));
  const missing = `${run.damaged} lines of metrics.jsonl cannot be read and are left out.`;
  const damaged = run.damaged ? make("p", { class: "bad" }, missing) : null;
  return make("article", { "aria-label": run.name },
    make("h2", {}, sideName(runs, i), make("span", { class: "quiet" }, `  ${titled(run)}`)),
    make("p", { class: run.status === "failed" ? "bad" : "quiet" }, run.sentence),
    make("progress", { max: run.steps, value: run.step, "aria-label": "steps done" }), facts, damaged,
    checkpoints(run));
}

window.addEventListener("resize", () => watching && draw(latest));
