// The sum of everything times a factor, in one workgroup and a fixed order; with MSE, of squared differences.

struct Uniforms { count: u32, factor: f32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
//#if ACT
@group(0) @binding(1) var<storage, read> a: array<wide_act>;
//#else
@group(0) @binding(1) var<storage, read> a: array<wide>;
//#endif
//#if MSE
//#if ACT
@group(0) @binding(2) var<storage, read> b: array<wide_act>;
//#else
@group(0) @binding(2) var<storage, read> b: array<wide>;
//#endif
@group(0) @binding(3) var<storage, read_write> y: array<f32>;
//#else
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
//#endif

var<workgroup> partial: array<f32, WORKGROUP>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(local_invocation_index) thread: u32) {
  var sum = wide();
  for (var i = thread; i < u.count; i += WORKGROUP) {
//#if MSE
    let difference = wide(a[i]) - wide(b[i]);
    sum += difference * difference;
//#else
    sum += wide(a[i]);
//#endif
  }
  partial[thread] = total(sum);
  workgroupBarrier();
  if (thread == 0u) {
    var all = 0.0;
    for (var k = 0u; k < WORKGROUP; k++) { all += partial[k]; }
    y[0] = all * u.factor;
  }
}
