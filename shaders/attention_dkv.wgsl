// Gradients of attention with respect to keys and values, with p and ds as in attention_dq.wgsl:
//
//   dv_j = sum_t p_tj do_t, dk_j = scale * sum_t ds_tj q_t      (over the queries of every head that shares the key)
//
// A thread has ROWS consecutive keys. It walks the queries from the last that sees any key of the workgroup down to its
// first key, so that the threads are at the same query at the same time and stop where nothing sees them.

struct Uniforms { tokens: u32, heads: u32, kv_heads: u32, vectors: u32, blocks: u32, window: u32, scale: f32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> q: array<wide_act>;
@group(0) @binding(2) var<storage, read> k: array<wide_act>;
@group(0) @binding(3) var<storage, read> v: array<wide_act>;
@group(0) @binding(4) var<storage, read> do_: array<wide_act>;
@group(0) @binding(5) var<storage, read> statistics: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read_write> dk: array<wide_act>;
@group(0) @binding(7) var<storage, read_write> dv: array<wide_act>;

override WORKGROUP: u32 = 32u;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let index = workgroup_index(group, groups);
  let vector = index / u.blocks;  // batch * kv_heads + kv_head
  let first = index % u.blocks * WORKGROUP * ROWS;
  let j = first + thread * ROWS;
  if (vector >= u.vectors || j >= u.tokens) { return; }
  let batch = vector / u.kv_heads;
  let kv_head = vector % u.kv_heads;
  let sharing = u.heads / u.kv_heads;

//#repeat i ROWS
  let j$i = min(j + $i, u.tokens - 1u);
  let base$i = ((batch * u.tokens + j$i) * u.kv_heads + kv_head) * UNITS;
//#repeat d UNITS
  let key$i_$d = wide(k[base$i + $d]) * u.scale;
  let value$i_$d = wide(v[base$i + $d]);
  var sum_k$i_$d = wide();
  var sum_v$i_$d = wide();
//#end
//#end

  let end = min(u.tokens, first + WORKGROUP * ROWS - 1u + u.window);
  for (var head = kv_head * sharing; head < (kv_head + 1u) * sharing; head++) {
    let row = (batch * u.heads + head) * u.tokens;
//#repeat i ROWS
    let segment$i = statistics[row + j$i].z;
//#end
    for (var next = end; next > j; next--) {
      let t = next - 1u;
      let at = ((batch * u.tokens + t) * u.heads + head) * UNITS;
      let statistic = statistics[row + t];
//#repeat i ROWS
      var product$i = wide();
      var dp$i = wide();
//#end
//#repeat d UNITS
      let query$d = wide(q[at + $d]);
      let upstream$d = wide(do_[at + $d]);
//#repeat i ROWS
      product$i += key$i_$d * query$d;
      dp$i += value$i_$d * upstream$d;
//#end
//#end
//#repeat i ROWS
      let seen$i = j$i <= t && t - j$i < u.window && statistic.z == segment$i;
      let p$i = select(0.0, exp(total(product$i) - bitcast<f32>(statistic.x)), seen$i);
      let ds$i = p$i * (total(dp$i) - bitcast<f32>(statistic.y));
//#end
//#repeat d UNITS
//#repeat i ROWS
      sum_k$i_$d += query$d * ds$i;
      sum_v$i_$d += upstream$d * p$i;
//#end
//#end
    }
  }

//#repeat i ROWS
  if (j + $i < u.tokens) {
//#repeat d UNITS
    dk[base$i + $d] = to_wide_act(sum_k$i_$d * u.scale);
    dv[base$i + $d] = to_wide_act(sum_v$i_$d);
//#end
  }
//#end
}
