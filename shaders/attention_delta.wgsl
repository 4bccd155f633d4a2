// What the backward pass of attention needs to know of each query: delta = sum over D of o * do, gathered with lse and
// the segment into one vec4 (as bits), because eight storage buffers do not hold them apart.

struct Uniforms { count: u32, tokens: u32, heads: u32, units: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> o: array<wide_act>;
@group(0) @binding(2) var<storage, read> do_: array<wide_act>;
@group(0) @binding(3) var<storage, read> lse: array<f32>;
@group(0) @binding(4) var<storage, read> segment_ids: array<u32>;
@group(0) @binding(5) var<storage, read_write> statistics: array<vec4<u32>>;

override WORKGROUP: u32 = 32u;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let index = workgroup_index(group, groups) * WORKGROUP + thread;  // (batch * tokens + t) * heads + head
  if (index >= u.count) { return; }
  var delta = wide();
  for (var d = 0u; d < u.units; d++) { delta += wide(o[index * u.units + d]) * wide(do_[index * u.units + d]); }
  let row = index / u.heads;
  let at = (row / u.tokens * u.heads + index % u.heads) * u.tokens + row % u.tokens;
  statistics[at] = vec4<u32>(bitcast<u32>(lse[at]), bitcast<u32>(total(delta)), segment_ids[row], 0u);
}
