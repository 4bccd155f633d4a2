/**
 * @file The worker of the page: builds the data, trains, keeps the runs of this browser, and packs them.
 *
 * Takes one request after the other from the page; while a run trains, only what concerns that run.
 */

import { exportRun, importRun } from "../runtime/checkpoint/archive.js";
import { verifyCheckpoint } from "../runtime/checkpoint/loading.js";
import { parameterShapes } from "../runtime/checkpoint/model.js";
import { withRunLock } from "../runtime/checkpoint/store.js";
import { buildStore } from "../runtime/data/build.js";
import { describeSource, textDocuments } from "../runtime/data/corpus.js";
import { prepareData } from "../runtime/data/prepare.js";
import { openDevice } from "../runtime/device.js";
import { ConfigError, ContractMismatch, DataContractError, HybridError, StopRequested } from "../runtime/errors.js";
import { ZipFolder } from "../runtime/folders/zip.js";
import { loadPlan } from "../runtime/plan.js";
import { metricsInterval } from "../runtime/runner/job.js";
import { errorFacts } from "../runtime/runner/outcome.js";
import { FolderRunPlace } from "../runtime/runner/place_folder.js";
import { setUpProgress } from "../runtime/runner/set_up.js";
import { TrainingRunner } from "../runtime/runner/training_runner.js";
import { PlanSession } from "../runtime/session.js";
import { deviceProfile } from "../runtime/subgroups.js";
import { openTokenizer } from "../runtime/tokenizers/open.js";
import { customSize } from "./custom.js";
import { checkBrought, chosenSettings, desktopCommand, jobOfCheckpoint, newJob } from "./job.js";
import { readSite } from "./planner.js";
import { Planning } from "./planning.js";
import { DATA_FOLDER, freeName, history, listRuns, openJob, openRuns, sweep, writeJob } from "./runs.js";
import { sendRun, UPLOADS } from "./upload.js";

/** @import { Progress } from "../runtime/executor.js" */
/** @import { Directory } from "../runtime/folders/folder.js" */
/** @import { Job } from "../runtime/runner/job.js" */
/** @import { Facts } from "../runtime/runner/place.js" */
/** @import { PythonWorker } from "../pyodide/client.js" */
/** @import { Shape } from "./custom.js" */
/** @import { Site } from "./planner.js" */

/** An event, for the page. @typedef {{kind: string, facts: Facts}} FromWorker */
/**
 * `begin` a run on texts (null: the page's own), go `on` with one (longer: for as many steps again), `import` an archive
 * (texts null: the page's own, if it is that), `download` the newest checkpoint, `remove` a run; see what a model `needs`;
 * `send` its newest checkpoint to the server of this page; run a `script` on texts; the others concern the run that trains, or the script that runs.
 *
 * @typedef {{ask: "list" | "pause" | "go" | "save" | "stop" | "stop-script"}
 *   | {ask: "begin", size: string | Shape, precision: string, steps: number, texts: File[] | null}
 *   | {ask: "needs", key: string, size: string | Shape, precision: string}
 *   | {ask: "script", source: string, texts: File[] | null}
 *   | {ask: "import", archive: File, texts: File[] | null}
 *   | {ask: "on", name: string, longer: boolean} | {ask: "download" | "send" | "remove", name: string}} ToWorker
 */

const BASE = new URL("./", globalThis.location.href);
const SCRIPT_TEXT = "text.txt"; // what a script finds the chosen text under
const clock = () => performance.now() / 1000;

/** The run that trains. @type {TrainingRunner | null} */
let runner = null;
/** @type {string | null} why the work under way is to end */
let stopping = null;
/** @type {Promise<Site> | null} */
let site = null;

/** @param {string} kind @param {Facts} facts */
function tell(kind, facts) {
  globalThis.postMessage({ kind, facts });
}

const planning = new Planning(BASE, (stage, done, total) => tell("progress", { stage, done, total }));
/** The Python whose script runs. @type {PythonWorker | null} */
let scripting = null;

/** @returns {Promise<Site>} */
function theSite() {
  site ??= readSite(BASE).catch((error) => {
    site = null;
    throw error;
  });
  return site;
}

/** One of the page's, or one of somebody's own. @param {Site} here @param {string | Shape} wanted */
function sizeOf(here, wanted) {
  if (typeof wanted !== "string") return customSize(here, wanted);
  const known = here.sizes.find(({ name }) => name === wanted);
  if (!known) throw new ConfigError(`there is no model called ${wanted} on this page`);
  return known;
}

/** What a browser says in words of its own, in ours. @param {unknown} error */
function inWords(error) {
  if (error instanceof HybridError || !(error instanceof Error)) return error;
  if (["NotReadableError", "NotFoundError"].includes(error.name)) {
    return new DataContractError(
      "a chosen file cannot be read any more: it was changed, moved or removed since, or it is a folder; choose it again",
      { cause: error },
    );
  }
  if (error instanceof TypeError && /fetch|network|load failed/i.test(error.message)) {
    return new HybridError(
      "the server of this page cannot be reached: see that the connection is there, and try again",
      {
        cause: error,
      },
    );
  }
  return error;
}

