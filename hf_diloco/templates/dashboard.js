"use strict";
// Replaces what changes every few seconds; what the reader has unfolded stays so.
const live = document.querySelector("#live");
const note = document.querySelector("#note");
const interval = 1000 * Number(document.body.dataset.interval);
let shown = "";

function show(text) {
  if (text !== shown) {
    const unfolded = new Set([...live.querySelectorAll("details[open]")].map((part) => part.id));
    live.innerHTML = shown = text;
    live.querySelectorAll("details").forEach((part) => { part.open = unfolded.has(part.id); });
  }
}

async function refresh() {
  if (!document.hidden) {
    const now = new Date().toLocaleTimeString();
    try {
      const answer = await fetch("live", { cache: "no-store", signal: AbortSignal.timeout(60000) });
      if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
      show(await answer.text());
      note.textContent = `as of ${now}`;
      note.className = "";
    } catch (error) {
      note.textContent = `${now}: no answer from hf-diloco dashboard (${error.message}); what you see is older`;
      note.className = "bad";
    }
  }
  setTimeout(refresh, interval);
}

setTimeout(refresh, interval);
