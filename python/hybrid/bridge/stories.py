"""A small text of our own for the page: short stories from a few hundred words, the same bytes each time.

Every choice is a word of Philox, so that no version of Python and no machine writes another text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybrid.random.philox import philox4x32
from hybrid.random.streams import stream_key

NAMES = (
    *("Ada", "Ben", "Clara", "David", "Elsa", "Finn", "Greta", "Hugo", "Ida", "Jonas"),
    *("Kira", "Leo", "Mara", "Nils", "Olga", "Paul", "Rosa", "Sam", "Tilda", "Viktor"),
)
ANIMALS = ["fox", "hare", "owl", "hedgehog", "mouse", "otter", "badger", "crow", "frog", "squirrel", "goat", "heron"]
PLACES = (
    *("in the forest", "by the river", "on the hill", "near the old mill", "behind the garden wall"),
    *("at the edge of the village", "beside the lake", "under the big oak tree", "in a small white house"),
)
THINGS = (
    *("a red kite", "a silver key", "a wooden boat", "a warm scarf", "an old map", "a little bell", "a round stone"),
    *("a blue lantern", "a broken clock", "a bag of seeds", "a paper crown", "a jar of honey"),
)
TIMES = ("One morning", "One evening", "On a windy day", "On a cold day", "After the rain", "When the sun came up")
MOODS = ["happy", "curious", "tired", "brave", "quiet", "proud", "sleepy", "cheerful"]
WEATHER = (
    *("The wind was strong.", "The sky was grey.", "It was a bright day.", "Snow fell on the roofs."),
    *("The air smelled of apples.", "The leaves were yellow and red."),
)
TROUBLES = (
    *("But the wind took it away.", "But it fell into the water.", "But soon it was lost in the tall grass."),
    *("But nobody knew what it was for.", "But it was too heavy to carry home.", "But then it began to rain."),
)
HELP = (
    *("Do not be sad, said the {animal}. We will look for it together.", "I can help you, said the {animal}."),
    *("Let us think first, said the {animal}. Then we will know what to do.", "Wait here, said the {animal}."),
)
DEEDS = (
    *("They walked along the path and looked under every leaf.", "They asked the children, and they asked the baker."),
    *("They made a long rope and pulled as hard as they could.", "They waited until the clouds were gone."),
    *("They crossed the bridge and climbed over the fence.", "They sat down and shared a piece of bread."),
)
FINDS = (
    *("At last they saw it.", "And there it was, between two stones.", "In the end it was easy."),
    *("Then {name} had an idea, and it worked.", "Then the {animal} laughed and held it up."),
)
ENDS = (
    *("{name} was {mood} and thanked the {animal}.", "{name} and the {animal} were friends from that day on."),
    *("That night {name} slept well.", "They went home before it was dark.", "{name} never forgot that day."),
)


class _Choices:
    """An endless row of choices."""

    def __init__(self, seed: int) -> None:
        self._key = stream_key(seed, "stories")
        self._count = 0

    def of(self, options: Sequence[str]) -> str:
        word = philox4x32((self._count, 0, 0, 0), self._key)[0]
        self._count += 1
        return options[word % len(options)]


def stories(count: int, seed: int = 1337) -> str:
    """`count` stories, one paragraph each, with an empty line between two."""
    return "\n\n".join(_stories(count, seed)) + "\n"


def _stories(count: int, seed: int) -> Iterator[str]:
    choices = _Choices(seed)
    for _ in range(count):
        facts = {"name": choices.of(NAMES), "animal": choices.of(ANIMALS), "mood": choices.of(MOODS)}
        thing = choices.of(THINGS)
        parts = [
            f"Once upon a time {facts['name']} lived {choices.of(PLACES)}.",
            choices.of(WEATHER),
            f"{choices.of(TIMES)} {facts['name']} found {thing}.",
            choices.of(TROUBLES),
            f"A {choices.of(MOODS)} {facts['animal']} came by.",
            choices.of(HELP),
            choices.of(DEEDS),
            choices.of(FINDS),
            choices.of(ENDS),
        ]
        yield " ".join(parts).format(**facts)
