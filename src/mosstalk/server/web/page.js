// The page: who is told what. Sound is in sound.js, the protocol in talk.js, the socket in wire.js.

import { Choices } from "./choices.js";
import { listDevices, speakTo, watchDevices } from "./devices.js";
import { Events } from "./events.js";
import { Figures } from "./figures.js";
import { Log } from "./log.js";
import { Player } from "./player.js";
import { holdToTalk } from "./press.js";
import { debugOptions, probe } from "./probe.js";
import { Record, save } from "./record.js";
import { Sound } from "./sound.js";
import { insecure, Stage, withheld } from "./stage.js";
import { Talk } from "./talk.js";
import { Turn } from "./turn.js";
import { drawWaves } from "./waves.js";
import { key, readAloud, Wire } from "./wire.js";
import { put, speak, wanted } from "./words.js";

/** @param {string} id @returns {any} */
const by = (id) => document.getElementById(id);

const DARK = { "": "(prefers-color-scheme: dark)", dark: "all", light: "not all" };
const PREVIEW = "preview";
const SPOKEN = "Hello! This is how I sound when I answer you.";
const debug = debugOptions();
const wire = new Wire();
const sound = new Sound();
// Before the talk, which answers an event as soon as it hears it.
const events = new Events(by("events"), by("events-hold"), wire);
const talk = new Talk(wire, sound);
const stage = new Stage(by);
const player = new Player();
const record = new Record();
const choices = new Choices(by("settings"));
const { fields } = choices;
const figures = new Figures(by("turns"), by("latest"), by("latest-of"), by("plot"));
const log = new Log(by("log"), by("read-out"), {
  play: (id) => (player.id === id ? player.stop() : again(id, record.wav(id))),
  save: (id) => save(record.wav(id), `${id}.wav`),
});
if (debug) probe(wire, sound, talk);

let started = false;
/** @type {import("./stage.js").Microphone} */
let microphone = { state: "unasked" };
let sessions = 0;
/** What is served, for the file of a conversation. */
const facts = { model: "", weights: "", session: {} };
/** Written before there was a session, a line each time. */
let unsent = "";

// Starting.

/** Open what is to be opened; a click or a key must have come before. */
async function start(withMicrophone) {
  if (!started) {
    started = true;
    show();
    try {
      if (isSecureContext) await sound.open(debug ?? { tap: false, loop: false });
    } catch {
      started = false;
      stage.notice(["unreachable"]); // The audio thread's file comes from the server.
      return show();
    }
    wire.connect();
  }
  if (!isSecureContext) stage.explain(microphone);
  else if (withMicrophone) await openMicrophone();
  show();
}

async function openMicrophone() {
  if (microphone.state !== "on") microphone = { state: "asking" };
  show();
  try {
    await sound.listen(choices.echoCancellation, fields.microphone.value);
    microphone = { state: "on" };
    stage.notice(null);
    listDevices(fields);
  } catch (error) {
    microphone = withheld(error);
    stage.explain(microphone);
  }
  show();
}

const handsFree = () => document.querySelector("input[name=turns]:checked").value === "hands-free";

/** Tell the server what was chosen. */
const configure = () => talk.configure(choices.session(handsFree()));

const show = () => stage.show({ started, wire, talk, microphone, handsFree: handsFree() });

/** Forget what was said, and have the server do so. */
function anew() {
  player.stop();
  for (const kept of [log, record, figures]) kept.clear();
  Turn.count = sessions = 0;
  by("intro").hidden = !by("can").textContent;
  by("save-sound").disabled = by("save-text").disabled = true;
  stage.notice(null);
  if (started) wire.renew();
}

// What the user does.

holdToTalk(by("press"), {
  active: () => started && microphone.state === "on" && talk.ready && !handsFree(),
  on: () => Boolean(talk.held),
  down: () => {
    player.stop();
    talk.press();
  },
  up: (at) => talk.release(at),
});

by("press").addEventListener("click", () => {
  if (microphone.state !== "on") start(true);
  else if (handsFree()) talk.mute(!talk.muted);
});

// A phone takes the sound away for a call, and gives it back only when asked by a touch.
addEventListener("pointerdown", () => sound.wake());
addEventListener("keydown", () => sound.wake());
by("interrupt").addEventListener("click", () => talk.interrupt());
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (player.id !== null) player.stop();
  else if (talk.held) talk.discard();
  else if (talk.interruptible) talk.interrupt();
});

/** Send a turn in writing. @param {string} text @param {number} at */
function write(text, at) {
  player.stop();
  if (talk.ready) talk.say(text, at);
  else unsent += unsent ? `\n${text}` : text;
  if (!started) start(false);
}

by("typed").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = by("text").value.trim();
  by("text").value = "";
  if (text) write(text, event.timeStamp);
});
by("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  by("typed").requestSubmit();
});

