/**
 * @file What happens once before the first step: variants are chosen, and kernels compiled. May import: executor and
 * variants, and below.
 */

import { TRAINING_PROGRAMS } from "./plan.js";
import { privateStorage } from "./storage.js";
import { chooseVariants, VariantCache } from "./variants.js";

/** @import { Encoded } from "./command_stream.js" */
/** @import { Executor, Progress } from "./executor.js" */
/** @import { SessionOptions } from "./session.js" */

/**
 * @param {Executor} executor
 * @param {SessionOptions} options
 */
export async function rememberedVariants(executor, { storage, progress, clock }) {
  const cache = new VariantCache(storage ?? (await privateStorage("hybrid")), executor.device, executor.plan.precision);
  const known = await cache.read();
  const programs = executor.plan.trains ? TRAINING_PROGRAMS : [];
  const variants = await chooseVariants(executor, known, { programs, progress, clock });
  const timed = Object.entries(variants).filter(([name, variant]) => known[name] !== variant);
  if (timed.length) await cache.add(Object.fromEntries(timed));
  return variants;
}

/**
 * Drivers compile at first dispatch: run a single workgroup of each kernel of a step, on zeros, then wipe what they left.
 *
 * @param {Executor} executor
 * @param {Progress} [progress]
 */
export async function warmUp(executor, progress) {
  /** @type {Map<GPUComputePipeline, Encoded>} */
  const kernels = new Map();
  for (const command of TRAINING_PROGRAMS.flatMap((name) => executor.program(name))) {
    if (!Array.isArray(command)) kernels.set(command.pipeline, { ...command, x: 1, y: 1, z: 1 });
  }
  progress?.("warming up", 0, 1);
  const stream = executor.stream();
  stream.program([...kernels.values()]);
  stream.finish();
  executor.clear(Object.keys(executor.plan.arenas).filter((arena) => arena !== "tables"));
  await executor.fence();
}
