// What the user chose, as session.update takes it; what the server made of it, as placeholders.

const SAMPLING = ["temperature", "top_p", "top_k", "repetition_penalty", "seed"];
const PCM = { type: "audio/pcm", rate: 24000 };

/** A number, or null where the field is empty. @param {HTMLInputElement} field */
const number = (field) => (field.value === "" ? null : field.valueAsNumber);

export class Choices {
  /** @param {HTMLFormElement} form @param {HTMLDataListElement} voices */
  constructor(form, voices) {
    this.form = form;
    this.fields = form.elements;
    this.voices = voices;
  }

  get echoCancellation() {
    return this.fields.echo.checked;
  }

  /** @param {boolean} handsFree @returns {object} a whole session.update */
  session(handsFree) {
    const { reply, voice, instructions } = this.fields;
    const output = voice.value.trim() ? { voice: voice.value.trim() } : { voice: null };
    return {
      type: "realtime",
      output_modalities: [reply.value],
      instructions: instructions.value.trim(),
      audio: {
        input: { format: PCM, turn_detection: handsFree ? this.detection() : null },
        output: { format: PCM, ...output },
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
    const options = voices.map((voice) => {
      const option = document.createElement("option");
      option.value = typeof voice === "string" ? voice : voice.id;
      return option;
    });
    this.voices.replaceChildren(...options);
  }

  /** Show what holds where nothing was chosen. @param {any} session */
  show(session) {
    const own = session.mosstalk ?? {};
    if (own.voices) this.offer(own.voices);
    const { voice } = session.audio?.output ?? {};
    if (voice && !this.fields.voice.value) this.fields.voice.placeholder = voice;
    const { instructions } = this.fields;
    if (!instructions.value) instructions.placeholder = session.instructions ?? "";
    return own.warnings ?? [];
  }
}
