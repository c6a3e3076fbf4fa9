"""The names that facts are about, and their values. With a space in front each is one token of the shipped tokenizer,
and each stands in one list only, so a word tells what kind of thing it is."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PEOPLE = _words("""
alice bruno carla diego elena felix greta hamid irene jonas karin lucia marco nadia oscar petra quinn rosa simon
tanya ursula viktor wanda xavier yusuf zoe adam beate cyril dora emil fiona gavin helga igor judith kevin laura
milan nora otto paula rafael sonja tobias ulrike vera walter yvonne amir bianca cedric daria edgar frida georg hanna
ivan jana klaus leila mateo nina olga pablo renata stefan teresa anton brigit clara dmitri esther fatima gustav heidi
isabel joel katya lorenz magda niels oriana philip ramon selma theo valeria wilma agnes boris celia dana erik flora
gloria hugo ingrid jasper kira liam mona noel ottilie pedro ruth sven tilda ugo vanessa wesley yara
""")
THINGS = _words("""
falcon heron badger otter lynx marten osprey kestrel bison gazelle jaguar leopard panther cougar coyote wolf raven
sparrow swallow finch thrush plover curlew egret pelican puffin gannet petrel albatross condor vulture buzzard
harrier merlin peregrine ibis stork crane flamingo toucan parrot macaw lorikeet cassowary kiwi penguin walrus narwhal
dolphin porpoise orca manatee dugong beluga marlin barracuda sturgeon salmon trout herring mackerel anchovy halibut
lobster oyster mussel urchin squid octopus nautilus cuttlefish gecko iguana chameleon tortoise python cobra viper
salamander axolotl newt toad cricket beetle hornet mantis dragonfly moth antelope giraffe zebra rhino hippo okapi
tapir llama alpaca camel donkey yak moose caribou elk ferret weasel stoat wombat koala platypus echidna
""")
VALUES = _words("""
amber basalt cedar copper coral crimson crystal cobalt ebony emerald fern flint garnet ginger granite hazel indigo
iris ivory jade jasmine juniper lapis laurel lavender lemon lilac linen lotus magnolia mahogany mango maple marble
maroon mint moss mustard myrtle nutmeg oak obsidian ochre olive onyx opal orchid papaya pearl pepper pine plum poplar
poppy pumice quartz raspberry rosewood ruby saffron sage sandal sapphire scarlet sepia shale silk slate spruce
sulphur sumac teak thistle thyme topaz tulip turmeric turquoise umber vanilla velvet violet walnut willow wisteria
yarrow zinc acorn almond aloe anise apricot aspen azure bamboo barley basil birch bramble bronze burgundy cactus
caramel cardamom cashew chestnut chive cinnamon citron clay clove clover cocoa cotton cumin cypress daffodil dahlia
denim elder fennel fig foxglove freesia fuchsia gold gravel hemlock hemp hickory holly honey hyacinth ivy kale kelp
larch leek lichen lime linden lupin malachite marigold mulberry nettle nickel oat oregano palm parsley peach pecan
peony persimmon pistachio platinum pomelo primrose pumpkin quince reed rhubarb rye sesame sorrel soya sunflower
tamarind tangerine tarragon tungsten verbena wheat yew zinnia
""")
THING_ATTRIBUTES = ("code", "region", "channel", "vault")
"""Attributes of a thing; each value is a word of VALUES."""
PERSON_ATTRIBUTES = ("badge", "color", "locker", "seal")
"""Attributes of a person; each value is a word of VALUES."""
RELATIONS = ("owner", "keeper", "alias", "backup")
"""Attributes of a thing whose value is a person (the first two) or another thing."""
