/**
 * @file What a run needs a plan for, in the words of the compiler: `plan_settings` of python/hybrid/bridge/job.py. May
 * import: nothing.
 */

/** @import { Settings } from "../runtime/runner/job.js" */
/** @import { PlanRequest } from "./tab_python.js" */

/** @param {string} name in camelCase */
const snake = (name) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);

/**
 * @param {Settings} settings a resolved configuration
 * @returns {PlanRequest}
 */
export function planRequest(settings) {
  const { model, data, precision, schedule, lossScaling, backend } = settings;
  const { maxNorm, ...optimizer } = settings.optimizer;
  return {
    model: Object.fromEntries(Object.entries(model).map(([name, value]) => [snake(name), value])),
    batchSize: data.microbatchSize,
    sequenceLength: data.sequenceLength,
    precision: precision.type,
    optimizer: { ...optimizer, scheduler: { enabled: true, ...schedule } },
    maxGradNorm: maxNorm || null,
    lossScaling,
    recompute: Boolean(backend.recompute),
  };
}
