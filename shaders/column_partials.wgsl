// Sums over rows, first half: each thread adds up BLOCK rows of one `wide` of columns, and `column_reduce` adds the
// blocks.
//
//   bias gradient:    sum_n dy[n, c]
//   weight gradient:  sum_n dy[n, c] * (x[n, c] - mean[n]) * rstd[n]      (RMS norm: mean = 0)

struct Uniforms { rows: u32, columns: u32, block: u32, blocks: u32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
//#if RMS
@group(0) @binding(1) var<storage, read> x: array<wide_act>;
@group(0) @binding(2) var<storage, read> rstd: array<f32>;
@group(0) @binding(3) var<storage, read> dy: array<wide_act>;
@group(0) @binding(4) var<storage, read_write> partials: array<wide>;
//#else
//#if LAYER
@group(0) @binding(1) var<storage, read> x: array<wide_act>;
@group(0) @binding(2) var<storage, read> mean: array<f32>;
@group(0) @binding(3) var<storage, read> rstd: array<f32>;
@group(0) @binding(4) var<storage, read> dy: array<wide_act>;
@group(0) @binding(5) var<storage, read_write> partials: array<wide>;
//#else
@group(0) @binding(1) var<storage, read> dy: array<wide_act>;
@group(0) @binding(2) var<storage, read_write> partials: array<wide>;
//#endif
//#endif

override WORKGROUP: u32 = 64u;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let index = workgroup_index(group, groups) * WORKGROUP + thread;
  if (index >= u.blocks * u.columns) { return; }
  let first = index / u.columns * u.block;
  let column = index % u.columns;
  var sum = wide();
  for (var n = first; n < min(first + u.block, u.rows); n++) {
    let at = n * u.columns + column;
//#if RMS
    sum += wide(dy[at]) * (wide(x[at]) * rstd[n]);
//#else
//#if LAYER
    sum += wide(dy[at]) * ((wide(x[at]) - mean[n]) * rstd[n]);
//#else
    sum += wide(dy[at]);
//#endif
//#endif
  }
  partials[index] = sum;
}
