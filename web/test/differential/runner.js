/** @file What `answer.js` can be asked about the training runner: entries, meter, contract, and resuming. */

import { stableJson } from "../../runtime/contracts/stable_json.js";
import { Entries } from "../../runtime/runner/entries.js";
import { withConfig } from "../../runtime/runner/job.js";
import { Meter } from "../../runtime/runner/meter.js";
import { agree, checkPlace } from "../../runtime/runner/resume.js";

// What each runtime says about itself.
const OWN = ["environment_metadata", "memory_stats"];

/** @type {Record<string, (one: any) => unknown>} */
export const RUNNER_TASKS = {
  meter: ({ calls, window }) => {
    let seconds = calls[0];
    const meter = new Meter(() => seconds, window);
    /** @param {any[]} inner */
    const run = async (inner) => {
      for (const [what, value] of inner) {
        if (what === "wait") seconds += value;
        else if (what === "step") meter.step(value);
        else if (what === "paused") await meter.paused(() => run(value));
        else await meter.stopped(() => run(value));
        seen.push([meter.seconds, meter.trainingSeconds, meter.tokensPerSecond, meter.stepMilliseconds]);
        seen.push(meter.etaSeconds(7));
      }
    };
    /** @type {unknown[]} */
    const seen = [];
    return run(calls[1]).then(() => seen);
  },

  entries: async ({ job, describe, state, began, steps, failOnAlert }) => {
    let seconds = began;
    /** @type {unknown[]} */
    const said = [];
    const clock = () => seconds;
    const meter = new Meter(clock);
    const place = {
      metrics: {
        append: async (/** @type {Record<string, unknown>} */ row) => {
          said.push(Object.fromEntries(Object.entries(row).filter(([name]) => !OWN.includes(name))));
        },
      },
      event: (/** @type {string} */ kind, /** @type {unknown} */ facts) => void said.push([kind, facts]),
    };
    try {
      const parts = { job, place, meter, describe, state, clock, now: () => (seconds + 1e9) * 1000 };
      const entries = new Entries(/** @type {any} */ (parts));
      for (const { result, where, memory, wait } of steps) {
        entries.begin(result.dataStep, where, memory);
        seconds += wait;
        if (failOnAlert) await entries.judge(result);
        meter.step(result.targetTokens);
        await entries.record([result]);
      }
      said.push(entries.state());
    } catch (error) {
      said.push([/** @type {Error} */ (error).name, /** @type {Error} */ (error).message]);
    }
    return said.map((one) => stableJson(one));
  },

  with_config: ({ job, config }) => {
    const { fingerprints, hashes } = withConfig(job, config);
    return [fingerprints.contract, hashes.configHash];
  },

  check_place: (manifest) => {
    checkPlace("folder", manifest);
    return "fits";
  },

  agree: ({ saved, current, audits, force }) => {
    const job = { fingerprints: current, resumeAudits: audits };
    return agree(saved, /** @type {any} */ (job), force, () => 1.7e12);
  },
};
