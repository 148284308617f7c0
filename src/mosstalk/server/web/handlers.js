// What an event of the server changes in the conversation: one handler for each type.

import { decode } from "./base64.js";
import { Turn } from "./turn.js";

/** Marks the events of a turn: an error that names it leaves no answer to wait for. */
export const TURN = "turn";
const SPEAKERS = { user: "you", assistant: "reply" };

/** @type {Record<string, (talk: import("./talk.js").Talk, event: any) => void>} by type, with _ for . */
export const HANDLERS = {
  session_created(talk, { session }) {
    const items = session.mosstalk?.resume?.items;
    talk.startOver(items);
    talk.wire.opened();
    talk.emit("settled", { session, first: true, resumed: items !== undefined });
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
    turn.endedAt = talk.sound.spokenAt(event.mosstalk.speech_end_ms);
    turn.waitMs = event.mosstalk.vad_wait_ms;
    talk.speaking = false;
    talk.spoken = { fromMs: talk.speechFromMs, toMs: event.audio_end_ms };
    talk.pending = turn;
    talk.emit("change");
  },
  input_audio_buffer_committed(talk, { item_id: id }) {
    const ms = talk.pending?.spokenMs;
    const note = ms ? ["spoken-for", { seconds: (ms / 1000).toFixed(1) }] : ["spoken"];
    const sound = talk.spoken && talk.tape.cut(talk.spoken.fromMs, talk.spoken.toMs);
    talk.spoken = null;
    talk.emit("entry", { id, who: "you", note, sound });
  },
  conversation_item_input_audio_transcription_delta(talk, { item_id: id, delta }) {
    if (delta) talk.emit("entry", { id, who: "you", more: delta });
  },
  conversation_item_input_audio_transcription_completed(talk, { item_id: id, transcript }) {
    if (transcript) talk.emit("entry", { id, who: "you", text: transcript.trim(), done: true });
  },
  /** What comes back was perhaps not told to its end before the connection was lost. */
  conversation_item_done(talk, { item }) {
    if (!talk.returning) return;
    talk.returning--;
    const parts = item.content?.map((part) => part.transcript ?? part.text ?? "") ?? [];
    const text = parts.join(" ").trim();
    if (!text || !(item.role in SPEAKERS)) return;
    talk.emit("entry", { id: item.id, who: SPEAKERS[item.role], text });
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
    if (talk.cutOff.has(response_id)) return;
    const pcm = decode(delta);
    talk.emit("entry", { id: item_id, who: "reply", sound: pcm.slice() });
    talk.sound.play(item_id, pcm);
    talk.sounding = item_id;
  },
  response_output_audio_done(talk, { response_id, item_id }) {
    talk.sounding = null;
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
    if (error) talk.emit("notice", { saying: ["no-answer", { reason: error.message }] });
    talk.emit("change");
  },
  error(talk, { error }) {
    if (error.code === "response_cancel_not_active") return;
    if (!error.event_id || error.event_id === TURN) talk.pending = null;
    talk.emit("notice", { saying: ["plain", { text: error.message ?? error.code }] });
    talk.emit("change");
  },
};
