// y[n] = table[ids[n]] for the ids in one slice of the table's rows. `columns` is in units of `wide`.

struct Uniforms { rows: u32, columns: u32, row_begin: u32, row_count: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
@group(0) @binding(2) var<storage, read> table: array<wide_act>;
@group(0) @binding(3) var<storage, read_write> y: array<wide_act>;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let index = workgroup_index(group, groups) * WORKGROUP + thread;
  if (index >= u.rows * u.columns) { return; }
  let id = ids[index / u.columns];
  if (id < u.row_begin || id - u.row_begin >= u.row_count) { return; }
  y[index] = to_wide_act(wide(table[(id - u.row_begin) * u.columns + index % u.columns]));
}