// Texts

/** The text that comes with the page. @returns {Promise<File>} */
async function ownText() {
  const { text } = await theSite();
  const response = await fetch(new URL(text.file, BASE));
  if (!response.ok) throw new DataContractError(`the text of this page cannot be read: status ${response.status}`);
  return new File([await response.blob()], text.name);
}

const watched = { progress: setUpProgress({ event: tell }, clock, () => checkStop()) };

function checkStop() {
  if (stopping !== null) throw new StopRequested("stopped before the first step");
}

// Runs

/**
 * A session for a job, on a device of its own.
 *
 * @param {Awaited<ReturnType<Planning["planner"]>>} planner
 */
function sessionOpener(planner) {
  return async (/** @type {Job} */ job, /** @type {Progress} */ progress) => {
    progress("opening the device", 0, 1);
    const device = await openDevice();
    try {
      progress("fetching the plan", 0, 1);
      const { folder } = await planner(job.config, await deviceProfile(device));
      const plan = await loadPlan(async (file) => /** @type {Uint8Array<ArrayBuffer>} */ (await folder.read(file)));
      const { seed } = job.config.run;
      return await PlanSession.create(plan, { device, seed, metricsInterval: metricsInterval(job.config), progress });
    } catch (error) {
      device.destroy();
      throw error;
    }
  };
}

/**
 * Train a run that has its job and data.
 *
 * @param {Directory} folder
 * @param {string} name
 */
async function train(folder, name) {
  const job = await openJob(folder);
  const data = await prepareData(await folder.directory(DATA_FOLDER), job.config.data, watched);
  const place = await FolderRunPlace.open(folder, job.config, {
    watch: (kind, facts) => announce(folder, job, kind, facts),
    stop: () => stopping,
    isLocked: true, // since before the run's folder was filled
  });
  try {
    const planner = await planning.planner(await theSite());
    runner = new TrainingRunner({ job, place, data, openSession: sessionOpener(planner) });
    tell("phase", { phase: "warm-up" });
    const latest = await place.checkpoints.latest();
    const step = latest?.step ?? 0;
    const about = { parameters: job.parameters, precision: job.config.precision.type };
    tell("history", { name, step, planned: job.steps, about, ...(await history(folder, step)) });
    if (latest) tellCommand(folder, job, step, latest.name);
    await runner.run();
  } finally {
    runner = null;
    await place.close();
  }
}

/**
 * @param {Directory} folder
 * @param {Job} job
 * @param {string} kind
 * @param {Facts} facts
 */
function announce(folder, job, kind, facts) {
  tell(kind, facts);
  if (kind === "checkpoint") tellCommand(folder, job, Number(facts.step), String(facts.path).split("/").at(-1) ?? "");
}

/**
 * How the desktop goes on from a checkpoint, once it is downloaded.
 *
 * @param {Directory} folder
 * @param {Job} job
 * @param {number} step
 * @param {string} checkpoint
 */
function tellCommand(folder, job, step, checkpoint) {
  const file = `${folder.name.split("/").at(-1)}-${checkpoint}.hybrid`;
  tell("command", { step, file, command: desktopCommand(file, job, step) });
}

/**
 * Make the folder of a new run; what fails while it is filled leaves nothing.
 *
 * @param {string} wish
 * @param {(folder: Directory, name: string) => Promise<void>} fill
 */
async function newRun(wish, fill) {
  const runs = await openRuns();
  await sweep(runs);
  const name = await freeName(runs, wish);
  await withRunLock(name, async () => {
    const folder = await runs.directory(name);
    try {
      await fill(folder, name);
    } catch (error) {
      await runs.remove(name).catch(() => {}); // what went wrong is what to show
      throw error;
    }
    await train(folder, name);
  });
}

/** @param {Extract<ToWorker, {ask: "begin"}>} request */
async function begin({ size: wanted, precision, steps, texts }) {
  const size = sizeOf(await theSite(), wanted);
  tell("phase", { phase: "data" });
  const files = texts ?? [await ownText()];
  const sources = files.map((file) => file.name);
  const subject = sources[0].replace(/\.[^.]*$/, "");
  await newRun(`${size.name}-${subject}`, async (folder, name) => {
    const choice = { size: size.name, precision, steps, name, sources };
    const { data } = chosenSettings(size, choice).config;
    const store = await folder.directory(DATA_FOLDER);
    const split = { by: data.split.by, validationShare: data.split.validationShare };
    await buildStore(textDocuments(files), "bytes", store, { split, source: describeSource(files), ...watched });
    await writeJob(folder, newJob(size, choice, await prepareData(store, data, { verify: false })));
  });
}

/** @param {Extract<ToWorker, {ask: "on"}>} request */
async function goOn({ name, longer }) {
  tell("phase", { phase: "data" });
  const runs = await openRuns();
  const folder = await runs.open(name);
  if (!folder) throw new ConfigError(`there is no run called ${name} in this browser any more`);
  await withRunLock(name, async () => {
    const job = await openJob(folder);
    // Steps are no part of what a run promises; the learning rate stays where its schedule ended.
    const run = { ...job.config.run, steps: 2 * job.steps };
    if (longer) await writeJob(folder, { ...job, steps: run.steps, config: { ...job.config, run } });
    await train(folder, name);
  });
}

