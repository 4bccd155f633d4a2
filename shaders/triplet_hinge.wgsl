// The triplet hinge of rows, one workgroup a row: max(0, margin + d(anchor, positive) - d(anchor, negative)), d the
// mean of squared differences over all columns, or with COLUMNS over those that a row's list names. A row whose mask is
// 0 has hinge 0.

struct Uniforms { rows: u32, width: u32, counted: u32, margin: f32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> anchor: array<act>;
@group(0) @binding(2) var<storage, read> positive: array<act>;
@group(0) @binding(3) var<storage, read> negative: array<act>;
@group(0) @binding(4) var<storage, read> mask: array<u32>;
//#if COLUMNS
@group(0) @binding(5) var<storage, read> columns: array<u32>;
@group(0) @binding(6) var<storage, read_write> hinge: array<f32>;
//#else
@group(0) @binding(5) var<storage, read_write> hinge: array<f32>;
//#endif

var<workgroup> sums: array<vec2<f32>, WORKGROUP>;  // to the positive, to the negative

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let row = workgroup_index(group, groups);
  if (row >= u.rows) { return; }
  var sum = vec2<f32>();
  for (var k = thread; k < u.counted; k += WORKGROUP) {
//#if COLUMNS
    let at = row * u.width + columns[row * u.counted + k];
//#else
    let at = row * u.width + k;
//#endif
    let difference = vec2<f32>(f32(anchor[at])) - vec2<f32>(f32(positive[at]), f32(negative[at]));
    sum += difference * difference;
  }
  sums[thread] = sum;
  workgroupBarrier();
  if (thread == 0u) {
    var all = vec2<f32>();
    for (var k = 0u; k < min(WORKGROUP, u.counted); k++) { all += sums[k]; }
    let mean = all / f32(u.counted);
    let above = u.margin + mean.x - mean.y;
    // Not max(), which could hide NaN.
    hinge[row] = select(above, 0.0, above < 0.0 || mask[row] == 0u);
  }
}
