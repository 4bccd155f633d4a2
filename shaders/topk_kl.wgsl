// Distillation against the K likeliest tokens of a teacher, for R rows of V logits, one workgroup a row; with GRADIENT
// the logits become their gradient. Rows begin at multiples of 4; the gradient of what lies between them is 0.
//
//   q = softmax(logits[ids] / T) over the K columns;  p = max(probs, 0) / sum, uniform where the sum is 0
//   kl = sum(max(p, f) (log max(p, f) - log max(q, f)));  nll = -log max(q[label], f);  f = 1e-8
//   d (alpha_kl kl + alpha_nll nll) / d logits[ids] = (alpha_kl (q - p) + alpha_nll (q - [label])) / T
//
// A column whose id is no row of the vocabulary is absent.

struct Uniforms {
  rows: u32, vocabulary: u32, columns: u32, upstream_stride: u32, temperature: f32, alpha_kl: f32, alpha_nll: f32,
}

@group(0) @binding(0) var<uniform> u: Uniforms;
//#if GRADIENT
@group(0) @binding(1) var<storage, read_write> logits: array<f32>;
//#else
@group(0) @binding(1) var<storage, read> logits: array<f32>;
//#endif
@group(0) @binding(2) var<storage, read> teacher_ids: array<u32>;
@group(0) @binding(3) var<storage, read> teacher_probs: array<f32>;
@group(0) @binding(4) var<storage, read> teacher_targets: array<u32>;
//#if GRADIENT
@group(0) @binding(5) var<storage, read> drows: array<f32>;
//#else
@group(0) @binding(5) var<storage, read_write> loss_rows: array<f32>;
@group(0) @binding(6) var<storage, read_write> kl_rows: array<f32>;
@group(0) @binding(7) var<storage, read_write> nll_rows: array<f32>;
//#endif

const LOWEST: f32 = -3.4028234e38;
const FLOOR: f32 = 1e-8;
const LOG_FLOOR: f32 = -18.420680743952367;
const ABSENT: f32 = -1.0;

var<workgroup> student: array<f32, MAX_COLUMNS>;  // logits / T; with GRADIENT, gradients in the end
var<workgroup> teacher: array<f32, MAX_COLUMNS>;  // probabilities before they are made to add up to 1, or ABSENT

// The bits of a value that is NaN or infinite, else 0: a compiler may assume that such values do not exist.
fn not_finite_bits(v: f32) -> u32 {
  let bits = bitcast<u32>(v);
  return select(0u, bits, (bits & 0x7f800000u) == 0x7f800000u);
}

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let row = workgroup_index(group, groups);
  if (row >= u.rows) { return; }
  let first = row * u.columns;
  let stride = (u.vocabulary + 3u) / 4u * 4u;
  let base = row * stride;
  for (var k = thread; k < u.columns; k += WORKGROUP) {
    let id = teacher_ids[first + k];
    student[k] = 0.0;
    teacher[k] = ABSENT;
    if (id < u.vocabulary) {
      student[k] = logits[base + id] / u.temperature;
      teacher[k] = max(teacher_probs[first + k], 0.0);
    }
  }
  workgroupBarrier();
  // Every thread adds up the few columns by itself, in one order.
  var high = LOWEST;
  var mass = 0.0;
  var present = 0.0;
  var bad = 0u;
  for (var k = 0u; k < u.columns; k++) {
    if (teacher[k] >= 0.0) {
      high = max(high, student[k]);
      mass += teacher[k];
      present += 1.0;
      bad |= not_finite_bits(student[k]);
    }
  }
  var sum = 0.0;
  for (var k = 0u; k < u.columns; k++) {
    if (teacher[k] >= 0.0) { sum += exp(student[k] - high); }
  }
  var log_sum = 0.0;
  if (present > 0.0) { log_sum = high + log(sum); }
  if (bad != 0u) { log_sum = bitcast<f32>(bad); }
  let shared_out = mass > 0.0;
  let label = teacher_targets[row];
//#if GRADIENT
  var counts = false;
  if (label < u.columns) { counts = teacher[label] >= 0.0; }
  let upstream = drows[row * u.upstream_stride] / u.temperature;
  // Every thread has read all columns before one of them is replaced.
  workgroupBarrier();
  for (var k = thread; k < u.columns; k += WORKGROUP) {
    if (teacher[k] >= 0.0) {
      let q = exp(student[k] - log_sum);
      var p = 1.0 / present;
      if (shared_out) { p = teacher[k] / mass; }
      var d = u.alpha_kl * (q - p);
      if (counts) { d += u.alpha_nll * (q - select(0.0, 1.0, k == label)); }
      student[k] = d * upstream;
    }
  }
  for (var v = thread; v < stride; v += WORKGROUP) { logits[base + v] = 0.0; }
  storageBarrier();
  workgroupBarrier();
  // One thread, because an id may occur twice.
  if (thread == 0u) {
    for (var k = 0u; k < u.columns; k++) {
      if (teacher[k] >= 0.0) {
        let at = base + teacher_ids[first + k];
        logits[at] = logits[at] + student[k];
      }
    }
  }
//#else
  if (thread == 0u) {
    var kl = 0.0;
    var nll = 0.0;
    for (var k = 0u; k < u.columns; k++) {
      if (teacher[k] >= 0.0) {
        var p = 1.0 / present;
        if (shared_out) { p = teacher[k] / mass; }
        p = max(p, FLOOR);
        // Not max(), which could hide NaN.
        var log_q = student[k] - log_sum;
        log_q = select(log_q, LOG_FLOOR, log_q < LOG_FLOOR);
        kl += p * (log(p) - log_q);
        if (k == label) { nll = -log_q; }
      }
    }
    loss_rows[row] = u.alpha_kl * kl + u.alpha_nll * nll;
    kl_rows[row] = kl;
    nll_rows[row] = nll;
  }
//#endif
}
