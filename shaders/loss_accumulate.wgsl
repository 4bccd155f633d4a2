// Adds the sums of two vectors of N row losses to the step's accumulators. One workgroup, a fixed order.

struct Uniforms { rows: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> loss_rows: array<f32>;
@group(0) @binding(2) var<storage, read> nll_rows: array<f32>;
@group(0) @binding(3) var<storage, read_write> step_state: array<u32>;

var<workgroup> partial: array<vec2<f32>, 64>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) thread: u32) {
  var sum = vec2<f32>();
  for (var n = thread; n < u.rows; n += 64u) { sum += vec2<f32>(loss_rows[n], nll_rows[n]); }
  partial[thread] = sum;
  workgroupBarrier();
  if (thread != 0u) { return; }
  var all = vec2<f32>();
  for (var k = 0u; k < min(64u, u.rows); k++) { all += partial[k]; }
  step_state[LOSS_ACC] = bitcast<u32>(bitcast<f32>(step_state[LOSS_ACC]) + all.x);
  step_state[NLL_ACC] = bitcast<u32>(bitcast<f32>(step_state[NLL_ACC]) + all.y);
}
