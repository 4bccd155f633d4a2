// Rotary position embedding on x [N, heads, D], pairs (i, i + D/2):
//
//   y1 = x1 * cos - sign * x2 * sin, y2 = x2 * cos + sign * x1 * sin      (sign = -1 turns back: the gradient)
//
// A row of `table` is [cos(0 .. D/2-1), sin(0 .. D/2-1)] of one position, made in float64 on the host, because drivers
// disagree on sin by more than training can bear. `half` is D/2 in units of `wide`.

struct Uniforms { count: u32, heads: u32, half: u32, sign: f32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> x: array<wide_act>;
@group(0) @binding(2) var<storage, read> positions: array<u32>;
@group(0) @binding(3) var<storage, read> table: array<wide>;
@group(0) @binding(4) var<storage, read_write> y: array<wide_act>;

override WORKGROUP: u32 = 64u;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let index = workgroup_index(group, groups) * WORKGROUP + thread;
  if (index >= u.count) { return; }
  let vector = index / u.half;  // which head of which row
  let i = index % u.half;
  let first = vector * 2u * u.half + i;
  let row = positions[vector / u.heads] * 2u * u.half + i;
  let cosine = table[row];
  let sine = table[row + u.half] * u.sign;
  let x1 = wide(x[first]);
  let x2 = wide(x[first + u.half]);
  y[first] = to_wide_act(x1 * cosine - x2 * sine);
  y[first + u.half] = to_wide_act(x2 * cosine + x1 * sine);
}
