// Handoffs of KV as they happen: a lane for each pair of workers, over the last minute.

import { byId, colour, el, reconcile, setText } from "./dom.js";
import * as format from "./format.js";

const WINDOW_MS = 60_000;
/** Further pairs are counted, not drawn. */
const LANES_MAX = 12;

/** Handoffs of the last minute, by pair. */
const lanes = new Map();
const list = byId("handoffs");

const keyOf = (prefill, decode) => JSON.stringify([prefill, decode]);

function lane(prefill, decode) {
  const key = keyOf(prefill, decode);
  if (!lanes.has(key)) lanes.set(key, { key, prefill, decode, open: 0, ended: [] });
  return lanes.get(key);
}

/** Handoffs that ended. */
export function ended(handoffs) {
  const now = performance.now();
  for (const handoff of handoffs) {
    lane(handoff.prefill, handoff.decode).ended.push({ ...handoff, at: now - handoff.ago_ms });
  }
}

/** How many are open now, by pair. */
export function open(pairs) {
  for (const of of lanes.values()) of.open = 0;
  for (const { prefill, decode, open } of pairs) lane(prefill, decode).open = open;
  update();
}

export function forget() {
  lanes.clear();
  update();
}

function make(of) {
  const canvas = el("canvas", { "aria-hidden": "true" });
  const node = el("div", { role: "listitem", class: "lane" },
    el("span", { class: "pair" }, of.prefill, el("span", { class: "arrow" }, " → "), of.decode),
    el("span", { class: "open num" }), canvas, el("span", { class: "sum num" }));
  node.parts = { canvas, open: node.querySelector(".open"), sum: node.querySelector(".sum") };
  return node;
}

const median = (numbers) => [...numbers].sort((a, b) => a - b)[Math.floor((numbers.length - 1) / 2)];

function update() {
  const now = performance.now();
  for (const of of lanes.values()) {
    of.ended = of.ended.filter((handoff) => now - handoff.at < WINDOW_MS);
    if (!of.open && !of.ended.length) lanes.delete(of.key);
  }
  const busiest = [...lanes.values()].sort((a, b) => b.ended.length + b.open - a.ended.length - a.open);
  const shown = busiest.slice(0, LANES_MAX).sort((a, b) => a.key.localeCompare(b.key, "en", { numeric: true }));
  reconcile(list, shown, (of) => of.key, make, (node, of) => {
    setText(node.parts.open, of.open ? `${of.open} open` : "");
    const bytes = of.ended.reduce((sum, handoff) => sum + handoff.bytes, 0);
    const exposed = median(of.ended.map((handoff) => handoff.exposed_us));
    setText(node.parts.sum, of.ended.length ? `${of.ended.length} × ${format.bytes(bytes / of.ended.length)}, exposed ${format.us(exposed)}` : "");
    node.parts.sum.title = of.ended.length
      ? `${of.ended.length} handoffs in the last minute, ${format.bytes(bytes)} in all; half of them exposed at most ${format.us(exposed)}; ${of.ended.at(-1).transport}`
      : "";
  });
  list.dataset.more = busiest.length > LANES_MAX ? `and ${busiest.length - LANES_MAX} more pairs` : "";
  list.dataset.none = lanes.size ? "" : "No KV has moved in the last minute. Prompts that a decode worker prefills itself need no handoff.";
  draw();
}

/** Draws the lanes at this moment. */
export function draw() {
  const now = performance.now();
  const colours = { bar: colour("prefill"), exposed: colour("bad"), line: colour("line") };
  for (const [key, node] of list.baton ?? []) {
    const of = lanes.get(key);
    if (of) drawLane(node.parts.canvas, of, now, colours);
  }
}

function drawLane(canvas, of, now, colours) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width) return;
  if (canvas.width !== Math.round(width * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const at = canvas.getContext("2d");
  at.setTransform(ratio, 0, 0, ratio, 0, 0);
  at.clearRect(0, 0, width, height);
  at.fillStyle = colours.line;
  for (let s = 0; s <= 60; s += 10) at.fillRect(Math.min(width - 1, (s / 60) * width), 0, 1, height);
  const x = (time) => width - ((now - time) / WINDOW_MS) * width;
  const most = Math.max(1, ...of.ended.map((handoff) => handoff.bytes));
  for (const handoff of of.ended) {
    const end = x(handoff.at);
    const long = Math.max(2, (handoff.transfer_us / 1000 / WINDOW_MS) * width);
    const high = Math.max(3, (handoff.bytes / most) * (height - 2));
    at.fillStyle = colours.bar;
    at.globalAlpha = 0.55;
    at.fillRect(end - long, height - high, long, high);
    at.globalAlpha = 1;
    const exposed = Math.max(1, (handoff.exposed_us / 1000 / WINDOW_MS) * width);
    at.fillRect(end - exposed, height - high, exposed, high);
  }
}
