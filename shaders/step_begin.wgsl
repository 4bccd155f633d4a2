// Opens a step: accumulators and flags to zero, and the seed of the backward pass.
//
//   loss_seed = loss_scale / target_tokens      (loss_scale 1 when the scaler is disabled)
//
// step_input: data step, target tokens, then f32 bits of 1 / target tokens and of the z-loss coefficient.

@group(0) @binding(1) var<storage, read> step_input: array<u32>;
@group(0) @binding(2) var<storage, read_write> step_state: array<u32>;
@group(0) @binding(3) var<storage, read_write> loss_seed: array<f32>;
@group(0) @binding(4) var<storage, read_write> z_loss: array<f32>;
@group(0) @binding(5) var<storage, read_write> overflow_flags: array<u32>;

@compute @workgroup_size(1)
fn main() {
  let scale = select(1.0, bitcast<f32>(step_state[LOSS_SCALE]), step_state[SCALER_ENABLED] != 0u);
  step_state[SKIP] = 0u;
  step_state[GRAD_MULTIPLIER] = 0u;
  step_state[LOSS_ACC] = 0u;
  step_state[NLL_ACC] = 0u;
  step_state[DATA_STEP] = step_input[0];
  step_state[TARGET_TOKENS] = step_input[1];
  step_state[LOSS_SCALE_USED] = bitcast<u32>(scale);
  loss_seed[0] = scale * bitcast<f32>(step_input[2]);
  z_loss[0] = bitcast<f32>(step_input[3]);
  overflow_flags[0] = 0u;
}
