// Log-softmax of rows, or with GRADIENT its gradient; one thread a row.
//
//   y = x - log(sum(exp(x)));  dx = dy - exp(y) * sum(dy)

struct Uniforms { rows: u32, columns: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
//#if GRADIENT
@group(0) @binding(1) var<storage, read> y: array<f32>;
@group(0) @binding(2) var<storage, read> dy: array<f32>;
//#if F32
@group(0) @binding(3) var<storage, read_write> dx: array<f32>;
//#else
@group(0) @binding(3) var<storage, read_write> dx: array<act>;
//#endif
//#else
//#if F32
@group(0) @binding(1) var<storage, read> x: array<f32>;
//#else
@group(0) @binding(1) var<storage, read> x: array<act>;
//#endif
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
//#endif

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let row = workgroup_index(group, groups) * WORKGROUP + thread;
  if (row >= u.rows) { return; }
  let first = row * u.columns;
  let end = first + u.columns;
//#if GRADIENT
  var sum = 0.0;
  for (var i = first; i < end; i++) { sum += dy[i]; }
  for (var i = first; i < end; i++) {
    let d = dy[i] - exp(y[i]) * sum;
//#if F32
    dx[i] = d;
//#else
    dx[i] = to_act(d);
//#endif
  }
//#else
  var high = f32(x[first]);
  for (var i = first + 1u; i < end; i++) { high = max(high, f32(x[i])); }
  var sum = 0.0;
  for (var i = first; i < end; i++) { sum += exp(f32(x[i]) - high); }
  let log_sum = high + log(sum);
  for (var i = first; i < end; i++) { y[i] = f32(x[i]) - log_sum; }
//#endif
}
