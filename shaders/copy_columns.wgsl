// Copies a run of columns between matrices of different widths: the pieces of split and concat.

struct Uniforms {
  rows: u32, columns: u32, source_width: u32, source_first: u32, target_width: u32, target_first: u32,
}

@group(0) @binding(0) var<uniform> u: Uniforms;
//#if F32
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
//#else
@group(0) @binding(1) var<storage, read> x: array<act>;
@group(0) @binding(2) var<storage, read_write> y: array<act>;
//#endif

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let index = workgroup_index(group, groups) * WORKGROUP + thread;
  if (index >= u.rows * u.columns) { return; }
  let row = index / u.columns;
  let column = index % u.columns;
  let from_column = row * u.source_width + u.source_first + column;
  let to_column = row * u.target_width + u.target_first + column;
//#if F32
  y[to_column] = x[from_column];
//#else
  y[to_column] = to_act(f32(x[from_column]));
//#endif
}
