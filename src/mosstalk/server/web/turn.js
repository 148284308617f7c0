// What is known of one turn: when the user had finished, and when the answer came, as heard here.

/** @typedef {"held" | "hands-free" | "typed" | "unasked"} TurnKind */

/** All times are in ms of the page's clock. */
export class Turn {
  /** How many there have been in this conversation. */
  static count = 0;
  /** @type {number | undefined} when the answer's first sample left the loudspeaker */
  soundAt;
  /** @type {number | undefined} when the first of its text was here */
  textAt;
  /** @type {number | undefined} the detector's wait, which `answerMs` has in it */
  waitMs;
  /** @type {number | undefined} how much of the answer was heard */
  heardMs;
  /** @type {number | undefined} from the audio thread to the loudspeaker, as the browser says */
  outputMs;
  /** The server's own figures, as response.done has them. */
  server = {};
  gaps = 0;
  status = "asked";

  /**
   * @param {TurnKind} kind
   * @param {number | undefined} endedAt when the user had finished: let go, sent, or spoke last
   * @param {number} [spokenMs]
   */
  constructor(kind, endedAt, spokenMs) {
    this.number = ++Turn.count;
    this.kind = kind;
    this.endedAt = endedAt;
    this.spokenMs = spokenMs;
  }

  /** From the user's end to the answer: its first sound, else its first text. */
  get answerMs() {
    const at = this.soundAt ?? this.textAt;
    return at === undefined || this.endedAt === undefined ? undefined : at - this.endedAt;
  }

  /** The answer was played to its end. @param {number} ms */
  heard(ms) {
    this.heardMs = ms;
  }

  /** The answer was cut off after so much of it. @param {number} ms */
  cut(ms) {
    this.heardMs = ms;
    this.wasCut = true;
  }

  /** @param {any} response as response.done has it */
  done(response) {
    const { reason } = response.status_details ?? {};
    this.status = response.status + (reason ? `, ${reason.replaceAll("_", " ")}` : "");
    this.server = response.mosstalk?.timings ?? {};
  }

  /** How the answer was heard; null for text. @returns {import("./words.js").Saying | null} */
  get note() {
    if (this.heardMs === undefined) return this.soundAt === undefined ? null : ["speaking"];
    const seconds = (this.heardMs / 1000).toFixed(1);
    return [this.wasCut ? "stopped-after" : "heard-for", { seconds }];
  }

  /** What `answerMs` is made of, in ms; undefined where it is not known. */
  get parts() {
    const { server, outputMs, answerMs } = this;
    const serverMs = server.commit_to_first_audio_ms ?? server.commit_to_first_text_ms;
    const output = this.soundAt === undefined ? undefined : outputMs;
    const known = (this.waitMs ?? 0) + (serverMs ?? 0) + (output ?? 0);
    const rest = serverMs == null || answerMs === undefined ? undefined : answerMs - known;
    return { wait: this.waitMs, server: serverMs, output, rest: rest && Math.max(0, rest) };
  }
}
