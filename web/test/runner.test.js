/** @file What the training loop does when, on a session that does no arithmetic. */

import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { validateEntry } from "../runtime/contracts/metrics.js";
import { NoAdapter } from "../runtime/device.js";
import { LimitExceeded } from "../runtime/errors.js";
import { MemoryDirectory } from "../runtime/folders/memory.js";
import { microRun, of, recordOf, rowsOf, saved } from "./support/micro.js";

/** @import { Facts } from "../runtime/runner/place.js" */

const ALERTS = { enabled: true, failOnAlert: true, thresholds: { maxGradientNorm: 5 } };

/** @param {Record<string, unknown>} alerts */
const telemetry = (alerts) => ({ telemetry: { mode: "step", windowSize: 4, emitNaNInfCounters: true, alerts } });

/** @param {any[]} rows */
const steps = (rows) => rows.map((row) => row.step);

/** @param {string[]} calls @param {string} name */
const count = (calls, name) => calls.filter((call) => call.split(" ")[0] === name).length;

/**
 * Loses the device at each of these calls once, in order.
 *
 * @param {[call: string, step: number][]} times
 */
function losing(times) {
  return (/** @type {string} */ call, /** @type {number} */ step) => {
    if (times[0]?.[0] !== call || times[0][1] !== step) return false;
    times.shift();
    return true;
  };
}

