// Matrix product C[M, N] (+)= A * B (+ bias) (+ residual) in blocks of 4 x 4, with vec4 loads only.
//
//   NT: A[M, K], B[N, K]     NN: A[M, K], B[K, N]     TN: A[K, M], B[K, N]
//
// Needs K, N, every leading dimension and every offset divisible by 4; NT and NN also M >= 4. TN reads the rows of A
// up to the next multiple of 4 of M, which must lie within lda. K is summed in ascending order, four terms at a time,
// and in this order whatever the variant.
//
// A thread owns ROW_LOADS * BLOCKS_A_LOAD blocks down and COLUMN_BLOCKS blocks across. Where its operands come from:
//   (default)  straight from memory: for CPUs, where workgroup memory is plain memory; BLOCKS_A_LOAD is 1
//   TILES      the workgroup copies STEP of K at a time to workgroup memory: for GPUs; BLOCKS_A_LOAD is 1
//   SUBGROUPS  each of the first 4 * BLOCKS_A_LOAD lanes loads its own vec4 of A and broadcasts it, so that one load
//              serves BLOCKS_A_LOAD blocks in every lane. All threads of the workgroup share their rows: THREADS_M is 1

struct Uniforms {
  m: u32, n: u32, k: u32, lda: u32, ldb: u32, ldc: u32, a_offset: u32, b_offset: u32, c_offset: u32, accumulate: u32,
}

//#if HALF
// Four f16 as two words: a CPU driver moves and unpacks them faster than four halves.
alias half4 = vec2<u32>;
fn from_half(v: half4) -> vec4<f32> { return vec4<f32>(unpack2x16float(v.x), unpack2x16float(v.y)); }
//#else
alias half4 = vec4<f32>;
fn from_half(v: half4) -> vec4<f32> { return v; }
//#endif
//#if A_F32
alias a4 = vec4<f32>;
fn from_a(v: a4) -> vec4<f32> { return v; }
//#else
alias a4 = half4;
fn from_a(v: a4) -> vec4<f32> { return from_half(v); }
//#endif
//#if B_F32
alias b4 = vec4<f32>;
fn from_b(v: b4) -> vec4<f32> { return v; }
//#else
alias b4 = half4;
fn from_b(v: b4) -> vec4<f32> { return from_half(v); }
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

// Blocks are matrices such that C's block is `right * left`: column i of `left` is row i of A's block, column k of
// `right` is row k of B's (K x N) block. Four vec4 from memory are either such a block or its transpose.

fn left_of(v0: vec4<f32>, v1: vec4<f32>, v2: vec4<f32>, v3: vec4<f32>) -> mat4x4<f32> {
//#if TN
  return transpose(mat4x4<f32>(v0, v1, v2, v3));
//#else
  return mat4x4<f32>(v0, v1, v2, v3);
//#endif
}

fn load_left(at: u32) -> mat4x4<f32> {
  let stride = u.lda / 4u;
  return left_of(
    from_a(a[at]), from_a(a[at + stride]), from_a(a[at + 2u * stride]), from_a(a[at + 3u * stride]));
}

