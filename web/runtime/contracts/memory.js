/** @file How much memory a run uses, as the metrics tell it. */

import { isFiniteNumber, isObject } from "./values.js";

const HEAP_FIELDS = {
  js_heap_used_bytes: "usedJSHeapSize",
  js_heap_total_bytes: "totalJSHeapSize",
  js_heap_limit_bytes: "jsHeapSizeLimit",
};

/**
 * The JavaScript heap from `performance.memory`; null where there is no such thing.
 *
 * @param {unknown} memory
 * @returns {Record<string, number | null> | null}
 */
export function heapStats(memory) {
  if (!isObject(memory)) return null;
  return Object.fromEntries(
    Object.entries(HEAP_FIELDS).map(([field, source]) => {
      const value = memory[source];
      return [field, isFiniteNumber(value) ? value : null];
    }),
  );
}

/**
 * The heap, where it is known, and `device_bytes`: bytes of the device by arena and their `total`. null when neither is
 * known.
 *
 * @param {Record<string, number> | null} [device]
 * @returns {Record<string, unknown> | null}
 */
export function memoryStats(device = null) {
  const heap = heapStats(/** @type {{memory?: unknown}} */ (globalThis.performance).memory);
  if (!heap && !device) return null;
  return { ...heap, device_bytes: device ? { ...device } : null };
}
