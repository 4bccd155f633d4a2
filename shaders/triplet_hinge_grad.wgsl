// One side of the triplet hinge's gradient, element by element: 2 / K (left - right) times the row's upstream gradient,
// where the row counts and its hinge is above 0. With COLUMNS, K columns of each row are listed, and an element counts
// as often as it is.

struct Uniforms { rows: u32, width: u32, counted: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> left: array<act>;
@group(0) @binding(2) var<storage, read> right: array<act>;
@group(0) @binding(3) var<storage, read> mask: array<u32>;
@group(0) @binding(4) var<storage, read> hinge: array<f32>;
@group(0) @binding(5) var<storage, read> drows: array<f32>;
//#if COLUMNS
@group(0) @binding(6) var<storage, read> columns: array<u32>;
@group(0) @binding(7) var<storage, read_write> result: array<act>;
//#else
@group(0) @binding(6) var<storage, read_write> result: array<act>;
//#endif

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let at = workgroup_index(group, groups) * WORKGROUP + thread;
  if (at >= u.rows * u.width) { return; }
  let row = at / u.width;
  var times = 1.0;
//#if COLUMNS
  times = 0.0;
  for (var k = 0u; k < u.counted; k++) {
    if (columns[row * u.counted + k] == at % u.width) { times += 1.0; }
  }
//#endif
  var d = 0.0;
  // The hinge is 0 or above, or not finite: its bits tell, where a comparison of floats might not.
  if (mask[row] != 0u && bitcast<u32>(hinge[row]) != 0u && times > 0.0) {
    d = times * (f32(left[at]) - f32(right[at])) * (2.0 / f32(u.counted)) * drows[row];
  }
  result[at] = to_act(d);
}
