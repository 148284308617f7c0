// Plays a file of sound again: a line of the conversation, or a voice to choose.

/** Events: "change" {id} (what is played now, null for nothing), "fault" {message}. */
export class Player extends EventTarget {
  audio = new Audio();
  /** @type {string | null} */
  id = null;

  constructor() {
    super();
    this.audio.addEventListener("ended", () => this.stop());
    this.audio.addEventListener("error", () => {
      if (this.id !== null) this.failed(this.audio.error?.message ?? "");
    });
  }

  /** @param {string} id what it is called here @param {Blob} blob */
  async play(id, blob) {
    this.stop();
    this.audio.src = this.address = URL.createObjectURL(blob);
    this.turn(id);
    try {
      await this.audio.play();
    } catch (error) {
      if (error.name !== "AbortError") this.failed(error.message);
    }
  }

  stop() {
    if (this.id === null) return;
    this.turn(null);
    this.audio.pause();
    this.audio.removeAttribute("src");
    URL.revokeObjectURL(this.address);
  }

  /** @param {string} id empty: the system's own loudspeaker */
  async speakTo(id) {
    await this.audio.setSinkId?.(id);
  }

  failed(message) {
    this.stop();
    this.dispatchEvent(new CustomEvent("fault", { detail: { message } }));
  }

  turn(id) {
    this.id = id;
    this.dispatchEvent(new CustomEvent("change", { detail: { id } }));
  }
}
