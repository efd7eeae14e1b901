// One request as `baton trace` draws it: a row for each span, a bar over the time of the whole.

import { el } from "./dom.js";

const ms = (ns) => (ns / 1e6).toFixed(2);

/** The colour of a span: its phase, on any process. */
function kind(name) {
  const phase = name.split(".")[0];
  if (phase === "prefill" || phase === "kv") return "prefill";
  return phase === "decode" ? "decode" : "router";
}

/** The waterfall of `/cluster/requests/{id}`. */
export function waterfall(told) {
  const total = Math.max(told.total_ns, 1);
  const scale = el("span", { class: "track scale" });
  for (let quarter = 0; quarter <= 4; quarter += 1) {
    const at = (told.total_ns / 4) * quarter;
    const mark = el("span", {}, total >= 1e8 ? String(Math.round(at / 1e6)) : ms(at));
    mark.style.left = `${quarter * 25}%`;
    scale.append(mark);
  }
  const head = el("div", { class: "span head", "aria-hidden": "true" },
    el("span", {}, "Phase"), el("span", {}, "Process"), el("span", { class: "num" }, "Start ms"),
    el("span", { class: "num" }, "ms"), scale);
  const notes = [
    ...told.moved.map(([process, by]) => el("p", { class: "dim" }, `${process}: its clock differs; moved by ${ms(by)} ms`)),
    ...told.silent.map((silent) => el("p", { class: "bad" }, `missing: worker ${silent}`)),
  ];
  return el("div", { class: "waterfall" }, el("p", { class: "dim facts" }, told.facts.join(" · ")), ...notes, head,
    ...told.rows.map((row) => span(row, total)));
}

function span(row, total) {
  const bar = el("i");
  const left = Math.min(99.9, (100 * row.start_ns) / total);
  bar.style.left = `${left}%`;
  bar.style.width = `${(100 * row.length_ns) / total}%`;
  const name = el("span", { class: "name" }, row.name);
  name.style.paddingLeft = `${row.depth}em`;
  const attributes = Object.entries(row.attributes).map(([key, value]) =>
    el("tr", {}, el("th", { scope: "row" }, key), el("td", {}, value)));
  return el("details", { class: row.failed ? `${kind(row.name)} failed` : kind(row.name) },
    el("summary", { class: "span" }, name, el("span", { class: "process" }, row.process),
      el("span", { class: "num" }, ms(row.start_ns)), el("span", { class: "num" }, ms(row.length_ns)),
      el("span", { class: "track", title: `${ms(row.start_ns)} ms + ${ms(row.length_ns)} ms` }, bar),
      row.note ? el("span", { class: "note" }, row.note) : undefined),
    attributes.length ? el("table", {}, el("tbody", {}, ...attributes)) : undefined);
}
