/**
 * @file The worker of the launch page: takes the job of the program that opened the page, and trains it.
 */

import { prepareData } from "../runtime/data/prepare.js";
import { ConfigError } from "../runtime/errors.js";
import { Control } from "../runtime/runner/control.js";
import { readJob } from "../runtime/runner/job.js";
import { LaunchServer } from "../runtime/runner/launch_server.js";
import { errorFacts } from "../runtime/runner/outcome.js";
import { LaunchRunPlace } from "../runtime/runner/place_launch.js";
import { setUpProgress } from "../runtime/runner/set_up.js";
import { TrainingRunner } from "../runtime/runner/training_runner.js";
import { sessionOpener } from "./open_session.js";

/** @import { Facts } from "../runtime/runner/place.js" */

/** An event, for the page. @typedef {{kind: string, facts: Facts}} FromWorker */
/** @typedef {{ask: "pause" | "resume" | "stop"}} ToWorker */

const seconds = () => performance.now() / 1000;
/** @type {TrainingRunner | null} */
let runner = null;
/** @type {string | null} */
let stopping = null;

globalThis.addEventListener("message", ({ data }) => {
  const { ask } = /** @type {ToWorker} */ (data);
  if (ask === "pause") runner?.pause();
  else if (ask === "resume") runner?.resume();
  else stopping = "asked for on the page";
});

/** @param {string} kind @param {Facts} facts */
function show(kind, facts) {
  globalThis.postMessage({ kind, facts });
}

/** What happens goes to the server and to the page, and either may ask for a stop. */
class WatchedRunPlace extends LaunchRunPlace {
  /** @param {string} kind @param {Facts} facts */
  event(kind, facts) {
    super.event(kind, facts);
    show(kind, facts);
  }

  stop() {
    return super.stop() ?? stopping;
  }
}

/** @param {LaunchServer} server */
async function train(server) {
  const job = readJob(await server.claim());
  const place = new WatchedRunPlace(server, job);
  try {
    place.event("phase", { phase: "data" });
    const control = new Control(() => place.stop(), job.config.run.maxHours, seconds);
    const progress = setUpProgress(place, seconds, () => control.check());
    const data = await prepareData(server.folder("data/", "the token store"), job.config.data, { progress });
    runner = new TrainingRunner({ job, place, data, openSession: sessionOpener(server) });
    await runner.run();
  } catch (error) {
    place.event("error", errorFacts(error)); // heard only if the runner has not said so already
    await place.close().catch(() => {}); // the first error is the one to show
    throw error;
  }
  await place.close();
}

// The page has given its worker the name that both have at the server.
const { name } = /** @type {{name: string}} */ (/** @type {unknown} */ (globalThis));
const server = new LaunchServer(new URL("./", globalThis.location.href), undefined, name || undefined);
// One tab of this browser at a time.
globalThis.navigator.locks
  .request(`hybrid/launch${server.base.pathname}`, { ifAvailable: true }, (lock) => {
    if (!lock) throw new ConfigError("this run is already open in another tab: close that one, or this one");
    return train(server);
  })
  .catch((error) => show("error", errorFacts(error)));
