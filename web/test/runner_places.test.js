/** @file Where a run lies: rows in files, the record, and what the server of a launched run is told. */

import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { ConfigError } from "../runtime/errors.js";
import { writeAll } from "../runtime/folders/folder.js";
import { MemoryDirectory } from "../runtime/folders/memory.js";
import { readJob } from "../runtime/runner/job.js";
import { JsonLines } from "../runtime/runner/json_lines.js";
import { LaunchServer } from "../runtime/runner/launch_server.js";
import { FolderRunPlace } from "../runtime/runner/place_folder.js";
import { LaunchRunPlace } from "../runtime/runner/place_launch.js";
import { TrainingRunner } from "../runtime/runner/training_runner.js";
import { ByteTokenizer } from "../runtime/tokenizers/bytes.js";
import { FakeSession } from "./support/fake_session.js";
import { CountingSamples, microJob, rowsOf } from "./support/micro.js";

/** @param {MemoryDirectory} folder @param {string} file */
const textOf = async (folder, file) => new TextDecoder().decode(await folder.read(file));

describe("a file of rows", () => {
  const open = () => {
    const folder = new MemoryDirectory("run");
    return { folder, lines: new JsonLines(folder, "rows.jsonl", "cut.jsonl") };
  };

  test("grows by a line a row, and goes on after it was closed", async () => {
    const { folder, lines } = open();
    assert.equal(await lines.last(), 0);
    await lines.append({ step: 1, text: "é\ud83d" });
    await lines.close();
    await lines.append({ step: 2 });
    assert.equal(await textOf(folder, "rows.jsonl"), '{"step":1,"text":"é\\ud83d"}\n{"step":2}\n');
    assert.equal(await lines.last(), 2);
  });

  test("is cut behind a step, and what is cut lies beside it", async () => {
    const { folder, lines } = open();
    for (const step of [1, 2, 3, 4]) await lines.append({ step });
    assert.equal(await lines.cut(2), 2);
    assert.equal(await lines.cut(2), 0);
    await lines.append({ step: 3, again: true });
    assert.equal(await lines.cut(2), 1);
    assert.deepEqual(
      (await rowsOf(folder, "rows.jsonl")).map(({ step }) => step),
      [1, 2],
    );
    assert.deepEqual(await rowsOf(folder, "cut.jsonl"), [{ step: 3 }, { step: 4 }, { step: 3, again: true }]);
  });

  for (const rest of ['{"step":3', "nonsense\n", '{"step":"3"}\n', "\xff\n"]) {
    test(`ends where ${JSON.stringify(rest)} begins`, async () => {
      const { folder, lines } = open();
      const bytes = Uint8Array.from(`{"step":1}\n{"step":2}\n${rest}`, (letter) => letter.charCodeAt(0));
      await writeAll(folder, "rows.jsonl", bytes);
      assert.equal(await lines.last(), 2);
      assert.equal(await lines.cut(9), 0);
      assert.equal(await textOf(folder, "rows.jsonl"), '{"step":1}\n{"step":2}\n');
    });
  }
});

describe("the record of a run in a folder", () => {
  const { config } = microJob();

  test("keeps what was said before, and when it began", async () => {
    const folder = new MemoryDirectory("run");
    const first = await FolderRunPlace.open(folder, config, { now: () => 0 });
    assert.equal(first.facts, null);
    await first.record({ status: "running", step: 1 });
    const second = await FolderRunPlace.open(folder, config, { now: () => 1e12 });
    await second.record({ step: 2 });
    assert.deepEqual(JSON.parse(await textOf(folder, "run.json")), {
      ...{ format: "hybrid.run", version: 1, createdAt: "1970-01-01T00:00:00.000Z", status: "running", step: 2 },
    });
  });

  test("survives an end by force while it is written", async () => {
    const folder = new MemoryDirectory("run");
    await (await FolderRunPlace.open(folder, config)).record({ step: 7 });
    await writeAll(folder, "run.json", '{"format": "hybrid.ru');
    assert.equal((await FolderRunPlace.open(folder, config)).facts?.step, 7);
  });

  test("that is another program's is refused", async () => {
    const folder = new MemoryDirectory("run");
    await writeAll(folder, "run.json", '{"format": "else"}');
    await assert.rejects(FolderRunPlace.open(folder, config), /run\/run\.json: expected an object with format/);
  });
});

