// Dropout with a mask drawn from Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"):
// four elements of one sample share the block (element / 4, sample, step, 0). The mask depends on nothing else, so
// any split of a batch draws the same one.

struct Uniforms { samples: u32, elements: u32, blocks: u32, site: u32, threshold: u32, factor: f32 }

@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> x: array<act>;
@group(0) @binding(2) var<storage, read> sample_ids: array<u32>;
@group(0) @binding(3) var<storage, read> data_step: array<u32>;
@group(0) @binding(4) var<storage, read> dropout_keys: array<u32>;
@group(0) @binding(5) var<storage, read_write> y: array<act>;

// The high word of a 32 x 32 bit product, from products of halves.
fn multiply_high(a: u32, b: u32) -> u32 {
  let a0 = a & 0xffffu;
  let a1 = a >> 16u;
  let b0 = b & 0xffffu;
  let b1 = b >> 16u;
  let middle = a1 * b0 + ((a0 * b0) >> 16u);
  let low = a0 * b1 + (middle & 0xffffu);
  return a1 * b1 + (middle >> 16u) + (low >> 16u);
}

fn philox(start: vec4<u32>, start_key: vec2<u32>) -> vec4<u32> {
  var c = start;
  var key = start_key;
  for (var round = 0u; round < 10u; round++) {
    let high0 = multiply_high(0xd2511f53u, c.x);
    let high1 = multiply_high(0xcd9e8d57u, c.z);
    c = vec4<u32>(high1 ^ c.y ^ key.x, 0xcd9e8d57u * c.z, high0 ^ c.w ^ key.y, 0xd2511f53u * c.x);
    key += vec2<u32>(0x9e3779b9u, 0xbb67ae85u);
  }
  return c;
}

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) thread: u32,
) {
  let index = workgroup_index(group, groups) * WORKGROUP + thread;
  if (index >= u.samples * u.blocks) { return; }
  let sample = index / u.blocks;
  let block = index % u.blocks;
  let key = vec2<u32>(dropout_keys[2u * u.site], dropout_keys[2u * u.site + 1u]);
  let words = philox(vec4<u32>(block, sample_ids[sample], data_step[0], 0u), key);
  for (var k = 0u; k < 4u; k++) {
    let element = 4u * block + k;
    if (element < u.elements) {
      let at = sample * u.elements + element;
      y[at] = to_act(select(0.0, f32(x[at]) * u.factor, words[k] >= u.threshold));
    }
  }
}
