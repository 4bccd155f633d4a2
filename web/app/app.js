/** @file The page: two views, a worker that trains, and what is dropped, chosen and pressed. */

import { askForPersistence } from "../runtime/checkpoint/room.js";
import { openDevice } from "../runtime/device.js";
import { describe } from "../runtime/errors.js";
import { button, element, input, show } from "./page.js";
import { readSite } from "./planner.js";
import { RunView } from "./run_view.js";
import { ScriptView } from "./script_view.js";
import { SendView } from "./send_view.js";
import { SetupView } from "./setup_view.js";

/** @import { FromWorker, ToWorker } from "./app_worker.js" */

const worker = new Worker(new URL("./app_worker.js", import.meta.url), { type: "module" });
const run = new RunView();
const setup = new SetupView(
  (chosen) => start({ ask: "begin", ...chosen }, "Getting ready"),
  (asked) => ask({ ask: "needs", ...asked }),
);
const script = new ScriptView({
  run: (source) => {
    if (broken) script.end(broken);
    else ask({ ask: "script", source, texts: setup.texts });
  },
  stop: () => ask({ ask: "stop-script" }),
});
const sender = new SendView(() => {
  if (run.name) ask({ ask: "send", name: run.name });
  return run.name;
});
/** Whether the worker has a run, from request to end. */
let busy = false;
/** Why the worker can do nothing any more. @type {string | null} */
let broken = null;
/** Whether a download waits for a save that was asked for. */
let downloading = false;
/** @type {File | null} a run whose text was asked for */
let waiting = null;

/** @param {ToWorker} request */
const ask = (request) => worker.postMessage(request);

// Views

/** @param {"setup" | "run"} name */
function view(name) {
  const changes = element(name).hidden;
  element("setup").hidden = name !== "setup";
  element("run").hidden = name !== "run";
  if (name === "setup") document.title = "hybrid";
  if (changes) element(`${name}-title`).focus({ preventScroll: true }); // what had the focus is gone
  if (changes) scrollTo(0, 0);
}

/** @param {string} message */
function alarm(message) {
  element("alert").hidden = false;
  show("alert-text", message);
  element("alert").scrollIntoView({ block: "nearest" });
}

function calm() {
  element("alert").hidden = true;
  show("alert-text", "");
}

/** Hand work to the worker, and look at it. @param {ToWorker} request @param {string} title */
function start(request, title) {
  if (busy) return;
  if (broken) return alarm(broken);
  busy = true;
  calm();
  element("wanted").hidden = true;
  askForPersistence().catch(() => {}); // whether it is promised or not, the run is kept as well as this browser can
  run.begin(title);
  sender.clear();
  view("run");
  show("status", "getting ready");
  stayAwake();
  ask(request);
}

/** @param {string} text */
function ended(text) {
  busy = downloading = false;
  run.end(text);
  letSleep();
}

// What the worker says

/** @type {Record<string, (facts: any) => void>} */
const HEARD = {
  runs: ({ runs }) =>
    setup.showRuns(runs, {
      goOn: (name) => start({ ask: "on", name, longer: false }, name),
      download: (name) => ask({ ask: "download", name }),
      remove: (name) => {
        if (confirm(`Delete ${name}? It is kept nowhere else unless you downloaded it.`)) ask({ ask: "remove", name });
      },
    }),
  checkpoint: () => {
    if (!downloading || !run.name) return;
    downloading = false;
    ask({ ask: "download", name: run.name });
  },
  end: ({ status, message, step, steps }) => {
    const text = { finished: `Finished at step ${step}.`, stopped: `Saved at step ${step}. You can close this tab.` }[
      String(status)
    ];
    run.finished = step >= steps;
    ended(text ?? message);
    if (status === "alert") alarm(message);
  },
  error: ({ error, message, ask: asked }) => {
    if (asked === undefined) return; // the runner's own; the request that ends with it says so too
    if (asked === "send") sender.failed();
    if (["begin", "on", "import"].includes(asked)) {
      const began = run.name !== null && run.saved;
      ended("This run has ended.");
      if (!began) view("setup");
    }
    if (error !== "StopRequested") alarm(sentence(message));
  },
  "text-wanted": ({ name, step, source }) => {
    ended("");
    view("setup");
    element("wanted").hidden = false;
    show(
      "wanted-text",
      `${name} stands at step ${step}. A run file does not hold its text: choose the text that it was trained on (${source}), and it goes on.`,
    );
    input("wanted-file").focus();
  },
  needs: ({ key, needs }) => setup.showNeeds(key, needs),
  "needs-problem": ({ key, message }) => setup.showProblem(key, sentence(message)),
  progress: ({ stage, done, total }) => {
    if (!busy) setup.showProblem(null, `${sentence(stage).slice(0, -1)}: ${done} of ${total}`);
  },
  "script-stage": ({ stage }) => script.stage(stage),
  "script-lines": ({ lines }) => script.lines(lines),
  "script-report": ({ values }) => script.report(values),
  "script-end": ({ message, error, traceback }) => script.end(error ? sentence(message) : null, error, traceback),
  "send-progress": (facts) => sender.progress(facts),
  sent: (facts) => sender.sent(facts),
  file: ({ name, blob }) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    show("download-note", name);
  },
};

