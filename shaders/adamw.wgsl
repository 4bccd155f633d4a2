// AdamW over a flat range of one parameter group.
//
//   g = gradient * multiplier, m = beta1 * m + rest1 * g, v = beta2 * v + rest2 * g^2
//   p -= rate * ((m / correction1) / (sqrt(v / correction2) + eps) + decay * p)
//
// rest = 1 - beta comes from the host: the difference of float32 numbers would miss it by up to 1e-5. `schedule` is
// eight words of header (the first: the optimizer step of its first row), then rows of f32 bits [correction1,
// correction2, (rate, decay) for each group]; it is read as u32 because a small integer is no float that every
// driver would load.

struct Uniforms {
  quads: u32, group: u32, row_width: u32, beta1: f32, beta2: f32, rest1: f32, rest2: f32, eps: f32,
}

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read_write> parameter: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> gradient: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> moment1: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> moment2: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> schedule: array<u32>;
@group(0) @binding(6) var<storage, read> step_state: array<u32>;
//#if HALF
@group(0) @binding(7) var<storage, read_write> half_copy: array<act4>;
//#endif

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  if (step_state[SKIP] != 0u) { return; }
  let multiplier = bitcast<f32>(step_state[GRAD_MULTIPLIER]);
  let row = SCHEDULE_HEADER + (step_state[OPTIMIZER_STEP] - schedule[0]) * u.row_width;
  let correction1 = bitcast<f32>(schedule[row]);
  let correction2 = bitcast<f32>(schedule[row + 1u]);
  let rate = bitcast<f32>(schedule[row + 2u + 2u * u.group]);
  let decay = bitcast<f32>(schedule[row + 3u + 2u * u.group]);
  let first = workgroup_index(group, groups) * WORKGROUP * QUADS + thread;
  for (var k = 0u; k < QUADS; k++) {
    let i = first + k * WORKGROUP;
    if (i >= u.quads) { return; }
    let g = gradient[i] * multiplier;
    let m = u.beta1 * moment1[i] + u.rest1 * g;
    let v = u.beta2 * moment2[i] + u.rest2 * (g * g);
    let p = parameter[i];
    let next = p - rate * ((m / correction1) / (sqrt(v / correction2) + u.eps) + decay * p);
    moment1[i] = m;
    moment2[i] = v;
    parameter[i] = next;
//#if HALF
    // A weight beyond f16 raises a flag of its own, which no step clears: every step from here on is an overflow.
    if (!fits_act4(next)) { atomicOr(&overflow_flags[1], 1u); }
    half_copy[i] = to_act4(clamp(next, vec4<f32>(-65504.0), vec4<f32>(65504.0)));
//#endif
  }
}
