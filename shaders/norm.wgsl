// RMS norm and layer norm over rows of C channels: the forward pass, or with DX the gradient with respect to x.
//
//   rstd = 1 / sqrt(mean((x - mean)^2) + eps), n = (x - mean) * rstd, y = n * weight + bias      (RMS norm: mean = 0)
//   g = dy * weight, dx = rstd * (g - mean(g) - n * mean(g * n))                                 (RMS norm: no
//   mean(g))
//
// LANES threads share a row; with one there is no barrier. `columns` is C in units of `wide`.

struct Uniforms { rows: u32, columns: u32, eps: f32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> x: array<wide_act>;
@group(0) @binding(2) var<storage, read> weight: array<wide>;
//#if DX
//#if LAYER
@group(0) @binding(3) var<storage, read> mean: array<f32>;
@group(0) @binding(4) var<storage, read> rstd: array<f32>;
@group(0) @binding(5) var<storage, read> dy: array<wide_act>;
@group(0) @binding(6) var<storage, read_write> dx: array<wide_act>;
//#else
@group(0) @binding(3) var<storage, read> rstd: array<f32>;
@group(0) @binding(4) var<storage, read> dy: array<wide_act>;
@group(0) @binding(5) var<storage, read_write> dx: array<wide_act>;
//#endif
//#else
//#if LAYER
//#if BIAS
@group(0) @binding(3) var<storage, read> bias: array<wide>;
@group(0) @binding(4) var<storage, read_write> y: array<wide_act>;
@group(0) @binding(5) var<storage, read_write> mean: array<f32>;
@group(0) @binding(6) var<storage, read_write> rstd: array<f32>;
//#else
@group(0) @binding(3) var<storage, read_write> y: array<wide_act>;
@group(0) @binding(4) var<storage, read_write> mean: array<f32>;
@group(0) @binding(5) var<storage, read_write> rstd: array<f32>;
//#endif
//#else
@group(0) @binding(3) var<storage, read_write> y: array<wide_act>;
@group(0) @binding(4) var<storage, read_write> rstd: array<f32>;
//#endif
//#endif

//#if SHARED_ROWS
var<workgroup> partial: array<f32, WORKGROUP>;

// The sum over the threads of a row, in the same order in each of them.
fn row_sum(mine: f32, thread: u32) -> f32 {
  workgroupBarrier();
  partial[thread] = mine;
  workgroupBarrier();
  let first = thread - thread % LANES;
  var sum = 0.0;
  for (var k = 0u; k < LANES; k++) { sum += partial[first + k]; }
  return sum;
}
//#else
fn row_sum(mine: f32, thread: u32) -> f32 { return mine; }
//#endif

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let row = (workgroup_index(group, groups) * WORKGROUP + thread) / LANES;
  let lane = thread % LANES;
  // Threads without a row go through the same barriers with nothing to add.
  let columns = select(0u, u.columns, row < u.rows);
  let base = row * u.columns;
  let scale = 1.0 / f32(u.columns * WIDTH);
//#if DX
//#if LAYER
  let centre = mean[row];
//#else
  let centre = 0.0;
//#endif
  let inverse = rstd[row];
  var sum_g = wide();
  var sum_gn = wide();
  for (var c = lane; c < columns; c += LANES) {
    let g = wide(dy[base + c]) * weight[c];
    sum_g += g;
    sum_gn += g * (wide(x[base + c]) - centre);
  }
//#if LAYER
  let mean_g = row_sum(total(sum_g), thread) * scale;
//#else
  let mean_g = 0.0;
//#endif
  let mean_gn = row_sum(total(sum_gn), thread) * scale * inverse;
  for (var c = lane; c < columns; c += LANES) {
    let g = wide(dy[base + c]) * weight[c];
    let n = (wide(x[base + c]) - centre) * inverse;
    dx[base + c] = to_wide_act((g - mean_g - n * mean_gn) * inverse);
  }
//#else
//#if LAYER
  var sum = wide();
  for (var c = lane; c < columns; c += LANES) { sum += wide(x[base + c]); }
  let centre = row_sum(total(sum), thread) * scale;
//#else
  let centre = 0.0;
//#endif
  var squares = wide();
  for (var c = lane; c < columns; c += LANES) {
    let d = wide(x[base + c]) - centre;
    squares += d * d;
  }
  let inverse = 1.0 / sqrt(row_sum(total(squares), thread) * scale + u.eps);
  for (var c = lane; c < columns; c += LANES) {
    let n = (wide(x[base + c]) - centre) * inverse;
//#if BIAS
    y[base + c] = to_wide_act(n * weight[c] + bias[c]);
//#else
    y[base + c] = to_wide_act(n * weight[c]);
//#endif
  }
  if (row < u.rows && lane == 0u) {
    rstd[row] = inverse;
//#if LAYER
    mean[row] = centre;
//#endif
  }
//#endif
}
