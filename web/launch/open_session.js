/**
 * @file A session for a job: opens the device, has a plan compiled for it by the run's server, and prepares that.
 */

import { openDevice } from "../runtime/device.js";
import { loadPlan } from "../runtime/plan.js";
import { metricsInterval } from "../runtime/runner/job.js";
import { PlanSession } from "../runtime/session.js";
import { deviceProfile } from "../runtime/subgroups.js";

/** @import { Progress } from "../runtime/executor.js" */
/** @import { Job } from "../runtime/runner/job.js" */
/** @import { LaunchServer } from "../runtime/runner/launch_server.js" */

/** @param {LaunchServer} server */
export function sessionOpener(server) {
  /** @param {Job} job @param {Progress} progress */
  return async (job, progress) => {
    const modest = job.config.backend.deviceProfile === "default";
    progress("opening the device", 0, 1);
    const device = await openDevice(modest ? { features: [], defaultLimits: true } : {});
    try {
      progress("compiling the plan", 0, 1);
      const { plan: folder } = await server.post("profile", await deviceProfile(device));
      const plan = await loadPlan(async (name) => {
        const answer = await server.request(folder + name);
        return new Uint8Array(await answer.arrayBuffer());
      });
      return await PlanSession.create(plan, {
        device,
        seed: job.config.run.seed,
        metricsInterval: metricsInterval(job.config),
        progress,
      });
    } catch (error) {
      device.destroy();
      throw error;
    }
  };
}
