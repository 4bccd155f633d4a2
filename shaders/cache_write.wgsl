// Appends T rows to a key or value cache at row start[0].

struct Uniforms { tokens: u32, width: u32, cache_length: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> x: array<act>;
@group(0) @binding(2) var<storage, read> start: array<u32>;
@group(0) @binding(3) var<storage, read_write> cache: array<act>;

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let index = workgroup_index(group, groups) * THREADS + thread;
  let row = start[0] + index / u.width;
  if (index >= u.tokens * u.width || row >= u.cache_length) { return; }
  cache[row * u.width + index % u.width] = to_act(f32(x[index]));
}