worker.onmessage = ({ data }) => {
  const { kind, facts } = /** @type {FromWorker} */ (data);
  run.event(kind, facts);
  HEARD[kind]?.(facts);
  sender.allow(run.saved && (!busy || run.paused));
};
worker.onerror = (event) => {
  broken = `The worker of this page failed: ${event.message || "it could not start"}. Load the page again.`;
  ended("The worker of this page failed.");
  alarm(broken);
};

/** An error as a sentence; one that begins with the name of a file keeps that. @param {string} message */
function sentence(message) {
  const begun = /^[a-z]+[ ,]/.test(message) ? message.charAt(0).toUpperCase() + message.slice(1) : message;
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

// What is pressed

button("pause").addEventListener("click", () => {
  run.pause(!run.paused);
  ask({ ask: run.paused ? "pause" : "go" });
  if (run.paused) letSleep();
  else stayAwake();
  sender.allow(run.saved && run.paused);
});
button("save").addEventListener("click", () => ask({ ask: "save" }));
button("stop").addEventListener("click", () => {
  for (const id of ["pause", "save", "stop"]) button(id).disabled = true;
  run.paused = false;
  show("status", "stopping after this step");
  ask({ ask: "stop" });
});
button("on").addEventListener("click", () => {
  if (run.name) start({ ask: "on", name: run.name, longer: run.finished }, run.name);
});
button("new").addEventListener("click", () => {
  view("setup");
  ask({ ask: "list" });
});
button("download").addEventListener("click", () => {
  if (!run.name) return;
  // While it trains, the newest state is saved first; a paused run is saved already.
  downloading = busy && !run.paused;
  ask(downloading ? { ask: "save" } : { ask: "download", name: run.name });
});
button("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(element("command").textContent ?? "");
  show("copy", "Copied");
  setTimeout(() => show("copy", "Copy"), 2000);
});
button("alert-close").addEventListener("click", calm);

// What is chosen and dropped

/** @param {File[]} files */
function take(files) {
  const archive = files.find(({ name }) => name.endsWith(".hybrid"));
  if (busy) return alarm("A run is training in this tab: stop it first, or use another tab.");
  if (archive) return open(archive, null);
  view("setup");
  if (files.length) setup.takeTexts(files);
}

/** @param {File} archive @param {File[] | null} texts */
function open(archive, texts) {
  waiting = archive;
  start({ ask: "import", archive, texts }, archive.name);
}

/** @param {string} id @param {(files: File[]) => void} act */
function chosen(id, act) {
  const field = input(id);
  field.addEventListener("change", () => {
    const files = [...(field.files ?? [])];
    field.value = ""; // so that the same file can be chosen again
    if (files.length) act(files);
  });
}

chosen("archive", ([archive]) => open(archive, null));
chosen("wanted-file", (files) => {
  if (waiting) open(waiting, files);
});

let over = 0;
addEventListener("dragenter", () => {
  over++;
  element("drop").hidden = false;
});
addEventListener("dragleave", () => {
  over--;
  if (over <= 0) element("drop").hidden = true;
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  over = 0;
  element("drop").hidden = true;
  take([...(event.dataTransfer?.files ?? [])]);
});

// Closing the tab loses what came after the last checkpoint: ask first.
addEventListener("beforeunload", (event) => {
  if (busy && !run.paused) event.preventDefault();
});

// The screen

/** @type {WakeLockSentinel | null} */
let awake = null;

async function stayAwake() {
  if (!busy || run.paused || awake || document.visibilityState !== "visible") return;
  try {
    awake = (await navigator.wakeLock?.request("screen")) ?? null;
    awake?.addEventListener("release", () => {
      awake = null;
    });
  } catch {
    awake = null; // refused, on a low battery say: training goes on as long as the device does
  }
}

function letSleep() {
  awake?.release().catch(() => {});
}

// The browser takes the lock back when the page is hidden.
document.addEventListener("visibilitychange", stayAwake);

// What there is

async function look() {
  try {
    const device = await openDevice();
    show("device", device.name);
    setup.showDevice({ limits: device.limits, features: [...device.features] });
    device.destroy();
  } catch (error) {
    show("device", "no graphics device");
    setup.showDevice(null);
    alarm(sentence(describe(error).message));
  }
}

async function begin() {
  try {
    const site = await readSite(new URL("./", document.baseURI));
    setup.showSite(site);
    script.showSite(site);
    const served = site.planners.server !== null; // a server that compiles plans also shows the runs it has, and takes more
    element("machine").hidden = !served;
    sender.offer(served);
  } catch (error) {
    show("sizes", "");
    alarm(sentence(describe(error).message));
  }
  await look();
}

ask({ ask: "list" });
begin();