/** @param {Extract<ToWorker, {ask: "import"}>} request */
async function takeIn({ archive, texts }) {
  tell("phase", { phase: "archive" });
  const zip = await ZipFolder.open(archive);
  const { manifest, model, files } = await verifyCheckpoint(zip);
  const config = /** @type {any} */ (manifest.config);
  checkBrought(archive.name, config, files);
  const shapes = Object.values(parameterShapes(model));
  const count = shapes.reduce((sum, shape) => sum + shape.reduce((product, n) => product * n, 1), 0);
  const tokenizer = await openTokenizer(files["tokenizer.json"]);
  const chosen = texts ?? [await ownText()];
  try {
    await newRun(String(config.run.name), async (folder, name) => {
      const store = await folder.directory(DATA_FOLDER);
      const { data } = config;
      const split = { by: data.split.by, validationShare: data.split.validationShare };
      await buildStore(textDocuments(chosen), tokenizer, store, { split, source: describeSource(chosen), ...watched });
      const prepared = await prepareData(store, data, { verify: false });
      const more = Math.max(200, config.run.steps ?? 0);
      await writeJob(folder, jobOfCheckpoint(manifest, files, count, prepared, { more, name }));
      await importRun(folder, archive);
    });
  } catch (error) {
    if (texts !== null || !(error instanceof ContractMismatch || error instanceof DataContractError)) throw error;
    const names = [config.data.source].flat().join(", ");
    tell("text-wanted", { name: String(config.run.name), step: manifest.progress.step, source: names });
  }
}

/** The newest checkpoint of a run, as a file. @param {string} name */
async function pack(name) {
  const folder = await (await openRuns()).open(name);
  if (!folder) throw new ConfigError(`there is no run called ${name} in this browser any more`);
  const packed = await exportRun(folder);
  return { name: packed.name, blob: await new Response(packed.stream()).blob() };
}

/** @param {string} run */
async function send(run) {
  const { name, blob } = await pack(run);
  const progress = (/** @type {string} */ stage, /** @type {number} */ done, /** @type {number} */ total) =>
    tell("send-progress", { stage, done, total });
  tell("sent", { ...(await sendRun(blob, name, new URL(UPLOADS, BASE), { progress })) });
}

/** @param {string} name */
async function remove(name) {
  const runs = await openRuns();
  await withRunLock(name, () => runs.remove(name));
}

async function list() {
  tell("runs", { runs: await listRuns(await openRuns()) });
}

/** @param {Extract<ToWorker, {ask: "needs"}>} request */
async function measure({ key, size, precision }) {
  try {
    const here = await theSite();
    tell("needs", { key, needs: await planning.needs(here, sizeOf(here, size), precision) });
  } catch (error) {
    tell("needs-problem", { key, ...errorFacts(inWords(error)) });
  }
}

/** @param {Extract<ToWorker, {ask: "script"}>} request */
async function runScript({ source, texts }) {
  try {
    const files = texts ?? [await ownText()];
    const text = (await Promise.all(files.map((file) => file.text()))).join("\n");
    tell("script-stage", { stage: "loading Python (19 MB, once)" });
    scripting = await planning.python(await theSite());
    tell("script-stage", { stage: "running" });
    await scripting.runScript(source, {
      texts: { [SCRIPT_TEXT]: text },
      print: (lines) => tell("script-lines", { lines }),
      report: (values) => tell("script-report", { values }),
      progress: (stage) => tell("script-stage", { stage }),
    });
    tell("script-end", {});
  } catch (error) {
    const { line = null, traceback = "" } = /** @type {import("../pyodide/client.js").FromScript} */ (error);
    tell("script-end", { ...errorFacts(inWords(error)), line, traceback });
  } finally {
    scripting = null;
  }
}

/** @param {ToWorker} request */
async function answer(request) {
  switch (request.ask) {
    case "begin":
    case "on":
    case "import":
      stopping = null;
      if (request.ask === "begin") await begin(request);
      else if (request.ask === "on") await goOn(request);
      else await takeIn(request);
      return list();
    case "list":
      return list();
    case "download":
      return tell("file", await pack(request.name));
    case "send":
      return send(request.name);
    case "remove":
      await remove(request.name);
      return list();
    case "needs":
      return measure(request);
    case "script":
      return runScript(request);
    case "stop-script":
      return scripting?.stop();
    case "pause":
      runner?.save(); // a paused tab is one that may be closed
      return runner?.pause();
    case "go":
      return runner?.resume();
    case "save":
      return runner?.save();
    case "stop":
      stopping = "asked for on the page";
  }
}

globalThis.addEventListener("message", ({ data }) => {
  const request = /** @type {ToWorker} */ (data);
  answer(request).catch((error) => tell("error", { ...errorFacts(inWords(error)), ask: request.ask }));
});
