// The page: conversation, asking, stopping, trying again, and what outlives a reload.

import { $, button, clear, el } from "./dom.js";
import { ApiError, chat, models } from "./client.js";
import { Answer, toBottom, watchTokens } from "./answer.js";
import { Comparison } from "./compare.js";
import { Gauges } from "./gauges.js";
import { ORIGINS } from "./tokens.js";
import { Params } from "./params.js";
import { read, write } from "./store.js";
import { redrawStrips } from "./strip.js";

const KEPT = "deepdraft.chat"; // in sessionStorage: this tab's conversation
const LOOK = "deepdraft.look"; // in localStorage: theme, toggles
const HINT = "Enter sends, Shift+Enter breaks the line, Esc stops";
const TRIES = [
  "implement the tetris game. output HTML code directly - no explanation.",
  "What is the capital of France?",
  "Write a Python function that reverses a string.",
  "Tell me a short story about a lighthouse.",
];

const root = document.documentElement;
const turns = []; // {question, reasoning, content, note}; of the last one `view` may be running
let running = null; // AbortController of the stream
let stopped = false;
let leaving = false; // the page is being left, which cuts its streams

const say = (text) => { $("status").textContent = text; };

// ---- looks ---------------------------------------------------------------------------------

const look = { theme: "system", origins: true, compare: false, thinking: true, ...read("localStorage", LOOK) };

function applyLook() {
  if (look.theme === "system") delete root.dataset.theme;
  else root.dataset.theme = look.theme;
  root.classList.toggle("origins", look.origins);
  $("show-origins").setAttribute("aria-pressed", look.origins);
  $("compare").setAttribute("aria-pressed", look.compare);
  $("theme-name").textContent = `Theme: ${look.theme}`;
  $("thinking").checked = look.thinking;
  write("localStorage", LOOK, look);
  redrawStrips();
}

function setLook(change) {
  // What other tabs have changed meanwhile is not undone.
  Object.assign(look, read("localStorage", LOOK), change);
  applyLook();
}

// ---- the conversation ----------------------------------------------------------------------

function questionNode(text) {
  return el("div.question", {}, el("h2.vh", {}, "You"), el("p", { dir: "auto" }, text));
}

function place(turn, view) {
  turn.view?.node.remove();
  turn.view = view;
  turn.node.append(view.node);
  toBottom();
}

function addTurn(question) {
  $("welcome").hidden = true;
  const turn = { question, reasoning: "", content: "", note: "", node: el("section.turn", { "aria-label": "Turn" }) };
  turn.node.append(questionNode(question));
  turns.push(turn);
  $("log").append(turn.node);
  return turn;
}

function messages(upto) {
  const list = [];
  if (params.system) list.push({ role: "system", content: params.system });
  for (const turn of turns.slice(0, upto + 1)) {
    list.push({ role: "user", content: turn.question });
    // An answer that was stopped or failed before its first word is none.
    if (turns.indexOf(turn) < upto && turn.content) list.push({ role: "assistant", content: turn.content });
  }
  return list;
}

function keep() {
  const kept = turns.map(({ question, reasoning, content, note }) => ({ question, reasoning, content, note }));
  write("sessionStorage", KEPT, { turns: kept });
}

function recall() {
  const { turns: kept } = read("sessionStorage", KEPT);
  for (const old of Array.isArray(kept) ? kept : []) {
    if (![old?.question, old?.reasoning, old?.content, old?.note].every((text) => typeof text === "string")) continue;
    const turn = addTurn(old.question);
    Object.assign(turn, { reasoning: old.reasoning, content: old.content, note: old.note });
    const view = new Answer({ retry: () => again(turn), say });
    view.restore(old);
    place(turn, view);
  }
  toBottom();
}

// Streams one answer into a view. True when it came to its end.
async function stream(view, body, turn) {
  running = new AbortController();
  let reason = "stopped", message = "";
  try {
    await chat({ ...body, stream: true, stream_options: { include_usage: true } }, running.signal,
      (chunk) => {
        view.chunk(chunk);
        turn.reasoning = view.reasoning.text;
        turn.content = view.content.text;
      },
      (far) => view.reading(far));
    reason = view.reason ?? "stop";
  } catch (error) {
    if (leaving) message = turn.note; // the browser cut it off
    else if (error.name !== "AbortError") {
      reason = "error";
      message = error instanceof ApiError ? error.message
        : `${view.times.first ? "Broken off" : "No answer"}: ${error.message}`;
      if (error.status === 401) {
        message = "This server asks for an API key: Settings, Access.";
        $("access").open = true;
      }
    }
  }
  running = null;
  view.finish(reason, message);
  gauges.cache(view.usage);
  if (!leaving) turn.note = view.note.textContent;
  say(reason === "error" ? message : `${reason === "stopped" ? "Stopped" : "Answered"}: ${view.strip.summary()}`);
  return reason !== "error" && reason !== "stopped";
}

// What the settings make of a request, or null where they cannot be sent as they are.
function settings() {
  let body = null, hint = HINT;
  try {
    body = params.body();
  } catch (error) {
    hint = error.message;
    openPanel(true);
    error.input.focus();
    say(hint);
  }
  $("hint").textContent = hint;
  $("hint").classList.toggle("bad", !body);
  return body;
}

