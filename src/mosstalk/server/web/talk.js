// The conversation: what is heard and typed goes out as Realtime events, replies come back.

import { decode, encode } from "./base64.js";
import { Turn } from "./turn.js";

const WIRE_SAMPLES_PER_MS = 24;
const SHORTEST_TURN_MS = 100;
const SILENCE_PEAK = 16;
/** Marks the events of a turn: an error that names it leaves no answer to wait for. */
const TURN = "turn";

/**
 * Events: "change" (something that `status` depends on), "turn" {turn}, "entry" {id, who, text,
 * more, note, done} (a line of the conversation: `text` and `note` replace, `more` adds),
 * "notice" {text}, "settled" {session, first} (what the server says is in force).
 */
export class Talk extends EventTarget {
  handsFree = false;
  muted = false;
  ready = false;
  /** @type {{samples: number, peak: number, at: number} | null} a turn that is being held */
  held = null;
  /** The user is speaking, as the server hears it. */
  speaking = false;
  /** @type {string | null} the response under way */
  response = null;

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

  /** A new session, which knows nothing of an earlier one. */
  startOver() {
    this.ready = this.speaking = false;
    this.held = this.response = null;
    /** @type {Map<string, Turn>} by response, and by item */
    this.turns = new Map();
    /** @type {Turn | null} a turn whose response has not begun */
    this.pending = null;
    this.playing = new Set();
    this.cutOff = new Set();
    this.sound.startOver();
    this.emit("change");
  }

  /** The session is gone; what of an answer is here already is played. */
  lost() {
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
    this.sound.send(this.ready && this.handsFree, this.muted);
    this.emit("change");
  }

  mute(on) {
    this.muted = on;
    this.openMicrophone();
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
    if (!this.held) return;
    this.held.samples += pcm.length;
    this.held.peak = pcm.reduce((peak, sample) => Math.max(peak, Math.abs(sample)), this.held.peak);
    if (last) this.commit();
  }

  commit() {
    const { samples, peak, at } = this.held;
    const ms = samples / WIRE_SAMPLES_PER_MS;
    if (ms < SHORTEST_TURN_MS) {
      this.discard();
      this.emit("notice", { text: "That was too short: hold while you speak." });
      return;
    }
    if (peak < SILENCE_PEAK) this.emit("notice", { text: "The microphone gives only silence." });
    this.held = null;
    this.pending = new Turn("held", at, ms);
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
      const heardMs = Math.floor(samples / WIRE_SAMPLES_PER_MS);
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
    this.noteOn(item, (turn) => (turn.soundAt ??= at));
    this.emit("change");
  }

  ended({ item, samples }) {
    this.playing.delete(item);
    this.noteOn(item, (turn) => turn.heard(samples / WIRE_SAMPLES_PER_MS));
    this.emit("change");
  }

  /** Change the turn that a response or item belongs to. */
  noteOn(id, change) {
    const turn = this.turns.get(id);
    if (!turn) return;
    change(turn);
    this.emit("turn", { turn });
    if (turn.itemId) this.emit("entry", { id: turn.itemId, who: "reply", note: turn.note });
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

/** @type {Record<string, (talk: Talk, event: any) => void>} by type, with _ for . */
const HANDLERS = {
  session_created(talk, { session }) {
    talk.startOver();
    talk.wire.opened();
    talk.emit("settled", { session, first: true });
    talk.configure(talk.settings);
  },
  session_updated(talk, { session }) {
    talk.ready = true;
    talk.emit("settled", { session });
    talk.openMicrophone();
  },
  input_audio_buffer_speech_started(talk, { audio_start_ms }) {
    talk.speaking = true;
    talk.speechFromMs = audio_start_ms;
    talk.cut(false);
  },
  input_audio_buffer_speech_stopped(talk, event) {
    const turn = new Turn("hands-free", undefined, event.audio_end_ms - talk.speechFromMs);
    turn.audioEndMs = event.audio_end_ms;
    turn.waited(talk.settings.audio.input.turn_detection.silence_duration_ms, talk.sound);
    talk.speaking = false;
    talk.pending = turn;
    talk.emit("change");
  },
  input_audio_buffer_committed(talk, { item_id: id }) {
    const ms = talk.pending?.spokenMs;
    talk.emit("entry", { id, who: "you", note: ms ? `spoken, ${(ms / 1000).toFixed(1)} s` : "spoken" });
  },
  conversation_item_input_audio_transcription_completed(talk, { item_id: id, transcript }) {
    if (transcript) talk.emit("entry", { id, who: "you", text: transcript, done: true });
  },
  response_created(talk, { response }) {
    talk.response = response.id;
    talk.turns.set(response.id, talk.pending ?? new Turn("unasked", performance.now()));
    talk.pending = null;
    talk.noteOn(response.id, (turn) => (turn.status = "under way"));
    talk.emit("change");
  },
  response_output_item_added(talk, { response_id, item }) {
    if (item.type !== "message") return;
    const turn = talk.turns.get(response_id);
    if (turn) turn.itemId = item.id;
    if (turn) talk.turns.set(item.id, turn);
    talk.emit("entry", { id: item.id, who: "reply" });
  },
  response_output_audio_delta(talk, { response_id, item_id, delta }) {
    if (!talk.cutOff.has(response_id)) talk.sound.play(item_id, decode(delta));
  },
  response_output_audio_done(talk, { response_id, item_id }) {
    if (!talk.cutOff.has(response_id)) talk.sound.end(item_id);
  },
  response_output_audio_transcript_delta(talk, { item_id: id, delta }) {
    talk.emit("entry", { id, who: "reply", more: delta });
  },
  response_output_text_delta(talk, { item_id: id, delta }) {
    talk.noteOn(id, (turn) => (turn.textAt ??= performance.now()));
    talk.emit("entry", { id, who: "reply", more: delta });
  },
  response_output_item_done(talk, { item }) {
    if (item.type === "message") talk.emit("entry", { id: item.id, who: "reply", done: true });
  },
  response_done(talk, { response }) {
    if (talk.response === response.id) talk.response = null;
    talk.noteOn(response.id, (turn) => turn.done(response, talk.sound));
    const { error } = response.status_details ?? {};
    if (error) talk.emit("notice", { text: `No answer: ${error.message}` });
    talk.emit("change");
  },
  error(talk, { error }) {
    if (error.code === "response_cancel_not_active") return;
    if (!error.event_id || error.event_id === TURN) talk.pending = null;
    talk.emit("notice", { text: error.message ?? error.code });
    talk.emit("change");
  },
};
