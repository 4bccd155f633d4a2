/** @file The second view: a run while it trains, and after. */

import { lossChart, rateChart } from "./charts.js";
import { bytes, duration, parameters, whole } from "./format.js";
import { button, element, make, show } from "./page.js";

const NOTES = 100; // kept on the page
const SAMPLES = 30;
const PHASES = /** @type {Record<string, string>} */ ({
  data: "reading the text",
  archive: "checking the run file",
  "warm-up": "preparing the device",
  train: "training",
  evaluate: "measuring on held-out text",
  sample: "writing a sample",
  save: "saving",
});
const STAGES = /** @type {Record<string, string>} */ ({
  tokens: "turning the text into tokens",
  documents: "reading the text",
});

export class RunView {
  #loss = lossChart(element("loss-chart"));
  #rate = rateChart(element("rate-chart"));
  /** @type {number | null} */
  #first = null;
  /** @type {{step: number, loss: number} | null} */
  #held = null;
  /** What the run is called; null before that is known. @type {string | null} */
  name = null;
  paused = false;
  /** Whether a checkpoint can be packed. */
  saved = false;
  /** Whether all of its steps are done. */
  finished = false;

  /** Tenths of the run that were spoken of. */
  #tenths = 0;

  /** Nothing is known of the run yet. @param {string} title */
  begin(title) {
    this.name = null;
    this.paused = this.saved = this.finished = false;
    this.#first = this.#held = null;
    this.#loss.clear();
    this.#rate.clear();
    for (const id of ["loss", "validation", "step", "rate", "left", "memory", "saved"]) show(id, "–");
    show("run-title", title);
    show("about", "");
    show("command", "the command appears with the first save");
    show("sample-step", "The first sample comes soon.");
    for (const id of ["sample", "samples", "notes"]) element(id).replaceChildren();
    element("earlier").hidden = true;
    element("sample").hidden = true;
    button("copy").disabled = true;
    button("pause").textContent = "Pause";
    for (const id of ["on", "new"]) element(id).hidden = true;
    for (const id of ["pause", "save", "stop"]) element(id).hidden = false;
    this.#allow(false);
    button("stop").disabled = false; // also before the first step
    this.#stand(0, 1);
    this.#tenths = 0;
    show("spoken", `${title}: getting ready`);
  }

