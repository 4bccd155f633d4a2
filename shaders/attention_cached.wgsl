// Attention of T new tokens to a key/value cache: o = softmax(q k^T * scale) v over the cache rows that a query sees.
// Each thread runs an online softmax over its share of the rows; the shares are then combined in order.

struct Uniforms { tokens: u32, heads: u32, kv_heads: u32, cache_length: u32, window: u32, scale: f32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> q: array<act>;
@group(0) @binding(2) var<storage, read> cache_k: array<act>;
@group(0) @binding(3) var<storage, read> cache_v: array<act>;
@group(0) @binding(4) var<storage, read> start: array<u32>;
@group(0) @binding(5) var<storage, read_write> o: array<act>;

const LOWEST: f32 = -3.4028234e38;

var<workgroup> maxima: array<f32, THREADS>;
var<workgroup> sums: array<f32, THREADS>;
var<workgroup> values: array<array<f32, HEAD_WIDTH>, THREADS>;

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let query = workgroup_index(group, groups);
  if (query >= u.tokens * u.heads) { return; }
  let head = query % u.heads;
  let kv_head = head / (u.heads / u.kv_heads);
  let end = min(start[0] + query / u.heads + 1u, u.cache_length);
  let first = select(0u, end - min(end, u.window), u.window > 0u);
  var accumulated: array<f32, HEAD_WIDTH>;
  var high = LOWEST;
  var sum = 0.0;
  for (var j = first + thread; j < end; j += THREADS) {
    let at = (j * u.kv_heads + kv_head) * HEAD_WIDTH;
    var score = 0.0;
    for (var d = 0u; d < HEAD_WIDTH; d++) { score += f32(q[query * HEAD_WIDTH + d]) * f32(cache_k[at + d]); }
    score *= u.scale;
    let next = max(high, score);
    let keep = exp(high - next);
    let weight = exp(score - next);
    sum = sum * keep + weight;
    for (var d = 0u; d < HEAD_WIDTH; d++) { accumulated[d] = accumulated[d] * keep + weight * f32(cache_v[at + d]); }
    high = next;
  }
  maxima[thread] = high;
  sums[thread] = sum;
  values[thread] = accumulated;
  workgroupBarrier();
  high = LOWEST;
  for (var k = 0u; k < THREADS; k++) { high = max(high, maxima[k]); }
  sum = 0.0;
  for (var k = 0u; k < THREADS; k++) { sum += sums[k] * exp(maxima[k] - high); }
  for (var d = thread; d < HEAD_WIDTH; d += THREADS) {
    var value = 0.0;
    for (var k = 0u; k < THREADS; k++) { value += values[k][d] * exp(maxima[k] - high); }
    o[query * HEAD_WIDTH + d] = to_act(value / sum);
  }
}
