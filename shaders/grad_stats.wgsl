// Sum of squares and counts of NaN and infinite elements of a block of gradients, one record a workgroup.
// Non-finite elements are told by their exponent bits: WGSL lets a compiler assume that they do not exist.

struct Uniforms { quads: u32, first_record: u32, records: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> gradients: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> partials: array<vec4<u32>>;

var<workgroup> squares: array<f32, WORKGROUP>;
var<workgroup> counts: array<vec2<u32>, WORKGROUP>;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let record = workgroup_index(group, groups);
  if (record >= u.records) { return; }
  let first = record * BLOCK_QUADS;
  let end = min(first + BLOCK_QUADS, u.quads);
  var sum = vec4<f32>();
  var nans = vec4<u32>();
  var infinities = vec4<u32>();
  for (var i = first + thread; i < end; i += WORKGROUP) {
    let g = gradients[i];
    let magnitude = bitcast<vec4<u32>>(g) & vec4<u32>(0x7fffffffu);
    nans += vec4<u32>(magnitude > vec4<u32>(0x7f800000u));
    infinities += vec4<u32>(magnitude == vec4<u32>(0x7f800000u));
    sum += g * g;
  }
  squares[thread] = (sum.x + sum.y) + (sum.z + sum.w);
  let pairs = vec4<u32>(nans.xy + nans.zw, infinities.xy + infinities.zw);
  counts[thread] = pairs.xz + pairs.yw;
  workgroupBarrier();
  if (thread != 0u) { return; }
  var all = 0.0;
  var count = vec2<u32>();
  for (var k = 0u; k < min(WORKGROUP, u.quads); k++) {
    all += squares[k];
    count += counts[k];
  }
  partials[u.first_record + record] = vec4<u32>(bitcast<u32>(all), count, 0u);
}
