/** @file The way from the page to the runs of the machine that serves it. */

import { bytes } from "./format.js";
import { button, element, show } from "./page.js";

const STAGES = /** @type {Record<string, string>} */ ({
  packing: "packing the run",
  sending: "sending it",
  checking: "the server checks every byte",
});

export class SendView {
  /** The run that is on its way. @type {string | null} */
  #name = null;
  #allowed = false;

  /** @param {() => string | null} send begins to send the run that is shown; its name */
  constructor(send) {
    button("send").addEventListener("click", () => {
      this.#name = send();
      element("sent").hidden = true;
      element("send-bar").hidden = false;
      show("send-note", "getting ready");
      this.allow(this.#allowed);
    });
  }

  /** Whether there is a server. @param {boolean} is */
  offer(is) {
    element("server").hidden = !is;
  }

  /** Whether the run that is shown can be sent now: it is saved, and does not go on meanwhile. @param {boolean} can */
  allow(can) {
    this.#allowed = can;
    button("send").disabled = !can || this.#name !== null;
  }

  /** Another run is shown. One that is on its way goes on. */
  clear() {
    element("sent").hidden = true;
    if (this.#name === null) show("send-note", "");
    show("send", "Send to the server");
    this.allow(false);
  }

  /** @param {{stage: string, done: number, total: number}} facts */
  progress({ stage, done, total }) {
    const bar = /** @type {HTMLProgressElement} */ (element("send-bar"));
    bar.max = total;
    bar.value = done;
    show("send-note", STAGES[stage]);
    show("send-far", stage === "sending" ? `${bytes(done)} of ${bytes(total)}` : "");
  }

  /** @param {{run: string, step: number}} facts the run that the server has made of it */
  sent({ run, step }) {
    this.#end("Send again", `${this.#name} is there, at step ${step}: `);
    const link = /** @type {HTMLAnchorElement} */ (element("sent"));
    link.href = `runs/#run/${run}`;
    link.textContent = `look at ${run}`;
    link.hidden = false;
  }

  /** What went wrong is said elsewhere. */
  failed() {
    this.#end("Try again", "It was not sent.");
  }

  /** @param {string} next @param {string} note */
  #end(next, note) {
    element("send-bar").hidden = true;
    show("send-far", "");
    show("send-note", note);
    show("send", next);
    this.#name = null;
    this.allow(this.#allowed);
  }
}
