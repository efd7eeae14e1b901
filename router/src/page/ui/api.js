// Calls of the router. The key is kept in this tab alone, and goes into a header, never into an address.

const KEY = "baton.key";
let onUnauthorized = () => {};

export const key = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** Who is told that a call needs a key. */
export function whenUnauthorized(listener) {
  onUnauthorized = listener;
}

/** What the router refused. `status` 0: it was not reached. */
export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The response of a call, or a `Refused`. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (key()) headers.authorization = `Bearer ${key()}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body), cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The router does not answer.");
  }
  if (response.ok) return response;
  let said;
  try {
    said = (await response.json()).error;
  } catch {
    said = undefined;
  }
  if (response.status === 401) onUnauthorized(path);
  throw new Refused(response.status, said?.message ?? `${response.status} ${response.statusText}`, said?.code);
}

export const json = async (path, options) => (await call(path, options)).json();

/** The server-sent events of a response, as `{event, data}`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "message";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          [event, data] = ["message", []];
        } else if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
