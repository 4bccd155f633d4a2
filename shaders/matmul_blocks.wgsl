// Matrix product C[M, N] (+)= A * B (+ bias) (+ residual) in registers alone: a thread owns ROW_BLOCKS x COLUMN_BLOCKS
// blocks of 4 x 4 and moves vec4 only. It suits CPUs and other machines where workgroup memory is plain memory.
//
//   NT: A[M, K], B[N, K]     NN: A[M, K], B[K, N]     TN: A[K, M], B[K, N]
//
// Needs K, N, every leading dimension and every offset divisible by 4; NT and NN also M >= 4. TN reads the rows of A
// up to the next multiple of 4 of M, which must lie within lda. K is summed in ascending order, four terms at a time.

struct Uniforms {
  m: u32, n: u32, k: u32, lda: u32, ldb: u32, ldc: u32, a_offset: u32, b_offset: u32, c_offset: u32, accumulate: u32,
}

//#if A_F32
alias a4 = vec4<f32>;
//#else
alias a4 = act4;
//#endif
//#if B_F32
alias b4 = vec4<f32>;
//#else
alias b4 = act4;
//#endif
//#if C_F32
alias c4 = vec4<f32>;
fn to_c(v: vec4<f32>) -> c4 { return v; }
//#else
alias c4 = act4;
fn to_c(v: vec4<f32>) -> c4 { return to_act4(v); }
//#endif

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> a: array<a4>;
@group(0) @binding(2) var<storage, read> b: array<b4>;
//#if BIAS
@group(0) @binding(3) var<storage, read> bias: array<vec4<f32>>;
//#if RESIDUAL
@group(0) @binding(4) var<storage, read> residual: array<act4>;
@group(0) @binding(5) var<storage, read_write> c: array<c4>;
//#else
@group(0) @binding(4) var<storage, read_write> c: array<c4>;
//#endif
//#else
//#if RESIDUAL
@group(0) @binding(3) var<storage, read> residual: array<act4>;
@group(0) @binding(4) var<storage, read_write> c: array<c4>;
//#else
@group(0) @binding(3) var<storage, read_write> c: array<c4>;
//#endif
//#endif

// Four vec4 of A, `stride` apart, as a matrix whose column i is row i of the block; of B, whose column k is row k.
fn load_a(at: u32, stride: u32) -> mat4x4<f32> {
  let block = mat4x4<f32>(
    vec4<f32>(a[at]), vec4<f32>(a[at + stride]), vec4<f32>(a[at + 2u * stride]), vec4<f32>(a[at + 3u * stride]));
//#if TN
  return transpose(block);
//#else
  return block;
//#endif
}

fn load_b(at: u32, stride: u32) -> mat4x4<f32> {
  let block = mat4x4<f32>(
    vec4<f32>(b[at]), vec4<f32>(b[at + stride]), vec4<f32>(b[at + 2u * stride]), vec4<f32>(b[at + 3u * stride]));
//#if NT
  return transpose(block);
//#else
  return block;
//#endif
}

// The row where the loads of a block begin: a block that hangs over the last row is moved up, not masked.
fn top_of(row: u32) -> u32 {
//#if TN
  return min(row, (u.m - 1u) / 4u * 4u);
//#else
  return min(row, u.m - 4u);
//#endif
}

// One block to C. A loop, because 4 x fewer stores in the text halve the time a CPU driver needs to compile it.
fn store(row: u32, column: u32, block: mat4x4<f32>) {
  let top = top_of(row);
  let end = min(4u, u.m - top);
  for (var i = select(4u, row - top, column < u.n); i < end; i++) {
    let at = (u.c_offset + (top + i) * u.ldc + column) / 4u;
    var v = select(select(block[0], block[1], i == 1u), select(block[2], block[3], i == 3u), i > 1u);
//#if BIAS
    v += bias[column / 4u];
//#endif
//#if RESIDUAL
    v += vec4<f32>(residual[at]);
//#endif
    if (u.accumulate != 0u) { v += vec4<f32>(c[at]); }
    c[at] = to_c(v);
  }
}

@compute @workgroup_size(THREADS_N, THREADS_M)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_id) thread: vec3<u32>,
) {
  let across = (u.n + 4u * COLUMN_BLOCKS * THREADS_N - 1u) / (4u * COLUMN_BLOCKS * THREADS_N);
  let tile = workgroup_index(workgroup, workgroups);
  let row = (tile / across * THREADS_M + thread.y) * 4u * ROW_BLOCKS;
  let column = (tile % across * THREADS_N + thread.x) * 4u * COLUMN_BLOCKS;
  let lda = u.lda / 4u;
  let ldb = u.ldb / 4u;
//#if TN
  let step_a = u.lda;
//#else
  let step_a = 1u;
//#endif
//#if NT
  let step_b = 1u;
//#else
  let step_b = u.ldb;
//#endif
//#repeat i ROW_BLOCKS
//#if TN
  let a$i = (u.a_offset + top_of(row + 4u * $iu)) / 4u;
//#else
  let a$i = (u.a_offset + top_of(row + 4u * $iu) * u.lda) / 4u;
//#endif
//#end
//#repeat j COLUMN_BLOCKS
//#if NT
  let b$j = (u.b_offset + min(column + 4u * $ju, u.n - 4u) * u.ldb) / 4u;
//#else
  let b$j = (u.b_offset + min(column + 4u * $ju, u.n - 4u)) / 4u;
//#endif
//#end
//#repeat i ROW_BLOCKS
//#repeat j COLUMN_BLOCKS
  var c$i$j = mat4x4<f32>();
//#end
//#end
  let steps = u.k / 4u;
  for (var k = 0u; k < steps; k++) {
//#repeat j COLUMN_BLOCKS
    let right$j = load_b(b$j + k * step_b, ldb);
//#end
//#repeat i ROW_BLOCKS
    let left$i = load_a(a$i + k * step_a, lda);
//#repeat j COLUMN_BLOCKS
    c$i$j += right$j * left$i;
//#end
//#end
  }
//#repeat i ROW_BLOCKS
//#repeat j COLUMN_BLOCKS
  store(row + 4u * $iu, column + 4u * $ju, c$i$j);
//#end
//#end
}
