// y = levels[0] * x + levels[1] * noise, element by element; with GRADIENT one side of its gradient: levels[level] dy.
// `count` is in units of `wide`.

struct Uniforms { count: u32, level: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
//#if GRADIENT
@group(0) @binding(1) var<storage, read> dy: array<wide_act>;
@group(0) @binding(2) var<storage, read> levels: array<f32>;
//#if TO_F32
@group(0) @binding(3) var<storage, read_write> result: array<wide>;
//#else
@group(0) @binding(3) var<storage, read_write> result: array<wide_act>;
//#endif
//#else
@group(0) @binding(1) var<storage, read> x: array<wide_act>;
@group(0) @binding(2) var<storage, read> noise: array<wide>;
@group(0) @binding(3) var<storage, read> levels: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<wide_act>;
//#endif

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let i = workgroup_index(group, groups) * WORKGROUP + thread;
  if (i >= u.count) { return; }
//#if GRADIENT
//#if TO_F32
  result[i] = levels[u.level] * wide(dy[i]);
//#else
  result[i] = to_wide_act(levels[u.level] * wide(dy[i]));
//#endif
//#else
  y[i] = to_wide_act(levels[0] * wide(x[i]) + levels[1] * noise[i]);
//#endif
}
