/** @file A run on its way to the server: in pieces, over a connection that breaks. */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { test } from "node:test";

import { sendRun } from "../app/upload.js";

const ADDRESS = new URL("http://localhost/api/uploads");
const MIB = 2 ** 20;

/** A server of one upload, and a connection that does to a request what `trouble` says. */
class Server {
  /** @type {Uint8Array[]} */
  pieces = [];
  /** @type {string[]} */
  asked = [];
  /** @type {Record<string, any> | null} */
  declared = null;
  committed = false;
  waits = 0;
  /** @type {(asked: string, count: number) => "lost" | "unanswered" | Response | undefined} */
  trouble = () => undefined;

  get received() {
    return this.pieces.reduce((sum, piece) => sum + piece.length, 0);
  }

  fetch = async (/** @type {URL} */ url, /** @type {any} */ { method, body }) => {
    const asked = `${method} ${url.pathname}${url.search}`;
    this.asked.push(asked);
    const trouble = this.trouble(asked, this.asked.filter((other) => other === asked).length);
    if (trouble instanceof Response) return trouble;
    if (trouble === "lost") throw new TypeError("Failed to fetch");
    const answer = await this.answer(url, method, body);
    if (trouble === "unanswered") throw new TypeError("Failed to fetch");
    return answer;
  };

  /** @param {URL} url @param {string} method @param {any} body */
  async answer(url, method, body) {
    if (method === "PUT") {
      const offset = Number(url.searchParams.get("offset"));
      if (offset !== this.received) return refusal(409, "HybridError", "another byte", { size: this.received });
      this.pieces.push(new Uint8Array(await body.arrayBuffer()));
      return Response.json({ received: this.received });
    }
    if (url.pathname.endsWith("/commit")) this.committed = true;
    else this.declared = JSON.parse(body);
    const run = this.committed ? { run: "mine", checkpoint: "step-00000005", step: 5 } : { run: null };
    return Response.json({ id: "0123", received: this.received, ...run });
  }

  /** @param {Blob} archive @param {(stage: string, done: number, total: number) => void} [progress] */
  send(archive, progress) {
    const wait = async () => {
      this.waits++;
    };
    return sendRun(archive, "mine.hybrid", ADDRESS, { progress, wait });
  }
}

/** @param {number} status @param {string} name @param {string} message @param {object} [more] */
const refusal = (status, name, message, more) => Response.json({ error: { name, message }, ...more }, { status });

/** @param {import("node:test").TestContext} context @param {number} size */
function sending(context, size) {
  const server = new Server();
  context.mock.method(globalThis, "fetch", server.fetch);
  const content = Uint8Array.from({ length: size }, (_, i) => i * 7);
  const sha256 = createHash("sha256").update(content).digest("hex");
  return { server, content, archive: new Blob([content]), sha256 };
}

test("a run is declared by its hash, sent in pieces, and committed", async (context) => {
  const { server, content, archive, sha256 } = sending(context, 9 * MIB + 3);
  /** @type {[string, number][]} */
  const stages = [];
  const sent = await server.send(archive, (stage, done) => stages.push([stage, done]));
  assert.deepEqual([sent.run, sent.step], ["mine", 5]);
  assert.deepEqual(server.declared, { name: "mine.hybrid", size: content.length, sha256 });
  assert.deepEqual(Buffer.concat(server.pieces), Buffer.from(content));
  const places = [0, 4 * MIB, 8 * MIB];
  assert.deepEqual(server.asked, [
    "POST /api/uploads",
    ...places.map((place) => `PUT /api/uploads/0123?offset=${place}`),
    "POST /api/uploads/0123/commit",
  ]);
  assert.deepEqual(stages.slice(-4), [...places.map((place) => ["sending", place]), ["checking", content.length]]);
});

test("requests and answers that are lost are sent again, and no byte comes twice", async (context) => {
  const { server, content, archive } = sending(context, 9 * MIB);
  server.trouble = (asked, count) => {
    if (count > 1) return undefined;
    if (asked.includes(`offset=${4 * MIB}`)) return "lost";
    return asked.includes("commit") || asked.includes("offset=0") ? "unanswered" : new Response("", { status: 502 });
  };
  assert.equal((await server.send(archive)).run, "mine");
  assert.deepEqual(Buffer.concat(server.pieces), Buffer.from(content));
});

test("a run that was sent in part goes on from there, and one that is there is not sent again", async (context) => {
  const { server, content, archive } = sending(context, 6 * MIB);
  server.pieces.push(content.subarray(0, 5 * MIB));
  await server.send(archive);
  assert.deepEqual(server.asked.slice(1), [`PUT /api/uploads/0123?offset=${5 * MIB}`, "POST /api/uploads/0123/commit"]);
  assert.deepEqual(Buffer.concat(server.pieces), Buffer.from(content));
  assert.equal((await server.send(archive)).run, "mine");
  assert.equal(server.asked.length, 4);
});

test("what the server says against it is what is thrown, and a server that is gone is said so", async (context) => {
  const { server, archive } = sending(context, 10);
  server.trouble = () => refusal(413, "LimitExceeded", "10 bytes; this server takes 5");
  await assert.rejects(server.send(archive), { name: "LimitExceeded", message: /takes 5/ });
  server.trouble = (asked) => (asked.includes("commit") ? refusal(422, "CheckpointCorrupt", "damaged") : undefined);
  await assert.rejects(server.send(archive), { name: "CheckpointCorrupt" });
  server.trouble = () => refusal(401, "HybridError", "the token is missing");
  await assert.rejects(server.send(archive), /open the address that it printed/);
  assert.equal(server.waits, 0, "no refusal is asked for twice");
  server.trouble = () => "lost";
  await assert.rejects(server.send(archive), /does not answer.*goes on from what is there/);
  assert.equal(server.waits, 5);
  server.pieces = [];
  server.trouble = (asked) => (asked.startsWith("PUT") ? refusal(409, "HybridError", "busy", { size: 0 }) : undefined);
  await assert.rejects(server.send(archive), /busy/, "it does not try forever");
});
