// Rows by index: result[i] = source[index[i]], or with SCATTER its transpose, result[r] = sum of source[i] where
// index[i] = r.

struct Uniforms { count: u32, rows: u32, columns: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> source: array<act>;
@group(0) @binding(2) var<storage, read> index: array<u32>;
@group(0) @binding(3) var<storage, read_write> result: array<act>;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let at = workgroup_index(group, groups) * WORKGROUP + thread;
  let row = at / u.columns;
  let column = at % u.columns;
//#if SCATTER
  if (row >= u.rows) { return; }
  var sum = 0.0;
  for (var i = 0u; i < u.count; i++) {
    if (index[i] == row) { sum += f32(source[i * u.columns + column]); }
  }
  result[at] = to_act(sum);
//#else
  if (row >= u.count) { return; }
  let from_row = index[row];
  if (from_row < u.rows) {
    result[at] = to_act(f32(source[from_row * u.columns + column]));
  } else {
    result[at] = to_act(0.0);
  }
//#endif
}
