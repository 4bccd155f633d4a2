/** @file What this page can have planned, and the one Python of this tab, which is loaded when it is first wanted. */

import { openDevice } from "../runtime/device.js";
import { ConfigError } from "../runtime/errors.js";
import { openOpfs } from "../runtime/folders/opfs.js";
import { deviceProfile } from "../runtime/subgroups.js";
import { keptPlanner, needs, pythonPlanner, serverPlanner } from "./compilers.js";
import { firstOf, sitePlanner } from "./planner.js";

/** @import { PythonWorker } from "../pyodide/client.js" */
/** @import { Planner, Profile, Site, SiteSize } from "./planner.js" */

const KEPT = ["plans"]; // in the private file system, beside the runs

export class Planning {
  #base;
  #progress;
  /** @type {Promise<PythonWorker> | null} */
  #python = null;
  /** @type {Promise<Profile> | null} */
  #profile = null;

  /**
   * @param {URL} base the address of the page's folder
   * @param {(stage: string, done: number, total: number) => void} progress of loading Python
   */
  constructor(base, progress) {
    this.#base = base;
    this.#progress = progress;
  }

  /** @param {Site} site */
  async planner(site) {
    const { server, python } = site.planners;
    /** @type {Planner[]} */
    const planners = [sitePlanner(site, this.#base)];
    if (server) planners.push(serverPlanner(new URL(server, this.#base), this.#base));
    else if (python) {
      const compiler = pythonPlanner(() => this.python(site));
      planners.push(keptPlanner(compiler, await openOpfs(KEPT), python.version));
    }
    return firstOf(site, planners);
  }

  /**
   * @param {Site} site
   * @returns {Promise<PythonWorker>}
   * @throws {ConfigError} where the page has none
   */
  async python(site) {
    const { python } = site.planners;
    if (!python) throw new ConfigError("this page was exported without Python: export it with --python");
    if (this.#python && (await this.#python.catch(() => null))?.ended !== false) this.#python = null;
    this.#python ??= this.#load(new URL(python.folder, this.#base));
    return this.#python;
  }

  /** @param {URL} folder */
  async #load(folder) {
    const { PythonWorker } = await import("../pyodide/client.js");
    const begin = () => new Worker(new URL("worker.js", folder), { type: "module" });
    return PythonWorker.open(begin, { progress: this.#progress });
  }

  /**
   * What a model would need of this device; its plan is then at hand.
   *
   * @param {Site} site
   * @param {SiteSize} size
   * @param {string} precision
   */
  async needs(site, { precisions }, precision) {
    const { config } = precisions[precision];
    const planner = await this.planner(site);
    this.#profile ??= measureDevice();
    const profile = await this.#profile.catch((error) => {
      this.#profile = null;
      throw error;
    });
    return needs((await planner(config, profile)).folder);
  }
}

async function measureDevice() {
  const device = await openDevice();
  try {
    return await deviceProfile(device);
  } finally {
    device.destroy();
  }
}
