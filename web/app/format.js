/** @file Numbers as people read them. May import: nothing. */

/** @param {number} count */
export const whole = (count) => Math.round(count).toLocaleString("en");

/** @param {number} count such as 824320: "0.82 million" @returns {string} */
export function parameters(count) {
  if (count < 1e5) return whole(count);
  if (count < 1e9) return `${Number((count / 1e6).toPrecision(2))} million`;
  return `${Number((count / 1e9).toPrecision(2))} billion`;
}

/** @param {number} count @returns {string} in units of 1024 */
export function bytes(count) {
  const units = ["bytes", "KB", "MB", "GB"];
  let value = count;
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit++) value /= 1024;
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

/** @param {number} seconds @returns {string} */
export function duration(seconds) {
  const rounded = Math.round(seconds);
  if (rounded < 60) return `${rounded} s`;
  if (rounded < 3600) return `${Math.floor(rounded / 60)} min ${rounded % 60} s`;
  return `${Math.floor(rounded / 3600)} h ${Math.floor((rounded % 3600) / 60)} min`;
}

/** @param {string} iso @param {number} now @returns {string} */
export function ago(iso, now) {
  const seconds = (now - Date.parse(iso)) / 1000;
  if (!(seconds >= 60)) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return new Date(iso).toLocaleDateString("en", { day: "numeric", month: "long", year: "numeric" });
}
