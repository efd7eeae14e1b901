// Requests that ended lately; one of them opens as a waterfall.

import { Refused, json } from "./api.js";
import { byId, el, reconcile, setText, show } from "./dom.js";
import * as format from "./format.js";
import { waterfall } from "./waterfall.js";

const EVERY_MS = 2000;
const LIMIT = 100;

let all = [];
let refused = false;
/** While a waterfall is open, the rows stay where they are. */
let held = null;
/** Key of the row whose waterfall is open. */
let opened = null;
const body = byId("list").tBodies[0];

export function start() {
  byId("filter").addEventListener("input", draw);
  byId("newer").addEventListener("click", () => {
    close();
    draw();
  });
  body.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (!step || !event.target.matches("button.open")) return;
    event.preventDefault();
    const buttons = [...body.querySelectorAll("button.open")];
    buttons[buttons.indexOf(event.target) + step]?.focus();
  });
  setInterval(() => {
    if (!document.hidden && !refused) load();
  }, EVERY_MS);
}

/** Reads the list. */
export async function load() {
  try {
    all = (await json(`cluster/requests?limit=${LIMIT}`)).requests;
    refused = false;
    show(byId("requests-refused"), false);
    draw();
  } catch (error) {
    if (!(error instanceof Refused) || ![401, 403].includes(error.status)) return;
    refused = true;
    close();
    show(byId("list"), false);
    show(byId("none"), false);
    setText(byId("requests-refused"), error.message);
    show(byId("requests-refused"), true);
  }
}

const keyOf = (request) => `${request.trace_id}/${request.request_id}/${request.started_ms}`;

function matches(request) {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = [request.request_id, request.trace_id, request.model, request.prefill, request.decode, request.error,
    request.finish_reason, request.placement, request.slow ? "slow" : "", request.retries ? "retried" : ""].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

function draw() {
  if (refused) return;
  const rows = (held ?? all).filter(matches);
  const newer = held ? all.filter((request) => !held.some((old) => keyOf(old) === keyOf(request))).filter(matches).length : 0;
  setText(byId("newer"), `${newer} newer`);
  show(byId("newer"), newer > 0);
  show(byId("list"), rows.length > 0);
  setText(byId("none"), all.length ? "No recent request matches." : "No request has ended at this router yet.");
  show(byId("none"), !rows.length);
  const longest = Math.max(1, ...rows.map((request) => request.total_ms));
  const items = rows.flatMap((request) => {
    const row = { key: keyOf(request), request, longest };
    return row.key === opened?.key ? [row, { key: `${row.key}/detail`, detail: opened.node }] : [row];
  });
  reconcile(body, items, (item) => item.key, (item) => item.detail ?? make(item.request), (node, item) => {
    if (item.detail) return;
    node.classList.toggle("opened", item.key === opened?.key);
    node.parts.open.setAttribute("aria-expanded", String(item.key === opened?.key));
    node.parts.phases.style.width = `${(100 * item.request.total_ms) / item.longest}%`;
  });
}

function make(request) {
  const open = el("button", { type: "button", class: "open link", "aria-expanded": "false", title: request.request_id }, request.request_id);
  const phases = el("i", { class: "phases" });
  const cell = (name, ...children) => el("td", { class: name }, ...children);
  const path = [request.prefill, request.decode].filter(Boolean).join(" → ");
  // A client that went away is no failure.
  const left = request.error === "cancelled";
  const failed = request.error && !left;
  const state = [failed && `failed: ${request.error}`, request.retries && `${request.retries} retried`, request.slow && "slow"].filter(Boolean).join(", ");
  const row = el("tr", { class: failed ? "failed" : "", on: { click: (event) => event.target.closest("button.open, tr") && toggle(request) } },
    cell("time", format.clock(request.started_ms + request.total_ms)), cell("id", open),
    cell("path", path, state ? el("span", { class: "bad" }, ` ${state}`) : "", left ? el("span", { class: "dim" }, " cancelled") : ""),
    cell("num in", format.count(request.prompt_tokens), request.cached_tokens ? el("span", { class: "dim", title: "cached" }, ` (${format.count(request.cached_tokens)})`) : ""),
    cell("num out", format.count(request.completion_tokens)), cell("num ttft", format.ms(request.ttft_ms)),
    cell("num total", format.ms(request.total_ms)), cell("num kv", format.bytes(request.kv_bytes)),
    cell("num exposed", format.ms(request.exposed_ms)), cell("spread", phases));
  for (const phase of bars(request)) {
    const bar = el("i", { class: phase.name, title: `${phase.name} ${format.ms(phase.ms)}` });
    bar.style.left = `${(100 * phase.start) / Math.max(request.total_ms, 1e-6)}%`;
    bar.style.width = `${(100 * phase.ms) / Math.max(request.total_ms, 1e-6)}%`;
    phases.append(bar);
  }
  row.parts = { open, phases };
  return row;
}

/** Queue, prefill and decode of a request: from its arrival, to its first token, to its last. */
function bars(request) {
  const { queue_ms: queue, ttft_ms: ttft, total_ms: total } = request;
  if (ttft === null) return [{ name: "queue", start: 0, ms: total }];
  const waited = Math.min(queue ?? 0, ttft);
  return [
    { name: "queue", start: 0, ms: waited },
    { name: "prefill", start: waited, ms: ttft - waited },
    { name: "decode", start: ttft, ms: Math.max(0, total - ttft) },
  ];
}

function close() {
  opened = null;
  held = null;
}

async function toggle(request) {
  const key = keyOf(request);
  if (opened?.key === key) {
    close();
    draw();
    return;
  }
  const cell = el("td", { colspan: 10 }, el("p", { class: "dim" }, "…"));
  const node = el("tr", { class: "detail" }, cell);
  held ??= all;
  opened = { key, node };
  draw();
  try {
    const id = request.request_id || request.trace_id;
    cell.replaceChildren(waterfall(await json(`cluster/requests/${encodeURIComponent(id)}`)));
    // All of it, if it fits below its row.
    if (opened?.key === key) {
      const pane = byId("requests");
      if (node.getBoundingClientRect().bottom > pane.getBoundingClientRect().bottom) {
        node.previousElementSibling.scrollIntoView({ block: "start" });
      }
    }
  } catch (error) {
    cell.replaceChildren(el("p", { class: "bad" }, error.message));
  }
}

/** Opens the waterfall of a request of this id. A request is among the recent ones shortly after its end. */
export async function openById(id) {
  for (let tries = 0; tries < 10; tries += 1) {
    await load();
    const found = all.find((request) => request.request_id === id);
    if (found || refused) {
      if (!found) return;
      byId("filter").value = "";
      close();
      await toggle(found);
      body.baton?.get(keyOf(found))?.parts.open.focus();
      return;
    }
    await new Promise((done) => setTimeout(done, 200));
  }
}

/** `prefill-0 → decode-1` of a request that has just ended; null where this caller may not know. */
export async function workersOf(id) {
  for (let tries = 0; tries < 5 && !refused; tries += 1) {
    await load();
    const found = all.find((request) => request.request_id === id);
    if (found) return [found.prefill, found.decode].filter(Boolean).join(" → ");
    await new Promise((done) => setTimeout(done, 200));
  }
  return null;
}
