// Level and waveform of both sides: a few seconds of peaks, or a plain meter for calm eyes.

const BAR_PX = 4;
const BAR_MS = 40;
const CALM_MS = 250;
const FLOOR_DB = -60;

const calm = matchMedia("(prefers-reduced-motion: reduce)");

class Wave {
  /** @type {number[]} the loudest sample of each moment, oldest first */
  peaks = [];
  since = 0;
  /** @type {AnalyserNode | null} */
  analyser = null;

  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
  }

  /** The loudest of the last 2048 samples, some 45 ms. */
  peak() {
    if (!this.analyser) return 0;
    this.sound ??= new Float32Array(this.analyser.fftSize);
    this.analyser.getFloatTimeDomainData(this.sound);
    return this.sound.reduce((most, sample) => Math.max(most, Math.abs(sample)), 0);
  }

  fit() {
    const { canvas } = this;
    const scale = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth * scale, canvas.clientHeight * scale].map(Math.round);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    this.pen.clearRect(0, 0, width, height);
    this.pen.fillStyle = getComputedStyle(canvas).color;
    return { width, height, bar: BAR_PX * scale };
  }

  /** Peaks move from right to left, one bar for each `BAR_MS`. @param {number} now */
  scroll(now) {
    const { width, height, bar } = this.fit();
    const peak = this.peak();
    const moved = Math.min(Math.floor((now - this.since) / BAR_MS), Math.ceil(width / bar));
    if (moved) this.since = now;
    this.peaks.push(...new Array(moved).fill(peak));
    if (!moved) this.peaks.push(Math.max(peak, this.peaks.pop() ?? 0));
    this.peaks.splice(0, this.peaks.length - Math.ceil(width / bar));
    this.peaks.forEach((peak, place) => {
      const tall = Math.max(bar / 2, Math.min(1, Math.sqrt(peak)) * height);
      const left = width - (this.peaks.length - place) * bar;
      this.pen.fillRect(left, (height - tall) / 2, bar / 2, tall);
    });
  }

  /** One bar that grows with the level. */
  meter() {
    const { width, height } = this.fit();
    const db = 20 * Math.log10(this.peak() + 1e-9);
    const share = Math.max(0, 1 - db / FLOOR_DB);
    this.pen.fillRect(0, height / 3, Math.max(2, width * share), height / 3);
  }
}

/**
 * Draw as long as the page is there.
 * @param {HTMLCanvasElement} you @param {HTMLCanvasElement} reply
 * @param {import("./sound.js").Sound} sound whose analysers appear when it opens
 */
export function drawWaves(you, reply, sound) {
  const waves = [new Wave(you), new Wave(reply)];
  let drawn = 0;
  const draw = (now) => {
    [waves[0].analyser, waves[1].analyser] = [sound.ear ?? null, sound.mouth ?? null];
    if (!calm.matches) waves.forEach((wave) => wave.scroll(now));
    else if (now - drawn > CALM_MS) {
      waves.forEach((wave) => wave.meter());
      drawn = now;
    }
    requestAnimationFrame(draw);
  };
  requestAnimationFrame(draw);
}
