// Gradient of attention with respect to the queries, from the probabilities made anew:
//
//   p_tj = exp(scale * q_t . k_j - lse_t), ds_tj = p_tj * (do_t . v_j - delta_t), dq_t = scale * sum_j ds_tj k_j
//
// A thread has ROWS queries, as in the forward pass. `statistics` comes from attention_delta.wgsl.

struct Uniforms { tokens: u32, heads: u32, kv_heads: u32, vectors: u32, blocks: u32, window: u32, scale: f32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> q: array<wide_act>;
@group(0) @binding(2) var<storage, read> k: array<wide_act>;
@group(0) @binding(3) var<storage, read> v: array<wide_act>;
@group(0) @binding(4) var<storage, read> do_: array<wide_act>;
@group(0) @binding(5) var<storage, read> statistics: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read_write> dq: array<wide_act>;

override WORKGROUP: u32 = 32u;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let index = workgroup_index(group, groups);
  let vector = index / u.blocks;
  let first = index % u.blocks * WORKGROUP * ROWS;
  let t = first + thread * ROWS;
  if (vector >= u.vectors || t >= u.tokens) { return; }
  let head = vector % u.heads;
  let row = vector / u.heads * u.tokens;
  let key_stride = u.kv_heads * UNITS;
  let key_base = row * key_stride + head / (u.heads / u.kv_heads) * UNITS;

//#repeat i ROWS
  let t$i = min(t + $i, u.tokens - 1u);
  let base$i = ((row + t$i) * u.heads + head) * UNITS;
  let statistic$i = statistics[vector * u.tokens + t$i];
  let lse$i = bitcast<f32>(statistic$i.x);
  let delta$i = bitcast<f32>(statistic$i.y);
//#repeat d UNITS
  let query$i_$d = wide(q[base$i + $d]) * u.scale;
  let upstream$i_$d = wide(do_[base$i + $d]);
  var sum$i_$d = wide();
//#end
//#end

  let end = min(t + ROWS, u.tokens);
  for (var j = first - min(first, u.window - 1u); j < end; j++) {
    let at = key_base + j * key_stride;
    let segment = statistics[vector * u.tokens + j].z;
//#repeat i ROWS
    var product$i = wide();
    var dp$i = wide();
//#end
//#repeat d UNITS
    let key$d = wide(k[at + $d]);
    let value$d = wide(v[at + $d]);
//#repeat i ROWS
    product$i += query$i_$d * key$d;
    dp$i += upstream$i_$d * value$d;
//#end
//#end
//#repeat i ROWS
    let seen$i = j <= t$i && t$i - j < u.window && segment == statistic$i.z;
    let ds$i = select(0.0, exp(total(product$i) - lse$i) * (total(dp$i) - delta$i), seen$i);
//#end
//#repeat d UNITS
//#repeat i ROWS
    sum$i_$d += key$d * ds$i;
//#end
//#end
  }

//#repeat i ROWS
  if (t + $i < u.tokens) {
//#repeat d UNITS
    dq[base$i + $d] = to_wide_act(sum$i_$d * u.scale);
//#end
  }
//#end
}
