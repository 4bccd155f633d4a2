// Matrix product C[M, N] (+)= A * B (+ bias) (+ residual) for every shape: the fallback of `matmul.wgsl`. A thread
// owns ROWS rows and COLUMNS columns (of `wide`), at clamped places near the edges.
//
//   NT: A[M, K], B[N, K]     NN: A[M, K], B[K, N]     TN: A[K, M], B[K, N]
//
// In NT K is `wide` and C scalar; in NN and TN N is `wide` and A scalar. The uniforms count elements, except those of
// the wide dimension, which count `wide`: k, lda, ldb, a_offset, b_offset in NT; n, ldb, ldc, b_offset, c_offset in NN
// and TN. K is summed in ascending order.

struct Uniforms {
  m: u32, n: u32, k: u32, lda: u32, ldb: u32, ldc: u32, a_offset: u32, b_offset: u32, c_offset: u32, accumulate: u32,
}

//#if NT
alias sum = f32;
//#else
alias sum = wide;
//#endif

//#if NT
//#if A_F32
alias a_element = wide;
//#else
alias a_element = wide_act;
//#endif
alias left = wide;
//#else
//#if A_F32
alias a_element = f32;
//#else
alias a_element = act;
//#endif
alias left = f32;
//#endif

//#if B_F32
alias b_element = wide;
//#else
alias b_element = wide_act;
//#endif

//#if NT
alias residual_element = act;
//#else
alias residual_element = wide_act;
//#endif

//#if C_F32
alias c_element = sum;
fn to_c(v: sum) -> c_element { return v; }
//#else
//#if NT
alias c_element = act;
fn to_c(v: sum) -> c_element { return to_act(v); }
//#else
alias c_element = wide_act;
fn to_c(v: sum) -> c_element { return to_wide_act(v); }
//#endif
//#endif

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> a: array<a_element>;
@group(0) @binding(2) var<storage, read> b: array<b_element>;
//#if BIAS
@group(0) @binding(3) var<storage, read> bias: array<sum>;
//#if RESIDUAL
@group(0) @binding(4) var<storage, read> residual: array<residual_element>;
@group(0) @binding(5) var<storage, read_write> c: array<c_element>;
//#else
@group(0) @binding(4) var<storage, read_write> c: array<c_element>;
//#endif
//#else
//#if RESIDUAL
@group(0) @binding(3) var<storage, read> residual: array<residual_element>;
@group(0) @binding(4) var<storage, read_write> c: array<c_element>;
//#else
@group(0) @binding(3) var<storage, read_write> c: array<c_element>;
//#endif
//#endif

fn product(x: left, y: wide) -> sum {
//#if NT
  return total(x * y);
//#else
  return x * y;
//#endif
}

fn store(row: u32, column: u32, value: sum) {
  if (row < u.m && column < u.n) {
    let at = u.c_offset + row * u.ldc + column;
    var v = value;
//#if BIAS
    v += bias[column];
//#endif
//#if RESIDUAL
    v += sum(residual[at]);
//#endif
    if (u.accumulate != 0u) { v += sum(c[at]); }
    c[at] = to_c(v);
  }
}

// One-dimensional, because lavapipe fills its vectors along x only.
@compute @workgroup_size(THREADS_M * THREADS_N)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let across = (u.n + COLUMNS * THREADS_N - 1u) / (COLUMNS * THREADS_N);
  let tile = workgroup_index(workgroup, workgroups);
  let row = (tile / across * THREADS_M + thread / THREADS_N) * ROWS;
  let column = (tile % across * THREADS_N + thread % THREADS_N) * COLUMNS;
//#if TN
  let step_a = u.lda;
  let along_a = 1u;
//#else
  let step_a = 1u;
  let along_a = u.lda;
//#endif
//#if NT
  let step_b = 1u;
  let along_b = u.ldb;
//#else
  let step_b = u.ldb;
  let along_b = 1u;
//#endif
//#repeat i ROWS
  let a$i = u.a_offset + min(row + $iu, u.m - 1u) * along_a;
//#end
//#repeat j COLUMNS
  let b$j = u.b_offset + min(column + $ju, u.n - 1u) * along_b;
//#end
//#repeat i ROWS
//#repeat j COLUMNS
  var c$i$j = sum();
//#end
//#end
  for (var k = 0u; k < u.k; k++) {
//#repeat j COLUMNS
    let right$j = wide(b[b$j + k * step_b]);
//#end
//#repeat i ROWS
    let left$i = left(a[a$i + k * step_a]);
//#repeat j COLUMNS
    c$i$j += product(left$i, right$j);
//#end
//#end
  }
//#repeat i ROWS
//#repeat j COLUMNS
  store(row + $iu, column + $ju, c$i$j);
//#end
//#end
}
