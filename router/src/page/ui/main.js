// Joins the panes: keys of the API, keys of the keyboard, and which pane is seen on a small screen.

import * as api from "./api.js";
import * as chat from "./chat.js";
import * as cluster from "./cluster.js";
import { byId, setText, show } from "./dom.js";
import * as requests from "./requests.js";

const PANES = ["chat", "cluster", "requests"];
const MODELS_MS = 5000;

function pane(name, focus) {
  document.body.dataset.pane = name;
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-pressed", String(button.dataset.pane === name));
  }
  if (!focus) return;
  if (name === "chat") chat.focusPrompt();
  else if (name === "requests") (document.querySelector("#list button.open") ?? byId("requests")).focus();
  else byId(name).focus();
}

/** What is the matter, in the header. */
function health(status) {
  const node = byId("health");
  const problems = status?.problems ?? [];
  node.className = !status ? "" : problems.length ? "bad" : "good";
  let text = "";
  if (problems.length === 1) text = "1 problem";
  else if (problems.length) text = `${problems.length} problems`;
  else if (status) text = "Nothing is the matter";
  setText(node, text);
  document.title = problems.length ? `(${problems.length}) Baton` : "Baton";
}

let askedFor = null;

function askForKey(why) {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  setText(byId("key-why"), why ?? "");
  byId("key-input").value = api.key();
  dialog.showModal();
  byId("key-input").select();
}

async function connect() {
  setText(byId("key"), api.key() ? "API key ✓" : "API key");
  cluster.follow();
  requests.load();
  try {
    await chat.loadModels();
  } catch {
    // Told by the key dialog, or tried again below.
  }
}

function start() {
  api.whenUnauthorized((path) => {
    // Once for each key: the cluster may be seen by operators alone, and the chat works without.
    if (!path.startsWith("v1/") || askedFor === api.key()) return;
    askedFor = api.key();
    askForKey(api.key() ? "This router does not know the key." : "This router asks for an API key.");
  });
  chat.start({
    openRequest: (id) => {
      pane("requests");
      requests.openById(id);
    },
    workersOf: requests.workersOf,
  });
  cluster.start(health);
  requests.start();
  for (const button of document.querySelectorAll("nav button")) {
    button.addEventListener("click", () => pane(button.dataset.pane, true));
  }
  byId("key").addEventListener("click", () => askForKey());
  byId("key-dialog").addEventListener("close", (event) => {
    const said = event.target.returnValue;
    const typed = byId("key-input").value.trim();
    byId("key-input").value = "";
    if (said === "cancel" || said === "") return;
    api.setKey(said === "use" ? typed : "");
    askedFor = null;
    connect();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("key-dialog").open) chat.stop();
    const writes = event.target.closest("input, textarea, select, dialog");
    if (writes || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") {
      event.preventDefault();
      pane("chat", true);
    } else if (PANES[Number(event.key) - 1]) {
      event.preventDefault();
      pane(PANES[Number(event.key) - 1], true);
    } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && event.target === byId("requests")) {
      event.preventDefault();
      document.querySelector("#list button.open")?.focus();
    }
  });
  setInterval(() => {
    // Models come and go; a router without keys that restarts gets its chat back.
    if (!document.hidden && askedFor === null) chat.loadModels().catch(() => {});
  }, MODELS_MS);
  pane("chat");
  show(document.body, true);
  connect();
}

start();
