/**
 * @file Typed errors and exit codes, the same names as in Python.
 *
 * A message names the thing, the value, what was expected, and what to do. Each class knows the exit code of the
 * command that ends with it. May import: nothing.
 */

export const EXIT_DONE = 0;
export const EXIT_FAILED = 1;
export const EXIT_USAGE = 2;
export const EXIT_REFUSED = 3;
export const EXIT_ALERT = 4;
export const EXIT_STOPPED = 75;

/** @typedef {readonly [field: string, saved: unknown, current: unknown]} Difference */

/** Base of every error that hybrid throws on purpose. */
export class HybridError extends Error {
  static exitCode = EXIT_FAILED;

  /** The class's name; bundlers rename classes, so each one says it. */
  static title = "HybridError";

  /**
   * @param {string} message
   * @param {ErrorOptions} [options] `cause`
   */
  constructor(message, options) {
    super(message, options);
    this.name = /** @type {typeof HybridError} */ (new.target).title;
  }

  /** @returns {number} the exit code of the command that ends with this error */
  get exitCode() {
    return /** @type {typeof HybridError} */ (this.constructor).exitCode;
  }
}

/** A configuration key, value or command-line option is wrong. */
export class ConfigError extends HybridError {
  static exitCode = EXIT_USAGE;
  static title = "ConfigError";
}

/** A resume disagrees with what the checkpoint promises; `differences` lists [field, saved, current]. */
export class ContractMismatch extends HybridError {
  static exitCode = EXIT_REFUSED;
  static title = "ContractMismatch";

  /**
   * @param {string} message
   * @param {readonly Difference[]} [differences]
   */
  constructor(message, differences = []) {
    super(message);
    this.differences = differences;
  }
}

/** There is no checkpoint where one was asked for. Never thrown for one that exists and cannot be read. */
export class CheckpointNotFound extends HybridError {
  static title = "CheckpointNotFound";
}

/** A checkpoint exists, and a byte, hash, shape, name or size in it is not what it should be. */
export class CheckpointCorrupt extends HybridError {
  static exitCode = EXIT_REFUSED;
  static title = "CheckpointCorrupt";
}

/** Training data breaks its contract: empty, truncated, changed, or an id outside the vocabulary. */
export class DataContractError extends HybridError {
  static exitCode = EXIT_REFUSED;
  static title = "DataContractError";
}

/** The device went away: driver reset, watchdog, memory pressure, or `destroy()`. */
export class DeviceLost extends HybridError {
  static title = "DeviceLost";
}

/** Something needs more than the device or format allows; the message names tensor, limit and remedy. */
export class LimitExceeded extends HybridError {
  static title = "LimitExceeded";
}

/** A loss or gradient is NaN or infinite where the run may not go on. */
export class NonFiniteError extends HybridError {
  static title = "NonFiniteError";
}

/** A telemetry alert with `failOnAlert` ended the run; `alerts` are their names, `step` the data step. */
export class AlertRaised extends HybridError {
  static exitCode = EXIT_ALERT;
  static title = "AlertRaised";

  /**
   * @param {readonly string[]} alerts
   * @param {number} step
   */
  constructor(alerts, step) {
    super(`training telemetry alert(s): ${alerts.join(", ")} at step ${step}.`);
    this.alerts = alerts;
    this.step = step;
  }
}

/** A stop was asked for; the run has saved and can be started again. */
export class StopRequested extends HybridError {
  static exitCode = EXIT_STOPPED;
  static title = "StopRequested";
}

/** An optional package is not there; the message says how it is brought. */
export class MissingDependency extends HybridError {
  static exitCode = EXIT_USAGE;
  static title = "MissingDependency";

  /**
   * @param {string} dependency the package
   * @param {string} remedy what brings it, such as `npm install NAME`
   */
  constructor(dependency, remedy) {
    super(`this needs the optional package '${dependency}': ${remedy}`);
  }
}

/**
 * What another runtime is told about an error: enough to raise the same one there.
 *
 * @param {unknown} error
 * @returns {{name: string, message: string, exitCode: number}} HybridErrors by their name; everything else is "Error"
 */
export function describe(error) {
  if (error instanceof HybridError) return { name: error.name, message: error.message, exitCode: error.exitCode };
  return { name: "Error", message: error instanceof Error ? error.message : String(error), exitCode: EXIT_FAILED };
}

/**
 * The error that another runtime described.
 *
 * @param {string} name
 * @param {string} message
 * @returns {HybridError} of the class with this name; a plain HybridError where a message does not make one
 */
export function errorNamed(name, message) {
  const kinds = [ConfigError, ContractMismatch, CheckpointNotFound, CheckpointCorrupt, DataContractError];
  const others = [DeviceLost, LimitExceeded, NonFiniteError, StopRequested];
  const Kind = [...kinds, ...others].find(({ title }) => title === name) ?? HybridError;
  return new Kind(message);
}
