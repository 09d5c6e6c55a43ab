"""Write the small preference data set that the recipes train on, offline and in seconds.

A prompt asks for something that can be answered: a sum, a fact, a line of pasted notes, a figure
in a system prompt. The chosen reply answers it, correctly and courteously. The rejected reply does
not: it is evasive, rude, vague, rambling or stalling. Polite openers and closers and all lengths
occur on both sides alike, so they do not give the chosen reply away; what tells the two apart is
whether the question is answered. A reader sees that at once and a tiny random model can learn it.

The shapes are those of real preference data: many short prompts and a few long ones, dialogues of
several turns, system prompts and documents shared by several rows, prompts with more than one pair
of replies. The held-out split has the same kinds of tasks on other people, places and things, and
its rejected replies are phrased in other ways.

    python recipes/data/make_preferences.py            # write preferences/{train,test}.jsonl
    python recipes/data/make_preferences.py --check    # fail unless the files are what it writes

The words, and the marks used in them, are in phrases.ini.
"""

import argparse
import configparser
import json
import random
import re
from pathlib import Path
from typing import NamedTuple


HERE = Path(__file__).resolve().parent
SEED = 98
SIZES = {"train": 360, "test": 60}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
VERBS = ["check", "clean", "measure", "paint", "photograph", "inspect", "decorate", "cover", "label", "mend"]
TONES = ["evasive", "rude", "vague", "rambling", "stalling"]
STRETCH = 0.5, 0.7, 0.9, 1, 1.3, 1.6  # the length of a rejected reply, relative to the chosen

INI = configparser.ConfigParser(delimiters="=", interpolation=None)
INI.optionxform = str  # keep the case of the keys
INI.read(HERE / "phrases.ini", encoding="ascii")


def section(name, mark):
    """The entries of a section, each split at `mark`."""
    entries = ((key, value.replace("\n", " ").split(mark)) for key, value in INI[name].items())
    return {key: [part.strip() for part in parts] for key, parts in entries}


POOLS, GRAMMAR = section("pools", ","), section("grammar", "|")
FACTS, GUIDES = section("facts", "--"), section("guides", "--")


class QA(NamedTuple):
    """A question, its short answer, a line more on it, and what it is about."""

    question: str
    answer: str
    detail: str
    topic: str


class Scene(NamedTuple):
    """What a dialogue is held on: questions that suit any order, on a document or system prompt."""

    questions: list
    document: str = ""
    system: str = ""


class Writer(random.Random):
    """The random draws of one split. The splits share no fact, guide, tone or word of a pool."""

    def __init__(self, split):
        super().__init__(f"{SEED} {split}")
        self.split = split

    def part(self, items):
        """The first two thirds for train, the others for test."""
        items, cut = list(items), len(items) * 2 // 3
        return items[:cut] if self.split == "train" else items[cut:]

    def some(self, pool, count):
        return self.sample(self.part(POOLS[pool]), count)

    def pick(self, pool):
        return self.some(pool, 1)[0]

    def tail(self, low, high):
        """A long-tailed count: mostly near `low`, at times up to `high`."""
        return low + int((high - low + 1) * self.random() ** 2.5)

    def say(self, text, **slots):
        """Choose one of the alternatives of `text` and draw what its slots stand for."""

        def draw(match):
            return slots.get(match[1]) or self.say(self.choice(GRAMMAR[match[1]]), **slots)

        return re.sub(r"<(\w+)>", draw, self.choice(text.split("|")).strip())

    def scene(self, name, **slots):
        """The scene of that name in phrases.ini, filled in with `slots`."""

        def fill(text):
            return re.sub(" // ?", "\n", text.format(**slots))

        texts = {fill(key): [*map(fill, parts)] for key, parts in section(name, "--").items()}
        document, system = (self.say(texts.pop(key, [""])[0]) for key in ("document", "system"))
        return Scene([QA(key, *parts) for key, parts in texts.items()], document, system)


