// The event log: what goes over the wire, for those who write a client of their own.

import { save } from "./record.js";

const MOST_EVENTS = 300;
const LONGEST_TEXT = 200;
/** Fields that hold sound as base64. */
const SOUND = ["audio", "delta"];

/** @typedef {{at: number, way: "↑" | "↓", type: string, count: number, event: object}} Entry */

export class Events {
  /** @type {{entry: Entry, line: HTMLLIElement}[]} oldest first */
  shown = [];

  /**
   * @param {HTMLOListElement} list @param {HTMLInputElement} hold whether nothing is to move
   * @param {import("./wire.js").Wire} wire
   */
  constructor(list, hold, wire) {
    this.list = list;
    this.hold = hold;
    wire.addEventListener("sent", ({ detail }) => this.put("↑", detail));
    wire.addEventListener("message", ({ detail }) => this.put("↓", detail));
  }

  /** Events of one type that follow one another share a line. */
  put(way, event) {
    if (this.hold.checked) return;
    const last = this.shown.at(-1);
    if (last?.entry.type === event.type && last.entry.way === way) {
      last.entry.count++;
      last.entry.event = short(event);
    } else {
      const entry = { at: performance.now(), way, type: event.type, count: 1, event: short(event) };
      this.shown.push({ entry, line: this.begin(entry) });
    }
    if (this.shown.length > MOST_EVENTS) this.shown.shift().line.remove();
    this.show(this.shown.at(-1));
  }

  show({ entry, line }) {
    const { at, way, type, count } = entry;
    const times = count > 1 ? ` × ${count}` : "";
    const below = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 40;
    line.querySelector("summary").textContent = `${(at / 1000).toFixed(3)} ${way} ${type}${times}`;
    if (below) this.list.scrollTop = this.list.scrollHeight;
  }

  begin(entry) {
    const line = document.createElement("li");
    const fold = document.createElement("details");
    const text = document.createElement("pre");
    fold.append(document.createElement("summary"), text);
    fold.addEventListener("toggle", () => {
      text.textContent = fold.open ? JSON.stringify(entry.event, null, 2) : "";
    });
    line.append(fold);
    this.list.append(line);
    return line;
  }

  clear() {
    this.shown = [];
    this.list.replaceChildren();
  }

  save() {
    const entries = this.shown.map(({ entry }) => ({ ...entry, at: Math.round(entry.at) }));
    save(new Blob([JSON.stringify(entries, null, 2)], { type: "application/json" }), "events.json");
  }
}

/** An event without its sound, and with long texts cut. */
function short(event) {
  const isSound = event.type.includes("audio.delta") || event.type === "input_audio_buffer.append";
  return JSON.parse(
    JSON.stringify(event, (name, value) => {
      if (typeof value !== "string" || value.length <= LONGEST_TEXT) return value;
      const length = `… ${value.length} characters`;
      return isSound && SOUND.includes(name) ? length : value.slice(0, LONGEST_TEXT) + length;
    }),
  );
}
