// AdamW over a flat range of one parameter group. `schedule` is eight words of header (the first: the optimizer step of its first
// row), then rows [bias correction 1, bias correction 2, (learning rate, weight decay) for each group].

struct Uniforms { quads: u32, group: u32, row_width: u32, beta1: f32, beta2: f32, eps: f32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read_write> parameter: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> gradient: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> moment1: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> moment2: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> schedule: array<f32>;
@group(0) @binding(6) var<storage, read> step_state: array<u32>;
//#if HALF
@group(0) @binding(7) var<storage, read_write> half_copy: array<act4>;
//#endif

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  if (step_state[3] != 0u) { return; }
  let multiplier = bitcast<f32>(step_state[4]);
  let row = 8u + (step_state[0] - bitcast<u32>(schedule[0])) * u.row_width;
  let correction1 = schedule[row];
  let correction2 = schedule[row + 1u];
  let rate = schedule[row + 2u + 2u * u.group];
  let decay = schedule[row + 3u + 2u * u.group];
  let first = workgroup_index(group, groups) * THREADS * QUADS + thread;
  for (var k = 0u; k < QUADS; k++) {
    let i = first + k * THREADS;
    if (i >= u.quads) { return; }
    let g = gradient[i] * multiplier;
    let m = u.beta1 * moment1[i] + (1.0 - u.beta1) * g;
    let v = u.beta2 * moment2[i] + (1.0 - u.beta2) * (g * g);
    let p = parameter[i];
    let next = p - rate * ((m / correction1) / (sqrt(v / correction2) + u.eps) + decay * p);
    moment1[i] = m;
    moment2[i] = v;
    parameter[i] = next;
//#if HALF
    half_copy[i] = to_act4(next);
//#endif
  }
}
