// Sums over rows, second half: adds the partial sums of `column_partials` to a gradient.

struct Uniforms { columns: u32, blocks: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> partials: array<wide>;
@group(0) @binding(2) var<storage, read_write> gradient: array<wide>;

override WORKGROUP: u32 = 32u;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let column = workgroup_index(group, groups) * WORKGROUP + thread;
  if (column >= u.columns) { return; }
  var sum = wide();
  for (var block = 0u; block < u.blocks; block++) { sum += partials[block * u.columns + column]; }
  gradient[column] += sum;
}
