/** @file The first view: the model, the text, and the runs that this browser keeps. */

import { CUSTOM, checkShape, countParameters, SHAPE, shapeOf } from "./custom.js";
import { ago, bytes, parameters, whole } from "./format.js";
import { button, element, input, make, makeButton, show } from "./page.js";
import { lacks } from "./planner.js";

/** @import { Shape } from "./custom.js" */
/** @import { Site, SiteSize } from "./planner.js" */
/** @import { RunSummary } from "./runs.js" */

/** What the page knows of its device. @typedef {{limits: Record<string, number>, features: string[]}} Abilities */

/** size: the name of one of the page's, or a shape of one's own. @typedef {{size: string | Shape, precision: string, steps: number, texts: File[] | null}} Chosen */

/** A plan that was compiled to see what it needs. @typedef {{requires: {features: string[], limits: Record<string, number>}, memoryBytes: number}} Needs */

const SETTLE_MS = 500; // somebody who types a number is not done with the first digit

export class SetupView {
  /** @type {Site | null} */
  #site = null;
  /** @type {Abilities | null} null while it is not known, or there is none */
  #abilities = null;
  /** @type {File[] | null} */
  #files = null;
  #ready = false;
  #measure;
  /** What models need whose plans were compiled here, by `keyOf`. @type {Map<string, Needs>} */
  #known = new Map();
  /** Those whose plans are asked for. */
  #asked = new Set();
  /** Those of the page's that were asked for without somebody having chosen them. */
  #listed = new Set();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #settling;

  /**
   * @param {(chosen: Chosen) => void} train called when the form is sent
   * @param {(asked: {key: string, size: string | Shape, precision: string}) => void} measure called to have a plan compiled:
   *   the answer goes to `showNeeds` or `showProblem`
   */
  constructor(train, measure) {
    this.#measure = measure;
    element("form").addEventListener("submit", (event) => {
      event.preventDefault();
      const size = this.#wanted;
      if (!size || !this.#ready) return;
      if (!this.ownText && !this.#files) return input("files").click();
      train({ size, precision: this.precision, steps: input("steps").valueAsNumber, texts: this.texts });
    });
    for (const key of Object.keys(SHAPE)) input(key).addEventListener("input", () => this.#fit());
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

  get ownText() {
    return !input("text-files").checked;
  }

  /** Null: the page's own. */
  get texts() {
    return this.ownText ? null : this.#files;
  }

  /** Whether a model of one's own size is wanted. */
  get custom() {
    return document.querySelector("input[name=size]:checked")?.getAttribute("value") === CUSTOM;
  }

  /** @returns {Shape} */
  get shape() {
    const numbers = Object.keys(SHAPE).map((key) => [key, input(key).valueAsNumber]);
    return Object.fromEntries(numbers);
  }

  /** @returns {string | Shape | undefined} */
  get #wanted() {
    return this.custom ? this.shape : this.size?.name;
  }

  /** @param {Site} site */
  showSite(site) {
    this.#site = site;
    show("own-text", `${bytes(site.text.bytes)}, comes with this page`);
    for (const [key, value] of Object.entries(shapeOf(site.sizes[0]))) input(key).valueAsNumber = value;
    const cards = site.sizes.map((size, i) => this.#card(size, i === 0));
    element("sizes").replaceChildren(...cards, this.#customCard(site));
    this.#chooseSize();
    performance.mark("interactive");
  }

  /** @param {Abilities | null} abilities null: nothing can be trained here */
  showDevice(abilities) {
    this.#abilities = abilities;
    const half = abilities?.features.includes("shader-f16") ?? false;
    const option = /** @type {HTMLOptionElement} */ (document.querySelector("#precision option[value=mixed-f16]"));
    option.disabled = !half;
    if (!half) option.textContent = "16 bits (not on this device)";
    this.#fit();
    this.#askNext();
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
        const about = run.damaged
          ? "the tab was ended while it wrote down what this run is for: download it, and drop the file here to go on"
          : `${parameters(run.parameters)} parameters · ${state}`;
        const what = make("span", "what", make("strong", "", run.name), make("span", "quiet", about));
        const row = make("li", "", what);
        if (run.busy) return row;
        const done = run.step >= run.steps;
        const look = () => acts.goOn(run.name);
        const goOn = done ? ["Look at it", "Look at"] : ["Go on", "Go on with"];
        if (!run.damaged) row.append(makeButton(goOn[0], look, `${goOn[1]} ${run.name}`));
        row.append(
          makeButton("Download", () => acts.download(run.name), `Download ${run.name}`),
          makeButton("Delete", () => acts.remove(run.name), `Delete ${run.name}`),
        );
        return row;
      }),
    );
  }

  /** @param {SiteSize} size @param {boolean} checked */
  #card(size, checked) {
    const memory = make("span", "quiet");
    memory.id = `memory-${size.name}`;
    const card = this.#radio(
      { value: size.name, checked },
      make("span", "name", size.title),
      make("span", "count", `${parameters(size.parameters)} parameters`),
      make("span", "quiet", size.about),
      memory,
    );
    memory.textContent = this.#memory(size);
    return card;
  }