  /** @param {boolean} training */
  #allow(training) {
    for (const id of ["pause", "save", "stop"]) button(id).disabled = !training;
    button("download").disabled = !(training || this.saved);
  }

  /** @param {number} step @param {number} steps */
  #stand(step, steps) {
    const bar = /** @type {HTMLProgressElement} */ (element("bar"));
    bar.max = steps;
    bar.value = step;
  }

  /** What happened. @param {string} kind @param {any} facts */
  event(kind, facts) {
    this.#shown[kind]?.(facts);
  }

  /** @type {Record<string, (facts: any) => void>} */
  #shown = {
    phase: ({ phase }) => {
      if (!this.paused) show("status", PHASES[phase] ?? phase);
    },
    progress: ({ stage, done, total }) => {
      const far = total > 1 ? `: ${whole(done)} of ${whole(total)}` : "";
      show("status", `${STAGES[stage] ?? stage}${far}`);
    },
    note: ({ text }) => {
      const list = element("notes");
      list.append(make("li", "", text));
      while (list.childElementCount > NOTES) list.firstElementChild?.remove();
    },
    history: ({ name, step: done, planned, about, steps, validation }) => {
      this.name = name;
      this.saved = done > 0;
      show("run-title", name);
      show("about", `${parameters(about.parameters)} parameters · ${about.precision}`);
      show("step", `${whole(done)} of ${whole(planned)}`);
      this.#stand(done, planned);
      if (this.saved) show("saved", `step ${whole(done)}`);
      const points = [...steps, ...validation.map((/** @type {any} */ row) => ({ held: row.loss, step: row.step }))];
      for (const { step, loss, lr, gradNorm, held } of points.sort((a, b) => a.step - b.step)) {
        this.#loss.add(step, [loss, held]);
        if (loss !== undefined) this.#rate.add(step, [lr, gradNorm]);
      }
      if (done > 0 && !points.length) {
        element("notes").append(make("li", "", "A file of a run has no curves: they begin where it goes on."));
      }
      this.#first = steps[0]?.loss ?? null;
      if (steps.length) show("loss", steps.at(-1).loss.toFixed(3));
      if (validation.length) this.#validation(validation.at(-1));
    },
    run: ({ name, step, steps, parameters: count, precision, adapter, memory }) => {
      this.name = name;
      show("run-title", name);
      show("about", `${parameters(count)} parameters · ${precision} · ${adapter ?? "this browser's device"}`);
      show("memory", bytes(memory.total));
      show("step", `${whole(step)} of ${whole(steps)}`);
      this.#loss.cut(step);
      this.#rate.cut(step);
      this.#stand(step, steps);
      this.#allow(true);
    },
    step: ({ step, steps, loss, lr, gradNorm, tokensPerSecond, etaSeconds }) => {
      this.#first ??= loss;
      this.#stand(step, steps);
      show("step", `${whole(step)} of ${whole(steps)}`);
      show("loss", loss.toFixed(3));
      show("rate", whole(tokensPerSecond));
      show("left", etaSeconds === null ? "–" : duration(etaSeconds));
      this.#loss.add(step, [loss, undefined]);
      this.#rate.add(step, [lr, gradNorm]);
      this.#describe(step, loss, lr, gradNorm);
      this.#speak(step, steps, loss);
      document.title = `${Math.floor((100 * step) / steps)} % · ${this.name} · hybrid`;
    },
    validation: (row) => {
      this.#loss.add(row.step, [undefined, row.loss]);
      this.#validation(row);
    },
    sample: ({ step, prompt, text }) => this.#sample(step, prompt, text),
    checkpoint: ({ step }) => {
      this.saved = true;
      show("saved", `step ${whole(step)}`);
      button("download").disabled = false;
    },
    command: ({ command }) => {
      show("command", command);
      button("copy").disabled = false;
    },
  };

  /** Ten times a run, for whoever listens to it. @param {number} step @param {number} steps @param {number} loss */
  #speak(step, steps, loss) {
    const tenths = Math.floor((10 * step) / steps);
    if (tenths > this.#tenths) show("spoken", `${tenths}0 percent done, loss ${loss.toFixed(2)}`);
    this.#tenths = tenths;
  }

  /** @param {{step: number, loss: number}} row */
  #validation(row) {
    this.#held = row;
    show("validation", row.loss.toFixed(3));
  }

  /** @param {number} step @param {number} loss @param {number} lr @param {number} gradNorm */
  #describe(step, loss, lr, gradNorm) {
    const held = this.#held ? `; validation loss ${this.#held.loss.toFixed(3)} at step ${this.#held.step}` : "";
    this.#loss.describe(`training loss ${loss.toFixed(3)} at step ${step}, ${this.#first?.toFixed(3)} at first${held}`);
    this.#rate.describe(
      `learning rate ${Number(lr.toPrecision(3))} and gradient norm ${Number(gradNorm.toPrecision(3))} at step ${step}`,
    );
  }

  /** @param {number} step @param {string} prompt @param {string} text */
  #sample(step, prompt, text) {
    const quote = element("sample");
    const before = quote.textContent;
    if (before) {
      const past = make("li", "", make("span", "quiet", `${element("sample-step").textContent}: `), before);
      element("samples").prepend(past);
      element("earlier").hidden = false;
      while (element("samples").childElementCount > SAMPLES) element("samples").lastElementChild?.remove();
    }
    quote.hidden = false;
    quote.replaceChildren(make("span", "prompt", prompt), text);
    quote.classList.remove("fresh");
    quote.getBoundingClientRect(); // so that the animation begins again
    quote.classList.add("fresh");
    show("sample-step", `At step ${whole(step)}`);
  }

  /** @param {boolean} paused */
  pause(paused) {
    this.paused = paused;
    button("pause").textContent = paused ? "Resume" : "Pause";
    show("status", paused ? "paused" : "training");
    show("spoken", paused ? "paused" : "training");
  }

  /** The run trains no more. @param {string} text */
  end(text) {
    this.paused = false;
    this.#allow(false);
    show("status", text);
    show("spoken", text);
    for (const id of ["pause", "save", "stop"]) element(id).hidden = true;
    element("on").hidden = !this.saved;
    show("on", this.finished ? "Train longer" : "Go on");
    element("new").hidden = false;
    show("left", "–");
    document.title = `${this.name ?? "run"} · hybrid`;
  }
}
