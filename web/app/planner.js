/**
 * @file Where plans come from.
 *
 * A `Planner` takes the settings of a run and what the device can do, and gives a folder that holds the plan, or nothing
 * if it has none of that model. Here: the plans that `hybrid export-site` compiled ahead of time; compilers.js has those
 * who compile one.
 */

import { repr } from "../runtime/contracts/names.js";
import { stableJson } from "../runtime/contracts/stable_json.js";
import { ConfigError, LimitExceeded } from "../runtime/errors.js";
import { fetchFiles } from "../runtime/plan.js";

/** @import { Folder } from "../runtime/folders/folder.js" */
/** @import { Settings } from "../runtime/runner/job.js" */

/** What `deviceProfile` says. @typedef {{limits: Record<string, number>, features: string[], subgroup_size: number, cpu: boolean | null}} Profile */

/** What is read of a plan: files by name. @typedef {Pick<Folder, "name" | "read">} PlanFolder */

/**
 * settings: a resolved configuration.
 *
 * @callback Planner
 * @param {Settings} settings
 * @param {Profile} profile
 * @returns {Promise<{folder: PlanFolder} | null>} holds `plan.json` and its constants; null: ask another planner
 */

/**
 * @typedef {object} SitePlan
 * @property {string} folder
 * @property {number} subgroupSize lanes that the device must have; 0: it needs no subgroup operations
 * @property {{features: string[], limits: Record<string, number>}} requires
 * @property {number} memoryBytes of all buffers
 */

/**
 * @typedef {object} SiteSize
 * @property {string} name
 * @property {string} title
 * @property {string} about
 * @property {number} parameters
 * @property {Record<string, any>} tokenizer its fingerprint
 * @property {Record<string, string>} checkpointFiles
 * @property {Record<string, {config: Settings, contract: Record<string, any>, plans: SitePlan[]}>} precisions
 *   no plans: they are compiled when they are asked for
 */

/**
 * @typedef {object} Site
 * @property {{file: string, name: string, bytes: number}} text
 * @property {{server: string | null, python: {folder: string, version: string} | null}} planners who compiles plans here:
 *   an address that takes settings, and the folder of Python in the tab
 * @property {SiteSize[]} sizes
 */

/**
 * What `site.json` says.
 *
 * @param {URL} base the address of the page's folder
 * @returns {Promise<Site>}
 * @throws {ConfigError}
 */
export async function readSite(base) {
  let site;
  try {
    site = JSON.parse(new TextDecoder().decode(await fetchFiles(base)("site.json")));
  } catch (error) {
    const { message } = /** @type {Error} */ (error);
    throw new ConfigError(
      `the list of models of this page cannot be read (${message}); see that the connection is there, and load the page again`,
    );
  }
  if (site?.format !== "hybrid.site" || site.version !== 2) {
    throw new ConfigError(`site.json has the format ${repr(site?.format)}, version ${repr(site?.version)}`);
  }
  return site;
}

/**
 * The first of some planners that has a plan.
 *
 * @param {Site} site
 * @param {readonly Planner[]} planners
 * @returns {(settings: Settings, profile: Profile) => Promise<{folder: PlanFolder}>}
 */
export function firstOf(site, planners) {
  return async (settings, profile) => {
    for (const planner of planners) {
      const found = await planner(settings, profile);
      if (found) return found;
    }
    const { layers, width } = settings.model;
    throw new ConfigError(
      `this page has no plan for this model (${layers} layers, ${width} wide, ${settings.precision.type}), and nobody to ` +
        `compile one: it has those of ${site.sizes.map(({ title }) => title).join(", ")}; continue the run on the desktop, ` +
        "or on a page that was exported with --python",
    );
  };
}

/**
 * Plans of a static export.
 *
 * @param {Site} site
 * @param {URL} base the address of the page's folder
 * @returns {Planner}
 */
export function sitePlanner(site, base) {
  return async (settings, profile) => {
    const key = planKey(settings);
    const known = site.sizes.flatMap(({ precisions }) => Object.values(precisions));
    const found = known.find(({ config }) => planKey(config) === key);
    if (!found?.plans.length) return null;
    const plan = bestPlan(found.plans, profile);
    const problem = lacks(plan, profile);
    if (problem) throw new LimitExceeded(problem);
    const read = fetchFiles(new URL(`${plan.folder}/`, base));
    return { folder: forRun({ name: plan.folder, read }, settings) };
  };
}

/**
 * A plan with the rate and schedule of a run, which the host computes from; the kernels do not know them.
 *
 * @param {PlanFolder} folder
 * @param {Settings} settings
 * @returns {PlanFolder}
 */
export function forRun(folder, settings) {
  return {
    name: folder.name,
    read: async (file) => {
      const bytes = await folder.read(file);
      if (file !== "plan.json") return bytes;
      const document = JSON.parse(new TextDecoder().decode(bytes));
      const { maxNorm: _, ...optimizer } = settings.optimizer;
      document.settings.optimizer = { ...optimizer, scheduler: { enabled: true, ...settings.schedule } };
      return new TextEncoder().encode(JSON.stringify(document));
    },
  };
}

/**
 * What a plan is compiled for, as text.
 *
 * @param {Settings} settings
 */
export function planKey({ model, data, precision, optimizer, lossScaling, backend }) {
  const { beta1, beta2, eps, maxNorm } = optimizer;
  const shape = [data.microbatchSize, data.sequenceLength];
  return stableJson([
    model,
    shape,
    precision.type,
    beta1,
    beta2,
    eps,
    maxNorm,
    lossScaling,
    Boolean(backend.recompute),
  ]);
}

/**
 * The plan that makes most of a device.
 *
 * @param {readonly SitePlan[]} plans
 * @param {Pick<Profile, "subgroup_size">} profile
 */
export function bestPlan(plans, { subgroup_size }) {
  const usable = plans.filter(({ subgroupSize }) => subgroupSize <= subgroup_size);
  return usable.reduce((best, plan) => (plan.subgroupSize > best.subgroupSize ? plan : best));
}

/**
 * Why a device cannot run a plan; null if it can.
 *
 * @param {Pick<SitePlan, "requires">} plan
 * @param {Pick<Profile, "limits" | "features">} profile
 */
export function lacks({ requires }, { limits, features }) {
  const feature = requires.features.find((name) => !features.includes(name));
  if (feature === "shader-f16") return "this device does not compute in 16 bits: choose 32 bits";
  if (feature) return `this device lacks ${feature}`;
  for (const [limit, needed] of Object.entries(requires.limits)) {
    if (needed > (limits[limit] ?? Number.POSITIVE_INFINITY)) {
      return `this model needs a ${limit} of ${needed}, and this device has ${limits[limit]}: choose a smaller model`;
    }
  }
  return null;
}