describe("a run", () => {
  test("goes through its steps, saves, and says how it ended", async () => {
    const report = await microRun();
    assert.equal(report.error, null);
    assert.deepEqual(report.outcome, {
      status: "finished",
      exitCode: 0,
      step: 20,
      steps: 20,
      runDir: "run",
      message: "finished at step 20: run",
    });
    assert.deepEqual(of(report, "end"), [report.outcome]);
    assert.equal(report.events.at(-1)?.[0], "end");
    const rows = await rowsOf(report.folder);
    assert.deepEqual(
      steps(rows),
      Array.from({ length: 20 }, (_, i) => i + 1),
    );
    for (const row of rows) validateEntry(row);
    assert.deepEqual(
      await saved(report.folder),
      [5, 10, 15, 20].map((step) => `step-000000${String(step).padStart(2, "0")}`),
    );
    assert.deepEqual(steps(of(report, "checkpoint")), [5, 10, 15, 20]);
    assert.equal(of(report, "checkpoint")[0].path, "run/checkpoints/step-00000005");
    const record = await recordOf(report.folder);
    assert.equal(record.status, "finished");
    assert.equal(record.step, 20);
    assert.equal(record.format, "hybrid.run");
    assert.deepEqual(report.calls.slice(-2), ["close", "destroy"]);
  });

  test("does each step in one order, with the z-loss and the targets of that step", async () => {
    const { calls } = await microRun({ config: { run: { steps: 3 }, checkpoint: { every: 0 } } });
    assert.deepEqual(calls.slice(0, 13), [
      "open",
      ...["begin 1 32 2 0.5", "accumulate 0,1", "accumulate 2,3", "apply", "poll now"],
      ...["begin 2 32 2 0.5", "accumulate 0,1", "accumulate 2,3", "apply", "poll now"],
      ...["begin 3 32 2 0", "accumulate 0,1"],
    ]);
  });

  test("saves before it evaluates, and evaluates before it samples", async () => {
    const report = await microRun({ config: { run: { steps: 5 }, evaluation: { every: 5 }, sampling: { every: 5 } } });
    const kinds = report.events.filter(([kind]) => kind === "phase").map(([, { phase }]) => phase);
    assert.deepEqual(kinds, ["warm-up", "train", "save", "train", "evaluate", "train", "sample", "train"]);
    assert.equal(of(report, "sample")[0].text, "AAAAAAAA");
    const [row] = await rowsOf(report.folder, "validation.jsonl");
    assert.deepEqual(row, { step: 5, split: "validation", loss: 2, perplexity: Math.exp(2), targetTokens: 32 });
    assert.deepEqual(of(report, "validation"), [row]);
  });

  for (const [loss, overflow, shown] of /** @type {[number, boolean, number][]} */ ([
    [3, true, 3],
    [Number.POSITIVE_INFINITY, false, 3.4028234663852886e38],
  ])) {
    test(`says of a validation loss that is not the model's (${loss}) that it is not`, async () => {
      const config = { run: { steps: 2 }, evaluation: { every: 2 } };
      const report = await microRun({ config, session: { evaluation: { loss, overflow } } });
      const rows = await rowsOf(report.folder, "validation.jsonl");
      assert.deepEqual(rows, of(report, "validation"));
      assert.deepEqual([rows[0].loss, rows[0].overflow], [shown, true]);
    });
  }

  test("counts neither evaluation nor saving as training time", async () => {
    const config = { run: { steps: 10 }, evaluation: { every: 2 }, sampling: { every: 2 } };
    const { folder, events } = await microRun({ config });
    for (const row of (await rowsOf(folder)).slice(1)) assert.ok(Math.abs(row.tokens_per_second - 320) < 1e-6);
    const last = /** @type {any} */ (events.filter(([kind]) => kind === "step").at(-1)?.[1]);
    assert.ok(Math.abs(last.stepMs - 100) < 1e-6);
  });

  test("reads each sample of an epoch once, and masks what is beyond the last one", async () => {
    const report = await microRun({ config: { run: { steps: null, epochs: 1 } } });
    assert.equal(report.outcome?.steps, 3);
    assert.deepEqual(
      report.train.read.slice().sort((a, b) => a - b),
      [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    );
    const rows = await rowsOf(report.folder);
    assert.deepEqual(
      rows.map((row) => row.ignored_target_count),
      [0, 0, 16],
    );
  });

  test("writes the entries of late results in order, and all of them", async () => {
    const report = await microRun({ session: { late: 3 }, config: { run: { steps: 7 }, checkpoint: { every: 0 } } });
    assert.deepEqual(steps(await rowsOf(report.folder)), [1, 2, 3, 4, 5, 6, 7]);
    assert.deepEqual(steps(of(report, "step")), [4, 7]);
    assert.ok(Math.abs(of(report, "step")[0].loss - (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4) < 1e-12);
  });

  test("saves when so many hours have passed", async () => {
    const checkpoint = { every: 0, everyHours: 0.25 / 3600 }; // a step takes 0.1 seconds
    const report = await microRun({ config: { run: { steps: 7 }, checkpoint } });
    assert.deepEqual(steps(of(report, "checkpoint")), [3, 6, 7]);
  });

  test("runs once", async () => {
    /** @type {Promise<unknown>[]} */
    const again = [];
    const watch = (/** @type {string} */ kind, /** @type {unknown} */ _, /** @type {any} */ runner) => {
      if (kind === "run") again.push(runner.run().catch((/** @type {Error} */ error) => error.message));
    };
    await microRun({ config: { run: { steps: 2 } }, watch });
    assert.deepEqual(await Promise.all(again), ["TrainingRunner: a runner runs once; make another one"]);
  });
});

describe("going on", () => {
  test("twenty steps are ten and ten, and five, five and ten", async () => {
    const whole = await microRun();
    for (const parts of [
      [10, 20],
      [5, 10, 20],
    ]) {
      const folder = new MemoryDirectory("run");
      for (const part of parts) await microRun({ folder, config: { run: { steps: part } } });
      assert.deepEqual(
        (await rowsOf(folder)).map((row) => [row.total_loss, row.epoch, row.batch]),
        (await rowsOf(whole.folder)).map((row) => [row.total_loss, row.epoch, row.batch]),
      );
    }
  });

  test("reads the same samples as a run in one piece", async () => {
    const whole = await microRun();
    const folder = new MemoryDirectory("run");
    const first = await microRun({ folder, config: { run: { steps: 10 } } });
    const second = await microRun({ folder });
    assert.deepEqual([...first.train.read, ...second.train.read], whole.train.read);
    assert.equal(of(second, "run")[0].resumedFrom.step, 10);
    const document = new TextDecoder();
    const checkpoints = await folder.directory("checkpoints");
    const manifest = async (/** @type {string} */ name) =>
      JSON.parse(document.decode(await (await checkpoints.open(name))?.read("checkpoint.json")));
    const [ten, fifteen] = [await manifest("step-00000010"), await manifest("step-00000015")];
    assert.equal(fifteen.lineage.previousCheckpointHash, ten.checkpointHash);
    assert.equal(fifteen.lineage.sequence, ten.lineage.sequence + 1);
    assert.equal(fifteen.progress.targetTokens, 15 * 32);
  });

  test("cuts what lies beyond the checkpoint, and keeps it beside", async () => {
    const folder = new MemoryDirectory("run");
    const ended = await microRun({ folder, session: { result: failingAt(8) } });
    assert.equal(ended.error?.message, "a mistake");
    assert.deepEqual(steps(await rowsOf(folder)), [1, 2, 3, 4, 5, 6, 7]);
    const again = await microRun({ folder, config: { run: { steps: 6 } } });
    assert.deepEqual(steps(await rowsOf(folder)), [1, 2, 3, 4, 5, 6]);
    assert.deepEqual(steps(await rowsOf(folder, "metrics.discarded.jsonl")), [6, 7]);
    assert.equal(of(again, "note")[0].text, "moved 2 metrics rows after step 5 to metrics.discarded.jsonl");
  });

  test("a finished run says so, and more steps go on", async () => {
    const folder = new MemoryDirectory("run");
    await microRun({ folder, config: { run: { steps: 5 } } });
    const before = await recordOf(folder);
    const again = await microRun({ folder, config: { run: { steps: 5 } } });
    assert.match(again.outcome?.message ?? "", /^run is finished: it is at step 5 of 5/);
    assert.deepEqual(await recordOf(folder), before);
    assert.deepEqual(again.calls, []);
    assert.equal((await microRun({ folder, config: { run: { steps: 7 } } })).outcome?.step, 7);
  });

  test("a longer run that never begins leaves the record of the finished one", async () => {
    const folder = new MemoryDirectory("run");
    await microRun({ folder, config: { run: { steps: 5 } } });
    const before = await recordOf(folder);
    const open = () => Promise.reject(new LimitExceeded("no memory left"));
    const again = await microRun({ folder, config: { run: { steps: 7 } }, session: { open } });
    assert.equal(again.error?.name, "LimitExceeded");
    assert.deepEqual(await recordOf(folder), before);
  });

  test("another contract is refused with a table, and the record stays", async () => {
    const folder = new MemoryDirectory("run");
    await microRun({ folder, config: { run: { steps: 5 } } });
    const before = await recordOf(folder);
    const { error, events } = await microRun({ folder, config: { optimizer: { lr: 0.5 } } });
    assert.equal(error?.name, "ContractMismatch");
    assert.match(error?.message ?? "", /contract\.optimizer\.lr/);
    assert.deepEqual(await recordOf(folder), before);
    const [, facts] = /** @type {[string, Facts]} */ (events.at(-1));
    assert.equal(facts.exitCode, 3);
    assert.ok(/** @type {unknown[]} */ (facts.differences).length);
  });

  test("a forced resume is recorded, and stays in later checkpoints", async () => {
    const folder = new MemoryDirectory("run");
    await microRun({ folder, config: { run: { steps: 5 } } });
    const changed = { lr: 0.5 };
    const options = { forceResume: true, forceResumeReason: "to see", checkpointOperator: "me" };
    const forced = await microRun({ folder, config: { optimizer: changed, run: { steps: 10 } }, options });
    assert.equal(forced.error, null);
    await microRun({ folder, config: { optimizer: changed, run: { steps: 15 } } });
    const manifest = await manifestOf(folder, "step-00000015");
    assert.equal(manifest.resumeAudits.length, 1);
    const [audit] = manifest.resumeAudits;
    assert.equal(audit.field, "contract.optimizer.lr");
    assert.equal(audit.reason, "to see");
    assert.equal(audit.operator, "me");
    assert.equal(audit.source, "training_runner");
  });

  test("a named checkpoint begins again from there", async () => {
    const folder = new MemoryDirectory("run");
    await microRun({ folder, config: { run: { steps: 10 } } });
    const report = await microRun({ folder, config: { run: { steps: 8 } }, options: { resumeFrom: "step-00000005" } });
    assert.deepEqual(steps(await rowsOf(folder)), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert.equal(report.outcome?.step, 8);
    assert.equal((await manifestOf(folder, "step-00000008")).lineage.sequence, 3);
    const missing = await microRun({ folder, options: { resumeFrom: "step-00000077" } });
    assert.equal(missing.error?.name, "CheckpointNotFound");
    assert.equal(missing.error?.message, "TrainingRunner: resume checkpoint not found or invalid: step-00000077");
  });

  test("a damaged checkpoint is refused, never taken for none", async () => {
    const folder = new MemoryDirectory("run");
    await microRun({ folder, config: { run: { steps: 5 } } });
    const checkpoint = await (await folder.directory("checkpoints")).directory("step-00000005");
    const bytes = await checkpoint.read("model.safetensors");
    bytes[bytes.length - 1] ^= 1;
    const sink = await checkpoint.create("model.safetensors");
    await sink.write(bytes);
    await sink.close();
    const { error } = await microRun({ folder });
    assert.equal(error?.name, "CheckpointCorrupt");
    assert.match(error?.message ?? "", /model\.safetensors/);
  });

  test("data other than the job's is refused", async () => {
    const { error } = await microRun({ fingerprint: "0".repeat(64) });
    assert.equal(error?.name, "DataContractError");
    assert.match(error?.message ?? "", /fingerprint/);
  });
});

describe("a stop", () => {
  for (const phase of ["warm-up", "train", "evaluate", "sample", "save"]) {
    test(`is honoured in ${phase}, and the run goes on exactly`, async () => {
      const config = { run: { steps: 12 }, evaluation: { every: 4 }, sampling: { every: 6 } };
      const whole = await microRun({ config });
      const folder = new MemoryDirectory("run");
      let asked = false;
      const report = await microRun({
        folder,
        config,
        watch: (kind, facts, runner) => {
          if (kind !== "phase" || facts.phase !== phase || asked) return;
          asked = true;
          runner.stop("a test");
        },
      });
      if (phase === "warm-up") {
        assert.equal(report.error?.name, "StopRequested");
        assert.equal(report.error?.message, "stopped before the first step: a test");
      } else {
        assert.equal(report.outcome?.status, "stopped");
        assert.equal(report.outcome?.exitCode, 75);
        assert.match(report.outcome?.message ?? "", /^stopped \(a test\), /);
        assert.ok(Number(report.outcome?.step) < 12);
      }
      assert.equal((await recordOf(folder)).status, "stopped");
      assert.equal((await microRun({ folder, config })).outcome?.status, "finished");
      assert.deepEqual(
        (await rowsOf(folder)).map((row) => row.total_loss),
        (await rowsOf(whole.folder)).map((row) => row.total_loss),
      );
      assert.deepEqual(await rowsOf(folder, "validation.jsonl"), await rowsOf(whole.folder, "validation.jsonl"));
    });
  }

  test("that cuts a sample off shows none", async () => {
    const config = { run: { steps: 4 }, sampling: { every: 2 } };
    const report = await microRun({
      config,
      watch: (kind, { phase }, runner, { events }) => {
        const samples = events.filter(([name, facts]) => name === "phase" && facts.phase === "sample").length;
        if (kind === "phase" && phase === "sample" && samples === 2) runner.stop("a test");
      },
    });
    assert.deepEqual(steps(of(report, "sample")), [2]);
  });

  test("by the place is asked for at each step", async () => {
    let asked = 0;
    const { outcome } = await microRun({ place: { stop: () => (++asked > 6 ? "the place" : null) } });
    assert.equal(outcome?.status, "stopped");
    assert.match(outcome?.message ?? "", /the place/);
  });

  test("at step zero saves nothing", async () => {
    const { outcome, folder } = await microRun({ watch: (kind, _, runner) => kind === "run" && runner.stop("a test") });
    assert.equal(outcome?.step, 0);
    assert.match(outcome?.message ?? "", /nothing to save at step 0/);
    assert.deepEqual(await saved(folder), []);
  });

  test("comes when the hours are over", async () => {
    const { outcome } = await microRun({ config: { run: { steps: 20, maxHours: 0.5 / 3600 } } });
    assert.equal(outcome?.status, "stopped");
    assert.match(outcome?.message ?? "", /run\.maxHours = .* is over/);
    assert.ok(Number(outcome?.step) >= 5 && Number(outcome?.step) < 20);
  });

  test("after the last step leaves the evaluation to the next start", async () => {
    const folder = new MemoryDirectory("run");
    const config = { run: { steps: 4 }, evaluation: { every: 4 } };
    const first = await microRun({
      folder,
      config,
      watch: (kind, { phase }, runner) => kind === "phase" && phase === "evaluate" && runner.stop("a test"),
    });
    assert.equal(first.outcome?.status, "stopped");
    assert.deepEqual(await rowsOf(folder, "validation.jsonl"), []);
    assert.equal((await microRun({ folder, config })).outcome?.status, "finished");
    assert.deepEqual(steps(await rowsOf(folder, "validation.jsonl")), [4]);
  });
});

describe("a pause", () => {
  test("holds the next step until it is over, and nothing is different afterwards", async () => {
    /** @type {number[]} */
    const held = [];
    const report = await microRun({
      watch: (kind, { text, step }, runner, { calls }) => {
        if (kind === "step" && step === 8) runner.pause();
        if (kind !== "note" || text !== "paused after step 8") return;
        const before = calls.length;
        setTimeout(() => {
          held.push(calls.length - before);
          runner.resume();
        }, 120);
      },
    });
    assert.equal(report.outcome?.status, "finished");
    assert.deepEqual(held, [0]);
    assert.equal(count(report.calls, "apply"), 20);
  });

  test("comes after the save that was asked for with it", async () => {
    const told = /** @type {string[]} */ ([]);
    const report = await microRun({
      config: { run: { steps: 8 }, checkpoint: { every: 0 } },
      watch: (kind, { text, step }, runner) => {
        if (kind === "step" && step === 4) {
          runner.save();
          runner.pause();
        }
        if (kind === "checkpoint") told.push(`saved ${step}`);
        if (kind !== "note") return;
        told.push(String(text));
        setTimeout(() => runner.resume(), 60);
      },
    });
    assert.deepEqual(told, ["saved 4", "paused after step 4", "going on after step 4", "saved 8"]);
    assert.deepEqual(await saved(report.folder), ["step-00000004", "step-00000008"]);
  });

  test("ends with a stop", async () => {
    const { outcome } = await microRun({
      watch: (kind, { text, step }, runner) => {
        if (kind === "step" && step === 8) runner.pause();
        if (kind === "note" && text === "paused after step 8") setTimeout(() => runner.stop("a test"), 60);
      },
    });
    assert.equal(outcome?.status, "stopped");
    assert.equal(outcome?.step, 8);
  });
});

describe("an alert", () => {
  test("with failOnAlert ends the run before the step is applied", async () => {
    const folder = new MemoryDirectory("run");
    const result = (/** @type {{dataStep: number}} */ { dataStep }) => ({ gradNorm: dataStep === 7 ? 6 : 1 });
    const report = await microRun({ folder, config: telemetry(ALERTS), session: { result } });
    assert.equal(report.outcome?.status, "alert");
    assert.equal(report.outcome?.exitCode, 4);
    assert.equal(report.outcome?.message, "training telemetry alert(s): max_gradient_norm_exceeded at step 7.");
    assert.equal(count(report.calls, "apply"), 6);
    const rows = await rowsOf(folder);
    assert.equal(rows.at(-1)?.step, 7);
    assert.deepEqual(rows.at(-1)?.telemetry_alerts, ["max_gradient_norm_exceeded"]);
    assert.equal((await recordOf(folder)).status, "alert");
    assert.equal(of(report, "error")[0].error, "AlertRaised");
    assert.deepEqual(await saved(folder), ["step-00000005"]);
    const again = await microRun({ folder, config: telemetry({ enabled: false, failOnAlert: false, thresholds: {} }) });
    assert.equal(again.outcome?.status, "finished");
  });

  test("about the step's time is judged after it, and the state is saved", async () => {
    const slow = { ...ALERTS, thresholds: { maxStepTimeMs: 0 } };
    const result = () => ({ stepTimeMs: 5 });
    const { outcome, folder } = await microRun({ config: telemetry(slow), session: { result } });
    assert.match(outcome?.message ?? "", /max_step_time_ms_exceeded at step 1\./);
    assert.deepEqual(await saved(folder), ["step-00000001"]);
  });

  test("without failOnAlert is reported", async () => {
    const report = await microRun({
      config: { ...telemetry({ ...ALERTS, failOnAlert: false }), run: { steps: 2 } },
      session: { result: () => ({ gradNorm: 6 }) },
    });
    assert.equal(report.outcome?.status, "finished");
    assert.deepEqual(
      of(report, "step").map(({ alerts }) => alerts),
      [["max_gradient_norm_exceeded"], ["max_gradient_norm_exceeded"]],
    );
  });
});

describe("a lost device", () => {
  /** @type {[string, [call: string, step: number][]][]} */
  const cases = [
    ["at once", [["accumulate", 1]]],
    [
      "in steps",
      [
        ["apply", 7],
        ["begin", 9],
      ],
    ],
    [
      "in saving and evaluation",
      [
        ["export", 5],
        ["evaluate", 8],
        ["poll", 12],
      ],
    ],
    [
      "in a sample, and again in the recovery",
      [
        ["generate", 8],
        ["restore", 0],
      ],
    ],
  ];
  for (const [name, times] of cases) {
    test(`${name} is replaced, and the run ends as if nothing had happened`, async () => {
      const config = { run: { steps: 15 }, evaluation: { every: 4 }, sampling: { every: 8 } };
      const whole = await microRun({ config });
      const wanted = times.length;
      const report = await microRun({ config, session: { lost: losing(times) } });
      assert.equal(report.outcome?.status, "finished", String(report.error));
      assert.deepEqual(times, []);
      assert.deepEqual(
        (await rowsOf(report.folder)).map((row) => row.total_loss),
        (await rowsOf(whole.folder)).map((row) => row.total_loss),
      );
      assert.deepEqual(steps(await rowsOf(report.folder, "validation.jsonl")), [4, 8, 12, 15]);
      const notes = of(report, "note").filter(({ text }) => text.includes("device was lost"));
      assert.equal(notes.length, wanted);
      assert.ok(notes.at(-1).text.includes(`(${wanted} of at most 3 times)`));
      assert.equal(count(report.calls, "destroy"), wanted + 1);
    });
  }

  test("costs at most one checkpoint interval", async () => {
    const report = await microRun({ config: { run: { steps: 15 } }, session: { lost: losing([["apply", 14]]) } });
    assert.deepEqual(steps(of(report, "run")), [0, 10]);
    assert.deepEqual(steps(await rowsOf(report.folder, "metrics.discarded.jsonl")), [11, 12, 13]);
  });

  test("is replaced once there is an adapter again", async () => {
    let opened = 0;
    const open = () => {
      if (++opened === 2) throw new NoAdapter("the GPU process has crashed");
    };
    const { outcome } = await microRun({ session: { lost: losing([["apply", 7]]), open } });
    assert.equal(outcome?.status, "finished");
    assert.equal(opened, 3);
    const none = await microRun({ session: { open: () => Promise.reject(new NoAdapter("there is none")) } });
    assert.equal(none.error?.name, "NoAdapter", "at the start, it is said at once");
  });

  test("is replaced a bounded number of times", async () => {
    const lost = losing([
      ["apply", 7],
      ["apply", 7],
      ["apply", 7],
      ["apply", 7],
    ]);
    const { error, folder } = await microRun({ config: { backend: { maxRecoveries: 2 } }, session: { lost } });
    assert.equal(error?.name, "DeviceLost");
    assert.match(error?.message ?? "", /lost 3 times, and backend\.maxRecoveries is 2/);
    assert.equal((await recordOf(folder)).status, "failed");
    assert.equal((await microRun({ folder, config: { run: { steps: 8 } } })).outcome?.step, 8);
  });
});

describe("failures", () => {
  test("a save that fails ends the run, and earlier checkpoints stay", async () => {
    const folder = new MemoryDirectory("run");
    const checkpoints = await folder.directory("checkpoints");
    const make = checkpoints.directory.bind(checkpoints);
    checkpoints.directory = async (name) => {
      if ((await saved(folder)).length) throw new Error("the disk is full");
      return make(name);
    };
    const { error, outcome } = await microRun({ folder });
    assert.equal(outcome, null);
    assert.match(error?.message ?? "", /the disk is full/);
    assert.deepEqual(await saved(folder), ["step-00000005"]);
    assert.equal((await recordOf(folder)).status, "failed");
  });

  test("a run that only skips steps fails in the end", async () => {
    const { error, folder } = await microRun({
      config: { run: { steps: 200 }, checkpoint: { every: 0 } },
      session: { result: () => ({ overflow: true, gradNorm: null }) },
    });
    assert.equal(error?.name, "NonFiniteError");
    assert.match(error?.message ?? "", /last 100 steps up to 100 .*the run has diverged/);
    assert.equal((await rowsOf(folder)).length, 100);
  });

  test("an error that nobody expected is told with its stack", async () => {
    const report = await microRun({ session: { result: failingAt(1) } });
    assert.equal(report.error?.message, "a mistake");
    const [facts] = of(report, "error");
    assert.equal(facts.error, "Error");
    assert.match(facts.stack, /a mistake/);
  });
});

/** @param {number} step @returns {(result: {dataStep: number}) => {}} */
function failingAt(step) {
  return ({ dataStep }) => {
    if (dataStep === step) throw new TypeError("a mistake");
    return {};
  };
}

/** @param {MemoryDirectory} folder @param {string} name @returns {Promise<any>} */
async function manifestOf(folder, name) {
  const checkpoint = await (await folder.directory("checkpoints")).directory(name);
  return JSON.parse(new TextDecoder().decode(await checkpoint.read("checkpoint.json")));
}
