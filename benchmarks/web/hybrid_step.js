/** @file A whole training step of hybrid in the tab: the plan is compiled elsewhere, for this device. */

import { Batch } from "../../web/runtime/batch.js";
import { openDevice } from "../../web/runtime/device.js";
import { loadPlan } from "../../web/runtime/plan.js";
import { PlanSession } from "../../web/runtime/session.js";
import { deviceProfile } from "../../web/runtime/subgroups.js";

import { batch, timeSteps } from "./model.js";

const device = await openDevice();

export const profile = () => deviceProfile(device);

/**
 * @param {string} folder URL of the plan
 * @param {number} steps
 */
export async function measure(folder, steps) {
  const plan = await loadPlan(async (file) => new Uint8Array(await (await fetch(`${folder}/${file}`)).arrayBuffer()));
  const began = performance.now();
  const session = await PlanSession.create(plan, { device });
  const opened = (performance.now() - began) / 1e3;
  const { B, T } = plan.shape;
  const { ids, targets } = batch();
  const input = new Batch([B, T], {
    ids: new Uint32Array(ids),
    targets: new Uint32Array(targets),
    positions: Uint32Array.from(ids, (_, i) => i % T),
    segmentIds: new Uint32Array(B * T).fill(1),
    sampleIds: Uint32Array.from({ length: B }, (_, row) => row),
  });
  let dataStep = 0;
  const found = await timeSteps(steps, 2, async () => {
    await session.begin({ dataStep: ++dataStep, targetTokens: B * T, microbatches: 1 });
    await session.accumulate(input);
    await session.apply();
    const results = await session.pollMetrics({ wait: true });
    return results[results.length - 1].loss;
  });
  const { variants, pipelines } = session.describe();
  session.close();
  return { ...found, first_step_s: opened + found.first_step_s, variants, pipelines };
}
