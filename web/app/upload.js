/**
 * @file Sends a packed run to the server that has this page: in pieces, each of which is sent again where no answer comes
 * (docs/server.md, "Uploads"). May import: errors, sha256.
 */

import { errorNamed, HybridError } from "../runtime/errors.js";
import { Sha256 } from "../runtime/sha256.js";

export const UPLOADS = "api/uploads"; // relative to a page that has such a server
const PIECE_BYTES = 4 * 2 ** 20;
const WAITS_MS = [500, 1000, 2000, 4000, 8000]; // a server that is started again takes a moment
const CONFLICT = 409;
const NO_ROOM = 507;

/** What became of it. @typedef {{run: string, checkpoint: string, step: number}} Sent */

/**
 * @typedef {object} SendOptions
 * @property {(stage: "packing" | "sending" | "checking", done: number, total: number) => void} [progress] in bytes
 * @property {(milliseconds: number) => Promise<unknown>} [wait]
 */

/**
 * Send a packed run. One that was sent in part before goes on from there; one that is there already is not sent again.
 *
 * @param {Blob} archive
 * @param {string} name of the file
 * @param {URL} address of the uploads
 * @param {SendOptions} [options]
 * @returns {Promise<Sent>}
 * @throws {HybridError} what the server says against it, or that it does not answer
 */
export async function sendRun(archive, name, address, { progress = () => {}, wait = pause } = {}) {
  const { size } = archive;
  const sha256 = await digest(archive, (done) => progress("packing", done, size));
  const declared = JSON.stringify({ name, size, sha256 });
  const headers = { "content-type": "application/json" };
  const upload = await wanted(address, { method: "POST", headers, body: declared }, wait);
  const place = new URL(`${address.href}/${upload.id}`);
  if (upload.run) return upload;

  let received = Number(upload.received);
  let refused = 0; // times in a row that the server stood elsewhere
  /** @param {{status: number, answer: Record<string, any>}} got whether the server stands elsewhere */
  const isElsewhere = ({ status, answer }) => {
    if (status !== CONFLICT || typeof answer.size !== "number" || refused === WAITS_MS.length) return false;
    refused++;
    received = answer.size;
    return true;
  };
  for (;;) {
    while (received < size) {
      progress("sending", received, size);
      const body = archive.slice(received, received + PIECE_BYTES);
      const got = await asked(new URL(`?offset=${received}`, place), { method: "PUT", body }, wait);
      if (isElsewhere(got)) continue;
      received = checked(got).received;
      refused = 0;
    }
    progress("checking", size, size);
    const got = await asked(new URL(`${place.href}/commit`), { method: "POST" }, wait);
    if (isElsewhere(got) && received < size) continue;
    return checked(got);
  }
}

/** @param {Blob} archive @param {(done: number) => void} progress */
async function digest(archive, progress) {
  const hash = new Sha256();
  for (let begin = 0; begin < archive.size; begin += PIECE_BYTES) {
    progress(begin);
    hash.update(new Uint8Array(await archive.slice(begin, begin + PIECE_BYTES).arrayBuffer()));
  }
  return hash.hex();
}

/** @param {URL} address @param {RequestInit} request @param {(milliseconds: number) => Promise<unknown>} wait */
async function wanted(address, request, wait) {
  return checked(await asked(address, request, wait));
}

/**
 * What the server answers, once it does: every request of an upload may be repeated.
 *
 * @param {URL} address
 * @param {RequestInit} request
 * @param {(milliseconds: number) => Promise<unknown>} wait
 * @returns {Promise<{status: number, answer: Record<string, any>}>}
 */
async function asked(address, request, wait) {
  for (const milliseconds of [...WAITS_MS, null]) {
    const got = await fetch(address, request).then(
      async (response) => ({ status: response.status, answer: await response.json().catch(() => ({})) }),
      () => null,
    );
    if (got && (got.status < 500 || got.status === NO_ROOM || got.answer.error)) return got;
    if (milliseconds !== null) await wait(milliseconds);
  }
  throw new HybridError(
    "the server does not answer: see whether it still runs, and send the run again; it goes on from what is there",
  );
}

/** @param {{status: number, answer: Record<string, any>}} got @returns {any} */
function checked({ status, answer }) {
  if (status < 300) return answer;
  if (status === 401) throw new HybridError("the server was started again: open the address that it printed");
  const { name = "HybridError", message = `the server answered with status ${status}` } = answer.error ?? {};
  throw errorNamed(name, message);
}

/** @param {number} milliseconds */
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
