// The conversation: what is heard and typed goes out as Realtime events, replies come back.

import { encode } from "./base64.js";
import { HANDLERS, TURN } from "./handlers.js";
import { SAMPLES_PER_MS, Tape } from "./tape.js";
import { Turn } from "./turn.js";

const SHORTEST_TURN_MS = 100;
const SILENCE_PEAK = 16;

/**
 * Events: "change" (something that `status` depends on), "turn" {turn}, "entry" {id, who, text,
 * more, note, done, sound, heardMs} (a line of the conversation: `text` and `note` replace, `more`
 * and `sound` add; of its sound so much was heard), "notice" {saying}, "settled" {session, first,
 * resumed} (what the server says is in force).
 */
export class Talk extends EventTarget {
  handsFree = false;
  muted = false;
  /** Something that was said before is played again, which is not to be taken for speech. */
  hushed = false;
  ready = false;
  /** What went to the server of the microphone. */
  tape = new Tape();
  /** @type {{samples: number, peak: number, at: number} | null} a turn that is being held */
  held = null;
  /** The user is speaking, as the server hears it. */
  speaking = false;
  /** @type {string | null} the response under way */
  response = null;
  /** @type {string | null} the item whose sound is on its way */
  sounding = null;

  /** @param {import("./wire.js").Wire} wire @param {import("./sound.js").Sound} sound */
  constructor(wire, sound) {
    super();
    this.wire = wire;
    this.sound = sound;
    this.startOver();
    wire.addEventListener("message", ({ detail }) => this.handle(detail));
    sound.addEventListener("mic", ({ detail }) => this.pass(detail));
    sound.addEventListener("started", ({ detail }) => this.started(detail));
    sound.addEventListener("ended", ({ detail }) => this.ended(detail));
    sound.addEventListener("dry", ({ detail }) => this.noteOn(detail.item, (turn) => turn.gaps++));
  }

  /**
   * A new session, which knows nothing of an earlier one, or goes on with the conversation. Then
   * what is played goes on too. @param {number} [items] that came back, where it goes on
   */
  startOver(items) {
    this.ready = this.speaking = false;
    this.held = this.response = null;
    /** Items that the server has yet to tell again. */
    this.returning = items ?? 0;
    /** @type {Turn | null} a turn whose response has not begun */
    this.pending = null;
    /** @type {{fromMs: number, toMs: number} | null} on the tape, the turn that is to be committed */
    this.spoken = null;
    this.tape = new Tape();
    this.sound.startOver(items === undefined);
    if (items === undefined) {
      /** @type {Map<string, Turn>} by response, and by item */
      this.turns = new Map();
      this.playing = new Set();
      this.cutOff = new Set();
    }
    this.emit("change");
  }

  /** The session is gone; what of an answer is here already is played. */
  lost() {
    if (this.sounding) this.sound.end(this.sounding);
    this.sounding = null;
    this.ready = this.speaking = false;
    this.held = this.response = this.pending = null;
    this.openMicrophone();
  }

  /** @returns {"off" | "hearing" | "speaking" | "thinking" | "waiting"} */
  get status() {
    if (!this.ready) return "off";
    if (this.held || this.speaking) return "hearing";
    if (this.playing.size) return "speaking";
    return this.response || this.pending ? "thinking" : "waiting";
  }

  /** Settings of the session, as session.update takes them. @param {object} session */
  configure(session) {
    this.settings = session;
    if (this.wire.state === "open") this.wire.send({ type: "session.update", session });
  }

  /** Who ends turns: the one who presses, or the server. */
  turnBy(handsFree) {
    if (this.held) this.discard();
    if (this.handsFree && !handsFree) this.wire.send({ type: "input_audio_buffer.clear" });
    this.handsFree = handsFree;
    this.speaking = false;
    this.openMicrophone();
  }

  /** Hands-free the microphone is always on; silence is sent while it is muted. */
  openMicrophone() {
    this.sound.send(this.ready && this.handsFree, this.muted || this.hushed);
    this.emit("change");
  }

  mute(on) {
    this.muted = on;
    this.openMicrophone();
  }

  /** @param {boolean} on whether something is played that the microphone should not hear */
  hush(on) {
    this.hushed = on;
    if (!this.held) this.openMicrophone();
  }

