// What was said by both sides, in words and sound, to be played again and saved.

import { joined, RATE, wav } from "./tape.js";

/** Sound of 30 minutes, 86 MB, is kept; before that the oldest goes. */
const MOST_SAMPLES = 30 * 60 * RATE;
const BETWEEN = new Int16Array(0.4 * RATE);

/** @typedef {{who: string, text: string, pieces: Int16Array[], samples: number, heardMs?: number}} Line */

export class Record {
  constructor() {
    this.clear();
  }

  clear() {
    this.startedAt = new Date();
    this.samples = 0;
    /** @type {Map<string, Line>} in the order in which they began */
    this.lines = new Map();
  }

  /** Add to a line, as the log does. Returns the lines whose sound had to go. @returns {string[]} */
  put({ id, who, text, more, sound, heardMs }) {
    const line = this.lines.get(id) ?? { who, text: "", pieces: [], samples: 0 };
    this.lines.set(id, line);
    if (text !== undefined) line.text = text;
    if (more) line.text += more;
    if (heardMs !== undefined) line.heardMs = heardMs;
    if (!sound?.length) return [];
    line.pieces.push(sound);
    line.samples += sound.length;
    this.samples += sound.length;
    return [...this.dropped(line)];
  }

  *dropped(newest) {
    for (const [id, line] of this.lines) {
      if (this.samples <= MOST_SAMPLES || line === newest) return;
      if (!line.samples) continue;
      this.samples -= line.samples;
      Object.assign(line, { pieces: [], samples: 0 });
      yield id;
    }
  }

  /** What was heard of a line. @param {string} id @returns {Int16Array} */
  pcm(id) {
    const { pieces, heardMs } = this.lines.get(id);
    const whole = joined(pieces);
    return heardMs === undefined ? whole : whole.subarray(0, Math.round((heardMs * RATE) / 1000));
  }

  /** @param {string} id */
  wav(id) {
    return wav(this.pcm(id));
  }

  /** Everything that was heard, one after the other. */
  wholeWav() {
    const parts = [...this.lines.keys()].map((id) => this.pcm(id)).filter((pcm) => pcm.length);
    return wav(joined(parts.flatMap((pcm) => [pcm, BETWEEN])));
  }

  /** All that is known, for programs. @param {object} facts of the server @param {object[]} turns */
  json(facts, turns) {
    const lines = [...this.lines].map(([id, { who, text, samples, heardMs }]) => ({
      id,
      role: who === "you" ? "user" : "assistant",
      text: text.trim(),
      sound_ms: Math.round((1000 * samples) / RATE),
      ...(heardMs === undefined ? {} : { heard_ms: Math.round(heardMs) }),
    }));
    const whole = { started_at: this.startedAt.toISOString(), ...facts, lines, turns };
    return new Blob([JSON.stringify(whole, null, 2)], { type: "application/json" });
  }
}

/** Have the browser keep a file. @param {Blob} blob @param {string} name */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  // The browser has opened it by then.
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
