// Cross-entropy of R rows of V logits, one workgroup a row; with GRADIENT the logits become their gradient in place.
// Rows begin at multiples of 4. TAIL is for a V that is none: what fills the last vector counts for nothing, and its
// gradient is 0.
//
//   lse = log(sum(exp(logits)));  nll = lse - logits[target];  loss = nll + z * lse^2
//   d loss / d logits = (1 + 2 z lse) * softmax - [target]

struct Uniforms { rows: u32, vocabulary: u32, upstream_stride: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
//#if GRADIENT
@group(0) @binding(1) var<storage, read_write> logits: array<wide>;
@group(0) @binding(2) var<storage, read> targets: array<u32>;
@group(0) @binding(3) var<storage, read> z_loss: array<f32>;
@group(0) @binding(4) var<storage, read> drows: array<f32>;
@group(0) @binding(5) var<storage, read_write> loss_rows: array<f32>;
@group(0) @binding(6) var<storage, read_write> nll_rows: array<f32>;
@group(0) @binding(7) var<storage, read_write> lse: array<f32>;
//#else
@group(0) @binding(1) var<storage, read> logits: array<wide>;
@group(0) @binding(2) var<storage, read> targets: array<u32>;
@group(0) @binding(3) var<storage, read> z_loss: array<f32>;
@group(0) @binding(4) var<storage, read_write> loss_rows: array<f32>;
@group(0) @binding(5) var<storage, read_write> nll_rows: array<f32>;
@group(0) @binding(6) var<storage, read_write> lse: array<f32>;
//#endif

const IGNORE: u32 = 0xffffffffu;
const LOWEST: f32 = -3.4028234e38;

var<workgroup> maxima: array<f32, WORKGROUP>;
var<workgroup> sums: array<f32, WORKGROUP>;
var<workgroup> not_finite: array<u32, WORKGROUP>;

// The bits of an element that is NaN or infinite, else 0. Kept as bits: a compiler may assume that such values do not
// exist. Two of them or-ed together still have an exponent of ones.
fn not_finite_bits(v: wide) -> u32 {
  let bits = bitcast<vec4<u32>>(v);
  let exponent = vec4<u32>(0x7f800000u);
  let kept = select(vec4<u32>(), bits, (bits & exponent) == exponent);
  return (kept.x | kept.y) | (kept.z | kept.w);
}
fn largest(v: wide) -> f32 { return max(max(v.x, v.y), max(v.z, v.w)); }
fn one_hot(i: u32) -> wide { return select(wide(), wide(1.0), vec4<u32>(i) == vec4<u32>(0u, 1u, 2u, 3u)); }

// Column `c` of vectors with `other` where it lies beyond the vocabulary.
fn within(v: wide, c: u32, other: f32) -> wide {
//#if TAIL
  return select(wide(other), v, vec4<u32>(4u * c) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(u.vocabulary));
//#else
  return v;
//#endif
}

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let row = workgroup_index(group, groups);
  if (row >= u.rows) { return; }
  let columns = (u.vocabulary + 3u) / 4u;
  let base = row * columns;
  var high = LOWEST;
  var sum = 0.0;
  var bad = 0u;
  for (var c = thread; c < columns; c += WORKGROUP) {
    let v = within(logits[base + c], c, LOWEST);
    bad |= not_finite_bits(v);
    let next = max(high, largest(v));
    sum = sum * exp(high - next) + total(within(exp(v - next), c, 0.0));
    high = next;
  }
  maxima[thread] = high;
  sums[thread] = sum;
  not_finite[thread] = bad;
  workgroupBarrier();
  // Threads without a column have nothing to add. The bound also keeps compilers from unrolling, which costs them long.
  let threads = min(WORKGROUP, columns);
  high = maxima[0];
  for (var k = 1u; k < threads; k++) {
    high = max(high, maxima[k]);
    bad |= not_finite[k];
  }
  bad |= not_finite[0];
  sum = 0.0;
  for (var k = 0u; k < threads; k++) { sum += sums[k] * exp(maxima[k] - high); }
  var log_sum = high + log(sum);
  if (bad != 0u) { log_sum = bitcast<f32>(bad); }
  let label = targets[row];
  let counts = label != IGNORE;
  let at = select(0u, label, counts);
  let z = z_loss[0];
  let chosen = logits[base + at / 4u][at % 4u];
//#if GRADIENT
  // Every thread has read the target's logit before one of them replaces it.
  storageBarrier();
  let upstream = drows[row * u.upstream_stride];
  let weight = (1.0 + 2.0 * z * log_sum) * upstream;
  for (var c = thread; c < columns; c += WORKGROUP) {
    if (counts) {
      var d = exp(logits[base + c] - log_sum) * weight;
      if (c == at / 4u) { d = d - one_hot(at % 4u) * upstream; }
      logits[base + c] = within(d, c, 0.0);
    } else {
      logits[base + c] = wide();
    }
  }
//#endif
  if (thread == 0u) {
    let nll = log_sum - chosen;
    lse[row] = log_sum;
    if (counts) {
      nll_rows[row] = nll;
      loss_rows[row] = nll + z * log_sum * log_sum;
    } else {
      nll_rows[row] = 0.0;
      loss_rows[row] = 0.0;
    }
  }
}
