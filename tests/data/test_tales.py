"""The embedded corpus: pinned, pure, varied, and grammatical as far as patterns can tell."""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter

import pytest

from stepformer.base.errors import UnknownNameError
from stepformer.data import tales

each_dialect = pytest.mark.parametrize("dialect", tales.DIALECTS)
CHECKED = 1500
PINNED = {
    "village": "31647a2bb0cfd7814207b44260ae44f57851f43d23caf91f1757da0ec66e2296",
    "space": "44a0ab7febf4145086f99cdb9e5d01833c1d6617efb3c0dd889650d80b7ab145",
}
MASCULINE = {"he", "him", "his", "himself", "boy"}
FEMININE = {"she", "her", "herself", "girl"}


@functools.cache
def told(dialect: str) -> tuple[tales.Tale, ...]:
    return tuple(tales.tale(index, dialect=dialect) for index in range(CHECKED))


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def digest(dialect: str) -> str:
    return hashlib.sha256("\n\n".join(tales.stories(50, dialect=dialect)).encode()).hexdigest()


def offenders(dialect: str, pattern: str) -> list[str]:
    """Each passage that matches, with its surroundings, so that a failure shows the sentence."""
    found = re.compile(pattern, re.MULTILINE)
    return [
        tale.text[max(0, hit.start() - 30) : hit.end() + 30]
        for tale in told(dialect)
        for hit in found.finditer(tale.text)
    ]


@each_dialect
def test_corpus_is_pinned(dialect):
    assert digest(dialect) == PINNED[dialect], (
        f"The stories of '{dialect}' changed: raise tales.VERSION and pin the new digest, or undo the change."
    )


def test_version_belongs_to_the_pinned_digests():
    assert tales.VERSION == 1, "The version was raised: pin the new digests above, then this number."


@each_dialect
def test_a_story_depends_on_its_arguments_only(dialect):
    forward = [tales.story(index, dialect=dialect, seed=3) for index in range(40)]
    backward = [tales.story(index, dialect=dialect, seed=3) for index in reversed(range(40))]
    assert forward == backward[::-1]
    assert forward[10:20] == list(tales.stories(10, dialect=dialect, seed=3, start=10))


def test_the_generator_is_splitmix64():
    dice = tales.Dice("")
    dice._state = 1234567
    # the first two outputs published for splitmix64 with this seed, of which `below` shows the top 32 bits
    assert [dice.below(2**32) for _ in range(2)] == [6457827717110365317 >> 32, 3203168211198807973 >> 32]


def test_seed_and_dialect_matter():
    texts = {tales.story(5, dialect=dialect, seed=seed) for dialect in tales.DIALECTS for seed in range(10)}
    assert len(texts) == 10 * len(tales.DIALECTS)
    assert tales.story(5) == tales.story(5, dialect=tales.DIALECTS[0], seed=0)


@each_dialect
def test_no_story_is_told_twice(dialect):
    assert len(set(tales.stories(5000, dialect=dialect))) == 5000


@each_dialect
def test_every_plot_is_told(dialect):
    counts = Counter(tale.plot for tale in told(dialect))
    plots = [plot for plot, _ in tales.grammar(dialect).plots]
    assert len(plots) >= 8
    assert min(counts[plot] for plot in plots) > CHECKED / len(plots) / 2


