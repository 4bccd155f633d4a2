/** @file The scripts that the Python panel begins with. May import: nothing. */

const IMPORTS = `\
import hybrid_tab as tab
from hybrid.models.config import ModelConfig
from hybrid.optim.settings import OptimizerSettings
from hybrid.plan.compiler import PlanSettings
`;

const MODEL = `\
STEPS = 60
model = ModelConfig(
    vocabulary_size=256, context_length=32, layers=2, width=32, heads=2, feed_forward_width=64
)
`;

/** @param {string} options of the compiler @param {string} rate how the optimizer is set */
const train = (options, rate = `optimizer = OptimizerSettings(type="adamw", lr=5e-3)`) => `\
${rate}
settings = PlanSettings(model, batch_size=4, sequence_length=32, optimizer=optimizer)
plan = await tab.compile(settings${options})
print(f"{plan.parameters:,} parameters, {plan.memory['total']:,} bytes on the device")

session = await tab.open(plan, seed=1337)
text = open("text.txt").read()  # the text chosen on this page
for batch in tab.byte_batches(text, batch_size=4, sequence_length=32, steps=STEPS):
    await session.step([batch])
    for result in await session.results():
        tab.report(step=result.data_step, loss=result.loss)
for result in await session.results(wait=True):
    tab.report(step=result.data_step, loss=result.loss)

ids = await session.generate([*b"Once "], tokens=60)
print(bytes(id for id in ids if id < 256).decode(errors="replace"))
`;

const SCHEDULE = `\
optimizer = OptimizerSettings(
    type="adamw",
    lr=8e-3,
    weight_decay=0.1,
    scheduler=SchedulerSettings(
        enabled=True, type="wsd", warmup_steps=10, total_steps=STEPS - 10, decay_share=0.3, min_lr=1e-4
    ),
)`;

const PARALLEL = `\
def layer(ops, p, x, inputs, cfg, label):
    """Attention and feed-forward side by side, instead of one after the other."""
    attention = decoder.attend(ops, p, decoder.normalise(ops, p.norm1, x, cfg), inputs, cfg)
    forward = decoder.feed_forward(ops, p, decoder.normalise(ops, p.norm2, x, cfg), cfg)
    return ops.add(x, ops.add(attention, forward))
`;

const ACTIVATION = `\
def feed_forward(ops, p, h, cfg):
    """SiLU and squared ReLU together, instead of the model's own activation."""
    up = ops.linear(h, p.up)
    return ops.linear(ops.add(ops.silu(up), ops.relu2(up)), p.down)
`;

const DECODER = IMPORTS.replace(
  "from hybrid.models.config",
  "from hybrid.models import decoder\nfrom hybrid.models.config",
);

/** @type {readonly {title: string, source: string}[]} */
export const EXAMPLES = [
  { title: "A small model", source: `${IMPORTS}\n${MODEL}${train("")}` },
  {
    title: "A learning rate that warms up, stays and decays",
    source: `${IMPORTS.replace("import OptimizerSettings", "import OptimizerSettings, SchedulerSettings")}\n${MODEL}${train("", SCHEDULE)}`,
  },
  {
    title: "A changed block: attention and feed-forward in parallel",
    source: `${DECODER}\n\n${PARALLEL}\n\n${MODEL}${train(', blocks={"layer": layer}')}`,
  },
  {
    title: "A changed block: another activation",
    source: `${IMPORTS}\n\n${ACTIVATION}\n\n${MODEL.replace("feed_forward_width=64", 'feed_forward_width=64, activation="silu"')}${train(', blocks={"feed_forward": feed_forward}')}`,
  },
];