  /** @param {Site} site */
  #customCard({ planners }) {
    const { server, python } = planners;
    const how = server
      ? "The server of this page compiles it."
      : "Python compiles it, in this tab: 19 MB, loaded once.";
    const without = "Not here: whoever serves this page can add it with hybrid export-site OUT --python.";
    return this.#radio(
      { value: CUSTOM, disabled: !(server || python) },
      make("span", "name", "Custom"),
      make("span", "count", "any size"),
      make("span", "quiet", server || python ? how : without),
    );
  }

  /** @param {Partial<HTMLInputElement>} properties @param {...HTMLElement} content */
  #radio(properties, ...content) {
    const radio = document.createElement("input");
    Object.assign(radio, { type: "radio", name: "size", ...properties });
    radio.addEventListener("change", () => this.#chooseSize());
    return make("label", "size", radio, ...content);
  }

  /** @param {SiteSize} size */
  #memory(size) {
    const needs = this.#needs(size, "f32");
    return needs ? `${bytes(needs.memoryBytes)} on the device` : "memory not known yet";
  }

  /** What is known of a model's needs. @param {SiteSize} size @param {string} precision @returns {Needs | undefined} */
  #needs(size, precision) {
    return size.precisions[precision].plans[0] ?? this.#known.get(keyOf(size.name, precision));
  }

  #chooseSize() {
    const { size } = this;
    element("shape").hidden = !this.custom;
    if (size) input("steps").valueAsNumber = size.precisions.f32.config.run.steps;
    this.#fit();
  }

  /** Say whether the chosen model fits. */
  #fit() {
    const { size, precision } = this;
    this.#ready = false;
    clearTimeout(this.#settling);
    if (this.custom) this.#fitCustom();
    else if (size) this.#fitNeeds(this.#needs(size, precision), "", 0);
    button("train").disabled = !this.#ready;
  }

  #fitCustom() {
    const { shape, precision } = this;
    const count = countParameters(shape, this.#site?.sizes[0].precisions.f32.config.model.vocabularySize);
    try {
      checkShape(shape);
    } catch (error) {
      return show("fit", `${/** @type {Error} */ (error).message}.`);
    }
    this.#fitNeeds(this.#known.get(keyOf(shape, precision)), `${parameters(count)} parameters. `, SETTLE_MS);
  }

  /**
   * @param {Needs | undefined} needs of the chosen model; if they are not known, its plan is compiled
   * @param {string} about it
   * @param {number} settle how long its numbers have to stay as they are before that, in milliseconds
   */
  #fitNeeds(needs, about, settle) {
    if (needs) return this.#show(needs, about);
    const { precision } = this;
    const wanted = /** @type {string | Shape} */ (this.#wanted);
    show("fit", this.#abilities ? `${about}Its plan is being compiled.` : about.trimEnd());
    if (settle) this.#settling = setTimeout(() => this.#ask(wanted, precision), settle);
    else this.#ask(wanted, precision);
  }

  /** Have a plan compiled to see what it needs. @param {string | Shape} size @param {string} precision */
  #ask(size, precision) {
    const key = keyOf(size, precision);
    if (!this.#abilities || this.#asked.has(key)) return;
    this.#asked.add(key);
    this.#measure({ key, size, precision });
  }

  /** One after the other, so that the chosen one does not wait for all. */
  #askNext() {
    const next = this.#site?.sizes.find((size) => !this.#needs(size, "f32") && !this.#listed.has(size.name));
    if (!next || !this.#abilities || this.#asked.size) return;
    this.#listed.add(next.name);
    this.#ask(next.name, "f32");
  }

  /** The key of the chosen model. */
  get #chosen() {
    return this.#wanted && keyOf(this.#wanted, this.precision);
  }

  /** What a plan needs that was asked for. @param {string} key @param {Needs} needs */
  showNeeds(key, needs) {
    this.#asked.delete(key);
    this.#known.set(key, needs);
    for (const size of this.#site?.sizes ?? []) show(`memory-${size.name}`, this.#memory(size));
    if (key === this.#chosen) this.#fit();
    this.#askNext();
  }

  /** Why there is no plan, or how far it is. @param {string | null} key null: of whatever is asked for @param {string} text */
  showProblem(key, text) {
    if (key === null) {
      if (this.#asked.has(this.#chosen)) show("fit", text);
      return;
    }
    this.#asked.delete(key);
    if (key === this.#chosen) show("fit", text);
    this.#askNext();
  }

  /** @param {Needs} plan @param {string} [about] */
  #show(plan, about = "") {
    if (!this.#abilities) return;
    const problem = lacks(plan, this.#abilities);
    const largest = plan.requires.limits.maxBufferSize;
    const most = this.#abilities.limits.maxBufferSize;
    this.#ready = problem === null;
    const needs = `It needs ${bytes(plan.memoryBytes)} on the device, in buffers of at most ${bytes(largest)}`;
    show("fit", about + (problem ? `${problem}.` : `${needs} (this device allows ${bytes(most)}).`));
    button("train").disabled = !this.#ready;
  }
}

/** @param {string | Shape} size @param {string} precision */
const keyOf = (size, precision) => JSON.stringify([size, precision]);
