/**
 * @file How far long work before the first step is: an event ten times a second at most, and one for each new stage.
 *
 * May import: nothing.
 */

/** @import { RunPlace } from "./place.js" */

const SECONDS = 0.1;

/**
 * @param {Pick<RunPlace, "event">} place
 * @param {() => number} clock seconds
 * @param {() => void} check called each time; throws to end the work
 * @returns {(stage: string, done: number, total: number | null) => void}
 */
export function setUpProgress(place, clock, check) {
  let last = Number.NEGATIVE_INFINITY;
  let shown = "";
  return (stage, done, total) => {
    const now = clock();
    if (now - last >= SECONDS || stage !== shown) {
      last = now;
      shown = stage;
      place.event("progress", { stage, done, total });
    }
    check();
  };
}
