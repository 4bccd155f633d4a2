/**
 * @file Encoding prepared programs into submits that are short enough to let a page draw in between.
 *
 * The graphics process draws pages between two submits and never inside one, so a training step of 200 ms in one
 * submit would stall every page on the screen. May import: nothing.
 */

/**
 * A dispatch ready to encode.
 *
 * @typedef {object} Encoded
 * @property {GPUComputePipeline} pipeline
 * @property {GPUBindGroup} group
 * @property {number} x
 * @property {number} y
 * @property {number} z
 * @property {string} phase "forward", "backward" or ""
 */

/** @typedef {Encoded | GPUBuffer[]} Prepared what to dispatch, or which buffers to clear */

/** Hands out query slots, two for each pass, and keeps the pass's phase. A step may use the slots first .. end - 1. */
export class Timestamps {
  /**
   * @param {GPUQuerySet} querySet
   * @param {number} first
   * @param {number} slots
   */
  constructor(querySet, first, slots) {
    this.querySet = querySet;
    this.first = first;
    this.next = first;
    this.end = first + slots;
    /** @type {string[]} the phase of each pass, in order */
    this.phases = [];
    /** Whether a pass went untimed for want of slots. */
    this.overflowed = false;
  }

  /**
   * @param {string} phase
   * @returns {GPUComputePassDescriptor | undefined}
   */
  nextPass(phase) {
    if (this.next + 2 > this.end) {
      this.overflowed = true;
      return undefined;
    }
    const slot = this.next;
    this.next += 2;
    this.phases.push(phase);
    return {
      timestampWrites: { querySet: this.querySet, beginningOfPassWriteIndex: slot, endOfPassWriteIndex: slot + 1 },
    };
  }
}

/**
 * Records programs and copies in order, and submits them when they have grown long enough. `finish` submits the rest.
 */
export class CommandStream {
  /** @type {GPUCommandEncoder | null} */
  #encoder = null;
  /** @type {GPUComputePassEncoder | null} */
  #pass = null;
  #phase = "";
  #dispatches = 0;

  /**
   * @param {GPUDevice} device
   * @param {(commands: GPUCommandBuffer) => void} submit
   * @param {number} perSubmit dispatches in one submit at most
   * @param {Timestamps | null} timestamps
   */
  constructor(device, submit, perSubmit, timestamps) {
    this.device = device;
    this.submit = submit;
    this.perSubmit = perSubmit;
    this.timestamps = timestamps;
  }

  /** The encoder outside any pass: for copies and clears. */
  get encoder() {
    this.#endPass();
    this.#encoder ??= this.device.createCommandEncoder();
    return this.#encoder;
  }

  /**
   * Append a program, or only its dispatches of some phases. With timestamps, forward and backward become passes of their
   * own, each timed.
   *
   * @param {readonly Prepared[]} commands
   * @param {readonly string[] | null} [phases]
   */
  program(commands, phases = null) {
    this.#phase = "";
    for (const command of commands) {
      if (phases && (Array.isArray(command) || !phases.includes(command.phase))) continue;
      if (Array.isArray(command)) {
        const encoder = this.encoder;
        for (const buffer of command) encoder.clearBuffer(buffer);
      } else {
        this.#dispatch(command);
      }
    }
    this.#endPass();
  }

  /** @param {Encoded} command */
  #dispatch(command) {
    const { phase } = command;
    if (this.#dispatches >= this.perSubmit) this.finish();
    else if (this.timestamps && phase && this.#phase && phase !== this.#phase) this.#endPass();
    this.#phase = phase || this.#phase;
    this.#pass ??= this.encoder.beginComputePass(this.timestamps?.nextPass(this.#phase));
    const pass = this.#pass;
    pass.setPipeline(command.pipeline);
    pass.setBindGroup(0, command.group);
    pass.dispatchWorkgroups(command.x, command.y, command.z);
    this.#dispatches++;
  }

  /** Submit what is recorded. */
  finish() {
    this.#endPass();
    if (this.#encoder) this.submit(this.#encoder.finish());
    this.#encoder = null;
    this.#dispatches = 0;
  }

  #endPass() {
    this.#pass?.end();
    this.#pass = null;
  }
}
