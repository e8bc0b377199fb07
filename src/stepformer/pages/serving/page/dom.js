// Elements, numbers and requests. Text from outside only ever becomes a text node.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

export function drawing(tag, attributes = {}, text = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return element;
}

export const LETTERS = ["A", "B"];
export const CLASSES = ["a", "b"];

// What a run is, where its name does not say so.
export const titled = (run) => (run.title === run.name ? "" : run.title);

// A run's name; the letter and its colour only where there are two.
export function sideName(runs, index) {
  return make("span", { class: "side", "data-side": runs.length > 1 ? LETTERS[index] : null }, runs[index].name);
}

export function percent(p) {
  if (p >= 0.9995) return "100 %";
  if (p >= 0.1) return `${(100 * p).toFixed(1)} %`;
  return p >= 1e-4 ? `${(100 * p).toPrecision(2)} %` : p.toExponential(0);
}

export const nats = (value) => value.toFixed(value < 0.01 && value > 0 ? 4 : 3);
export const whole = (value) => Math.round(value).toLocaleString("en");

export function duration(seconds) {
  const s = Math.round(seconds);
  if (s < 90) return `${s} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
  return `${Math.round(s / 86400)} days`;
}

async function answer(response) {
  if (response.ok) return response;
  let sentence = `The server answered with status ${response.status}.`;
  try { sentence = (await response.json()).error; } catch { /* no sentence came with it */ }
  throw new Error(sentence);
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer: was it stopped?");
  }
  return answer(response);
}

export const get = async (path) => (await request(path)).json();

export function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

// The JSON objects of an answer, one a line, as they arrive.
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}
