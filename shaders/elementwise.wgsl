// Functions of one, two or three tensors, element by element. A switch named after the function chooses it; UNARY, BINARY and GATED say how
// many tensors it takes. `count` is in units of `wide`.

struct Uniforms { count: u32, factor: f32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
//#if BROADCAST
@group(0) @binding(1) var<storage, read> a: array<f32>;
//#else
//#if FROM_F32
@group(0) @binding(1) var<storage, read> a: array<wide>;
//#else
@group(0) @binding(1) var<storage, read> a: array<wide_act>;
//#endif
//#endif
//#if UNARY
//#if TO_F32
@group(0) @binding(2) var<storage, read_write> y: array<wide>;
//#else
@group(0) @binding(2) var<storage, read_write> y: array<wide_act>;
//#endif
//#endif
//#if BINARY
@group(0) @binding(2) var<storage, read> b: array<wide_act>;
@group(0) @binding(3) var<storage, read_write> y: array<wide_act>;
//#endif
//#if GATED
@group(0) @binding(2) var<storage, read> b: array<wide_act>;
@group(0) @binding(3) var<storage, read> c: array<wide_act>;
@group(0) @binding(4) var<storage, read_write> y: array<wide_act>;
@group(0) @binding(5) var<storage, read_write> z: array<wide_act>;
//#endif

fn sigmoid(v: wide) -> wide { return 1.0 / (1.0 + exp(-v)); }

// tanh of the inner function of gelu; beyond 15 it is 1 to the last bit, and some drivers overflow.
fn gelu_tanh(v: wide) -> wide {
  let inner = 0.7978845608028654 * (v + 0.044715 * v * v * v);
  return tanh(clamp(inner, wide(-15.0), wide(15.0)));
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let i = workgroup_index(group, groups) * THREADS + thread;
  if (i >= u.count) { return; }
//#if BROADCAST
  y[i] = wide(a[0]);
//#endif
//#if SCALE
  y[i] = to_wide_act(u.factor * wide(a[i]));
//#endif
//#if SCALE_F32
  y[i] = u.factor * a[i];
//#endif
//#if CAST_ACT
  y[i] = to_wide_act(a[i]);
//#endif
//#if CAST_F32
  y[i] = wide(a[i]);
//#endif
//#if ADD
  y[i] = to_wide_act(wide(a[i]) + wide(b[i]));
//#endif
//#if MUL
  y[i] = to_wide_act(wide(a[i]) * wide(b[i]));
//#endif
//#if GELU
  let v = wide(a[i]);
  y[i] = to_wide_act(0.5 * v * (1.0 + gelu_tanh(v)));
//#endif
//#if GELU_GRAD
  let v = wide(a[i]);
  let t = gelu_tanh(v);
  let slope = 0.5 * (1.0 + t) + 0.5 * v * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * v * v);
  y[i] = to_wide_act(wide(b[i]) * slope);
//#endif
//#if SILU
  let v = wide(a[i]);
  y[i] = to_wide_act(v * sigmoid(v));
//#endif
//#if SILU_GRAD
  let v = wide(a[i]);
  let s = sigmoid(v);
  y[i] = to_wide_act(wide(b[i]) * s * (1.0 + v * (1.0 - s)));
//#endif
//#if RELU2
  let v = max(wide(a[i]), wide());
  y[i] = to_wide_act(v * v);
//#endif
//#if RELU2_GRAD
  y[i] = to_wide_act(wide(b[i]) * 2.0 * max(wide(a[i]), wide()));
//#endif
//#if SWIGLU
  let v = wide(a[i]);
  y[i] = to_wide_act(v * sigmoid(v) * wide(b[i]));
//#endif
//#if SWIGLU_GRAD
  let v = wide(a[i]);
  let s = sigmoid(v);
  let up = wide(b[i]);
  let d = wide(c[i]);
  y[i] = to_wide_act(d * up * s * (1.0 + v * (1.0 - s)));
  z[i] = to_wide_act(d * v * s);
//#endif
}
