// Adds to each table row that the batch used the sum of its positions' gradients. One thread owns one `wide` of one
// distinct row and adds its positions in order.

struct Uniforms { rows: u32, columns: u32, row_begin: u32, row_count: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> dy: array<wide_act>;
@group(0) @binding(2) var<storage, read> row_order: array<u32>;
@group(0) @binding(3) var<storage, read> row_starts: array<u32>;
@group(0) @binding(4) var<storage, read> row_ids: array<u32>;
@group(0) @binding(5) var<storage, read> distinct: array<u32>;
@group(0) @binding(6) var<storage, read_write> gradient: array<wide>;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let index = workgroup_index(group, groups) * WORKGROUP + thread;
  let row = index / u.columns;
  if (row >= min(distinct[0], u.rows)) { return; }
  let id = row_ids[row];
  if (id < u.row_begin || id - u.row_begin >= u.row_count) { return; }
  let column = index % u.columns;
  var sum = wide();
  for (var k = row_starts[row]; k < row_starts[row + 1u]; k++) { sum += wide(dy[row_order[k] * u.columns + column]); }
  let at = (id - u.row_begin) * u.columns + column;
  gradient[at] = gradient[at] + sum;
}
