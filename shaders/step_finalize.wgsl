// Closes a step: gradient norm, finite check, loss scale, clip factor, and the result row.
//
//   norm = sqrt(sum of squares) / loss_scale;  clip factor = max_norm / (norm + 1e-6) where norm > max_norm > 0, else 1
//   overflow: any element, the norm or the loss is not finite, or an f16 store did not fit -> the update is skipped,
//   and the loss scale backs off; otherwise it grows after growth_interval steps.

struct Uniforms {
  records: u32, ring_rows: u32, max_norm: f32, min_scale: f32, max_scale: f32, scale_factor: f32, backoff_factor: f32,
  growth_interval: u32, overflow_check: u32,
}

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> partials: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> step_state: array<u32>;
@group(0) @binding(3) var<storage, read> overflow_flags: array<u32>;
@group(0) @binding(4) var<storage, read_write> ring: array<u32>;

var<workgroup> squares: array<f32, 64>;
var<workgroup> counts: array<vec2<u32>, 64>;

fn finite(bits: u32) -> bool { return (bits & 0x7f800000u) != 0x7f800000u; }

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) thread: u32) {
  var sum = 0.0;
  var count = vec2<u32>();
  for (var i = thread; i < u.records; i += 64u) {
    let record = partials[i];
    sum += bitcast<f32>(record.x);
    count += record.yz;
  }
  squares[thread] = sum;
  counts[thread] = count;
  workgroupBarrier();
  if (thread != 0u) { return; }
  var total = 0.0;
  var bad = vec2<u32>();
  for (var k = 0u; k < min(64u, u.records); k++) {  // others have nothing; a bound that is no constant is not unrolled
    total += squares[k];
    bad += counts[k];
  }
  let enabled = step_state[SCALER_ENABLED] != 0u;
  let scale = bitcast<f32>(step_state[LOSS_SCALE_USED]);
  let targets = f32(step_state[TARGET_TOKENS]);
  let loss = bitcast<f32>(step_state[LOSS_ACC]) / targets;
  let nll = bitcast<f32>(step_state[NLL_ACC]) / targets;
  let norm_finite = finite(bitcast<u32>(total)) && bad.x + bad.y == 0u;
  let norm = select(0.0, sqrt(total) / scale, norm_finite);
  let loss_finite = finite(bitcast<u32>(loss)) && finite(bitcast<u32>(nll));
  let overflow = !norm_finite || !loss_finite || (overflow_flags[0] | overflow_flags[1]) != 0u;
  let clips = !overflow && u.max_norm > 0.0 && norm > u.max_norm;
  let factor = select(1.0, u.max_norm / (norm + 1e-6), clips);

  var next_scale = bitcast<f32>(step_state[LOSS_SCALE]);
  var growth = step_state[GROWTH_COUNTER];
  if (enabled) {
    if (overflow && u.overflow_check != 0u) {
      next_scale = max(u.min_scale, next_scale * u.backoff_factor);
      growth = 0u;
    } else {
      growth += 1u;
      if (growth >= u.growth_interval) {
        next_scale = min(u.max_scale, next_scale * u.scale_factor);
        growth = 0u;
      }
    }
  }
  step_state[LOSS_SCALE] = bitcast<u32>(next_scale);
  step_state[GROWTH_COUNTER] = growth;
  step_state[SKIP] = u32(overflow);
  step_state[GRAD_MULTIPLIER] = bitcast<u32>(factor / scale);
  if (!overflow) { step_state[OPTIMIZER_STEP] += 1u; }

  let row = (step_state[DATA_STEP] % u.ring_rows) * RING_WORDS;
  ring[row] = step_state[DATA_STEP];
  ring[row + 1u] = bitcast<u32>(loss);
  ring[row + 2u] = bitcast<u32>(nll);
  ring[row + 3u] = step_state[TARGET_TOKENS];
  ring[row + 4u] = bitcast<u32>(norm);
  ring[row + 5u] = bitcast<u32>(factor);
  ring[row + 6u] = bitcast<u32>(scale);
  ring[row + 7u] = select(0u, FLAG_OVERFLOW, overflow) | select(0u, FLAG_LOSS_OVERFLOW, !loss_finite) |
    select(0u, FLAG_NORM_NOT_FINITE, !norm_finite);
  ring[row + 8u] = bad.x;
  ring[row + 9u] = bad.y;
  ring[row + 10u] = step_state[OPTIMIZER_STEP];
  ring[row + 11u] = growth;
  ring[row + 12u] = bitcast<u32>(select(1.0, next_scale, enabled));
  ring[row + 13u] = 0u;
  ring[row + 14u] = 0u;
  ring[row + 15u] = 0u;
}
