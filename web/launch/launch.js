/**
 * @file The page of a run that a program has opened: shows what its worker says, and passes the two buttons on.
 *
 * The worker trains, so that neither a hidden page nor a busy one matters.
 */

import { LaunchServer } from "../runtime/runner/launch_server.js";

/** @import { FromWorker } from "./worker.js" */

const NOTES = 100; // kept on the page

/** @param {string} id @returns {HTMLElement} */
const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const bar = /** @type {HTMLProgressElement} */ (element("bar"));
const [pause, stop] = ["pause", "stop"].map((id) => /** @type {HTMLButtonElement} */ (element(id)));

const tab = crypto.randomUUID();
const server = new LaunchServer(new URL("./", location.href), undefined, tab);
const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module", name: tab });
let paused = false;
let ended = false;

/** @param {string} id @param {string} text */
function show(id, text) {
  element(id).textContent = text;
}

/** @param {string} text */
function note(text) {
  const list = element("notes");
  const item = document.createElement("li");
  item.textContent = text;
  list.append(item);
  while (list.childElementCount > NOTES) list.firstElementChild?.remove();
}

/** @param {number} count @param {string} unit */
const plural = (count, unit) => `${count.toLocaleString("en")} ${unit}${count === 1 ? "" : "s"}`;

/** @param {number} seconds */
function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return plural(whole, "second");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** @param {number} step @param {number} steps */
function stand(step, steps) {
  show("step", `${step} of ${steps}`);
  bar.max = steps;
  bar.value = step;
}

/** The page has nothing left to do. @param {string} text @param {boolean} [failed] */
function finish(text, failed = false) {
  ended = true;
  show("status", text);
  element("status").classList.toggle("error", failed);
  pause.disabled = stop.disabled = true;
  document.title = `hybrid: ${failed ? "ended" : "done"}`;
}

/** What each event changes on the page. @type {Record<string, (facts: any) => void>} */
const SHOWN = {
  phase: ({ phase }) => {
    if (!paused) show("status", { train: "training", "warm-up": "preparing the device" }[String(phase)] ?? phase);
  },
  progress: ({ stage, done, total }) => {
    show("status", `${stage}: ${done.toLocaleString("en")}${total ? ` of ${total.toLocaleString("en")}` : ""}`);
    bar.max = total || 1;
    if (total) bar.value = done;
    else bar.removeAttribute("value");
  },
  note: ({ text }) => note(text),
  run: ({ name, step, steps, parameters, precision, adapter }) => {
    show("name", name);
    show("about", `${parameters.toLocaleString("en")} parameters in ${precision} on ${adapter ?? "this browser"}. `);
    element("about").append(
      "This tab trains for the program that opened it. It may lie in the background; keep it open.",
    );
    document.title = `hybrid: ${name}`;
    stand(step, steps);
    pause.disabled = stop.disabled = false;
  },
  step: ({ step, steps, loss, tokensPerSecond, etaSeconds }) => {
    stand(step, steps);
    show("loss", loss.toFixed(4));
    show("rate", Math.round(tokensPerSecond).toLocaleString("en"));
    show("left", etaSeconds === null ? "–" : duration(etaSeconds));
  },
  validation: ({ step, loss, overflow }) => {
    const doubt = overflow ? "; not the loss of the model, for a value overflowed" : "";
    show("validation", `${loss.toFixed(4)} at step ${step}${doubt}`);
  },
  sample: ({ step, prompt, text }) => {
    show("sample", prompt + text);
    show("sample-heading", `Sample at step ${step}`);
  },
  checkpoint: ({ step }) => show("saved", `step ${step}`),
  end: ({ message }) => finish(message),
  error: ({ error, message }) => finish(`${error}: ${message}`, true),
};

worker.onmessage = ({ data }) => {
  const { kind, facts } = /** @type {FromWorker} */ (data);
  SHOWN[kind]?.(facts);
};
/** Nothing comes from a worker that could not begin, or has died: the program that waits for it is told here. @param {string} what */
function broken(what) {
  if (ended) return;
  worker.terminate();
  const message = `the worker of this page failed: ${what}; the browser's console says more, and \`make web\` builds the page anew`;
  finish(message, true);
  server.fail(message).catch((error) => note(error.message));
}
worker.onerror = ({ message }) => broken(message || "its script could not be loaded or is broken");
worker.onmessageerror = () => broken("it said something that cannot be read");

pause.onclick = () => {
  paused = !paused;
  pause.textContent = paused ? "Go on" : "Pause";
  show("status", paused ? "paused" : "training");
  worker.postMessage({ ask: paused ? "pause" : "resume" });
};
stop.onclick = () => {
  stop.disabled = true;
  show("status", "stopping after this step");
  worker.postMessage({ ask: "stop" });
};
addEventListener("pagehide", () => {
  if (!ended) server.leave();
});
// Closing the tab loses what came after the last checkpoint: ask first.
addEventListener("beforeunload", (event) => {
  if (!ended) event.preventDefault();
});
