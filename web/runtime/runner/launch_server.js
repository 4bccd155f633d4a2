/**
 * @file Requests to the small server of the program that opened this page.
 *
 * A page is known there by a name that it gives itself at each load. Answers are typed errors where they are none of
 * success. May import: errors, contracts, folders.
 */

import { isObject } from "../contracts/values.js";
import { errorNamed, HybridError } from "../errors.js";
import { HttpFolder } from "../folders/http.js";

/** @typedef {typeof globalThis.fetch} Fetch */

const RETRIES_MS = [100, 300, 1000, 3000];
// The server keeps a run for a page that was heard of recently, such as this one before it was loaded again.
const CLAIMS = 8;
const CLAIM_PAUSE_MS = 700;
const CONFLICT = 409;

export class LaunchServer {
  #fetch;
  #tab;

  /**
   * @param {string | URL} base address of the run, with a slash at its end
   * @param {Fetch} [fetch]
   * @param {string} [tab] the name of the page, where its worker shares it
   */
  constructor(base, fetch = globalThis.fetch.bind(globalThis), tab = crypto.randomUUID()) {
    this.base = new URL(base);
    this.#fetch = fetch;
    this.#tab = tab;
  }

  /**
   * The job of the run, which belongs to this page from then on.
   *
   * @returns {Promise<unknown>}
   * @throws {HybridError} when another page has it, or it has ended
   */
  async claim() {
    for (let attempt = 1; ; ) {
      const response = await this.ask("job.json");
      if (response.ok) return response.json();
      const error = await refusal(response.clone(), "job.json");
      if (response.status !== CONFLICT || attempt === CLAIMS) throw error;
      // Still at work for a page that is gone: that ends.
      if (!(await response.json()).busy) attempt++;
      await delay(CLAIM_PAUSE_MS);
    }
  }

  /** End the run with an error, in the place of a worker that cannot. @param {string} message */
  async fail(message) {
    await this.claim(); // reports begin anew with it
    await this.post("events", { sequence: 1, events: [{ kind: "error", name: "HybridError", message }] });
  }

  /** Say that the page is going: it is closed, or loaded again. */
  leave() {
    // The browser sends this one also when the page is gone.
    const init = { method: "POST", keepalive: true, headers: { "X-Hybrid-Tab": this.#tab } };
    this.#fetch(new URL("leave", this.base), init).catch(() => {});
  }

  /**
   * @param {string} path below the base
   * @param {RequestInit} [init]
   * @returns {Promise<Response>} of success
   * @throws {HybridError} what the server answers otherwise, or that it is gone
   */
  async request(path, init) {
    const response = await this.ask(path, init);
    if (!response.ok) throw await refusal(response, path);
    return response;
  }

  /**
   * @param {string} path of a folder below the base, with a slash at its end
   * @param {string} name for messages
   */
  folder(path, name) {
    return new HttpFolder(new URL(path, this.base), { name, fetch: (url, init) => this.ask(url, init) });
  }

  /**
   * POST a value.
   *
   * @param {string} path
   * @param {unknown} value
   * @returns {Promise<any>} the answer
   */
  async post(path, value) {
    const body = JSON.stringify(value);
    return (await this.request(path, { method: "POST", body, headers: { "Content-Type": "application/json" } })).json();
  }

  /**
   * Any answer, whole. Tries again for a few seconds when none comes, or one that breaks off: browsers end requests when the
   * machine wakes up, or the network changes, also those to the machine itself.
   *
   * @param {string | URL} path below the base
   * @param {RequestInit} [init]
   * @returns {Promise<Response>}
   */
  async ask(path, init) {
    const headers = { ...init?.headers, "X-Hybrid-Tab": this.#tab };
    for (let attempt = 0; ; attempt++) {
      try {
        const answer = await this.#fetch(new URL(path, this.base), { cache: "no-store", ...init, headers });
        return new Response(await answer.arrayBuffer(), answer);
      } catch (cause) {
        if (attempt === RETRIES_MS.length) {
          const message = "the program that opened this page does not answer any more; start it again to go on";
          throw new HybridError(message, { cause });
        }
        await delay(RETRIES_MS[attempt]);
      }
    }
  }
}

/**
 * The error of an answer that is none of success.
 *
 * @param {Response} response
 * @param {string} path
 * @returns {Promise<Error>}
 */
export async function refusal(response, path) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    if (isObject(error)) return errorNamed(String(error.name), String(error.message));
  } catch {
    // not one of ours
  }
  return new HybridError(`${path}: the server answers ${response.status} ${text.slice(0, 200)}`);
}

/** @param {number} milliseconds */
function delay(milliseconds) {
  return new Promise((done) => setTimeout(done, milliseconds));
}
