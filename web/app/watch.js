/**
 * @file The runs of the machine that serves this page: a list, one of them live, several side by side. What is shown
 * stands behind the # of the address, so going back and links work.
 */

import { linesChart, lossChart, rateChart } from "./charts.js";
import { ago, parameters, whole } from "./format.js";
import { button, element, make, show } from "./page.js";

/** @typedef {Record<string, any>} Facts */

const API = new URL("../api/", location.href);
const LIST_MS = 4000;
const TALK_MS = 5000;
const FIELDS = ["total_loss", "lr", "gradient_norm_unclipped", "tokens_per_second"];
const LINES = ["first", "second", "third", "fourth", "fifth", "sixth"];
const COLOURS = ["accent", "held", "third", "fourth", "fifth", "sixth"];
const VIEWS = ["list", "run", "comparison"];

/** @param {unknown} value */
const digits = (value) => (typeof value === "number" ? value.toFixed(4) : "–");

/** @param {string} text nothing: all is well */
function complain(text) {
  show("alert-text", text);
  element("alert").hidden = !text;
}

/**
 * @param {string} path below `api/`
 * @returns {Promise<Facts>}
 */
async function ask(path) {
  let response;
  try {
    response = await fetch(new URL(path, API));
  } catch {
    throw new Error("the server does not answer: is it still running?");
  }
  const answer = await response.json().catch(() => ({}));
  if (response.status === 401) throw new Error("the server was started again: open the address that it printed");
  if (!response.ok) throw new Error(answer.error?.message ?? `the server answered with status ${response.status}`);
  return answer;
}

// --- the list

const chosen = new Set();

/** @param {Facts[]} runs */
function showList(runs) {
  element("none").hidden = runs.length > 0;
  element("table").hidden = !runs.length;
  for (const name of chosen) if (!runs.some((run) => run.name === name)) chosen.delete(name);
  const focused = document.activeElement?.id;
  element("rows").replaceChildren(...runs.map(listed));
  if (focused) document.getElementById(focused)?.focus();
  showChosen();
}

/** @param {Facts} run */
function listed(run) {
  const box = /** @type {HTMLInputElement} */ (make("input", ""));
  box.type = "checkbox";
  box.id = `box-${run.name}`;
  box.checked = chosen.has(run.name);
  box.setAttribute("aria-label", `compare ${run.name}`);
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(run.name);
    else chosen.delete(run.name);
    showChosen();
  });
  const link = /** @type {HTMLAnchorElement} */ (make("a", "", run.name));
  link.id = `link-${run.name}`;
  link.href = `#run/${run.name}`;
  const steps =
    run.step === null ? "–" : run.steps === null ? whole(run.step) : `${whole(run.step)} of ${whole(run.steps)}`;
  const changed = run.updatedAt ? ago(run.updatedAt, Date.now()) : "–";
  return make(
    "tr",
    "",
    make("td", "", box),
    make("td", "", link),
    make("td", "", run.problem ? `cannot be read: ${run.problem}` : (run.status ?? "–")),
    make("td", "number", steps),
    make("td", "number", digits(run.loss)),
    make("td", "number", digits(run.validationLoss)),
    make("td", "", changed),
  );
}

function showChosen() {
  const few = chosen.size < 2;
  const many = chosen.size > LINES.length;
  button("compare").disabled = few || many;
  show("chosen", few ? "choose two runs or more" : many ? `at most ${LINES.length}` : [...chosen].join(", "));
}

// --- one run

/** Draws what it is told, also when it comes late or is taken back. */
class Live {
  #loss = lossChart(element("loss-chart"));
  #rate = rateChart(element("rate-chart"));
  /** @type {Map<number, (number | null | undefined)[]>} loss, validation loss, learning rate, norm */
  #points = new Map();
  #last = 0;
  #due = 0;
  #talked = 0;

  clear() {
    this.#points.clear();
    this.#redraw();
  }

  /** What came after a step in a file is not true any more. @param {string} file @param {number} step */
  cut(file, step) {
    for (const [at, [loss, held, rate, norm]] of this.#points) {
      if (at <= step) continue;
      const kept = file === "validation" ? [loss, undefined, rate, norm] : [undefined, held];
      if (kept.every((value) => value === undefined)) this.#points.delete(at);
      else this.#points.set(at, kept);
    }
    this.#redraw();
  }

