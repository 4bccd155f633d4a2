// Appends T rows of keys or values to a cache: cache[start + t] = x[t].

struct Uniforms { tokens: u32, columns: u32, length: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> x: array<wide_act>;
@group(0) @binding(2) var<storage, read> start: array<u32>;
@group(0) @binding(3) var<storage, read_write> cache: array<wide_act>;

override WORKGROUP: u32 = 64u;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let index = workgroup_index(group, groups) * WORKGROUP + thread;
  let row = start[0] + index / u.columns;
  if (index >= u.tokens * u.columns || row >= u.length) { return; }
  cache[row * u.columns + index % u.columns] = to_wide_act(wide(x[index]));
}