  // Turns of the user.

  press() {
    if (!this.ready || this.held || this.handsFree) return;
    this.cut(true);
    this.held = { samples: 0, peak: 0, at: 0 };
    this.sound.send(true);
    this.emit("change");
  }

  /** @param {number} at when it was let go, in ms of the page's clock */
  release(at) {
    if (!this.held) return;
    this.held.at = at;
    this.sound.flush();
  }

  /** Take back what was said while held. */
  discard() {
    this.held = null;
    this.sound.send(false);
    this.wire.send({ type: "input_audio_buffer.clear" });
    this.emit("change");
  }

  /** More of the microphone. */
  pass({ pcm, last }) {
    if (pcm.length) this.wire.send({ type: "input_audio_buffer.append", audio: encode(pcm) });
    this.tape.add(pcm);
    if (!this.held) return;
    this.held.samples += pcm.length;
    this.held.peak = pcm.reduce((peak, sample) => Math.max(peak, Math.abs(sample)), this.held.peak);
    if (last) this.commit();
  }

  commit() {
    const { samples, peak, at } = this.held;
    const ms = samples / SAMPLES_PER_MS;
    if (ms < SHORTEST_TURN_MS) {
      this.discard();
      this.emit("notice", { saying: ["too-short"] });
      return;
    }
    if (peak < SILENCE_PEAK) this.emit("notice", { saying: ["only-silence"] });
    this.held = null;
    this.pending = new Turn("held", at, ms);
    this.spoken = { fromMs: this.tape.ms - ms, toMs: this.tape.ms };
    this.wire.send({ type: "input_audio_buffer.commit", event_id: TURN });
    this.wire.send({ type: "response.create", event_id: TURN });
    this.emit("change");
  }

  /** A typed turn. @param {string} text @param {number} at */
  async say(text, at) {
    await this.cut(true);
    const id = `item_page_${Math.random().toString(36).slice(2, 12)}`;
    const item = { id, type: "message", role: "user", content: [{ type: "input_text", text }] };
    this.pending = new Turn("typed", at);
    this.wire.send({ type: "conversation.item.create", item });
    this.wire.send({ type: "response.create", event_id: TURN });
    this.emit("entry", { id, who: "you", text, done: true });
    this.emit("change");
  }

  /** Stop the answer by hand. */
  interrupt() {
    return this.cut(true);
  }

  /** Whether there is an answer to stop. */
  get interruptible() {
    return Boolean(this.response || this.playing.size);
  }

  /**
   * Be silent, and tell the server how much was heard: all that has left the audio thread, as
   * what is on its way to the loudspeaker cannot be called back.
   */
  async cut(cancel) {
    if (this.response) {
      this.cutOff.add(this.response);
      if (cancel) this.wire.send({ type: "response.cancel", response_id: this.response });
    }
    for (const { item, samples } of await this.sound.stop()) {
      const heardMs = Math.floor(samples / SAMPLES_PER_MS);
      const cut = { item_id: item, content_index: 0, audio_end_ms: heardMs };
      this.wire.send({ type: "conversation.item.truncate", ...cut });
      this.playing.delete(item);
      this.noteOn(item, (turn) => turn.cut(heardMs));
    }
    this.emit("change");
  }

  // What the audio thread tells.

  started({ item, at }) {
    this.playing.add(item);
    this.noteOn(item, (turn) => {
      turn.soundAt ??= at;
      turn.outputMs ??= this.sound.clock.outputMs;
    });
    this.emit("change");
  }

  ended({ item, samples }) {
    this.playing.delete(item);
    this.noteOn(item, (turn) => turn.heard(samples / SAMPLES_PER_MS));
    this.emit("change");
  }

  /** Change the turn that a response or item belongs to. */
  noteOn(id, change) {
    const turn = this.turns.get(id);
    if (!turn) return;
    change(turn);
    this.emit("turn", { turn });
    const { itemId, note, heardMs } = turn;
    if (itemId) this.emit("entry", { id: itemId, who: "reply", note, heardMs });
  }

  emit(type, detail = {}) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }

  // What the server tells.

  /** @param {{type: string}} event */
  handle(event) {
    const name = event.type.replaceAll(".", "_");
    if (name in HANDLERS) HANDLERS[name](this, event);
  }
}
