// The audio thread: the microphone to 24 kHz PCM16 packets, 24 kHz PCM16 replies to the loudspeaker.
//
// Told:  {type: "send", on, muted} | {type: "flush"} | {type: "play", item, pcm}
//        | {type: "end", item} | {type: "stop"} | {type: "tap"}
// Tells: {type: "mic", pcm, frame, last} | {type: "started", item, frame}
//        | {type: "ended", item, samples} | {type: "dry", item} | {type: "stopped", items}
//        | {type: "tap", frame, pcm, out}
// `frame` counts the context's frames; `samples` count at 24 kHz what has left this thread.

const WIRE_RATE = 24000;
const PACKET_SAMPLES = 480;
/** Zero crossings of the filter on each side, and its cut-off over the lower Nyquist frequency. */
const CROSSINGS = 24;
const ROLL_OFF = 0.91;
const KAISER_BETA = 8;
/** Sound kept back before a reply begins, and the most after it has run dry again and again. */
const CUSHION_SAMPLES = 1440;
const MOST_CUSHION_SAMPLES = 5760;

/** @param {number} a @param {number} b @returns {number} */
const gcd = (a, b) => (b ? gcd(b, a % b) : a);

/** The modified Bessel function I0. @param {number} x */
function bessel(x) {
  let sum = 1;
  for (let k = 1, term = 1; term > 1e-9 * sum; k++) {
    term *= (x / (2 * k)) ** 2;
    sum += term;
  }
  return sum;
}

/**
 * Resampling by a ratio of whole numbers: a sinc under a Kaiser window, one row of taps for each
 * place between two input samples. It lags `half` input samples.
 */
class Polyphase {
  /** @param {number} from @param {number} to rates in Hz */
  constructor(from, to) {
    const common = gcd(from, to);
    this.up = to / common;
    this.down = from / common;
    const cutoff = 0.5 * Math.min(1, to / from) * ROLL_OFF;
    this.half = from === to ? 0 : Math.ceil(CROSSINGS / (2 * cutoff));
    this.taps = 2 * this.half + 1;
    this.rows = Array.from({ length: this.up }, (_, phase) => this.row(phase / this.up, cutoff));
    this.reset();
  }

  /** Taps for a place `part` of a sample after the middle, with a sum of one. */
  row(part, cutoff) {
    const row = new Float32Array(this.taps);
    for (let k = 0; k < this.taps; k++) {
      const at = k - this.half - part;
      const x = 2 * Math.PI * cutoff * at;
      const place = at / (this.half + 1);
      row[k] = (x ? Math.sin(x) / x : 1) * bessel(KAISER_BETA * Math.sqrt(1 - place * place));
    }
    const sum = row.reduce((a, b) => a + b, 0);
    return row.map((tap) => tap / sum);
  }

  reset() {
    this.line = new Float32Array(2 * this.taps);
    this.at = 0;
    this.phase = this.up;
  }

  /** Whether an output sample can be read before the next one goes in. */
  get ready() {
    return this.phase < this.up;
  }

  /** @param {number} sample */
  insert(sample) {
    // Written twice, so that the last `taps` samples always lie in one piece.
    this.line[this.at] = this.line[this.at + this.taps] = sample;
    this.at = (this.at + 1) % this.taps;
    this.phase -= this.up;
  }

  read() {
    const row = this.rows[this.phase];
    let sum = 0;
    for (let k = 0; k < this.taps; k++) sum += row[k] * this.line[this.at + k];
    this.phase += this.down;
    return sum;
  }
}

/** The microphone's sound, in packets on the wire's rate while it is being sent. */
class Recorder {
  /** @param {(message: object) => void} tell */
  constructor(tell) {
    this.tell = tell;
    this.filter = new Polyphase(sampleRate, WIRE_RATE);
    this.sending = false;
    this.muted = false;
    this.frame = 0;
    this.clear();
  }

  clear() {
    this.packet = new Int16Array(PACKET_SAMPLES);
    this.filled = 0;
  }

  /** @param {boolean} on @param {boolean} muted */
  send(on, muted) {
    if (on && !this.sending) this.clear();
    this.sending = on;
    this.muted = muted;
  }

  /** @param {Float32Array} sound whose first sample is the context's frame `frame` */
  push(sound, frame) {
    for (let i = 0; i < sound.length; i++) {
      this.filter.insert(this.muted ? 0 : sound[i]);
      this.frame = frame + i - this.filter.half;
      while (this.filter.ready) this.keep(this.filter.read());
    }
  }

  /** @param {number} sample */
  keep(sample) {
    if (!this.sending) return;
    this.packet[this.filled++] = Math.max(-32768, Math.min(32767, Math.round(sample * 32768)));
    if (this.filled === PACKET_SAMPLES) this.pass(false);
  }

  /** @param {boolean} last whether the turn ends with this packet */
  pass(last) {
    this.tell({ type: "mic", pcm: this.packet.slice(0, this.filled), frame: this.frame, last });
    this.filled = 0;
  }

