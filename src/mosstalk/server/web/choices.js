// What the user chose, as session.update takes it; what the server made of it, as placeholders.

import { put } from "./words.js";

const SAMPLING = ["temperature", "top_p", "top_k", "repetition_penalty", "seed"];
const DETECTION = { threshold: "0.5", silence_duration_ms: "500" };
const PCM = { type: "audio/pcm", rate: 24000 };
/** What a preset sets; of the rest of sampling and detection it takes the usual. */
const PRESETS = {
  usual: {},
  quick: { silence_duration_ms: "300" },
  patient: { silence_duration_ms: "1200" },
  steady: { temperature: "0", seed: "1" },
};

/** A number, or null where the field is empty. @param {HTMLInputElement} field */
const number = (field) => (field.value === "" ? null : field.valueAsNumber);

export class Choices {
  /** @param {HTMLFormElement} form */
  constructor(form) {
    this.form = form;
    this.fields = form.elements;
    form.addEventListener("change", ({ target }) => {
      if (target.name === "preset") this.preset(target.value);
      else if (SAMPLING.includes(target.name) || target.name in DETECTION) this.fields.preset.value = "";
    });
  }

  get echoCancellation() {
    return this.fields.echo.checked;
  }

  /** The voice that was chosen, else the server's own, which is the first that it names. */
  get voice() {
    return this.fields.voice.value || (this.fields.voice.options[1]?.value ?? "default");
  }

  /** @param {string} name empty: all stays as it is */
  preset(name) {
    if (!name) return;
    const usual = Object.fromEntries(SAMPLING.map((field) => [field, ""]));
    for (const [field, value] of Object.entries({ ...usual, ...DETECTION, ...PRESETS[name] })) {
      this.fields[field].value = value;
    }
  }

  /** @param {boolean} handsFree @returns {object} a whole session.update */
  session(handsFree) {
    const { reply, voice, instructions } = this.fields;
    return {
      type: "realtime",
      output_modalities: [reply.value],
      instructions: instructions.value.trim(),
      audio: {
        input: { format: PCM, turn_detection: handsFree ? this.detection() : null },
        output: { format: PCM, voice: voice.value || null },
      },
      mosstalk: {
        sampling: Object.fromEntries(SAMPLING.map((name) => [name, number(this.fields[name])])),
      },
    };
  }

  detection() {
    return {
      type: "server_vad",
      threshold: number(this.fields.threshold) ?? 0.5,
      silence_duration_ms: number(this.fields.silence_duration_ms) ?? 500,
      create_response: true,
      interrupt_response: true,
    };
  }

  /** Voices that there are. @param {(string | {id: string})[]} voices */
  offer(voices) {
    const names = voices.map((voice) => (typeof voice === "string" ? voice : voice.id));
    offer(this.fields.voice, names.map((name) => ({ value: name, text: name })));
  }

  /** Show what holds where nothing was chosen. @param {any} session */
  show(session) {
    const own = session.mosstalk ?? {};
    if (own.voices) this.offer(own.voices);
    const { instructions } = this.fields;
    if (!instructions.value) instructions.placeholder = session.instructions ?? "";
    return own.warnings ?? [];
  }
}

/**
 * What can be chosen besides the first option, which is there always.
 * @param {HTMLSelectElement} select
 * @param {{value: string, text?: string, saying?: import("./words.js").Saying}[]} offered
 */
export function offer(select, offered) {
  const chosen = select.value;
  const options = offered.map(({ value, text, saying }) => {
    const option = document.createElement("option");
    option.value = value;
    if (saying) put(option, ...saying);
    else option.textContent = text;
    return option;
  });
  select.replaceChildren(select.options[0], ...options);
  select.value = offered.some(({ value }) => value === chosen) ? chosen : "";
}