test("a job of another format or version is refused", () => {
  assert.throws(
    () => readJob({ format: "hybrid.job", version: 2 }),
    /job: format 'hybrid\.job' version 2; this program/,
  );
  assert.throws(() => readJob([]), /job: format None version None/);
});

test("a job whose members are missing or of another kind is refused by name, never half understood", () => {
  const good = microJob();
  const withResume = {
    ...good,
    resume: { name: "step-00000005", step: 5, sequence: 1, checkpointHash: "a".repeat(64) },
  };
  assert.equal(readJob(good), good);
  assert.equal(readJob(withResume), withResume);
  const odd = [undefined, -1, 1.5, "7", [], [7], {}, true, 2 ** 60, "x".repeat(1000)];
  let refused = 0;
  for (const path of members(withResume)) {
    for (const value of odd) {
      /** @type {any} */
      const job = structuredClone(withResume);
      const last = /** @type {string} */ (path.at(-1));
      const owner = path.slice(0, -1).reduce((inner, name) => inner[name], job);
      if (value === undefined) delete owner[last];
      else owner[last] = value;
      try {
        readJob(job);
      } catch (error) {
        assert.ok(error instanceof ConfigError, `${path}: ${error}`);
        assert.match(error.message, /^job: /);
        refused++;
      }
    }
  }
  assert.ok(refused > 300, `${refused}`);
  for (const member of [
    "config",
    "steps",
    "runId",
    "fingerprints",
    "hashes",
    "resumeAudits",
    "checkpointFiles",
    "resume",
  ]) {
    assert.throws(() => readJob({ ...good, [member]: undefined }), new RegExp(`job: ${member}.* is None: expected`));
  }
  assert.throws(() => readJob(JSON.parse('{"format":"hybrid.job","version":1,"__proto__":{"steps":1}}')), /job: steps/);
});

/** Paths of all members of an object, and of those of its members. @param {any} value @returns {string[][]} */
function members(value) {
  if (typeof value !== "object" || value === null) return [];
  return Object.keys(value).flatMap((name) => [[name], ...members(value[name]).map((path) => [name, ...path])]);
}

/**
 * A server that keeps what it is told. fail: asked before each request; may throw, or answer in its place.
 *
 * @param {(path: string, count: number) => Response | null} [fail]
 * @param {(path: string, offset: number) => void} [arrived] asked after each piece of a file; may throw
 */
function fakeServer(fail = () => null, arrived = () => {}) {
  /** @type {string[]} */
  const tabs = [];
  /** @type {any[]} */
  const events = [];
  /** @type {Map<string, Uint8Array>} */
  const files = new Map();
  const state = {
    tabs,
    events,
    files,
    committed: /** @type {any[]} */ ([]),
    stop: /** @type {string | null} */ (null),
  };
  let sequence = 0;
  let count = 0;
  /** @param {unknown} value @param {number} [status] */
  const json = (value, status = 200) => new Response(JSON.stringify(value), { status });
  const fetch = async (/** @type {any} */ url, /** @type {RequestInit} */ init = {}) => {
    const { pathname, searchParams } = new URL(url);
    const path = pathname.replace("/token/", "");
    state.tabs.push(new Headers(init.headers).get("X-Hybrid-Tab") ?? "");
    const instead = fail(path, ++count);
    if (instead) return instead;
    if (path === "events") {
      const report = JSON.parse(String(init.body));
      if (report.sequence === sequence + 1) {
        sequence++;
        events.push(...report.events);
      } else assert.equal(report.sequence, sequence, "sent again");
      return json({ stop: state.stop });
    }
    if (init.method === "PUT") {
      const had = files.get(path) ?? new Uint8Array(0);
      const offset = Number(searchParams.get("offset"));
      if (offset && offset !== had.length)
        return json({ error: { name: "HybridError", message: "no" }, size: had.length }, 409);
      const piece = new Uint8Array(await new Response(init.body).arrayBuffer());
      const whole = new Uint8Array(offset + piece.length);
      whole.set(had.subarray(0, offset));
      whole.set(piece, offset);
      files.set(path, whole);
      arrived(path, offset);
      return json({ size: whole.length });
    }
    state.committed.push(JSON.parse(await new Response(init.body).text()));
    return json({ checkpointHash: state.committed.at(-1).checkpointHash });
  };
  return { state, server: new LaunchServer("http://127.0.0.1:1/token/", /** @type {any} */ (fetch)) };
}

