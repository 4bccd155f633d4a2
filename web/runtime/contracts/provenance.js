/** @file Which build is running: commit, build id and time, from options and the environment. */

import { isSet, objectOrEmpty, optionalText, parseTime } from "./values.js";

export const COMMIT_VARIABLES = [
  "HYBRID_BUILD_COMMIT",
  "DOPPLER_BUILD_COMMIT",
  "GIT_COMMIT",
  "COMMIT_SHA",
  "SOURCE_VERSION",
  "VERCEL_GIT_COMMIT_SHA",
];
export const ID_VARIABLES = ["HYBRID_BUILD_ID", "DOPPLER_BUILD_ID", "BUILD_ID", "VERCEL_BUILD_ID", "GITHUB_RUN_ID"];
export const TIMESTAMP_VARIABLES = [
  "HYBRID_BUILD_TIMESTAMP",
  "DOPPLER_BUILD_TIMESTAMP",
  "BUILD_TIMESTAMP",
  "VERCEL_GIT_COMMIT_TIMESTAMP",
];

/**
 * @typedef {object} BuildProvenance
 * @property {string | null} commitHash
 * @property {string | null} buildId
 * @property {string | null} buildTimestamp
 */

/**
 * Each from the first place that is set, or null.
 *
 * Places, in order: options.buildProvenance.<field>; options.buildCommitHash, buildId or buildTimestamp; the variables
 * above in `environment`. Empty text, 0 and null count as not set; blank text is set, and gives null. The timestamp is
 * epoch milliseconds or an ISO date, and becomes ISO in UTC; null when it is neither.
 *
 * @param {Record<string, unknown>} options
 * @param {Record<string, string | undefined>} [environment] `process.env`; a page has none
 * @returns {BuildProvenance}
 */
export function buildProvenance(options, environment = {}) {
  const nested = objectOrEmpty(options.buildProvenance);
  /** @param {string} field @param {string} option @param {readonly string[]} variables @returns {unknown} */
  const first = (field, option, variables) =>
    [nested[field], options[option], ...variables.map((name) => environment[name])].find(isSet);
  return {
    commitHash: optionalText(first("commitHash", "buildCommitHash", COMMIT_VARIABLES)),
    buildId: optionalText(first("buildId", "buildId", ID_VARIABLES)),
    buildTimestamp: parseTime(first("buildTimestamp", "buildTimestamp", TIMESTAMP_VARIABLES)),
  };
}
