// f16 copies of float32 weights, as adamw.wgsl makes them.

struct Uniforms { quads: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> parameter: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> half_copy: array<act4>;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let i = workgroup_index(group, groups) * WORKGROUP + thread;
  if (i >= u.quads) { return; }
  if (!fits_act4(parameter[i])) { atomicOr(&overflow_flags[1], 1u); }
  half_copy[i] = to_act4(clamp(parameter[i], vec4<f32>(-65504.0), vec4<f32>(65504.0)));
}
