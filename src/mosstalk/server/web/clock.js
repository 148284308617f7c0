// Which moment of the page's own clock (performance.now) a frame of the audio context belongs to.

import { SAMPLES_PER_MS } from "./tape.js";

const READINGS = 250;
const MOST_PACKETS = 6000;

/** The audio context's frames on the page's clock. */
export class FrameClock {
  /** @param {AudioContext} context */
  constructor(context) {
    this.context = context;
    this.framesPerMs = context.sampleRate / 1000;
    /** @type {number[]} */
    this.offsets = [];
  }

  /**
   * A message from the audio thread said that `frame` had just been computed. Messages come late,
   * never early, so the earliest of the last few seconds is nearest to the truth.
   * @param {number} frame
   */
  note(frame) {
    this.offsets.push(performance.now() - frame / this.framesPerMs);
    if (this.offsets.length > READINGS) this.offsets.shift();
  }

  /** When the audio thread computed a frame, in ms. @param {number} frame */
  computedAt(frame) {
    const offset = this.offsets.length
      ? Math.min(...this.offsets)
      : performance.now() - this.context.currentTime * 1000;
    return offset + frame / this.framesPerMs;
  }

  /** Delay from the audio thread to the loudspeaker, in ms, as the browser reports it. */
  get outputMs() {
    return 1000 * ((this.context.baseLatency || 0) + (this.context.outputLatency || 0));
  }

  /** When a frame leaves the loudspeaker, in ms. @param {number} frame */
  audibleAt(frame) {
    return this.computedAt(frame) + this.outputMs;
  }
}

/** Which sample on the wire was recorded when: one entry a packet. */
export class PacketTimes {
  /** @type {{end: number, frame: number}[]} */
  packets = [];
  samples = 0;

  /** @param {number} samples @param {number} frame the last sample's frame */
  add(samples, frame) {
    this.samples += samples;
    this.packets.push({ end: this.samples, frame });
    if (this.packets.length > MOST_PACKETS) this.packets.shift();
  }

  /** The frame at which a millisecond of what was sent was recorded, undefined if long ago. */
  frameOf(ms, framesPerMs) {
    const sample = ms * SAMPLES_PER_MS;
    const packet = this.packets.find(({ end }) => end >= sample);
    return packet && packet.frame - ((packet.end - sample) / SAMPLES_PER_MS) * framesPerMs;
  }
}