for (const radio of document.querySelectorAll("input[name=turns]")) {
  radio.addEventListener("change", () => {
    talk.turnBy(handsFree());
    configure();
    show();
  });
}
by("settings").addEventListener("submit", (event) => event.preventDefault());
by("settings").addEventListener("change", async ({ target }) => {
  if (target.name === "loudspeaker") {
    const refusal = await speakTo(target, sound, player);
    if (refusal) stage.notice(refusal);
  } else if (target.name !== "echo" && target.name !== "microphone") configure();
  else if (sound.context && microphone.state !== "unasked") openMicrophone();
});
by("volume").addEventListener("input", ({ target }) => {
  sound.setVolume(target.valueAsNumber / 100);
  player.audio.volume = target.valueAsNumber / 100;
});
by("theme").addEventListener("change", ({ target }) => (by("dark").media = DARK[target.value]));
by("language").addEventListener("change", ({ target }) => {
  const address = new URL(location.href);
  address.searchParams.set("lang", target.value);
  history.replaceState(null, "", address);
  speak(target.value);
});

by("reconnect").addEventListener("click", () => wire.connect());
by("dismiss").addEventListener("click", () => stage.notice(null));
by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(by("key").value);
  by("key").value = "";
  wire.connect();
});
by("anew").addEventListener("click", anew);
by("save-sound").addEventListener("click", () => save(record.wholeWav(), "conversation.wav"));
by("save-text").addEventListener("click", () =>
  save(record.json(facts, figures.json()), "conversation.json"),
);
by("events-clear").addEventListener("click", () => events.clear());
by("events-save").addEventListener("click", () => events.save());

/** Play what is there already; the microphone is not to hear it. @param {Blob} blob */
async function again(id, blob) {
  if (talk.interruptible) await talk.interrupt();
  await player.play(id, blob);
}

by("preview").addEventListener("click", ({ target }) =>
  player.id === PREVIEW ? player.stop() : preview(target),
);

/** Let the chosen voice be heard. @param {HTMLButtonElement} button */
async function preview(button) {
  button.disabled = true;
  put(button, "previewing");
  try {
    await again(PREVIEW, await readAloud(SPOKEN, choices.voice, facts.model));
  } catch ({ saying }) {
    stage.notice(saying ?? ["unreachable"]);
  }
  button.disabled = false;
  put(button, player.id === PREVIEW ? "stop-playing" : "preview");
}

// What happens.

wire.addEventListener("state", ({ detail: { state, why, seconds } }) => {
  if (state !== "open") talk.lost();
  const again = seconds ? ["again", { why, seconds: Math.ceil(seconds) }] : why;
  if (why) stage.notice(again, state !== "key");
  else if (state === "open" && !by("reconnect").hidden) stage.notice(null);
  show();
  if (state === "key") by("key").focus();
});
wire.addEventListener("models", ({ detail }) => {
  const [model] = detail.data ?? [];
  if (!model) return;
  Object.assign(facts, { model: model.id, weights: model.weights });
  stage.introduce(model, write);
  by("intro").hidden ||= record.lines.size > 0;
  if (model.voices) choices.offer(model.voices);
});
sound.addEventListener("lost", () => {
  sound.stream = null;
  microphone = { state: "lost" };
  stage.explain(microphone);
  show();
});
sound.addEventListener("started", () => player.stop());
player.addEventListener("change", ({ detail: { id } }) => {
  log.playing(id);
  talk.hush(id !== null);
  if (!by("preview").disabled) put(by("preview"), id === PREVIEW ? "stop-playing" : "preview");
});
player.addEventListener("fault", ({ detail }) => stage.notice(["not-played", detail]));
talk.addEventListener("change", show);
talk.addEventListener("notice", ({ detail }) => stage.notice(detail.saying));
talk.addEventListener("entry", ({ detail }) => {
  log.put(detail);
  record.put(detail).forEach((id) => log.silence(id));
  by("intro").hidden = true;
  by("save-text").disabled = false;
  if (record.samples) by("save-sound").disabled = false;
});
talk.addEventListener("turn", ({ detail }) => figures.put(detail.turn));
talk.addEventListener("settled", ({ detail: { session, first, resumed } }) => {
  if (first && sessions++ && !resumed) log.say("new-session");
  if (first && !session.audio.input.turn_detection) onlyHeld();
  const warnings = choices.show(session);
  facts.session = session;
  if (!first && warnings.length) stage.notice(["warns", { warnings: warnings.join("; ") }]);
  if (first || !unsent) return;
  talk.say(unsent, performance.now());
  unsent = "";
});

/** The server finds no ends of turns. */
function onlyHeld() {
  const [free, held] = document.querySelectorAll("input[name=turns]");
  if (!free.checked) return;
  held.checked = free.disabled = true;
  talk.handsFree = false;
  talk.settings = choices.session(false);
}

by("language").value = wanted();
speak(wanted());
watchDevices(fields);
wire.look();
talk.handsFree = handsFree();
configure();
if (!isSecureContext) {
  // Nor is there an audio thread, which replies would need.
  microphone = insecure();
  fields.reply.value = "text";
  fields.reply.disabled = true;
  stage.explain(microphone);
  configure();
}
show();
drawWaves(by("wave-you"), by("wave-reply"), sound);
