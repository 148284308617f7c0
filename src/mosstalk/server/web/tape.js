// Sound that is kept for a while: the microphone's last minutes, and a file of any of it.

export const RATE = 24000;
export const SAMPLES_PER_MS = RATE / 1000;
const KEPT_MS = 180_000;
const HEADER_BYTES = 44;

/** What went to the server, on the server's clock of milliseconds. */
export class Tape {
  /** @type {{from: number, pcm: Int16Array}[]} */
  pieces = [];
  samples = 0;

  /** How long it is. */
  get ms() {
    return this.samples / SAMPLES_PER_MS;
  }

  /** @param {Int16Array} pcm */
  add(pcm) {
    this.pieces.push({ from: this.samples, pcm });
    this.samples += pcm.length;
    const oldest = this.samples - KEPT_MS * SAMPLES_PER_MS;
    while (this.pieces.length && this.pieces[0].from < oldest) this.pieces.shift();
  }

  /** A part of it, as far as it is still there. @param {number} fromMs @param {number} toMs */
  cut(fromMs, toMs) {
    const [from, to] = [fromMs, toMs].map((ms) => Math.round(ms * SAMPLES_PER_MS));
    const parts = this.pieces.map(({ from: at, pcm }) =>
      pcm.subarray(Math.max(0, from - at), Math.max(0, to - at)),
    );
    return joined(parts);
  }
}

/** @param {Int16Array[]} pieces */
export function joined(pieces) {
  const whole = new Int16Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}

/** A wav file of mono PCM16 at 24 kHz. @param {Int16Array} pcm */
export function wav(pcm) {
  const head = new DataView(new ArrayBuffer(HEADER_BYTES));
  const text = (at, letters) =>
    [...letters].forEach((letter, place) => head.setUint8(at + place, letter.charCodeAt(0)));
  text(0, "RIFF");
  head.setUint32(4, HEADER_BYTES - 8 + pcm.byteLength, true);
  text(8, "WAVEfmt ");
  head.setUint32(16, 16, true);
  head.setUint16(20, 1, true); // PCM
  head.setUint16(22, 1, true); // channels
  head.setUint32(24, RATE, true);
  head.setUint32(28, 2 * RATE, true);
  head.setUint16(32, 2, true); // bytes a sample
  head.setUint16(34, 16, true); // bits a sample
  text(36, "data");
  head.setUint32(40, pcm.byteLength, true);
  return new Blob([head, pcm], { type: "audio/wav" });
}
