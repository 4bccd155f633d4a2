// The table row of the n-gram that ends at each position: h = mix32(seed + n * 0x9e3779b9), then h = mix32(h ^ id) for
// its ids, oldest first; the row is h mod buckets. An id before the row's start or of another segment counts as
// NO_TOKEN. With DECODING the ids continue those of `context`, otherwise `context` holds the segments.

// start: seed + n * 0x9e3779b9. history: ids in `context`, when decoding.
struct Uniforms { count: u32, time: u32, history: u32, order: u32, buckets: u32, start: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
@group(0) @binding(2) var<storage, read> context: array<u32>;
@group(0) @binding(3) var<storage, read_write> rows: array<u32>;

const NO_TOKEN: u32 = 0xffffffffu;

fn mix32(start: u32) -> u32 {
  var word = start;
  word ^= word >> 16u;
  word *= 0x7feb352du;
  word ^= word >> 15u;
  word *= 0x846ca68bu;
  return word ^ (word >> 16u);
}

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let n = workgroup_index(group, groups) * WORKGROUP + thread;
  if (n >= u.count) { return; }
  let t = n % u.time;
  var h = mix32(u.start);
  for (var i = 0u; i < u.order; i++) {
    let back = u.order - 1u - i;
    var id = NO_TOKEN;
    if (back <= t) {
//#if DECODING
      id = ids[n - back];
//#else
      if (context[n - back] == context[n]) { id = ids[n - back]; }
//#endif
    }
//#if DECODING
    if (back > t && back - t <= u.history) { id = context[u.history - (back - t)]; }
//#endif
    h = mix32(h ^ id);
  }
  rows[n] = h % u.buckets;
}
