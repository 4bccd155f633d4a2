/** @file Small helpers for the elements of the page. May import: nothing. */

/** @param {string} id @returns {HTMLElement} */
export const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
/** @param {string} id @returns {HTMLButtonElement} */
export const button = (id) => /** @type {HTMLButtonElement} */ (element(id));
/** @param {string} id @returns {HTMLInputElement} */
export const input = (id) => /** @type {HTMLInputElement} */ (element(id));

/** @param {string} id @param {string} text */
export function show(id, text) {
  const shown = element(id);
  if (shown.textContent !== text) shown.textContent = text; // a live region speaks each change
}

/**
 * @param {string} tag
 * @param {string} className
 * @param {...(Node | string)} content
 * @returns {HTMLElement}
 */
export function make(tag, className, ...content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

/** @param {string} label @param {() => void} act @param {string} [description] for who cannot see what stands beside it */
export function makeButton(label, act, description) {
  const made = /** @type {HTMLButtonElement} */ (make("button", "small", label));
  made.type = "button";
  if (description) made.setAttribute("aria-label", description);
  made.addEventListener("click", act);
  return made;
}
