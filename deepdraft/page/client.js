// Talks to the server: one streamed answer, lists, counters.

import { read, write } from "./store.js";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const PATIENCE_MS = 10000; // with lists and counters

const kept = read("sessionStorage", "deepdraft.access").key;
let apiKey = typeof kept === "string" ? kept : "";

export function setKey(key) {
  apiKey = key.trim();
  // For this tab only; a key is not written to disk by us.
  write("sessionStorage", "deepdraft.access", apiKey ? { key: apiKey } : null);
}

export const hasKey = () => apiKey !== "";

function headers(more = {}) {
  // What a browser does not let into a header is often invisible, as copied from a document.
  if (/[^\x20-\x7e]/.test(apiKey)) throw new ApiError("the API key holds a character that no key has: type it anew", 0);
  return apiKey ? { ...more, authorization: `Bearer ${apiKey}` } : more;
}

// What an error of the API says, whatever it is made of.
function told({ error }) {
  const what = error.message ?? error;
  return typeof what === "string" ? what : JSON.stringify(what);
}

async function refuse(response) {
  let message = "";
  try {
    message = told(await response.json());
  } catch { /* no JSON: the status says enough */ }
  throw new ApiError(message || `the server answered ${response.status}`, response.status);
}

export async function models() {
  const response = await fetch("v1/models", { headers: headers(), signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!response.ok) await refuse(response);
  return (await response.json()).data;
}

// The counters of /metrics as a map from "name{labels}" to a number.
export async function metrics() {
  const response = await fetch("metrics", { signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!response.ok) await refuse(response);
  const values = new Map();
  for (const line of (await response.text()).split("\n")) {
    if (!line || line[0] === "#") continue;
    const cut = line.lastIndexOf(" ");
    values.set(line.slice(0, cut), Number(line.slice(cut + 1)));
  }
  return values;
}

// What the server says while it reads a long prompt, in comments of the stream.
const READING = /^: prompt (\d+) of (\d+) tokens, (\d+) a second, (\d+) s left$/;

// POSTs a chat body and calls onChunk for each chunk until the stream ends, and before that
// onReading({done, total, rate, left}) while the prompt is read. Throws ApiError, or the AbortError
// of `signal`.
export async function chat(body, signal, onChunk, onReading) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) await refuse(response);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    held += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      const far = READING.exec(line);
      if (far) {
        const [done, total, rate, left] = far.slice(1).map(Number);
        onReading({ done, total, rate, left });
      }
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      let chunk = null;
      try {
        chunk = JSON.parse(data);
      } catch { /* nor is null a chunk */ }
      if (!chunk) throw new ApiError("the server sent what is no JSON object", 0);
      if (chunk.error) throw new ApiError(told(chunk), 0);
      onChunk(chunk);
    }
    if (done) throw new ApiError("the stream broke off before the end of the answer", 0);
  }
}
