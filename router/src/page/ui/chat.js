// The chat: a client of /v1/chat/completions like any other.

import { Refused, call, events, json } from "./api.js";
import { byId, el, setText, show } from "./dom.js";
import * as format from "./format.js";

/** Messages of the conversation, as they are sent. */
let conversation = [];
/** Stops the answer that is being read. */
let stopping = null;
/** Shows a request among the recent ones. */
let openRequest = () => {};
/** The workers of a request, where this caller may know them. */
let workersOf = async () => null;

/** Higher prompts are folded. */
const FOLD_PX = 200;
const [MORE, LESS] = ["Show all", "Show less"];
const log = byId("log");
const prompt = byId("prompt");

export async function loadModels() {
  const models = (await json("v1/models")).data;
  const select = byId("model");
  const chosen = select.value;
  select.replaceChildren(...models.map((model) => el("option", { value: model.id }, model.id)));
  if (models.some((model) => model.id === chosen)) select.value = chosen;
  if (!models.length) select.append(el("option", { value: "" }, "no model is ready"));
  select.disabled = models.length < 2;
  return models.length;
}

/** Follows the text as long as the reader is at its end. */
function following(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function message(role, text) {
  const body = el("div", { class: "text" }, text);
  const shown = el("article", { class: role }, el("h3", {}, role === "user" ? "You" : "Model"), body);
  following(() => log.append(shown));
  // A long prompt is folded: its answer is what the reader waits for.
  if (role === "user" && body.clientHeight > FOLD_PX) {
    body.classList.add("folded");
    const all = el("button", { type: "button", class: "link", on: { click: () => setText(all, body.classList.toggle("folded") ? MORE : LESS) } }, MORE);
    following(() => shown.append(all));
  }
  return { shown, body };
}

/** An answer as it grows: text, reasoning apart from it, and its figures. */
class Answer {
  constructor() {
    const { shown, body } = message("assistant", "");
    this.shown = shown;
    this.body = body;
    this.meta = el("p", { class: "meta dim" });
    this.text = "";
    this.thought = "";
    this.deltas = 0;
    this.sent = performance.now();
    this.first = null;
    this.due = false;
    shown.setAttribute("aria-busy", "true");
    shown.append(this.meta);
  }

  take(chunk) {
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    if (delta.content || delta.reasoning_content) {
      this.first ??= performance.now();
      this.deltas += 1;
      this.last = performance.now();
    }
    this.text += delta.content ?? "";
    this.thought += delta.reasoning_content ?? "";
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    this.timings = choice?.timings ?? chunk.timings ?? this.timings;
    this.crossed = choice?.crossed_classes ?? chunk.crossed_classes ?? this.crossed;
    this.usage = chunk.usage ?? this.usage;
    // Once for each frame, however many tokens come.
    if (!this.due) {
      this.due = true;
      requestAnimationFrame(() => this.draw());
    }
  }

  draw() {
    this.due = false;
    following(() => {
      if (this.thought) {
        if (!this.reasoning) {
          this.reasoning = el("div", { class: "text" });
          this.details = el("details", { class: "reasoning", open: true }, el("summary", {}, "Reasoning"), this.reasoning);
          this.body.before(this.details);
        }
        setText(this.reasoning, this.thought);
        if (this.text && !this.folded) {
          this.folded = true;
          this.details.open = false;
        }
      }
      setText(this.body, this.text);
      if (this.first && !this.ended) {
        setText(this.meta, `${this.deltas} tokens${this.rate(this.deltas)}`);
      }
    });
  }

  rate(tokens) {
    const s = (this.last - this.first) / 1000;
    return tokens > 1 && s > 0 ? ` at ${format.perSecond((tokens - 1) / s)} tokens/s` : "";
  }

  /** Its figures, once it has ended. */
  end(requestId, note) {
    this.ended = true;
    this.draw();
    this.shown.removeAttribute("aria-busy");
    const t = this.timings ?? {};
    const facts = [];
    const ttft = t.ttft_us ? format.us(t.ttft_us) : this.first && format.ms(this.first - this.sent);
    if (ttft) facts.push(`TTFT ${ttft}`);
    const tokens = this.usage?.completion_tokens ?? this.deltas;
    if (tokens) facts.push(`${format.count(tokens)} tokens${this.rate(tokens)}`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (this.usage) {
      const from = cached ? `, ${format.count(cached)} cached` : "";
      const took = t.prefill_us ? ` in ${format.us(t.prefill_us)}` : "";
      facts.push(`prefill ${format.count(this.usage.prompt_tokens)} tokens${from}${took}`);
    }
    if (t.transfer_bytes) {
      facts.push(`KV ${format.bytes(t.transfer_bytes)} moved, ${format.us(t.exposed_us)} exposed`);
    }
    if (this.finish === "length") facts.push("ended by its length");
    if (this.crossed?.length) facts.push(`several numerics classes: ${this.crossed.join(", ")}`);
    if (note) facts.push(note);
    const path = el("span");
    const open = requestId && el("button", { type: "button", class: "link", on: { click: () => openRequest(requestId) } }, "waterfall");
    this.meta.replaceChildren(facts.join(" · "), path, " ", open ?? "");
    if (requestId && !note) workersOf(requestId).then((workers) => following(() => setText(path, workers ? ` · ${workers}` : "")));
  }

  fail(error) {
    this.ended = true;
    this.draw();
    this.shown.removeAttribute("aria-busy");
    this.shown.classList.add("failed");
    setText(this.meta, error.message);
    this.meta.setAttribute("role", "alert");
  }
}

function request() {
  const system = byId("system").value.trim();
  const body = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    stream: true, stream_options: { include_usage: true },
  };
  if (byId("model").value) body.model = byId("model").value;
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  body.temperature = number("temperature");
  body.max_tokens = number("max-tokens");
  if (byId("prefill-policy").value) body.prefill_policy = byId("prefill-policy").value;
  return body;
}

async function send() {
  const text = prompt.value.trim();
  if (!text || stopping) return;
  // Another chat may begin before this answer ends.
  const mine = conversation;
  mine.push({ role: "user", content: text });
  const asked = message("user", text);
  prompt.value = "";
  grow();
  const answer = new Answer();
  stopping = new AbortController();
  busy(true);
  let requestId = null;
  try {
    const response = await call("v1/chat/completions", { body: request(), signal: stopping.signal });
    requestId = response.headers.get("x-request-id");
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(200, chunk.error.message, chunk.error.code);
      answer.take(chunk);
    }
    mine.push({ role: "assistant", content: answer.text });
    answer.end(requestId);
  } catch (error) {
    if (error.name === "AbortError") {
      mine.push({ role: "assistant", content: answer.text });
      answer.end(requestId, "stopped");
    } else {
      // The question is the reader's again.
      mine.pop();
      answer.fail(error);
      if (!answer.text) {
        asked.shown.remove();
        if (!prompt.value) prompt.value = text;
        grow();
      }
    }
  } finally {
    stopping = null;
    busy(false);
  }
}

export function stop() {
  stopping?.abort();
}

export const focusPrompt = () => prompt.focus();

function busy(is) {
  show(byId("send"), !is);
  show(byId("stop"), is);
}

/** As high as its text, within the limits of the style. */
function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

export function start(handlers) {
  openRequest = handlers.openRequest;
  workersOf = handlers.workersOf;
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt.addEventListener("input", grow);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  byId("stop").addEventListener("click", stop);
  byId("new").addEventListener("click", () => {
    stop();
    conversation = [];
    log.replaceChildren();
    prompt.focus();
  });
}
