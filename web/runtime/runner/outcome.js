/**
 * @file How a run ended: for its record, whoever watches, and the exit code of a command.
 *
 * May import: errors.
 */

import {
  AlertRaised,
  ContractMismatch,
  describe,
  EXIT_ALERT,
  EXIT_DONE,
  EXIT_REFUSED,
  EXIT_STOPPED,
  HybridError,
  StopRequested,
} from "../errors.js";

/** @import { Facts, RunPlace } from "./place.js" */

/**
 * stopped: saved on request, to be started again. step: the last one done.
 *
 * @typedef {object} Outcome
 * @property {"finished" | "stopped" | "alert"} status
 * @property {number} exitCode
 * @property {number} step
 * @property {number} steps
 * @property {string} runDir
 * @property {string} message
 */

/**
 * @param {"finished" | "stopped" | "alert"} status
 * @param {number} exitCode
 * @param {number} step
 * @param {number} steps
 * @param {string} runDir
 * @param {string} message
 * @returns {Outcome}
 */
function outcome(status, exitCode, step, steps, runDir, message) {
  return { status, exitCode, step, steps, runDir, message };
}

/**
 * A run that has come to its end, or has saved because of `reason`.
 *
 * @param {RunPlace} place
 * @param {number} step
 * @param {number} steps
 * @param {string | null} reason to stop
 */
export function ended({ location, again }, step, steps, reason) {
  if (reason === null) {
    return outcome("finished", EXIT_DONE, step, steps, location, `finished at step ${step}: ${location}`);
  }
  const saved = step ? `saved at step ${step}` : "nothing to save at step 0";
  return outcome("stopped", EXIT_STOPPED, step, steps, location, `stopped (${reason}), ${saved}; ${again}`);
}

/**
 * There was nothing left to do.
 *
 * @param {RunPlace} place
 * @param {number} step
 * @param {number} steps
 */
export function alreadyFinished({ location }, step, steps) {
  const message = `${location} is finished: it is at step ${step} of ${steps}; a larger number of steps goes on`;
  return outcome("finished", EXIT_DONE, step, steps, location, message);
}

/**
 * @param {RunPlace} place
 * @param {AlertRaised} alert
 * @param {number} step the last one done
 * @param {number} steps
 */
export function alerted({ location }, alert, step, steps) {
  return outcome("alert", EXIT_ALERT, step, steps, location, alert.message);
}

/**
 * Whether a run was stopped or ended by force after its last step: the evaluation at the end is still to be made.
 *
 * @param {Facts | null} facts the record as the last process left it
 * @param {number} step
 * @param {number} steps
 */
export function lacksItsEnd(facts, step, steps) {
  const ended = facts === null || !["running", "stopped", "failed"].includes(String(facts.status));
  return !ended && step === steps;
}

/** What the record says about a run that ended with this error. @param {unknown} error */
export function statusOf(error) {
  if (error instanceof AlertRaised) return "alert";
  if (error instanceof StopRequested) return "stopped";
  return error instanceof HybridError && error.exitCode === EXIT_REFUSED ? "refused" : "failed";
}

/**
 * The `error` event.
 *
 * @param {unknown} error
 * @returns {Facts}
 */
export function errorFacts(error) {
  const { name, message, exitCode } = describe(error);
  const facts = { error: name, message, exitCode };
  if (error instanceof ContractMismatch) return { ...facts, differences: error.differences };
  if (error instanceof AlertRaised) return { ...facts, alerts: error.alerts, step: error.step };
  if (!(error instanceof HybridError) && error instanceof Error) return { ...facts, stack: error.stack ?? "" };
  return facts;
}
