/** @file The Python panel: a script, what it says, and its loss. */

import { lossChart } from "./charts.js";
import { EXAMPLES } from "./examples.js";
import { button, element, show } from "./page.js";

/** @import { Site } from "./planner.js" */

const LINES = 500; // kept on the page
const LINE_LENGTH = 5000; // of which as much is shown
const KEPT = "hybrid.script"; // where this browser keeps what somebody wrote
const STEPS_SPOKEN = 10; // a status that changes with every step would be spoken with every step

export class ScriptView {
  /** @type {ReturnType<typeof lossChart> | null} */
  #chart = null;
  #source = /** @type {HTMLTextAreaElement} */ (element("source"));
  #example = /** @type {HTMLSelectElement} */ (element("example"));
  /** @type {{step: number, loss: number} | null} */
  #last = null;
  #first = 0;
  /** How many lines each node of the shown ones has, the oldest first. @type {number[]} */
  #counts = [];

  /** @param {{run: (source: string) => void, stop: () => void}} acts */
  constructor({ run, stop }) {
    for (const { title } of EXAMPLES) this.#example.append(new Option(title));
    this.#example.addEventListener("change", () => {
      const own = !EXAMPLES.some(({ source }) => source === this.#source.value);
      if (own && !confirm("Replace your script by the example?")) return;
      this.#source.value = EXAMPLES[this.#example.selectedIndex].source;
      keep(null);
    });
    this.#source.addEventListener("input", () => keep(this.#source.value));
    this.#source.value = kept() ?? EXAMPLES[0].source;
    button("script-run").disabled = true;
    button("script-run").addEventListener("click", () => {
      this.#begin();
      run(this.#source.value);
    });
    button("script-stop").addEventListener("click", () => {
      show("script-status", "stopping");
      stop();
    });
  }

  /** @param {Site} site */
  showSite({ planners }) {
    button("script-run").disabled = !planners.python;
    if (planners.python) return;
    show(
      "python-about",
      "This page was put up without Python: whoever serves it can add it with hybrid export-site OUT --python. Scripts then compile a model in this tab, and train it on your device.",
    );
  }

  #begin() {
    element("script-wrong").hidden = true;
    element("script-shown").hidden = false;
    this.#chart ??= lossChart(element("script-chart"));
    this.#chart.clear();
    this.#last = null;
    element("script-lines").replaceChildren();
    this.#counts = [];
    button("script-run").disabled = true;
    button("script-stop").disabled = false;
    show("script-status", "getting ready");
  }

  /** @param {string} stage what it is doing */
  stage(stage) {
    if (!this.#last) show("script-status", stage);
  }

  /** @param {string[]} lines that it printed */
  lines(lines) {
    const shown = element("script-lines");
    const newest = lines.slice(-LINES);
    shown.append(`${newest.map(cut).join("\n")}\n`);
    this.#counts.push(newest.length);
    let count = this.#counts.reduce((sum, one) => sum + one, 0);
    // Whole nodes, as long as enough stays.
    for (let first = this.#counts[0]; count - first >= LINES; first = this.#counts[0]) {
      shown.firstChild?.remove();
      this.#counts.shift();
      count -= first;
    }
    shown.scrollTop = shown.scrollHeight;
  }

  /** What it reports: `step` and `loss` are drawn. @param {Record<string, number | string | null>} values */
  report({ step, loss }) {
    if (typeof step !== "number" || typeof loss !== "number") return;
    if (!this.#last) this.#first = loss;
    this.#last = { step, loss };
    this.#chart?.add(step, [loss, undefined]);
    this.#chart?.describe(`training loss ${loss.toFixed(3)} at step ${step}, ${this.#first.toFixed(3)} at first`);
    if (step % STEPS_SPOKEN === 0) show("script-status", `step ${step}, loss ${loss.toFixed(3)}`);
  }

  /**
   * @param {string | null} message what went wrong
   * @param {string} [error] its class
   * @param {string} [traceback] where in the script, for who wants to know
   */
  end(message, error, traceback) {
    button("script-run").disabled = false;
    button("script-stop").disabled = true;
    const reached = this.#last ? `step ${this.#last.step}, loss ${this.#last.loss.toFixed(3)}` : "no step reported";
    show("script-status", `${message === null ? "Finished" : "Ended"}: ${reached}.`);
    if (message === null || error === "StopRequested") return;
    if (traceback) this.lines(traceback.split("\n"));
    element("script-wrong").hidden = false;
    show("script-error", message);
  }
}

/** @param {string} line */
function cut(line) {
  const more = line.length - LINE_LENGTH;
  return more > 0 ? `${line.slice(0, LINE_LENGTH)} … and ${more} characters more` : line;
}

function kept() {
  try {
    return localStorage.getItem(KEPT);
  } catch {
    return null; // storage is refused here
  }
}

/** @param {string | null} source */
function keep(source) {
  try {
    if (source === null) localStorage.removeItem(KEPT);
    else localStorage.setItem(KEPT, source);
  } catch {
    // refused, or full: it lasts as long as the page does
  }
}