/**
 * A whole run at a server.
 *
 * @param {ReturnType<typeof fakeServer>} parts
 * @param {Partial<import("../runtime/runner/job.js").Job>} [changes]
 */
async function launch({ server }, changes) {
  const job = microJob({ run: { steps: 6 }, evaluation: { every: 3 } }, { runDir: "runs/micro", ...changes });
  const place = new LaunchRunPlace(server, job);
  const clock = { seconds: 0 };
  /** @type {string[]} */
  const calls = [];
  const runner = new TrainingRunner({
    job,
    place,
    data: /** @type {any} */ ({
      tokenizer: new ByteTokenizer(),
      train: new CountingSamples(),
      validation: new CountingSamples(4),
    }),
    openSession: async () => /** @type {any} */ (new FakeSession(clock, calls)),
    clock: () => clock.seconds,
  });
  try {
    return await runner.run();
  } finally {
    await place.close().catch(() => {});
  }
}

describe("a launched run", () => {
  test("tells everything, in order, and uploads its checkpoints", async () => {
    const parts = fakeServer();
    const outcome = await launch(parts);
    assert.equal(outcome.message, "finished at step 6: runs/micro");
    const { events, committed, files, tabs } = parts.state;
    assert.equal(new Set(tabs).size, 1);
    const entries = events.filter(({ kind }) => kind === "entry").map(({ row }) => row.step);
    assert.deepEqual(entries, [1, 2, 3, 4, 5, 6]);
    assert.deepEqual(
      events.filter(({ kind }) => kind === "validation").map(({ row }) => row.step),
      [3, 6],
    );
    assert.deepEqual(
      events.filter(({ kind }) => kind === "cut"),
      [
        { kind: "cut", step: 0, file: "metrics" },
        { kind: "cut", step: 0, file: "validation" },
      ],
    );
    assert.ok(events.some(({ kind, facts }) => kind === "record" && facts.status === "finished"));
    const { runDir: _, ...end } = outcome;
    assert.deepEqual(events.at(-1), { kind: "end", ...end });
    assert.deepEqual(
      committed.map(({ progress }) => progress.step),
      [5, 6],
    );
    assert.deepEqual(
      committed.map(({ lineage }) => lineage.sequence),
      [1, 2],
    );
    assert.equal(committed[1].lineage.previousCheckpointHash, committed[0].checkpointHash);
    for (const [name, { size }] of /** @type {[string, any][]} */ (Object.entries(committed[0].files))) {
      assert.equal(files.get(`checkpoints/step-00000005/${name}`)?.length, size, name);
    }
  });

  test("counts on from the run's last sequence", async () => {
    const parts = fakeServer();
    await launch(parts, { lastSequence: 7 });
    assert.deepEqual(
      parts.state.committed.map(({ lineage }) => lineage.sequence),
      [8, 9],
    );
  });

  test("is stopped by the answer of the server", async () => {
    const parts = fakeServer();
    parts.state.stop = "SIGINT received";
    const outcome = await launch(parts);
    assert.equal(outcome.status, "stopped");
    assert.match(outcome.message, /^stopped \(SIGINT received\), .*start it again with --run-dir runs\/micro$/);
  });

  test("sends again what was not answered, and nothing is counted twice", async () => {
    const parts = fakeServer((_, count) => {
      if (count % 3 === 0) throw new TypeError("fetch failed");
      return null;
    });
    assert.equal((await launch(parts)).status, "finished");
    const steps = parts.state.events.filter(({ kind }) => kind === "entry").map(({ row }) => row.step);
    assert.deepEqual(steps, [1, 2, 3, 4, 5, 6]);
  });

  test("waits for the run as long as the server works for a page that is gone", async () => {
    let asked = 0;
    const error = { name: "ConfigError", message: "already open" };
    const { server } = fakeServer((path) => {
      assert.equal(path, "job.json");
      const done = ++asked > 2;
      return new Response(JSON.stringify(done ? { runId: "this" } : { error, busy: true }), {
        status: done ? 200 : 409,
      });
    });
    assert.deepEqual(await server.claim(), { runId: "this" });
    assert.equal(asked, 3);
  });

  test("sends again what was answered by half", async () => {
    const half = () => new ReadableStream({ pull: (controller) => controller.error(new TypeError("network error")) });
    let broken = 0;
    const parts = fakeServer((_, count) => (count % 3 === 0 && ++broken ? new Response(half()) : null));
    assert.equal((await launch(parts)).status, "finished");
    assert.ok(broken > 2);
    const steps = parts.state.events.filter(({ kind }) => kind === "entry").map(({ row }) => row.step);
    assert.deepEqual(steps, [1, 2, 3, 4, 5, 6]);
  });

  test("reads files again whose answer broke off", async () => {
    const bytes = Uint8Array.from([5, 6, 7, 8]);
    let asked = 0;
    const { server } = fakeServer((path) => {
      assert.equal(path, "data/tokens.bin");
      const broken = new ReadableStream({ pull: (controller) => controller.error(new TypeError("network error")) });
      const headers = { "Content-Range": asked++ < 2 ? "bytes 0-0/4" : "bytes 0-3/4" };
      const whole = asked === 2 ? bytes.slice(0, 1) : bytes;
      return new Response(asked % 2 ? broken : whole, { status: 206, headers });
    });
    assert.deepEqual(await server.folder("data/", "the store").read("tokens.bin"), bytes);
    assert.equal(asked, 4);
  });

  test("goes on when the answer to a piece of a file was lost on the way", async () => {
    /** @type {string[]} */
    const lost = [];
    const parts = fakeServer(
      () => null,
      (path, offset) => {
        if (!offset || lost.length) return;
        lost.push(path);
        throw new TypeError("fetch failed");
      },
    );
    assert.equal((await launch(parts)).status, "finished");
    assert.equal(lost.length, 1, "some file comes in more than one piece");
    const [{ files }] = parts.state.committed;
    const name = lost[0].split("/")[2];
    assert.equal(parts.state.files.get(lost[0])?.length, files[name].size);
  });

  test("ends with the typed error that the server gives", async () => {
    const refusal = { error: { name: "CheckpointCorrupt", message: "not this one" } };
    const parts = fakeServer((path) =>
      path.endsWith("/commit") ? new Response(JSON.stringify(refusal), { status: 422 }) : null,
    );
    await assert.rejects(launch(parts), { name: "CheckpointCorrupt", message: /not this one/ });
    const last = parts.state.events.at(-1);
    assert.deepEqual([last.kind, last.name, last.exitCode], ["error", "CheckpointCorrupt", 3]);
  });

  test("ends when the program is gone", async () => {
    const parts = fakeServer((path) => (path === "events" ? new Response("gone", { status: 410 }) : null));
    await assert.rejects(launch(parts), /events: the server answers 410 gone/);
  });
});
