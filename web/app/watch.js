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
const TALK_MS = 1000;
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
  box.disabled = run.step === null; // it never began: there is nothing to compare
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

// --- rows as they come

/** @type {EventSource | null} */
let source = null;

/** Draws what it is told, also when it comes late or is taken back. */
class Live {
  #charts;
  #talk;
  /** @type {Map<number, (number | null | undefined)[]>} the values of each line, by step */
  #points = new Map();
  #last = 0;
  #due = 0;
  #talking = 0;

  /**
   * @param {{chart: ReturnType<typeof lossChart>, lines: number[]}[]} charts and which of the values each of them draws
   * @param {(step: number, values: (number | null | undefined)[]) => void} talk of the newest step, for whoever cannot
   *   see it, now and then
   */
  constructor(charts, talk) {
    this.#charts = charts;
    this.#talk = talk;
  }

  clear() {
    this.#points.clear();
    this.#redraw();
  }

  /** What came after a step in these lines is not true any more. @param {number[]} lines @param {number} step */
  cut(lines, step) {
    for (const [at, values] of this.#points) {
      if (at <= step) continue;
      for (const index of lines) values[index] = undefined;
      if (values.every((value) => value === undefined)) this.#points.delete(at);
    }
    this.#redraw();
  }

  /** @param {number} step @param {Record<number, number | null | undefined>} values by line; those that are absent stay */
  add(step, values) {
    const all = this.#points.get(step) ?? [];
    for (const [index, value] of Object.entries(values)) if (value !== undefined) all[Number(index)] = value;
    this.#points.set(step, all);
    if (step >= this.#last) this.#draw(step, all);
    else this.#due ||= setTimeout(() => this.#redraw(), 100);
    this.#talking ||= setTimeout(() => {
      this.#talking = 0;
      this.#talk(this.#last, this.#points.get(this.#last) ?? []);
    }, TALK_MS);
  }

  /** @param {number} step @param {(number | null | undefined)[]} values */
  #draw(step, values) {
    this.#last = step;
    for (const { chart, lines } of this.#charts) {
      chart.add(
        step,
        lines.map((index) => values[index]),
      );
    }
  }

  #redraw() {
    clearTimeout(this.#due);
    this.#due = this.#last = 0;
    for (const { chart } of this.#charts) chart.clear();
    for (const step of [...this.#points.keys()].sort((a, b) => a - b)) this.#draw(step, this.#points.get(step) ?? []);
  }
}

/**
 * Listen to events of the server.
 *
 * @param {string} path below `api/`
 * @param {string} what is watched, for a sentence
 * @param {Record<string, (value: Facts) => void>} acts by kind of event
 */
function listen(path, what, acts) {
  const opened = new EventSource(new URL(path, API));
  source = opened;
  for (const [kind, act] of Object.entries(acts)) {
    opened.addEventListener(kind, (event) => act(JSON.parse(/** @type {MessageEvent} */ (event).data)));
  }
  opened.addEventListener("open", () => complain(""));
  opened.addEventListener("error", () => {
    if (opened.readyState === EventSource.CLOSED) {
      for (const id of VIEWS) element(id).hidden = id !== "list";
      refresh(shown).catch(() => {}); // the server has said enough
      complain(`${what} cannot be watched: it is not there any more, or never was. These are there:`);
    } else complain("the server does not answer: trying again");
  });
}

// --- one run

const [LOSS, HELD, RATE, NORM] = [0, 1, 2, 3];

function liveRun() {
  const loss = lossChart(element("loss-chart"));
  const rate = rateChart(element("rate-chart"));
  const charts = [
    { chart: loss, lines: [LOSS, HELD] },
    { chart: rate, lines: [RATE, NORM] },
  ];
  return new Live(charts, (step, values) => {
    loss.describe(`loss by step: ${digits(values[LOSS])} at step ${step}`);
    rate.describe(`learning rate ${values[RATE] ?? "–"} and gradient norm ${digits(values[NORM])} at step ${step}`);
  });
}

/** @type {Live | null} */
let live = null;

/** @param {string} name */
function follow(name) {
  live ??= liveRun();
  live.clear();
  const view = live;
  for (const id of ["loss", "validation", "step", "rate", "parameters", "backend"]) show(id, "–");
  show("run-title", name);
  show("status", "waiting for the run");
  /** @type {number | null} */
  let steps = null;
  const stand = (/** @type {number} */ step) => {
    show("step", steps === null ? whole(step) : `${whole(step)} of ${whole(steps)}`);
    /** @type {HTMLProgressElement} */ (element("bar")).value = steps ? step / steps : 0;
  };
  listen(`runs/${name}/events?fields=${FIELDS.join(",")}`, `the run ${name}`, {
    run: (run) => {
      steps = run.steps;
      // It has no rows where it was uploaded.
      if (run.step !== null && element("step").textContent === "–") stand(run.step);
      const told = run.message?.startsWith(run.status) ? [run.message] : [run.status, run.message];
      const came = run.step > 0 && run.loss === null ? ["its curves did not come along"] : [];
      show("status", run.problem ?? [...told, ...came].filter(Boolean).join(": "));
      if (run.parameters !== null) show("parameters", parameters(run.parameters));
      if (run.backend !== null) show("backend", run.backend);
    },
    entry: (row) => {
      const { step, total_loss: loss, lr, gradient_norm_unclipped: norm, tokens_per_second: rate } = row;
      view.add(step, { [LOSS]: loss, [RATE]: lr, [NORM]: norm });
      show("loss", digits(loss));
      stand(step);
      if (typeof rate === "number") show("rate", whole(rate));
    },
    validation: ({ step, loss }) => {
      view.add(step, { [HELD]: loss });
      show("validation", digits(loss));
    },
    cut: ({ file, step }) => view.cut(file === "validation" ? [HELD] : [LOSS, RATE, NORM], step),
    gone: () => {
      source?.close();
      complain(`the run ${name} was removed`);
    },
  });
}

// --- several runs

/** @param {string[]} names @param {number} view */
async function compare(names, view) {
  element("compare-chart").replaceChildren();
  const asked = `${names.map((name) => `run=${name}`).join("&")}&fields=total_loss`;
  const found = await ask(`compare?${asked}`);
  if (view !== shown) return;
  show("comparison-title", names.join(", "));
  const keys = names.map((name, index) => make("span", `key ${LINES[index]}`, name));
  element("keys").replaceChildren(...keys);
  showDifferences(names, found.config);

  /** How each run stands, and its newest loss. @type {{status: string, loss: unknown}[]} */
  const standing = names.map(() => ({ status: "", loss: undefined }));
  const stand = (/** @type {number} */ index) => {
    const { status, loss } = standing[index];
    keys[index].textContent = [names[index], status, digits(loss)].filter(Boolean).join(" · ");
  };
  const chart = linesChart(element("compare-chart"), COLOURS.slice(0, names.length));
  const lines = new Live([{ chart, lines: names.map((_, index) => index) }], () => {
    const ends = names.map((name, index) => `${name} ${digits(standing[index].loss)}`);
    chart.describe(`training loss by step; the newest: ${ends.join(", ")}`);
  });
  /** @param {number} index @param {number} step @param {number | null | undefined} loss */
  const add = (index, step, loss) => {
    if (loss !== null) standing[index].loss = loss;
    lines.add(step, { [index]: loss });
  };
  const { steps, values } = found.metrics;
  for (const [at, step] of steps.entries()) {
    for (const index of names.keys()) {
      const loss = values[index].total_loss[at];
      if (loss !== null) add(index, step, loss);
    }
  }
  for (const index of names.keys()) stand(index);
  /** @param {(index: number, data: Facts) => void} act */
  const each =
    (act) =>
    (/** @type {Facts} */ { run, data }) =>
      act(names.indexOf(run), data);
  listen(`compare/events?${asked}&lastEventId=${found.at}`, "one of these runs", {
    run: each((index, run) => {
      standing[index].status = run.problem ? "cannot be read" : (run.status ?? "");
      stand(index);
    }),
    entry: each((index, { step, total_loss: loss }) => {
      add(index, step, loss);
      stand(index);
    }),
    cut: each((index, { file, step }) => {
      if (file === "metrics") lines.cut([index], step);
    }),
    gone: each((index) => {
      standing[index].status = "removed";
      stand(index);
    }),
  });
}

/** @param {string[]} names @param {Facts[]} differences of their settings */
function showDifferences(names, differences) {
  const head = (/** @type {string} */ text) => {
    const made = make("th", "", text);
    made.setAttribute("scope", "col");
    return made;
  };
  element("heads").replaceChildren(...["setting", ...names].map(head));
  const rows = differences.map(({ key, values: cells }) =>
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
    else if (view === "comparison") await compare([...new Set(name.split(","))].slice(0, LINES.length), shown);
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
