// Functions of one, two or three tensors, element by element. A switch named after the function chooses it; UNARY,
// BINARY and GATED say how many tensors it takes. `count` is in units of `wide`.

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
//#if TO_F32
@group(0) @binding(2) var<storage, read> b: array<wide>;
@group(0) @binding(3) var<storage, read_write> y: array<wide>;
//#else
@group(0) @binding(2) var<storage, read> b: array<wide_act>;
@group(0) @binding(3) var<storage, read_write> y: array<wide_act>;
//#endif
//#endif
//#if GATED
@group(0) @binding(2) var<storage, read> b: array<wide_act>;
@group(0) @binding(3) var<storage, read> c: array<wide_act>;
@group(0) @binding(4) var<storage, read_write> y: array<wide_act>;
@group(0) @binding(5) var<storage, read_write> z: array<wide_act>;
//#endif

// Clamped where the result is 1 or as good as 0, because an exponential that overflows may come out as anything.
// NaN stays NaN in what is computed from it: the callers multiply by v.
fn sigmoid(v: wide) -> wide { return 1.0 / (1.0 + exp(-clamp(v, wide(-80.0), wide(80.0)))); }

// gelu(v) = v/2 * (1 + tanh(t)) = v * sigmoid(2t), t = sqrt(2/pi) * (v + 0.044715 v^3).
fn gelu_gate(v: wide) -> wide { return sigmoid(1.5957691216057308 * v * (1.0 + 0.044715 * v * v)); }

// max(v, 0) in a form that lets NaN through, so that a run that diverges is seen to.
fn rectified(v: wide) -> wide { return select(v, wide(), v < wide()); }

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let i = workgroup_index(group, groups) * WORKGROUP + thread;
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
//#if ADD_F32
  y[i] = a[i] + b[i];
//#endif
//#if MUL_F32
  y[i] = a[i] * b[i];
//#endif
//#if MUL
  y[i] = to_wide_act(wide(a[i]) * wide(b[i]));
//#endif
//#if GELU
  let v = wide(a[i]);
  y[i] = to_wide_act(v * gelu_gate(v));
//#endif
//#if GELU_GRAD
  let v = wide(a[i]);
  let s = gelu_gate(v);
  let slope = s + v * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * v * v);
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
  let v = rectified(wide(a[i]));
  y[i] = to_wide_act(v * v);
//#endif
//#if RELU2_GRAD
  y[i] = to_wide_act(wide(b[i]) * 2.0 * rectified(wide(a[i])));
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
