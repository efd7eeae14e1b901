// The cluster as it is now: problems, workers, and what moves between them.

import { Refused, call, events } from "./api.js";
import { byId, el, reconcile, setText, show } from "./dom.js";
import * as format from "./format.js";
import * as handoffs from "./handoffs.js";

/** Samples of a sparkline: a minute of events. */
const SAMPLES = 120;
const RETRY_MS = [500, 1000, 2000, 5000, 10_000];
/** The router sends an event twice a second. */
const SILENT_MS = 5000;

let current = null;
let failures = 0;
let heard = 0;
let refusal = "";
let onStatus = () => {};
const history = new Map();

export function start(listener) {
  onStatus = listener;
  setInterval(() => {
    if (document.hidden) return;
    handoffs.draw();
  }, 200);
  setInterval(lively, 1000);
  // A page that nobody sees takes no stream.
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : follow()));
}

/** Opens the stream, again if there is one. */
export async function follow() {
  close();
  const mine = (current = new AbortController());
  while (current === mine) {
    try {
      const response = await call("cluster/events", { signal: mine.signal });
      if (current !== mine) return;
      refused("");
      // A stream begins with the last minute.
      handoffs.forget();
      for await (const { event, data } of events(response)) {
        if (current !== mine) return;
        failures = 0;
        heard = performance.now();
        const told = JSON.parse(data);
        if (event === "handoffs") handoffs.ended(told);
        else if (event === "cluster") {
          draw(told.status);
          handoffs.open(told.open_handoffs);
        }
      }
    } catch (error) {
      if (current !== mine || error.name === "AbortError") return;
      // Asking again changes nothing before the key does.
      if (error instanceof Refused && [401, 403, 404].includes(error.status)) {
        current = null;
        refused(error.message);
        return;
      }
      setText(byId("live"), error instanceof Refused ? error.message : "The stream broke; connecting again.");
    }
    await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
    failures += 1;
  }
}

function close() {
  current?.abort();
  current = null;
}

function refused(message) {
  refusal = message;
  setText(byId("cluster-refused"), message);
  show(byId("cluster-refused"), Boolean(message));
  if (message) {
    show(byId("cluster-body"), false);
    setText(byId("live"), "");
    onStatus(null);
  }
}

function lively() {
  if (refusal || !heard || document.hidden) return;
  const silent = performance.now() - heard;
  const late = silent > SILENT_MS;
  byId("cluster-body").classList.toggle("stale", late);
  if (late) setText(byId("live"), `last heard ${format.age(silent)} ago`);
}

function draw(status) {
  show(byId("cluster-body"), true);
  byId("cluster-body").classList.remove("stale");
  setText(byId("live"), "live");
  figures(status);
  const problems = byId("problems");
  show(problems, status.problems.length > 0);
  reconcile(problems, status.problems, (p) => JSON.stringify([p.worker, p.kind]), () => el("li"), (node, problem) =>
    setText(node, problem.worker ? `${problem.worker}: ${problem.text}` : problem.text));
  const body = byId("workers").tBodies[0];
  const models = new Set(status.workers.map((worker) => worker.model));
  const rows = [...status.workers].sort((a, b) =>
    b.role.localeCompare(a.role) || a.instance.localeCompare(b.instance, "en", { numeric: true }));
  for (const known of history.keys()) {
    if (!rows.some((worker) => keyOf(worker) === known)) history.delete(known);
  }
  reconcile(body, rows, keyOf, makeRow, (node, worker) => drawRow(node, worker, models.size > 1));
  onStatus(status);
}

const keyOf = (worker) => `${worker.instance}@${worker.incarnation}`;
const sum = (workers, of) => workers.reduce((all, worker) => all + (of(worker) ?? 0), 0);

function figures({ router, workers }) {
  const live = workers.filter((worker) => worker.state !== "gone");
  const by = (role) => live.filter((worker) => worker.role === role);
  const shown = [
    ["Running", `${format.count(router?.running)}`, `of ${format.count(router?.running_max)}`],
    ["Queued", format.count(router?.queued), ""],
    ["TTFT median", format.ms(router?.ttft_p50_ms), router?.ttft_count ? `${router.ttft_count} in a minute` : ""],
    ["TTFT p95", format.ms(router?.ttft_p95_ms), ""],
    ["Prefill", format.perSecond(sum(by("prefill"), (w) => w.tokens_per_s)), "tokens/s"],
    ["Decode", format.perSecond(sum(by("decode"), (w) => w.tokens_per_s)), "tokens/s"],
    ["KV moved", `${format.bytes(sum(by("prefill"), (w) => w.kv_bytes_per_s))}/s`, ""],
  ];
  if (router?.etcd_reachable === false) shown.push(["etcd", "silent", `view ${format.age(router.view_age_ms)} old`]);
  reconcile(byId("figures"), shown, ([name]) => name, ([name]) => {
    const node = el("div", {}, el("dt", {}, name), el("dd", {}, el("b"), " ", el("span", { class: "dim" })));
    return node;
  }, (node, [, value, rest]) => {
    setText(node.querySelector("b"), value);
    setText(node.querySelector("span"), rest);
    node.querySelector("span").classList.toggle("rest", /^\d/.test(rest));
  });
}

