// Causal attention with online softmax: o = softmax(scale * q k^T) v, never as a T x T matrix.
//
// Query t of head h sees key j of head h / (heads / kv_heads) when j <= t, t - j < window and both are in one segment.
// A thread keeps ROWS consecutive queries and their sums in registers and walks the keys, so that each key it loads
// serves ROWS queries; the threads of a workgroup are at the same key at the same time. `lse` is the logarithm of the
// softmax's denominator, which the backward pass needs. UNITS is D in units of `wide`.

struct Uniforms { tokens: u32, heads: u32, kv_heads: u32, vectors: u32, blocks: u32, window: u32, scale: f32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> q: array<wide_act>;
@group(0) @binding(2) var<storage, read> k: array<wide_act>;
@group(0) @binding(3) var<storage, read> v: array<wide_act>;
@group(0) @binding(4) var<storage, read> segment_ids: array<u32>;
@group(0) @binding(5) var<storage, read_write> o: array<wide_act>;
@group(0) @binding(6) var<storage, read_write> lse: array<f32>;

override WORKGROUP: u32 = 32u;

const LOWEST = -1e30;  // below any score, and finite

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let index = workgroup_index(group, groups);
  let vector = index / u.blocks;  // batch * heads + head
  let first = index % u.blocks * WORKGROUP * ROWS;
  let t = first + thread * ROWS;
  if (vector >= u.vectors || t >= u.tokens) { return; }
  let head = vector % u.heads;
  let row = vector / u.heads * u.tokens;  // of token 0 of this sample
  let key_stride = u.kv_heads * UNITS;
  let key_base = row * key_stride + head / (u.heads / u.kv_heads) * UNITS;

  // A thread whose rows reach past the last token repeats that token, and stores it once.
//#repeat i ROWS
  let t$i = min(t + $i, u.tokens - 1u);
  let base$i = ((row + t$i) * u.heads + head) * UNITS;
  let segment$i = segment_ids[row + t$i];
  var highest$i = LOWEST;
  var denominator$i = 0.0;
//#repeat d UNITS
  let query$i_$d = wide(q[base$i + $d]) * u.scale;
  var sum$i_$d = wide();
//#end
//#end

  // The first key that the workgroup's first query sees; the same for all, to keep the threads at one key.
  let end = min(t + ROWS, u.tokens);
  for (var j = first - min(first, u.window - 1u); j < end; j++) {
    let at = key_base + j * key_stride;
    let segment = segment_ids[row + j];
//#repeat i ROWS
    var product$i = wide();
//#end
//#repeat d UNITS
    let key$d = wide(k[at + $d]);
//#repeat i ROWS
    product$i += query$i_$d * key$d;
//#end
//#end
//#repeat i ROWS
    let seen$i = j <= t$i && t$i - j < u.window && segment == segment$i;
    let score$i = select(LOWEST, total(product$i), seen$i);
    let next$i = max(highest$i, score$i);
    let shrink$i = exp(highest$i - next$i);
    let p$i = select(0.0, exp(score$i - next$i), seen$i);
    denominator$i = denominator$i * shrink$i + p$i;
    highest$i = next$i;
//#end
//#repeat d UNITS
    let value$d = wide(v[at + $d]);
//#repeat i ROWS
    sum$i_$d = sum$i_$d * shrink$i + value$d * p$i;
//#end
//#end
  }

  // Every query sees itself, so no denominator is zero.
//#repeat i ROWS
  if (t + $i < u.tokens) {
    let inverse = 1.0 / denominator$i;
//#repeat d UNITS
    o[base$i + $d] = to_wide_act(sum$i_$d * inverse);
//#end
    lse[vector * u.tokens + t + $i] = highest$i + log(denominator$i);
  }
//#end
}