  /** Pass on what there is, and send no more. */
  flush() {
    this.sending = false;
    this.pass(true);
    this.clear();
  }
}

/** @typedef {{item: string, given: number, heard: number, over: boolean}} Reply */

/** A queue of replies, each sample of which is counted when it leaves. */
class Player {
  /** @param {(message: object) => void} tell */
  constructor(tell) {
    this.tell = tell;
    this.filter = new Polyphase(WIRE_RATE, sampleRate);
    this.cushion = CUSHION_SAMPLES;
    this.tap = false;
    this.stopping = false;
    this.forget();
  }

  forget() {
    /** @type {{reply: Reply, pcm: Int16Array, at: number}[]} */
    this.pieces = [];
    /** @type {Reply[]} */
    this.replies = [];
    this.waiting = 0;
    this.running = false;
    this.filter.reset();
    /** Whose samples are on their way through the first half of the filter. */
    this.inside = new Array(this.filter.half + 1).fill(null);
    this.place = 0;
    this.tapped = [];
  }

  /** @param {string} item */
  reply(item) {
    let found = this.replies.find((reply) => reply.item === item);
    if (!found) {
      found = { item, given: 0, heard: 0, over: false };
      this.replies.push(found);
    }
    return found;
  }

  /** @param {string} item @param {Int16Array} pcm */
  play(item, pcm) {
    const reply = this.reply(item);
    reply.given += pcm.length;
    this.waiting += pcm.length;
    this.pieces.push({ reply, pcm, at: 0 });
  }

  /** No more will come of an item. @param {string} item */
  end(item) {
    this.reply(item).over = true;
  }

  /** @param {Float32Array} out whose first sample is the context's frame `frame` */
  render(out, frame) {
    for (let i = 0; i < out.length; i++) {
      while (!this.filter.ready) this.feed(frame + i);
      out[i] = this.filter.read();
    }
    if (this.stopping) for (let i = 0; i < out.length; i++) out[i] *= 1 - (i + 1) / out.length;
    if (this.tap) this.showTap(out, frame);
    this.settle();
    if (this.stopping) this.stopped();
  }

  /** Put one sample into the filter, and count the one that is in its middle now. */
  feed(frame) {
    const piece = this.next();
    const sample = piece ? piece.pcm[piece.at++] : 0;
    if (piece) this.waiting--;
    if (piece && this.tap) this.tapped.push(sample);
    this.filter.insert(sample / 32768);
    this.inside[this.place] = piece ? piece.reply : null;
    this.place = (this.place + 1) % this.inside.length;
    const heard = this.inside[this.place];
    if (heard && heard.heard++ === 0) this.tell({ type: "started", item: heard.item, frame });
  }

  /** The piece that the next sample comes from, if it is time for one. */
  next() {
    while (this.pieces.length && this.pieces[0].at === this.pieces[0].pcm.length) {
      this.pieces.shift();
    }
    const piece = this.pieces[0];
    if (!piece) this.rest();
    else if (this.waiting >= this.cushion || piece.reply.over) this.running = true;
    return this.running ? piece : undefined;
  }

  /** There is nothing to play; in the middle of a reply that is a gap, and the cushion grows. */
  rest() {
    if (!this.running) return;
    this.running = false;
    const open = this.replies.find((reply) => reply.given && !reply.over);
    if (!open) return;
    this.cushion = Math.min(2 * this.cushion, MOST_CUSHION_SAMPLES);
    this.tell({ type: "dry", item: open.item });
  }

  /** Tell of replies that were heard to their end. */
  settle() {
    for (const reply of this.replies.filter((one) => one.over && one.heard === one.given)) {
      this.tell({ type: "ended", item: reply.item, samples: reply.heard });
      this.replies = this.replies.filter((one) => one !== reply);
    }
  }

  stopped() {
    const items = this.replies.map(({ item, heard }) => ({ item, samples: heard }));
    this.tell({ type: "stopped", items });
    this.stopping = false;
    this.forget();
  }

  showTap(out, frame) {
    if (!this.tapped.length && !out.some((sample) => sample)) return;
    this.tell({ type: "tap", frame, pcm: Int16Array.from(this.tapped), out: out.slice() });
    this.tapped = [];
  }
}

class Voice extends AudioWorkletProcessor {
  constructor() {
    super();
    const tell = (message) => this.port.postMessage(message);
    const recorder = (this.recorder = new Recorder(tell));
    const player = (this.player = new Player(tell));
    const told = {
      send: ({ on, muted }) => recorder.send(on, muted),
      flush: () => recorder.flush(),
      play: ({ item, pcm }) => player.play(item, pcm),
      end: ({ item }) => player.end(item),
      stop: () => (player.stopping = true),
      tap: () => (player.tap = true),
    };
    this.port.onmessage = ({ data }) => told[data.type](data);
  }

  process([input], [output]) {
    if (input.length) this.recorder.push(input[0], currentFrame);
    this.player.render(output[0], currentFrame);
    return true;
  }
}

registerProcessor("voice", Voice);
