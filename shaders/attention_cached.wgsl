// Attention of a few new queries over the key/value cache, one workgroup for each query and head.
//
// Keys come in chunks of WORKGROUP: each thread scores one key, then each thread adds up one channel of the values,
// with the online softmax of attention_forward.wgsl between chunks. Every thread keeps the same running maximum.

struct Uniforms { heads: u32, kv_heads: u32, vectors: u32, window: u32, scale: f32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> q: array<wide_act>;
@group(0) @binding(2) var<storage, read> cache_k: array<wide_act>;
@group(0) @binding(3) var<storage, read> cache_v: array<act>;
@group(0) @binding(4) var<storage, read> start: array<u32>;
@group(0) @binding(5) var<storage, read_write> o: array<act>;

const LOWEST = -1e30;
const D: u32 = UNITS * WIDTH;

var<workgroup> scores: array<f32, WORKGROUP>;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let vector = workgroup_index(group, groups);  // t * heads + head
  if (vector >= u.vectors) { return; }
  let position = start[0] + vector / u.heads;
  let kv_head = vector % u.heads / (u.heads / u.kv_heads);
  let end = position + 1u;

  // Up to 128 channels: a thread has channel `thread`, and channel `thread + WORKGROUP` where there is one.
  var highest = LOWEST;
  var denominator = 0.0;
  var sum = vec2<f32>();
  for (var first = end - min(end, u.window); first < end; first += WORKGROUP) {
    let count = min(WORKGROUP, end - first);
    var product = wide();
    if (thread < count) {
      let key = ((first + thread) * u.kv_heads + kv_head) * UNITS;
      for (var d = 0u; d < UNITS; d++) { product += wide(q[vector * UNITS + d]) * wide(cache_k[key + d]); }
    }
    scores[thread] = total(product) * u.scale;
    workgroupBarrier();
    var next = highest;
    for (var j = 0u; j < count; j++) { next = max(next, scores[j]); }
    let shrink = exp(highest - next);
    denominator *= shrink;
    sum *= shrink;
    highest = next;
    for (var j = 0u; j < count; j++) {
      let p = exp(scores[j] - highest);
      denominator += p;
      let value = ((first + j) * u.kv_heads + kv_head) * D;
      if (thread < D) { sum.x += p * f32(cache_v[value + thread]); }
      if (thread + WORKGROUP < D) { sum.y += p * f32(cache_v[value + thread + WORKGROUP]); }
    }
    workgroupBarrier();
  }
  if (thread < D) { o[vector * D + thread] = to_act(sum.x / denominator); }
  if (thread + WORKGROUP < D) { o[vector * D + thread + WORKGROUP] = to_act(sum.y / denominator); }
}
