"""Word tables of foils: colours, numbers, nouns and phrases, with replacements."""

from __future__ import annotations

COLOURS = {  # colour -> colours that nobody confuses with it
    "red": ("blue", "green", "yellow", "black", "white"),
    "blue": ("red", "yellow", "orange", "white", "pink"),
    "green": ("red", "orange", "white", "pink", "purple"),
    "yellow": ("red", "blue", "purple", "black"),
    "orange": ("blue", "green", "white", "black", "purple"),
    "pink": ("blue", "green", "black", "yellow"),
    "purple": ("yellow", "green", "white", "orange"),
    "black": ("white", "red", "yellow", "pink", "brown"),
    "white": ("black", "red", "blue", "green", "brown"),
    "brown": ("white", "blue", "green", "black"),
    "gray": ("red", "yellow", "green", "orange", "brown"),
    "grey": ("red", "yellow", "green", "orange", "brown"),
    "tan": ("black", "blue", "green"),
}

ANIMAL_COLOURS = frozenset({"black", "white", "brown"})

NUMBERS = ("two", "three", "four", "five", "six")

# Nouns of people and animals; nouns with a common letter may name the same being.
BEINGS = {
    noun: beings
    for beings, nouns in {
        "m": "man guy",
        "w": "woman lady",
        "b": "boy",
        "g": "girl",
        "bg": "child kid toddler baby",
        "mw": "adult",
        "mwbg": "teenager person player rider climber hiker runner swimmer soldier clown "
        "skateboarder snowboarder skier surfer biker cyclist bicyclist motorcyclist",
        "d": "dog puppy",
        "c": "cat",
        "h": "horse",
        "r": "bird duck",
        "o": "cow bull",
        "s": "sheep goat",
        "y": "monkey",
    }.items()
    for noun in nouns.split()
}

PRONOUNS = {"he|his|him|himself": "wg", "she|hers?|herself": "mb"}  # pronouns -> excluded beings

PLURALS = {  # irregular
    "man": "men",
    "woman": "women",
    "person": "people",
    "child": "children",
    "sheep": "sheep",
    "lady": "ladies",
    "puppy": "puppies",
    "baby": "babies",
}

GUESSABLE = (  # nouns of an obvious colour, or of none
    "grass|snow|water|sky|sand|trees?|leaves|foliage|hair|haired|beard|eyes?|smoke|ice|clouds?|"
    "mountains?|fields?|forest|lights?|belt|wine|juice|photo|photograph|picture|image|shot|object"
)

HEIGHTS = (  # nouns behind "up" and "down"
    "hill|hillside|slope|mountain|mountainside|stairs|steps|staircase|stairway|ramp|cliff|dune|"
    "ladder|escalator|embankment|slide|rail|railing|handrail|bannister|banister"
)

SUPPORTS = (  # nouns behind "on" and "under"
    "bench|table|bike|bicycle|motorcycle|skateboard|surfboard|snowboard|couch|chair|bed|horse|"
    "bridge|trampoline|rock|rocks|boulder|log|swing|roof|deck|dock|pier|platform|stage|car|truck|"
    "tree|blanket|towel|carpet|rug|ledge|wall|raft|boat|sled|scooter|counter|desk|mat|stool"
)

CONTAINERS = (  # nouns behind "in" and "beside"
    "pool|lake|river|pond|stream|creek|fountain|puddle|boat|canoe|kayak|raft|car|truck|tub|bathtub|"
    "box|tent|bucket|basket|cage|swing|cart|wheelchair|stroller|bed|crib|tunnel|doorway|hammock"
)

_THE = r"(?= (?:an?|the|some|his|her|their|its|another|other|two|three)\b)"
_SOME = r"(?= (?:an?|the|some|his|her|their) (?:[\w-]+ ){0,2}?"

PHRASES: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "preposition": (
        ("in front of", ("behind",)),
        (rf"(?<!from )behind{_THE}", ("in front of",)),
        ("on top of", ("underneath",)),
        ("(?:at|on|near) the top of", ("at the bottom of",)),
        ("(?:at|on|near) the bottom of", ("at the top of",)),
        (rf"(?:under|underneath|beneath|below){_THE}", ("on top of", "above")),
        (rf"above{_THE}", ("below",)),
        (rf"(?:jump|leap|fl[iy]|hop|hurdl|step|climb|soar|vault)\w* (over){_THE}", ("under",)),
        (rf"inside(?: of)?{_THE}", ("outside",)),
        (rf"outside(?: of)?{_THE}", ("inside",)),
        (r"outside(?=$|[ ]?[.,])", ("inside", "indoors")),
        (r"(?:indoors|inside)(?=$|[ ]?[.,])", ("outside", "outdoors")),
        (rf"into{_THE}(?! (?:the |an? )?(?:camera|air|distance|sun))", ("out of",)),
        (rf"out of{_THE}", ("into",)),
        (rf"onto{_THE}", ("off",)),
        (rf"towards?{_THE}", ("away from",)),
        (rf"away from{_THE}", ("towards",)),
        (rf"up{_SOME}(?:{HEIGHTS})\b)", ("down",)),
        (rf"down{_SOME}(?:{HEIGHTS})\b)", ("up",)),
        (rf"on{_SOME}(?:{SUPPORTS})\b)", ("under",)),
        (rf"in{_SOME}(?:{CONTAINERS})\b)", ("beside",)),
    ),
    "near_far": (
        (rf"(?:very )?(?:near|next to|close to|beside|alongside){_THE}", ("far from",)),
        (r"(?:very )?far (?:away )?from", ("next to", "near")),
        ("nearby", ("far away",)),
        ("in the (?:background|distance)", ("in the foreground",)),
        ("in the foreground", ("in the background",)),
    ),
}

LEFT_RIGHT = r"(?:the|his|her|its|their|to|far) (left|right)(?! (?:way|moment|time|over|behind)\b)"

SYMMETRIC = (  # text between two nouns whose exchange leaves a caption true
    r"^(?:,|or|while|by)?$|\band$|"
    r"\b(?:with|next to|beside|near|alongside|nearby|facing|opposite|across from|face to face)$|"
    r"(?<!ed )by$|"
    r"\b(?:fight|wrestl|kiss|hug|embrac|danc|play|rac(?:e|ing)|talk|meet|argu|spar|greet|shak)\w*"
)

SMALL_WORDS = (  # words that end a noun phrase
    "in|on|at|of|with|and|or|as|by|to|for|from|into|onto|over|under|near|behind|through|while|is|"
    "are|was|who|that|which|has|have|his|her|its|their|him|them|it|he|she|they|a|an|the|next|up|"
    "down|off|out|inside|outside|beside|between|around|along|across|toward|towards|against"
)

SEVERAL = (  # words that imply more than one being
    "two|three|four|five|six|several|many|some|group|crowd|team|couple|pair|both|each|another|"
    "other|others|people|all|few|they|their|them|and"
)