const SVG = "http://www.w3.org/2000/svg";

function makeRow(worker) {
  const cell = (name, ...children) => el("td", { class: name }, ...children);
  const parts = {
    name: el("b"), model: el("span", { class: "dim model" }), state: el("span"), since: el("span", { class: "dim" }),
    batch: el("span", { class: "figure" }), batchBar: el("i", { class: "bar" }, el("i")),
    waiting: cell("num waiting"), pool: el("span", { class: "figure" }),
    blocks: Object.fromEntries(["referenced", "cached", "quarantined"].map((name) => [name, el("i", { class: name })])),
    tokens: el("span", { class: "figure" }), kv: cell("num kv"), heard: cell("num heard"),
    spark: document.createElementNS(SVG, "svg"), line: document.createElementNS(SVG, "polyline"),
  };
  parts.spark.setAttribute("viewBox", `0 0 ${SAMPLES - 1} 16`);
  parts.spark.setAttribute("preserveAspectRatio", "none");
  parts.spark.setAttribute("aria-hidden", "true");
  parts.spark.append(parts.line);
  parts.poolBar = el("i", { class: "bar pool" }, ...Object.values(parts.blocks));
  const row = el("tr", { class: worker.role },
    el("th", { scope: "row", class: "worker" }, parts.name, " ", parts.model),
    cell("state", parts.state, " ", parts.since),
    cell("batch", parts.batchBar, parts.batch), parts.waiting, cell("pool", parts.poolBar, parts.pool),
    cell("num tokens", parts.spark, parts.tokens), parts.kv, parts.heard);
  row.parts = parts;
  return row;
}

function drawRow(row, worker, severalModels) {
  const { parts } = row;
  row.classList.toggle("bad", !["ready", "starting", "draining"].includes(worker.state));
  setText(parts.name, worker.instance);
  setText(parts.model, severalModels ? worker.model : "");
  parts.name.title = `${worker.model}, pool ${worker.pool}, ${worker.endpoint}, class ${worker.class}, protocol ${worker.protocol}, incarnation ${worker.incarnation}`;
  setText(parts.state, worker.state);
  setText(parts.since, format.age(worker.since_ms));
  const batch = worker.running === null ? "–" : `${worker.running}/${worker.running_max}`;
  setText(parts.batch, worker.still_ms > 2000 ? `${batch}, a step takes ${format.age(worker.still_ms)}` : batch);
  parts.batchBar.firstChild.style.width = `${share(worker.running, worker.running_max)}%`;
  setText(parts.waiting, format.count(worker.waiting));
  const blocks = worker.blocks;
  const used = blocks?.total ? (100 * (blocks.referenced + blocks.quarantined)) / blocks.total : null;
  setText(parts.pool, used === null ? "–" : `${Math.round(used)}%`);
  for (const [name, part] of Object.entries(parts.blocks)) part.style.width = `${share(blocks?.[name], blocks?.total)}%`;
  parts.poolBar.title = blocks
    ? `${blocks.total} blocks: ${blocks.referenced} in use, ${blocks.cached} cached, ${blocks.quarantined} quarantined, ${blocks.free} free`
    : "";
  setText(parts.tokens, format.perSecond(worker.tokens_per_s));
  setText(parts.kv, worker.kv_bytes_per_s === null ? "–" : `${format.bytes(worker.kv_bytes_per_s)}/s`);
  setText(parts.heard, format.age(worker.heard_ms));
  const past = history.get(keyOf(worker)) ?? [];
  past.push(worker.tokens_per_s ?? 0);
  history.set(keyOf(worker), past.slice(-SAMPLES));
  const most = Math.max(1, ...past);
  const from = SAMPLES - Math.min(past.length, SAMPLES);
  const points = past.slice(-SAMPLES).map((value, at) => `${from + at},${(15 - (14 * value) / most).toFixed(1)}`);
  parts.line.setAttribute("points", points.join(" "));
}

const share = (part, whole) => (part && whole ? Math.min(100, (100 * part) / whole) : 0);