@each_dialect
def test_length(dialect):
    lengths = sorted(len(words(tale.text)) for tale in told(dialect))
    assert lengths[0] >= 65
    assert lengths[-1] <= 300
    assert lengths[len(lengths) * 19 // 20] - lengths[len(lengths) // 20] > 80


@each_dialect
@pytest.mark.parametrize(
    "pattern",
    [
        r"[^\x20-\x7e\n]",  # printable ASCII
        r"[{}<>\[\]|/]",  # notation that was not resolved
        r"  | $|^ |\n\n|\n\Z",
        r" [.,!?;:]",
        r"[,;:][.,!?;:]|\.\.|[.,!?;:][A-Za-z]",
        r"(?<![.!?])(?<![.!?]\")$",  # paragraphs end a sentence
        r"\b[Aa] (?!one\b|use|uni|eu)[aeiou]|\b[Aa]n (?!hour|honest)[^aeiou]",
        r"\b(\w+) \1\b",
        r"^\"?[a-z]|[.!?] \"?[a-z]|\.\" \"?[a-z]|[!?]\" \"[a-z]",  # sentences begin with a capital
        r"\b(?:a|an|the|and|his|its)[.,!?]",
        r"\b(?:a|an) (?:a|an|the|two|three|six)\b|\bthe (?:a|an|the)\b",
        r"\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve) was\b|\b[Oo]ne were\b",
    ],
)
def test_surface_grammar(dialect, pattern):
    assert offenders(dialect, pattern)[:5] == []


@each_dialect
def test_quotation_marks_pair_up(dialect):
    for tale in told(dialect):
        for paragraph in tale.text.split("\n"):
            marks = [hit.start() for hit in re.finditer('"', paragraph)]
            assert len(marks) % 2 == 0, paragraph
            for opening, closing in zip(marks[::2], marks[1::2], strict=True):
                assert opening == 0 or paragraph[opening - 1] == " ", paragraph
                assert paragraph[closing - 1] in ".,!?", paragraph
                assert paragraph[closing + 1 : closing + 2] in ("", " "), paragraph


@each_dialect
def test_the_cast_stays(dialect):
    for tale in told(dialect):
        names = [name for name, _ in tale.cast.values()]
        assert tale.text.count(tale.cast["hero"][0]) >= 3, tale
        assert len(set(names)) == len(names), tale
        for name in names:
            assert name in tale.text, tale


@each_dialect
def test_pronouns_have_somebody_to_refer_to(dialect):
    one_gender = 0
    for tale in told(dialect):
        pronouns = {pronoun for _, pronoun in tale.cast.values()}
        used = set(words(tale.text))
        one_gender += len(pronouns & {"he", "she"}) == 1
        assert "he" in pronouns or not used & MASCULINE, tale
        assert "she" in pronouns or not used & FEMININE - {"girl"}, tale
    assert one_gender > 50  # else the two assertions above checked nothing


def test_the_hero_is_called_boy_or_girl_rightly():
    for dialect in tales.DIALECTS:
        for tale in told(dialect):
            name, pronoun = tale.cast["hero"]
            introduced = re.findall(rf"(boy|girl) (?:named|called) {name}\b", tale.text)
            assert set(introduced) <= {"boy" if pronoun == "he" else "girl"}, tale.text


def test_the_lost_thing_is_found_in_its_colour():
    checked = 0
    for tale in told("village"):
        if tale.plot == "lost treasure":
            lost = re.search(r'"Have you seen my ([a-z]+) ([a-z ]+)\?"', tale.text)
            assert lost is not None
            hues = set(re.findall(rf"(?:owned an?|my|the) ([a-z]+) {lost[2]}\b", tale.text))
            hues |= set(re.findall(r"It was still ([a-z]+),", tale.text))
            assert hues == {lost[1]}, tale.text
            checked += 1
    assert checked > 30


def test_counting_is_right():
    numbers = {word: value for value, word in enumerate(tales._NUMBERS)}
    number = "|".join(numbers)
    checked = 0
    for tale in told("village"):
        for part, more, total in re.findall(
            rf"({number}) baskets of \w+ and ({number}) of \w+, so there were ({number})", tale.text
        ):
            assert numbers[part] + numbers[more] == numbers[total], tale.text
            checked += 1
    assert checked > 30


@each_dialect
def test_facts_hold_in_every_story(dialect):
    """Who is introduced with a trade has the same trade everywhere."""
    trades: dict[str, set[str]] = {}
    people = {
        row[table.main](tales.Telling(tales.Dice(""))) for table in tables_of_experts(dialect) for row in table.rows
    }
    for tale in told(dialect):
        for name, trade in re.findall(
            r"([A-Z][a-z]+ [A-Z][a-z]+) the ([a-z]+(?: maker| operator| technician)?)", tale.text
        ):
            if name in people:
                trades.setdefault(name, set()).add(trade)
    assert len(trades) >= 10
    assert {name: found for name, found in trades.items() if len(found) > 1} == {}


def tables_of_experts(dialect: str) -> list[tales.Table]:
    return [table for table in tales.grammar(dialect).tables.values() if {"he", "tool"} <= table.fields]


@each_dialect
def test_vocabulary_size(dialect):
    vocabulary = {word for tale in told(dialect) for word in words(tale.text)}
    assert 1500 <= len(vocabulary) <= 3000


def test_dialects_share_few_content_words():
    content = []
    for dialect in tales.DIALECTS:
        counts = Counter(word for tale in told(dialect) for word in words(tale.text))
        content.append({word for word in counts if len(word) > 3})
    shared = len(content[0] & content[1]) / len(content[0] | content[1])
    assert 0.05 < shared < 0.35


@each_dialect
def test_later_stories_keep_saying_new_things(dialect):
    def grams(text: str) -> set[tuple[str, ...]]:
        sequence = words(text)
        return {tuple(sequence[start : start + 8]) for start in range(len(sequence) - 7)}

    seen: set[tuple[str, ...]] = set()
    for tale in told(dialect)[:1200]:
        seen |= grams(tale.text)
    later = [gram for tale in told(dialect)[1200:] for gram in grams(tale.text)]
    known = sum(gram in seen for gram in later) / len(later)
    assert 0.3 < known < 0.8  # neither a closed list of sentences nor noise


def test_unknown_dialect_is_explained():
    with pytest.raises(UnknownNameError, match=r"^There is no dialect 'vilage'; .* Did you mean 'village'\?$"):
        tales.story(0, dialect="vilage")
    with pytest.raises(UnknownNameError):
        tales.stories(1, dialect="opera")


# a dialect small enough to see what each mark does
SCRIPT = {
    "roles": {"hero": "child"},
    "tables": {"child": "name ; he\nAda ; she", "fruit": "apple, pear, plum"},
    "rules": {"end": "The end."},
    "plots": {
        "one": """
{hero} had a {fruit} [] and {fruit2} [].
/yes: [Yes.|Yes!]
when yes: {hero.he} ate
 the {fruit}.
unless yes: Never told.

<end>
"""
    },
}


def test_notation():
    for key in "abcdef":
        text = tales.Grammar("script", SCRIPT).tell(tales.Dice(key)).text
        told_as = re.fullmatch(
            r"Ada had (an apple|a pear|a plum) and (\w+)\. Yes[.!] She ate the (\w+)\.\nThe end\.", text
        )
        assert told_as is not None, text
        assert told_as[1].split()[1] == told_as[3] != told_as[2]


@pytest.mark.parametrize("plot", ["{nobody}", "{hero.hat}", "<nothing>", "[open", "shut]", "a|b"])
def test_mistakes_in_a_script_are_refused(plot):
    with pytest.raises(ValueError, match=r"^script: "):
        tales.Grammar("script", {**SCRIPT, "plots": {"one": plot}})


def test_a_table_can_be_used_up():
    greedy = {**SCRIPT, "plots": {"one": "{fruit} {fruit2} {fruit3} {fruit4}"}}
    with pytest.raises(ValueError, match="more than the 3 rows of table 'fruit'"):
        tales.Grammar("script", greedy).tell(tales.Dice("a"))
