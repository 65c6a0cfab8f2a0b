"""Endless simple stories from a few plots, so that a story can be about what was asked for.

A plot is text with alternatives in brackets, `[one|two|three]`, and names in braces. It makes the
little prose that is free to use go further: the same grammar with other animals and things.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .wording import ANIMALS, BOYS, COLOURS, FOODS, GIRLS, PETS, PLACES, Rng, capital, pick

OPENINGS = (
    "Once upon a time, there was a {kind} named {name}.",
    "Once upon a time, a {kind} named {name} lived near a {place}.",
    "One day, a {kind} named {name} went to the {place}.",
    "There once was a {kind} called {name}.",
    "{Name} was a {kind} who lived by the {place}.",
)
ENDINGS = (
    "{Name} was very happy. [The end.|]",
    "And they lived happily ever after.",
    "That night, {name} fell asleep with a big smile.",
    "{Name} learned that it is good to [share|help others|be kind|tell the truth|try again].",
    '"This was the best day ever," said {name}.',
    "{Name} [went home|ran home|walked home] and told {his} [mom|dad|family] all about it.",
)
PLOTS = (
    # lost and found
    """{Name} had a {colour} {thing}. {He} [loved it very much|took it everywhere|liked to play with
    it every day]. [One morning|One day], {he} could not find the {thing}. {Name} was [sad|very
    sad| worried]. {He} looked [under the bed|behind the door|in the garden|on the shelf]. {He}
    looked [in the box|near the tree|in the kitchen|under the table] too. But the {thing} was not
    there. ##Then {he} met a {adj} {animal}. "Why are you [sad|crying]?" asked the {animal}. "I
    lost my {colour} {thing}," said {name}. "I will help you," said the {animal}. [They looked and
    looked.| They looked together all day.|] At last they found the {thing} [in the {place2}|under
    a big leaf|behind a rock]. "Thank you!" said {name}. [{He} gave the {animal} a hug.|The
    {animal} smiled.|]""",
    # sharing
    """{Name} had {some_food}. {He} wanted to eat all of it. A {adj} {animal} came and said, "I am
    hungry. Can I have some?" {Name} said, "No, it is mine!" The {animal} was sad and [went
    away|sat down under a tree|walked to the {place2}]. ##{Name} felt bad. {He} thought about the
    {animal}. Then {he} [ran|went|walked] to the {animal} and said, "I am sorry. Let us share."
    The {animal} was [happy|very happy]. They ate the {food} together [in the sun|under a tree|by
    the water]. [It tasted even better.|It was the best food they ever had.|]""",
    # afraid, then brave
    """{Name} was afraid of [the dark|the water|loud noises|high places]. [Every night|Every
    day], {he} hid [under the bed|behind the door|under a blanket]. {His} friend, a {adj} {animal}
    named {friend}, wanted to help. "Come with me," said {friend}. "We will go
    [slowly|together|step by step]." ##They went to the {place2}. {Name} was scared, but {he} held
    {friend} [tight|by the hand|very close]. Then they saw a {colour} {thing} [shining in the
    light|on the ground|in the grass]. "Look!" said {name}. "It is beautiful!" {Name} forgot to be
    afraid. "You are brave," said {friend}. {Name} [smiled|laughed|felt proud].""",
    # help someone
    """One [sunny|cold|rainy|windy|warm] day, {he} heard a [small|soft|strange|sad] sound in the
    {place2}. {He} went to look. A little {animal} was stuck [in the mud|under a log|in a hole|in
    a net]. "Help me, please!" said the {animal}. {Name} pulled and pulled, but {he} was not
    strong enough. ##So {he} [ran|went] to get {his} [mom|dad|big brother|friend {friend}]. They
    used a {thing} and pulled together. Pop! The {animal} was free. "Thank you for saving me,"
    said the {animal}. [From then on, they played together every day.|They all laughed.|The
    {animal} gave them {some_food}.]""",
    # make something
    """{Name} wanted to make a {thing}. {He} had some [paper|wood|string|clay] and a lot of {colour}
    paint. The first {thing} [fell down|broke|was too small]. {Name} was sad. "Try again," said
    {his} [mom|dad|grandma|friend {friend}]. The second one [fell down|broke] too. ##"Do not give
    up," said {his} [mom|dad|grandma]. {Name} tried again. {He} worked [all day|slowly|with care].
    This time, the {thing} was [perfect|big and strong|very pretty]. Everyone in the {place2} came
    to see it. "What a nice {colour} {thing}!" they said.""",
    # a rule broken
    """{His} mom said, "Do not go to the {place2} alone." But {name} wanted to see the {animal} that
    lived there. So {he} went [when no one was looking|early in the morning|all by {himself}]. At
    the {place2}, it was [dark|cold|very quiet]. {Name} could not find the way home. {He} began to
    cry. ##A {adj} {animal} came and asked, "Are you lost?" "Yes," said {name}. "I should have
    listened to my mom." "Follow me," said the {animal}. They walked [past the trees|over the
    hill|along the path] until they saw the house. {Name} said sorry to {his} mom, and she gave
    {him} a [big|warm] hug.""",
    # a contest
    """One day there was a race in the {place2}. {Name} wanted to win the {colour} {thing}. A {adj}
    {animal} named {friend} wanted to win it too. "I am faster than you," said {friend}. They ran
    and ran. Then {friend} [fell|hurt a leg|tripped on a stone] and cried. ##{Name} could win now.
    But {he} stopped and went back. "Are you okay?" asked {name}. {He} helped {friend} get up, and
    they [walked|ran] to the end together. [Everyone clapped.|All the animals cheered.] They both
    got the {thing}. "You are a good friend," said {friend}.""",
)
KIND_ADJECTIVES = "little small big brave kind clever happy young funny silly shy curious".split()
GOOD_ADJECTIVES = "kind friendly wise old little big gentle clever brave funny happy nice".split()
TOYS = """
ball kite book hat drum boat doll bike scarf bell box car train balloon cup puppet robot rocket map
flag whistle umbrella basket ring lamp
""".split()
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True)
class Story:
    """A story, and words for asking for it: who it is about and what plays a part in it."""

    text: str
    topics: tuple[str, ...]


def make_story(rng: Rng) -> Story:
    """A new story of 400 to 1,000 characters."""
    he = "he" if rng.random() < 0.5 else "she"
    people = BOYS if he == "he" else GIRLS
    if rng.random() < 0.5:
        kind, name = ("boy" if he == "he" else "girl"), pick(rng, people)
        topic = f"a {kind} named {name}"
    else:
        kind, name = pick(rng, ANIMALS), pick(rng, PETS + people)
        topic = f"a {kind} named {name}"
    animal = pick(rng, [a for a in ANIMALS if a != kind])
    thing, place, food = pick(rng, TOYS), pick(rng, PLACES), pick(rng, FOODS)
    names = {
        "kind": f"{pick(rng, KIND_ADJECTIVES)} {kind}",
        "name": name,
        "he": he,
        "his": "his" if he == "he" else "her",
        "him": "him" if he == "he" else "her",
        "himself": "himself" if he == "he" else "herself",
        "friend": pick(rng, [n for n in PETS + BOYS + GIRLS if n != name]),
        "animal": animal,
        "thing": thing,
        "place": place,
        "place2": pick(rng, [p for p in PLACES if p != place]),
        "colour": pick(rng, COLOURS),
        "adj": pick(rng, GOOD_ADJECTIVES),
        "food": food,
        "some_food": f"some {food}",
    }
    names |= {capital(key): capital(value) for key, value in names.items() if key != "place2"}
    plot = pick(rng, PLOTS)
    template = f"{pick(rng, OPENINGS)} {plot}##{pick(rng, ENDINGS)}"
    while "[" in template:
        template = _CHOICE.sub(lambda m: pick(rng, m[1].split("|")), template)
    parts = [_SPACES.sub(" ", p.format(**names)).strip() for p in template.split("##")]
    text = _ARTICLE.sub(r"\1n ", "\n\n".join(parts))
    topics = [topic, f"a {kind}"] if kind not in ("boy", "girl") else [topic, name]
    topics += [
        word for word in (f"a {animal}", f"a {thing}", food) if word.split()[-1] in plot_words(text)
    ]
    return Story(text, tuple(_ARTICLE.sub(r"\1n ", t) for t in topics))


def plot_words(text: str) -> set[str]:
    """The lower-case words of a text."""
    return set(re.findall(r"[a-z]+", text.lower()))
