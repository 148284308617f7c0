// For tests and the curious: what goes on, as events on the document. docs/web-page.md has more.

/** What `?debug=tap,loop` in the address asks for; null without `debug`. */
export function debugOptions() {
  const asked = new URLSearchParams(location.search).get("debug");
  if (asked === null) return null;
  const words = asked.split(",");
  return { tap: words.includes("tap"), loop: words.includes("loop") };
}

/**
 * Dispatch "mosstalk" events {what, when, ...} for all that passes.
 * @param {import("./wire.js").Wire} wire @param {import("./sound.js").Sound} sound
 * @param {import("./talk.js").Talk} talk
 */
export function probe(wire, sound, talk) {
  const pass = (what, source, type, read) =>
    source.addEventListener(type, ({ detail }) => {
      const shown = { what, when: performance.now(), ...read(detail) };
      document.dispatchEvent(new CustomEvent("mosstalk", { detail: shown }));
    });
  pass("sent", wire, "sent", (event) => ({ event }));
  pass("received", wire, "message", (event) => ({ event }));
  pass("tap", sound, "tap", (tap) => tap);
  pass("started", sound, "started", (started) => started);
  pass("ended", sound, "ended", (ended) => ended);
  pass("dry", sound, "dry", (dry) => dry);
  pass("turn", talk, "turn", ({ turn }) => ({ turn: { ...turn, answerMs: turn.answerMs } }));
}