fn load_right(at: u32) -> mat4x4<f32> {
  let stride = u.ldb / 4u;
  let block = mat4x4<f32>(
    from_b(b[at]), from_b(b[at + stride]), from_b(b[at + 2u * stride]), from_b(b[at + 3u * stride]));
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

// Places in A and B, in vec4: of a row of blocks or a column of blocks at K = 0, and the distance of 4 along K.
fn place_a(row: u32) -> u32 {
//#if TN
  return (u.a_offset + top_of(row)) / 4u;
//#else
  return (u.a_offset + top_of(row) * u.lda) / 4u;
//#endif
}

fn place_b(column: u32) -> u32 {
//#if NT
  return (u.b_offset + min(column, u.n - 4u) * u.ldb) / 4u;
//#else
  return (u.b_offset + min(column, u.n - 4u)) / 4u;
//#endif
}

fn step_a() -> u32 {
//#if TN
  return u.lda;
//#else
  return 1u;
//#endif
}

fn step_b() -> u32 {
//#if NT
  return 1u;
//#else
  return u.ldb;
//#endif
}

fn row_of(block: mat4x4<f32>, i: u32) -> vec4<f32> {
  return select(select(block[0], block[1], i == 1u), select(block[2], block[3], i == 3u), i > 1u);
}

fn store(row: u32, column: u32, sum: vec4<f32>) {
  let at = (u.c_offset + row * u.ldc + column) / 4u;
  var v = sum;
//#if BIAS
  v += bias[column / 4u];
//#endif
//#if RESIDUAL
  v += vec4<f32>(residual[at]);
//#endif
  if (u.accumulate != 0u) { v += vec4<f32>(c[at]); }
  c[at] = to_c(v);
}

//#if TILES
const DOWN: u32 = THREADS_M * ROW_LOADS;  // blocks of the workgroup's tile
const ACROSS: u32 = THREADS_N * COLUMN_BLOCKS;
// Row k of the tile, in vec4 along M or N: the same layout for all forms.
var<workgroup> tile_a: array<vec4<f32>, STEP * DOWN>;
var<workgroup> tile_b: array<vec4<f32>, STEP * ACROSS>;

// Copy STEP / 4 blocks of K from `k4` on (in blocks) for the tile at (row, column).
fn fill(row: u32, column: u32, k4: u32, thread: u32) {
  for (var i = thread; i < STEP / 4u * (DOWN + ACROSS); i += THREADS_M * THREADS_N) {
    let q = i % (STEP / 4u);
    let line = i / (STEP / 4u);
    if (4u * (k4 + q) < u.k) {
      if (line < DOWN) {
        let block = transpose(load_left(place_a(row + 4u * line) + (k4 + q) * step_a()));
        let at = 4u * q * DOWN + line;
        tile_a[at] = block[0];
        tile_a[at + DOWN] = block[1];
        tile_a[at + 2u * DOWN] = block[2];
        tile_a[at + 3u * DOWN] = block[3];
      } else {
        let block = load_right(place_b(column + 4u * (line - DOWN)) + (k4 + q) * step_b());
        let at = 4u * q * ACROSS + line - DOWN;
        tile_b[at] = block[0];
        tile_b[at + ACROSS] = block[1];
        tile_b[at + 2u * ACROSS] = block[2];
        tile_b[at + 3u * ACROSS] = block[3];
      }
    }
  }
}
//#endif

// One-dimensional, because lavapipe fills its vectors along x only.
@compute @workgroup_size(THREADS_M * THREADS_N)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
//#if SUBGROUPS
  @builtin(subgroup_invocation_id) lane: u32,
//#endif
) {
  let across = (u.n + 4u * COLUMN_BLOCKS * THREADS_N - 1u) / (4u * COLUMN_BLOCKS * THREADS_N);
  let tile = workgroup_index(workgroup, workgroups);
  let tile_row = tile / across * THREADS_M * 4u * ROW_LOADS * BLOCKS_A_LOAD;
  let tile_column = tile % across * THREADS_N * 4u * COLUMN_BLOCKS;
  let block_row = thread / THREADS_N * ROW_LOADS;
  let block_column = thread % THREADS_N * COLUMN_BLOCKS;
  let row = tile_row + 4u * block_row;
  let column = tile_column + 4u * block_column;
  let last = u.k / 4u;
//#repeat p ROW_LOADS
//#repeat h BLOCKS_A_LOAD
//#repeat j COLUMN_BLOCKS
  var c$p$h$j = mat4x4<f32>();
//#end
//#end
//#end
//#if TILES
  for (var k = 0u; k < last; k += STEP / 4u) {
    workgroupBarrier();
    fill(tile_row, tile_column, k, thread);
    workgroupBarrier();
    for (var q = 0u; q < min(STEP / 4u, last - k); q++) {
      let left_at = 4u * q * DOWN + block_row;
      let right_at = 4u * q * ACROSS + block_column;
//#repeat j COLUMN_BLOCKS
      let right$j = mat4x4<f32>(
        tile_b[right_at + $ju], tile_b[right_at + $ju + ACROSS],
        tile_b[right_at + $ju + 2u * ACROSS], tile_b[right_at + $ju + 3u * ACROSS]);
//#end
//#repeat p ROW_LOADS
      let left$p = transpose(mat4x4<f32>(
        tile_a[left_at + $pu], tile_a[left_at + $pu + DOWN],
        tile_a[left_at + $pu + 2u * DOWN], tile_a[left_at + $pu + 3u * DOWN]));
//#repeat j COLUMN_BLOCKS
      c$p0$j += right$j * left$p;
//#end
//#end
    }
  }
//#else
//#repeat p ROW_LOADS
//#if SUBGROUPS
  let a$p = place_a(row + 4u * ($pu * BLOCKS_A_LOAD + lane / 4u % BLOCKS_A_LOAD)) + lane % 4u * (u.lda / 4u);
//#else
  let a$p = place_a(row + 4u * $pu);
//#endif
//#end
//#repeat j COLUMN_BLOCKS
  let b$j = place_b(column + 4u * $ju);
//#end
  for (var k = 0u; k < last; k++) {
//#if SUBGROUPS
//#repeat p ROW_LOADS
    let own$p = from_a(a[a$p + k * step_a()]);
//#end
//#endif
//#repeat j COLUMN_BLOCKS
    let right$j = load_right(b$j + k * step_b());
//#end
//#repeat p ROW_LOADS
//#repeat h BLOCKS_A_LOAD
//#if SUBGROUPS
    let left$p$h = left_of(
      subgroupBroadcast(own$p, 4u * $hu), subgroupBroadcast(own$p, 4u * $hu + 1u),
      subgroupBroadcast(own$p, 4u * $hu + 2u), subgroupBroadcast(own$p, 4u * $hu + 3u));
//#else
    let left$p$h = load_left(a$p + k * step_a());
//#endif
//#repeat j COLUMN_BLOCKS
    c$p$h$j += right$j * left$p$h;
//#end
//#end
//#end
  }
//#endif
  // One loop and one store for a column of blocks: choosing the row costs less than compiling a store for each.
//#repeat j COLUMN_BLOCKS
  let end$j = min(row + 4u * ROW_LOADS * BLOCKS_A_LOAD, u.m);
  for (var r = select(end$j, row, column + 4u * $ju < u.n); r < end$j; r++) {
    let block = (r - row) / 4u;
    let i = r - top_of(row + 4u * block);
    var v = vec4<f32>();
//#repeat p ROW_LOADS
//#repeat h BLOCKS_A_LOAD
    v = select(v, row_of(c$p$h$j, i), block == $pu * BLOCKS_A_LOAD + $hu);
//#end
//#end
    store(r, column + 4u * $ju, v);
  }
//#end
}
