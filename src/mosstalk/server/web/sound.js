// Microphone and loudspeaker of the page, around the audio thread in worklet.js.

import { FrameClock, PacketTimes } from "./clock.js";

const MICROPHONE = { echoCancellation: true, noiseSuppression: true, autoGainControl: true };
const LOOP_GAIN = 10 ** (-10 / 20);
const LOOP_DELAY_S = 0.12;

/**
 * Events, with their `detail`: "mic" {pcm, last}, "started" {item, at}, "ended" {item, samples},
 * "dry" {item}, "tap" {pcm, out, frame}, "lost". `at` is in ms of the page's clock; samples are
 * of 24 kHz.
 */
export class Sound extends EventTarget {
  /** @type {MediaStream | null} */
  stream = null;
  /** When what was sent was recorded. */
  packets = new PacketTimes();
  /** @type {((items: {item: string, samples: number}[]) => void)[]} */
  stops = [];
  volume = 1;
  /** The loudspeaker's id; empty: the system's own. */
  speaker = "";

  /**
   * Start the audio thread; needs a click or key before.
   * @param {{tap: boolean, loop: boolean}} debug
   * @throws {DOMException} its file cannot be fetched
   */
  async open(debug) {
    const context = new AudioContext({ latencyHint: "interactive" });
    try {
      await context.audioWorklet.addModule(new URL("worklet.js", import.meta.url));
    } catch (error) {
      context.close();
      throw error;
    }
    this.context = context;
    this.node = new AudioWorkletNode(this.context, "voice", {
      numberOfInputs: 1,
      outputChannelCount: [1],
      channelCount: 1,
      channelCountMode: "explicit",
    });
    this.clock = new FrameClock(this.context);
    this.node.port.onmessage = ({ data }) => this.heard(data);
    this.ear = this.analyser();
    this.mouth = this.analyser();
    this.gain = new GainNode(this.context, { gain: this.volume });
    this.node.connect(this.mouth).connect(this.gain).connect(this.context.destination);
    await this.speakTo(this.speaker);
    if (debug.tap) this.tell({ type: "tap" });
    if (debug.loop) this.loop();
    await this.context.resume();
  }

  /** @param {number} volume from 0 to 1 */
  setVolume(volume) {
    this.volume = volume;
    if (this.gain) this.gain.gain.value = volume;
  }

  /** Choose the loudspeaker. @param {string} id empty: the system's own @throws {DOMException} */
  async speakTo(id) {
    if (id !== this.speaker || (id && this.context)) await this.context?.setSinkId?.(id);
    this.speaker = id;
  }

  /** Go on after something else took the sound away. */
  wake() {
    if (this.context && this.context.state !== "running") this.context.resume();
  }

  analyser() {
    return new AnalyserNode(this.context, { fftSize: 2048 });
  }

  /** For tests: the loudspeaker is heard by the microphone, later and more quietly. */
  loop() {
    const delay = new DelayNode(this.context, { delayTime: LOOP_DELAY_S });
    const gain = new GainNode(this.context, { gain: LOOP_GAIN });
    this.node.connect(delay).connect(gain).connect(this.node);
  }

  /**
   * Ask for the microphone.
   * @param {boolean} echoCancellation
   * @param {string} id of the microphone; empty: the system's own
   * @throws {DOMException} as getUserMedia does
   */
  async listen(echoCancellation, id) {
    const audio = { ...MICROPHONE, echoCancellation, channelCount: 1 };
    if (id) audio.deviceId = { exact: id };
    // First, as some browsers open one microphone at a time; and if this fails there is none.
    this.source?.disconnect();
    this.stream?.getTracks().forEach((track) => track.stop());
    this.stream = null;
    const stream = await navigator.mediaDevices.getUserMedia({ audio });
    this.stream = stream;
    this.source = this.context.createMediaStreamSource(stream);
    this.source.connect(this.ear);
    this.source.connect(this.node);
    stream.getAudioTracks()[0].onended = () => this.emit("lost", {});
  }

  /** Pass the microphone on, or silence in its place, or nothing. */
  send(on, muted = false) {
    this.tell({ type: "send", on, muted });
  }

  /** Pass on what is left of a turn: the next "mic" with `last` has it. */
  flush() {
    this.tell({ type: "flush" });
  }

  /** Play more of an item. @param {string} item @param {Int16Array} pcm */
  play(item, pcm) {
    this.tell({ type: "play", item, pcm }, [pcm.buffer]);
  }

  /** No more will come of an item. @param {string} item */
  end(item) {
    this.tell({ type: "end", item });
  }

  /**
   * Be silent at once. Returns the items that were cut, with how many of their samples were heard.
   * @returns {Promise<{item: string, samples: number}[]>}
   */
  stop() {
    this.tell({ type: "stop" });
    if (this.context?.state !== "running") return Promise.resolve([]);
    return new Promise((resolve) => this.stops.push(resolve));
  }

  /** Forget what was sent: a new session counts from zero. @param {boolean} silent at once */
  startOver(silent) {
    this.packets = new PacketTimes();
    if (silent) this.stop();
  }

  /** When a moment of what was sent was spoken, in ms of the page's clock; undefined if unknown. */
  spokenAt(ms) {
    const frame = this.packets.frameOf(ms, this.clock.framesPerMs);
    if (frame === undefined) return undefined;
    const latency = this.stream?.getAudioTracks()[0]?.getSettings().latency ?? 0;
    return this.clock.computedAt(frame) - 1000 * latency;
  }

  tell(message, moved = []) {
    this.node?.port.postMessage(message, moved);
  }

  emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }

  /** A message from the audio thread. */
  heard(data) {
    if (data.type === "mic") {
      this.clock.note(data.frame);
      this.packets.add(data.pcm.length, data.frame);
    } else if (data.type === "stopped") {
      // Two stops within one block of sound are answered by one message.
      this.stops.splice(0).forEach((resolve, place) => resolve(place ? [] : data.items));
      return;
    } else if (data.type === "started") {
      data.at = this.clock.audibleAt(data.frame);
    }
    this.emit(data.type, data);
  }
}
