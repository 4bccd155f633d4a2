/** @file The first view: the model, the text, and the runs that this browser keeps. */

import { ago, bytes, parameters, whole } from "./format.js";
import { button, element, input, make, makeButton, show } from "./page.js";
import { lacks } from "./planner.js";

/** @import { Site, SiteSize } from "./planner.js" */
/** @import { RunSummary } from "./runs.js" */

/** What the page knows of its device. @typedef {{limits: Record<string, number>, features: string[]}} Abilities */

/** @typedef {{size: string, precision: string, steps: number, texts: File[] | null}} Chosen */

export class SetupView {
  /** @type {Site | null} */
  #site = null;
  /** @type {Abilities | null} null while it is not known, or there is none */
  #abilities = null;
  /** @type {File[] | null} */
  #files = null;
  #ready = false;

  /** @param {(chosen: Chosen) => void} train called when the form is sent */
  constructor(train) {
    element("form").addEventListener("submit", (event) => {
      event.preventDefault();
      const { size } = this;
      if (!size || !this.#ready) return;
      const own = !input("text-files").checked;
      if (!own && !this.#files) return input("files").click();
      const steps = input("steps").valueAsNumber;
      train({ size: size.name, precision: this.precision, steps, texts: own ? null : this.#files });
    });
    input("files").addEventListener("change", () => {
      const { files } = input("files");
      if (files?.length) this.takeTexts([...files]);
    });
    element("precision").addEventListener("change", () => this.#fit());
  }

  get precision() {
    return /** @type {HTMLSelectElement} */ (element("precision")).value;
  }

  /** @returns {SiteSize | undefined} */
  get size() {
    const name = /** @type {HTMLInputElement | null} */ (document.querySelector("input[name=size]:checked"))?.value;
    return this.#site?.sizes.find((size) => size.name === name);
  }

  /** @param {Site} site */
  showSite(site) {
    this.#site = site;
    show("own-text", `${bytes(site.text.bytes)}, comes with this page`);
    element("sizes").replaceChildren(...site.sizes.map((size, i) => this.#card(size, i === 0)));
    this.#chooseSize();
  }

  /** @param {Abilities | null} abilities null: nothing can be trained here */
  showDevice(abilities) {
    this.#abilities = abilities;
    const half = abilities?.features.includes("shader-f16") ?? false;
    const option = /** @type {HTMLOptionElement} */ (document.querySelector("#precision option[value=mixed-f16]"));
    option.disabled = !half;
    if (!half) option.textContent = "16 bits (not on this device)";
    this.#fit();
  }

  /** @param {File[]} files */
  takeTexts(files) {
    this.#files = files;
    input("text-files").checked = true;
    const size = files.reduce((sum, file) => sum + file.size, 0);
    show("files-text", `${files.map(({ name }) => name).join(", ")} (${bytes(size)})`);
  }

  /**
   * @param {readonly RunSummary[]} runs
   * @param {{goOn: (name: string) => void, download: (name: string) => void, remove: (name: string) => void}} acts
   */
  showRuns(runs, acts) {
    element("runs").hidden = !runs.length;
    element("run-list").replaceChildren(
      ...runs.map((run) => {
        const state = run.busy
          ? "open in another tab"
          : `step ${whole(run.step)} of ${whole(run.steps)}, ${run.step >= run.steps ? "finished" : ago(run.updatedAt, Date.now())}`;
        const about = `${parameters(run.parameters)} parameters · ${state}`;
        const what = make("span", "what", make("strong", "", run.name), make("span", "quiet", about));
        const row = make("li", "", what);
        if (run.busy) return row;
        const done = run.step >= run.steps;
        row.append(
          makeButton(
            done ? "Look at it" : "Go on",
            () => acts.goOn(run.name),
            `${done ? "Look at" : "Go on with"} ${run.name}`,
          ),
          makeButton("Download", () => acts.download(run.name), `Download ${run.name}`),
          makeButton("Delete", () => acts.remove(run.name), `Delete ${run.name}`),
        );
        return row;
      }),
    );
  }

  /** @param {SiteSize} size @param {boolean} checked */
  #card(size, checked) {
    const radio = document.createElement("input");
    Object.assign(radio, { type: "radio", name: "size", value: size.name, checked });
    radio.addEventListener("change", () => this.#chooseSize());
    return make(
      "label",
      "size",
      radio,
      make("span", "name", size.title),
      make("span", "count", `${parameters(size.parameters)} parameters`),
      make("span", "quiet", size.about),
      make("span", "quiet", `${bytes(this.#memory(size, "f32"))} on the device`),
    );
  }

  /** @param {SiteSize} size @param {string} precision */
  #memory(size, precision) {
    return size.precisions[precision].plans[0].memoryBytes;
  }

  #chooseSize() {
    const { size } = this;
    if (size) input("steps").valueAsNumber = size.precisions.f32.config.run.steps;
    this.#fit();
  }

  /** Say whether the chosen model fits. */
  #fit() {
    const { size, precision } = this;
    this.#ready = false;
    if (size && this.#abilities) {
      const plan = size.precisions[precision].plans[0];
      const problem = lacks(plan, this.#abilities);
      const largest = plan.requires.limits.maxBufferSize;
      const most = this.#abilities.limits.maxBufferSize;
      this.#ready = problem === null;
      const needs = `It needs ${bytes(plan.memoryBytes)} on the device, in buffers of at most ${bytes(largest)}`;
      show("fit", problem ?? `${needs} (this device allows ${bytes(most)}).`);
    }
    button("train").disabled = !this.#ready;
  }
}