async function answer(turn, body) {
  body.messages = messages(turns.indexOf(turn));
  body.thinking = { type: look.thinking ? "enabled" : "disabled" };
  stopped = false;
  setBusy(true);
  gauges.wake();
  const actions = { retry: () => again(turn), say };
  turn.note = "The page was left before the end.";
  if (look.compare) {
    const versus = new Comparison(actions);
    place(turn, versus);
    body.seed ??= Math.floor(Math.random() * 2 ** 31);
    await versus.run(body, (view, own) => (stopped ? false : stream(view, own, turn)));
    if (!versus.plain.reason) versus.plain.finish("stopped");
    versus.drafted.actions.retry = actions.retry;
    versus.drafted.offer();
  } else {
    const view = new Answer(actions);
    place(turn, view);
    await stream(view, body, turn);
  }
  setBusy(false);
  keep();
}

function again(turn) {
  if (running) return;
  const body = settings();
  if (!body) return;
  // What came after it answered something else.
  for (const later of turns.splice(turns.indexOf(turn) + 1)) later.node.remove();
  answer(turn, body);
  if (!inUse(document.activeElement)) $("send").focus();
}

function stop() {
  stopped = true;
  running?.abort();
}

function setBusy(busy) {
  $("send").textContent = busy ? "Stop" : "Send";
  $("send").classList.toggle("stop", busy);
  root.classList.toggle("busy", busy);
  if (busy) say("Answering");
}

function newChat() {
  stop();
  for (const turn of turns.splice(0)) turn.node.remove();
  write("sessionStorage", KEPT, null);
  $("welcome").hidden = false;
  $("prompt").focus();
}

// ---- what can be touched -------------------------------------------------------------------

// Whether somebody who uses the keyboard is anywhere: what they were on may be gone.
const inUse = (node) => node !== document.body && node.checkVisibility();

function ask(text) {
  if (running || !text.trim()) return;
  const body = settings();
  if (!body) return;
  const turn = addTurn(text);
  $("prompt").value = "";
  fit();
  answer(turn, body);
  if (!inUse(document.activeElement)) $("send").focus();
}

function fit() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = Math.min(box.scrollHeight + 2, innerHeight * 0.4) + "px";
}

function openPanel(open) {
  root.classList.toggle("panel-open", open);
  $("panel-toggle").setAttribute("aria-expanded", open);
  if ($("panel").contains(document.activeElement) && !inUse(document.activeElement)) $("panel-toggle").focus();
}

let served = ""; // the model's name
let trouble = "connecting"; // why there is none

async function connect() {
  try {
    const list = await models();
    params.defaults(list);
    served = list[0].id;
  } catch (error) {
    served = "";
    trouble = error instanceof ApiError ? error.message : "no connection";
    if (error.status === 401) $("access").open = true;
    if (error.status === 429 || error.status >= 500) setTimeout(connect, 1000);
  }
  showState(served !== "" || trouble !== "no connection");
}

let lost = false; // the server was gone when last asked

// `reachable`: the server has just answered something.
function showState(reachable) {
  if (reachable && lost && served) {
    lost = false;
    connect(); // it may be another one, with another model
    return;
  }
  lost = !reachable;
  $("state-dot").classList.toggle("up", reachable && served !== "");
  $("state").textContent = reachable ? served || trouble : "no connection";
  if (reachable && trouble === "no connection" && !served) {
    trouble = "connecting";
    connect();
  }
}

const params = new Params($("params"), connect);
// A browser lends one server six connections: where all tabs together stream over as many, the
// counters wait, and the stream shows that the server is there.
const gauges = new Gauges($("gauges"), (answers) => showState(answers || running !== null));

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) stop();
  else ask($("prompt").value);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask($("prompt").value);
});
$("prompt").addEventListener("input", fit);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (running) stop();
  else openPanel(false);
});
$("clear").addEventListener("click", newChat);
$("thinking").addEventListener("change", () => setLook({ thinking: $("thinking").checked }));
$("show-origins").addEventListener("click", () => setLook({ origins: !look.origins }));
$("compare").addEventListener("click", () => setLook({ compare: !look.compare }));
$("theme").addEventListener("click", () => {
  const order = ["system", "light", "dark"];
  setLook({ theme: order[(order.indexOf(look.theme) + 1) % 3] });
  say(`Theme: ${look.theme}`);
});
$("panel-toggle").addEventListener("click", () => openPanel(!root.classList.contains("panel-open")));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawStrips);
addEventListener("beforeunload", () => {
  leaving = true;
  setTimeout(() => { leaving = false; }, 2000); // it may be called off
});
addEventListener("pagehide", () => { if (turns.length) keep(); });

for (const [kind, [name, meaning]] of Object.entries(ORIGINS)) {
  $("legend").append(el("li", {}, el(`span.chip.${kind}`, {}, name), " " + meaning));
}
for (const text of TRIES) $("tries").append(button(text, () => ask(text), { class: "try" }));
clear($("tip"));
watchTokens($("log"));
applyLook();
recall();
connect();
$("prompt").focus();