def sums(w):
    who, goods, ware, yard = (w.pick(pool) for pool in ("people", "goods", "wares", "yards"))
    n, k, off = w.randint(13, 60), w.randint(3, 9), w.choice([5, 10, 15, 20, 25, 30, 40])
    total, price, each, more = n * k, w.randint(2, 20) * 20, n // k, n + w.randint(2, 9)
    paid, saved = (total // 10 + w.randint(1, 3)) * 10, price * off // 100
    return w.scene(
        w.choice(["shopping", "sharing", "sale", "yard"]),
        who=who,
        goods=goods,
        ware=ware,
        yard=yard,
        n=n,
        k=k,
        total=total,
        paid=paid,
        change=paid - total,
        more=more,
        cost=more * k,
        each=each,
        dealt=each * k,
        left=n % k,
        lack=k - n % k,
        price=price,
        off=off,
        saved=saved,
        now=price - saved,
        around=2 * (n + k),
    )


def facts(w):
    return Scene([QA(fact, *FACTS[fact]) for fact in w.sample(w.part(FACTS), 6)])


def guides(w):
    questions = []
    for task in w.sample(w.part(GUIDES), 2):
        text, care = GUIDES[task]
        steps, topic = text.split("; "), task.split(" ", 1)[1]
        items = "\n".join(f"{i}. {step}." for i, step in enumerate(steps, 1))
        questions += [
            QA(
                f"How do I {task}?|Can you tell me how to {task}?|What are the steps to {task}?",
                f"{'. '.join(steps)}.|{items}",
                f"Keep in mind: {care}.",
                topic,
            ),
            QA(
                f"What should I watch out for when I {task}?|Any advice before I {task}?",
                f"{care}.",
                f"Also take your time with this step: {steps[1]}.",
                topic,
            ),
        ]
    return Scene(questions)


def letters(w):
    who, me = w.some("people", 2)
    return w.scene(
        "letters",
        who=who,
        me=me,
        day=w.choice(DAYS),
        place=w.pick("places"),
        event=w.pick("events"),
        ware=w.pick("wares"),
        gift=w.pick("gifts"),
    )


def stock(w):
    goods = w.some("goods", w.tail(4, 18))
    counts = dict(zip(goods, w.sample(range(2, 90), len(goods))))
    lines = [f"- {counts[item]} {item}" for item in goods]
    (a, b), top = w.sample(goods, 2), max(goods, key=counts.get)
    return w.scene(
        "stock",
        place=w.pick("places"),
        lines="\n".join(lines),
        a=a,
        b=b,
        top=top,
        na=counts[a],
        nb=counts[b],
        both=counts[a] + counts[b],
        most=counts[top],
        at=goods.index(a) + 1,
        inline=", ".join(sorted(goods)),
        sorted="\n".join(sorted(lines, key=lambda line: line.split()[-1])),
    )


def notes(w):
    team, place, euros = w.some("people", w.randint(3, 6)), w.pick("places"), w.randint(4, 60) * 5
    (day, today), hour, other = w.sample(DAYS, 2), w.randint(9, 20), w.pick("people")
    jobs = [
        (w.choice(team), f"{w.choice(VERBS)} the {thing}", w.choice(DAYS), thing)
        for thing in w.some("objects", w.tail(2, 15))
    ]
    who, job, due, thing = w.choice(jobs)
    plan = [f"{who} will {job} by {due}." for who, job, due, _ in jobs]
    lines = [
        *plan,
        f"There are {euros} euros in the cash box.",
        f"Next meeting: {day} at {hour}:00, {place}.",
        *map(w.say, w.sample(GRAMMAR["remark"], w.tail(0, 14))),
    ]
    return w.scene(
        "notes",
        group=w.pick("groups"),
        today=today,
        present=", ".join(team),
        place=place,
        lines="\n".join(f"- {line}" for line in w.sample(lines, len(lines))),
        plan=" ".join(plan),
        table="\n".join(f"- {who}: {job} ({due})" for who, job, due, _ in jobs),
        euros=euros,
        who=who,
        job=job,
        due=due,
        thing=thing,
        day=day,
        hour=hour,
        other=other,
        was_there=f"Yes, {other} was there." if other in team else f"No, {other} is not listed.",
    )


def calls(w):
    (a, b), (day, other), event = w.some("people", 2), w.sample(DAYS, 2), w.pick("events")
    hour, place, goods, n = w.randint(8, 20), w.pick("places"), w.pick("goods"), w.randint(5, 60)
    parts = [
        [
            f"{a}: Does {other} suit you for the {event}?",
            f"{b}: Not really. Could we say {day}?",
            f"{a}: {day} is fine.",
        ],
        [f"{b}: And where do we meet?", f"{a}: At the {place}, they have room for all of us."],
        [f"{a}: What time is best?", f"{b}: Let us say {hour}:00, then nobody has to rush."],
        [f"{b}: Who brings the {goods}?", f"{a}: I will. How many?", f"{b}: {n} should do."],
    ]
    for chat in w.sample(GRAMMAR["chat"], w.tail(0, 13)):
        said, replied = w.say(chat).split(" / ")
        parts.insert(w.randrange(len(parts) + 1), [f"{a}: {said}", f"{b}: {replied}"])
    return w.scene(
        "calls",
        lines="\n".join(sum(parts, [])),
        a=a,
        b=b,
        day=day,
        other=other,
        hour=hour,
        place=place,
        goods=goods,
        n=n,
    )


def houses(w):
    house = w.pick("houses")
    its = random.Random(house)  # particulars hang on the name, so that rows share a system prompt
    price, dogs = its.randint(2, 9) * 2, its.random() < 0.5
    adults, kids = w.randint(2, 5), w.randint(2, 6)
    return w.scene(
        "houses",
        house=house,
        street=its.choice(w.part(POOLS["streets"])),
        price=price,
        number=its.randint(2, 90),
        opens=its.randint(8, 10),
        closes=its.randint(16, 20),
        closed=its.choice(DAYS),
        tour=its.randint(11, 14),
        half=price // 2,
        adults=adults,
        kids=kids,
        total=adults * price + kids * price // 2,
        goods=w.pick("goods"),
        dogs="Dogs are welcome on a lead." if dogs else "No dogs but guide dogs.",
        may_dogs="Yes, on a lead.|Yes, please keep it on a lead."
        if dogs
        else "No, sorry, no dogs.|Dogs have to stay outside.",
    )


KINDS = {sums: 9, facts: 5, guides: 6, letters: 5, stock: 7, notes: 10, calls: 7, houses: 11}


def join(*texts):
    """Put texts on one line or, if one of them has several, on lines of their own."""
    texts = [text for text in texts if text]
    return ("\n" if any("\n" in text for text in texts) else " ").join(texts)


def write_prompt(w, scene):
    """Open a dialogue on `scene`: its messages, and the question that is left to answer."""
    turns = w.choices(range(1, 7), (70, 12, 8, 5, 3, 2))[0]
    asked = w.sample(scene.questions, min(turns, len(scene.questions)))
    system = scene.system or (w.say("<system>") if w.random() < 0.2 else "")
    messages = [{"role": "system", "content": system}] if system else []
    for turn, qa in enumerate(asked):
        text = w.say(qa.question)
        hail = w.say("<again>" if turn else "<greeting>") if w.random() < 0.3 else ""
        page = "" if turn else scene.document
        text = f"{page}\n\n{join(hail, text)}" if "\n" in page else join(hail, page, text)
        messages.append({"role": "user", "content": text})
        if qa is not asked[-1]:
            reply = join(w.say(qa.answer.split("|")[0]), qa.detail)
            messages.append({"role": "assistant", "content": reply})
    return messages, asked[-1]


def frame(w, *texts):
    """Give a reply an opener, a closer, both or none."""
    opener, closer = (f"<{end}>" if w.random() < 0.3 else "" for end in ("opener", "closer"))
    return join(w.say(opener), *texts, w.say(closer))


def answer(w, qa):
    return frame(w, w.say(qa.answer), qa.detail if w.random() < 0.7 else "")


def waffle(w, qa, words):
    """Fill that many words with one tone, then with the others, without an answer."""
    first, *others = (w.part(GRAMMAR[tone]) for tone in w.sample(TONES, len(TONES)))
    curt, rest, text = w.choice(w.part(GRAMMAR["curt"])), sum(others, []), ""
    for phrase in w.sample([*first, curt], len(first) + 1) + w.sample(rest, len(rest)):
        longer = f"{text} {w.say(phrase, topic=qa.topic)}".strip()
        if len(longer.split()) <= words:
            text = longer
    return text or curt


def write_pairs(w, scene, qa, count):
    """Draw pairs of replies, chosen and rejected, until there are `count` different ones."""
    pairs = {}
    while len(pairs) < count:
        chosen = answer(w, qa)
        if w.random() < 0.05:  # beside the point: the answer to another question
            other = w.choice([other for other in scene.questions if other != qa])
            pairs[chosen] = frame(w, w.say(other.answer))
        else:
            words = min(len(chosen.split()), 75) * w.choice(STRETCH)
            pairs[chosen] = frame(w, waffle(w, qa, words))
    return pairs.items()


def write_split(split):
    """The rows of a split, as the text of a .jsonl file."""
    w, rows, seen = Writer(split), [], set()
    for kind, share in KINDS.items():
        goal = len(rows) + share * SIZES[split] // sum(KINDS.values())
        scene = kind(w)
        while len(rows) < goal:
            prompt, qa = write_prompt(w, scene)
            if str(prompt) not in seen:
                seen.add(str(prompt))
                copies = min(w.choices((1, 2, 3), (88, 9, 3))[0], goal - len(rows))
                rows += [(prompt, *pair) for pair in write_pairs(w, scene, qa, copies)]
            if w.random() < 0.6:
                scene = kind(w)
    w.shuffle(rows)
    return "".join(
        json.dumps(
            {
                "prompt": prompt,
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
            }
        )
        + "\n"
        for prompt, chosen, rejected in rows
    )


def to_dialogues(pairs):
    """The same prompts with their good replies, for SFT."""
    rows = map(json.loads, pairs.splitlines())
    return "".join(json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) + "\n" for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the files, do not write them")
    check = parser.parse_args().check
    files = {}
    for split in SIZES:
        pairs = write_split(split)
        files[HERE / "preferences" / f"{split}.jsonl"] = pairs
        files[HERE / "dialogues" / f"{split}.jsonl"] = to_dialogues(pairs)
    for path, text in files.items():
        if check and not (path.exists() and path.read_text(encoding="ascii") == text):
            raise SystemExit(f"{path} is not what {Path(__file__).name} writes")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="ascii", newline="\n")


if __name__ == "__main__":
    main()
