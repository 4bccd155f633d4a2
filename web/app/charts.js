/** @file The two charts of a run, in the colours of the page. */

import uPlot from "uplot";

const REDRAW_MS = 100;

/** @param {string} name of a custom property */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const FONT = "12px system-ui, sans-serif";

/** @param {Partial<uPlot.Axis>} more @returns {uPlot.Axis} */
function axis(more) {
  return {
    stroke: () => colour("quiet"),
    font: FONT,
    ticks: { show: false },
    grid: { stroke: () => colour("grid"), width: 1 },
    ...more,
  };
}

/**
 * @param {string} name of a custom property
 * @param {Partial<uPlot.Series>} [more]
 * @returns {uPlot.Series}
 */
const line = (name, more) => ({
  stroke: () => colour(name),
  width: 1.75,
  points: { show: false },
  spanGaps: true,
  ...more,
});

/** @param {number} value */
const short = (value) =>
  value !== 0 && Math.abs(value) < 0.01 ? value.toExponential(1).replace(".0", "") : String(+value.toFixed(3));

/** Lines over steps; values are appended, and drawn ten times a second at most. */
class Chart {
  #element;
  #plot;
  /** @type {(number | null)[][]} steps, and the values of each line */
  #columns;
  #due = 0;

  /**
   * @param {HTMLElement} element
   * @param {uPlot.Series[]} lines
   * @param {uPlot.Axis[]} axes
   * @param {uPlot.Scales} scales
   */
  constructor(element, lines, axes, scales) {
    this.#element = element;
    this.#columns = [[], ...lines.map(() => [])];
    /** @type {uPlot.Options} */
    const options = {
      ...this.#size(),
      series: [{}, ...lines],
      axes: [axis({ size: 30, space: 70, grid: { show: false } }), ...axes],
      scales: {
        x: { time: false, range: (_, least, most) => [least ?? 0, Math.max(most ?? 1, (least ?? 0) + 1)] },
        ...scales,
      },
      legend: { show: false },
      cursor: { show: false },
    };
    this.#plot = new uPlot(options, /** @type {uPlot.AlignedData} */ (this.#columns), element);
    new ResizeObserver(() => this.#plot.setSize(this.#size())).observe(element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#plot.redraw());
  }

  #size() {
    return { width: Math.max(100, this.#element.clientWidth), height: Math.max(100, this.#element.clientHeight) };
  }

  clear() {
    for (const column of this.#columns) column.length = 0;
    this.#draw();
  }

  /** Begin again behind a step: what came after it is not true any more. @param {number} step */
  cut(step) {
    const steps = /** @type {number[]} */ (this.#columns[0]);
    const end = steps.findIndex((value) => value > step);
    if (end >= 0) for (const column of this.#columns) column.length = end;
  }

  /**
   * @param {number} step not before the last one
   * @param {readonly (number | null | undefined)[]} values of each line; one that is absent leaves the line as it is
   */
  add(step, values) {
    const [steps, ...lines] = this.#columns;
    if (steps.at(-1) !== step) for (const column of this.#columns) column.push(column === steps ? step : null);
    for (const [i, value] of values.entries()) if (value !== undefined) lines[i][steps.length - 1] = value;
    if (this.#due) return;
    this.#due = setTimeout(() => this.#draw(), REDRAW_MS);
  }

  #draw() {
    clearTimeout(this.#due);
    this.#due = 0;
    this.#plot.setData(/** @type {uPlot.AlignedData} */ (this.#columns));
  }

  /** For whoever cannot see it. @param {string} text */
  describe(text) {
    this.#element.setAttribute("aria-label", text);
  }
}

/** Training and validation loss. @param {HTMLElement} element */
export function lossChart(element) {
  const held = line("held", {
    width: 2,
    points: { show: true, size: 6, fill: () => colour("held"), stroke: () => colour("held") },
  });
  return new Chart(element, [line("accent"), held], [axis({ size: 44, values: (_, all) => all.map(short) })], {
    y: { range: (_, least, most) => (least === null ? [0, 1] : uPlot.rangeNum(least, most, 0.08, false)) },
  });
}

/** Learning rate, and gradient norm with a scale of its own. @param {HTMLElement} element */
export function rateChart(element) {
  /** @type {uPlot.Scale} */
  const fromZero = { range: (_, __, most) => [0, most ? most * 1.1 : 1] };
  return new Chart(
    element,
    [line("accent", { scale: "rate" }), line("norm", { scale: "norm", width: 1.25 })],
    [
      axis({ scale: "rate", size: 52, space: 36, values: (_, all) => all.map(short) }),
      axis({ scale: "norm", side: 1, size: 44, space: 36, grid: { show: false }, values: (_, all) => all.map(short) }),
    ],
    { rate: fromZero, norm: fromZero },
  );
}

/**
 * The losses of several runs, told apart by colour and dashes.
 *
 * @param {HTMLElement} element
 * @param {readonly string[]} colours names of custom properties
 */
export function linesChart(element, colours) {
  const dashes = [[], [8, 4], [2, 3]];
  const lines = colours.map((name, index) => line(name, { dash: dashes[index % dashes.length] }));
  return new Chart(element, lines, [axis({ size: 44, values: (_, all) => all.map(short) })], {
    y: { range: (_, least, most) => (least === null ? [0, 1] : uPlot.rangeNum(least, most, 0.08, false)) },
  });
}