  /** @param {number} step @param {(number | null | undefined)[]} values those that are absent stay */
  add(step, values) {
    const known = this.#points.get(step) ?? [];
    const all = Array.from({ length: 4 }, (_, index) => values[index] ?? known[index]);
    this.#points.set(step, all);
    if (step >= this.#last) this.#draw(step, all);
    else this.#due ||= setTimeout(() => this.#redraw(), 100);
    if (performance.now() - this.#talked > TALK_MS) this.#talk();
  }

  /** @param {number} step @param {(number | null | undefined)[]} values */
  #draw(step, [loss, held, rate, norm]) {
    this.#last = step;
    this.#loss.add(step, [loss, held]);
    this.#rate.add(step, [rate, norm]);
  }

  #redraw() {
    clearTimeout(this.#due);
    this.#due = this.#last = 0;
    this.#loss.clear();
    this.#rate.clear();
    for (const step of [...this.#points.keys()].sort((a, b) => a - b)) this.#draw(step, this.#points.get(step) ?? []);
  }

  #talk() {
    this.#talked = performance.now();
    const [loss, , rate, norm] = this.#points.get(this.#last) ?? [];
    this.#loss.describe(`loss by step: ${digits(loss)} at step ${this.#last}`);
    this.#rate.describe(`learning rate ${rate ?? "–"} and gradient norm ${digits(norm)} at step ${this.#last}`);
  }
}

/** @type {Live | null} */
let live = null;
/** @type {EventSource | null} */
let source = null;

/** @param {string} name */
function follow(name) {
  live ??= new Live();
  live.clear();
  const view = live;
  for (const id of ["loss", "validation", "step", "rate", "parameters", "backend"]) show(id, "–");
  show("run-title", name);
  show("status", "waiting for the run");
  const opened = new EventSource(new URL(`runs/${name}/events?fields=${FIELDS.join(",")}`, API));
  source = opened;
  /** @type {number | null} */
  let steps = null;
  /** @param {string} kind @param {(value: Facts) => void} act */
  const on = (kind, act) => opened.addEventListener(kind, (event) => act(JSON.parse(event.data)));
  const stand = (/** @type {number} */ step) => {
    show("step", steps === null ? whole(step) : `${whole(step)} of ${whole(steps)}`);
    /** @type {HTMLProgressElement} */ (element("bar")).value = steps ? step / steps : 0;
  };
  on("run", (run) => {
    steps = run.steps;
    if (run.step !== null && element("step").textContent === "–") stand(run.step); // it has no rows where it was uploaded
    show("status", run.problem ?? [run.status, run.message].filter(Boolean).join(": "));
    if (run.parameters !== null) show("parameters", parameters(run.parameters));
    if (run.backend !== null) show("backend", run.backend);
  });
  on("entry", (row) => {
    const { step, total_loss: loss, lr, gradient_norm_unclipped: norm, tokens_per_second: rate } = row;
    view.add(step, [loss, undefined, lr, norm]);
    show("loss", digits(loss));
    stand(step);
    if (typeof rate === "number") show("rate", whole(rate));
  });
  on("validation", ({ step, loss }) => {
    view.add(step, [undefined, loss]);
    show("validation", digits(loss));
  });
  on("cut", ({ file, step }) => view.cut(file, step));
  on("gone", () => {
    opened.close();
    complain(`the run ${name} was removed`);
  });
  opened.addEventListener("open", () => complain(""));
  opened.addEventListener("error", () => {
    if (opened.readyState === EventSource.CLOSED) complain(`the run ${name} cannot be watched: is it still there?`);
    else complain("the server does not answer: trying again");
  });
}

// --- several runs

/** @param {string[]} names */
async function compare(names) {
  element("compare-chart").replaceChildren();
  const found = await ask(`compare?${names.map((name) => `run=${name}`).join("&")}&fields=total_loss`);
  show("comparison-title", names.join(", "));
  element("keys").replaceChildren(...names.map((name, index) => make("span", `key ${LINES[index]}`, name)));
  const chart = linesChart(element("compare-chart"), COLOURS.slice(0, names.length));
  const { steps, values } = found.metrics;
  for (const [index, step] of steps.entries()) {
    chart.add(
      step,
      values.map((/** @type {Facts} */ run) => run.total_loss[index] ?? undefined),
    );
  }
  const ends = names.map((name, index) => {
    const known = values[index].total_loss.filter((/** @type {unknown} */ value) => value !== null);
    return `${name} ${digits(known.at(-1))}`;
  });
  chart.describe(`training loss by step; the newest: ${ends.join(", ")}`);
  const head = (/** @type {string} */ text) => {
    const made = make("th", "", text);
    made.setAttribute("scope", "col");
    return made;
  };
  element("heads").replaceChildren(...["setting", ...names].map(head));
  const rows = found.config.map((/** @type {Facts} */ { key, values: cells }) =>
    make(
      "tr",
      "",
      make("td", "", make("code", "", key)),
      ...cells.map((/** @type {unknown} */ cell) => make("td", "", make("code", "", JSON.stringify(cell)))),
    ),
  );
  const same = make("td", "quiet", "none");
  element("settings").replaceChildren(...(rows.length ? rows : [make("tr", "", same)]));
}

// --- what is shown

/** Counts the views: an answer for one that was left is late. */
let shown = 0;

async function open() {
  shown += 1;
  source?.close();
  source = null;
  complain("");
  const [kind, ...rest] = decodeURIComponent(location.hash.slice(1)).split("/");
  const name = rest.join("/");
  const view = kind === "run" && name ? "run" : kind === "compare" && name ? "comparison" : "list";
  for (const id of VIEWS) element(id).hidden = id !== view;
  document.title = `${view === "list" ? "Runs" : name.replaceAll(",", ", ")} - hybrid`;
  try {
    if (view === "run") follow(name);
    else if (view === "comparison") await compare(name.split(",").slice(0, LINES.length));
    else await refresh(shown);
  } catch (error) {
    complain(/** @type {Error} */ (error).message);
  }
}

/** @param {number} view */
async function refresh(view) {
  const { runs } = await ask("runs");
  if (view === shown) showList(runs);
}

window.addEventListener("hashchange", async () => {
  await open();
  const title = VIEWS.find((id) => !element(id).hidden) ?? "list";
  element(`${title}-title`).focus();
});
button("compare").addEventListener("click", () => {
  location.hash = `compare/${[...chosen].join(",")}`;
});
setInterval(() => {
  if (element("list").hidden || document.hidden) return;
  refresh(shown).then(
    () => complain(""),
    (error) => complain(error.message),
  );
}, LIST_MS);
open();
