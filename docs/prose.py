"""Check the prose of docstrings, comments and pages against limits.

    python docs/prose.py            # prints the measures, and the findings of limits that are exceeded
    python docs/prose.py --all      # prints all findings
    python docs/prose.py FOLDER     # checks another checkout

The script reads Python below python/hpgo and research, Rust below src, README.md, CONTRIBUTING.md and docs/*.md. It
exits with 1 if a limit is exceeded. `make lint` runs it.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


def words(text: str) -> set[str]:
    """Return the words of a list."""
    return set(text.split())


MAX_PERCENT = {"fragment": 8.0, "function fragment": 12.0, "opener": 1.0, "short": 4.0, "long": 3.0}
"""Largest percentages: of docstrings, of functions (function fragment) or of the sentences of pages (long)."""
MAX_PER_1000_WORDS = {"term": 0.3, "style": 0.1}
"""Largest numbers of coined terms and of unclear phrases per 1,000 words of all prose, messages included."""
MIN_COMMENTS = 1.5
"""Smallest number of comments per 100 lines of a package."""
MIN_COMMENTS_OF_ALGORITHMS = 3.0
ALGORITHMS = {"src/planner", "src/cost", "src/simulate", "python/hpgo/llm", "python/hpgo/runtime", "python/hpgo/timing"}
"""Packages whose code needs more reasons than others."""
MIN_LINES = 400
"""Smaller packages have no limit of comments, since one comment would decide. Nor has research: it is not shipped."""
MIN_DOCSTRING_WORDS = 4
MAX_SENTENCE_WORDS = 35
MIN_COMMENT_WORDS = 4
"""A comment of fewer words holds no reason, so it does not count."""

OPENERS = words("of those what how likewise whose which who whom why than such and or but nor also too behind beside")
"""Words that open clipped text."""
CLAUSE_OPENERS = words(
    "as at because before after by for from in on since so to under until where with within without above below between"
)
"""Words that open clipped text unless a verb follows the first comma, as in "For each stage, return …"."""
VERBS = words(
    """
    accept add advance allocate anneal append apply ask assign begin build call change check choose clear close
    collect combine compare complete compute connect continue convert copy count create decide declare defer define
    delete derive describe destroy draw drop end ensure estimate evaluate exchange exit explain export extend fetch
    fill filter find finish fit flush follow forget format forward free gather generate give group grow guard handle
    have hold ignore import improve initialize install invert iterate join keep kill lay leave let limit list load
    locate lower make map mark measure merge move multiply name normalize open pack parse perform place plan post
    predict prepare print process project queue raise read rebuild receive record reduce refine refuse register release
    remove render repeat replace report reset reshape resolve respond restore resume return reverse round run save scale
    schedule search select send serve set settle show simulate skip sleep solve sort spend split start stop store
    stream sum summarize suppress swap take tell test time train transfer try turn undo update use validate verify
    wait warn write yield
    """
)
"""Base forms that open docstrings of this project. Add a verb if the check does not know it yet."""
NOUN_ENDS = words("that which who whose is are has have for with without in on by per and or as between")
FREE_VERBS = words(
    """
    anneal ask begin check complete continue count declare draw evaluate exit fill finish iterate join keep list read
    record report respond return run save search send sleep solve sort start stop train try wait write
    """
)
"""Verbs that any word but "of" may follow. Others are nouns before NOUN_ENDS: "Plans by name" is no sentence."""

TERMS = {
    r"\banew\b": "again",
    r"\b(?:foretold|foretells?)\b": "predicted",
    r"(?<!dual )\b(?:prices?|priced|pricing|reprices?|repriced)\b": "cost, estimate",
    r"\bways of training\b|\b(?:quickest|fastest|found|chosen|given) ways?\b|\bhow many ways\b": "configuration",
    r"\b(?:is|are|be|were|was|not) parted\b|\bto part (?:the|a)\b": "split, partition, shard",
    r"\b(?:two|each|the|a|of|to) products?\b(?! of (?:two|all) numbers)": "matrix multiplication, package",
    r"\bnarrow[- ]gradients?\b": "bf16 gradient reduction",
    r"\bwhat lies (?:in )?between\b": "the names of the operations",
    r"\bstraight (?:pipeline|plan)s?\b": "pipeline without data parallelism",
    r"\b(?:chunks?|stages) an? (?:rank|device|GPU)\b": "virtual stages per rank",
    r"\b(?:other|each|every|this) (?:room|floor)s?\b|\b[Ff]loor \d\b|\bthe floors\b": "package, layer",
    r"\blone\b": "single",
    r"\b(?:layers|stages|groups) lie\b|\blies on\b": "are placed on",
}
STYLE = {
    r"\bthose of\b": "the noun again",
    r"\blikewise\b": "the statement again",
    r"\b(?:says?|said) (?:so|what|which|how|why|where|whether)\b|\b(?:is|are|was|be) said\b": "states, shows, sets",
    r"\b(?:is|are|was|were|be|been) told\b|\b(?:tells?|told) (?:apart|from)\b": "reports, distinguishes",
    r"\bso (?:many|much|long)\b(?! (?:that|as|of))": "the number or its name",
    r"\b(?:equally|as) many\b(?! (?:\w+ )?(?:as|of)\b)": "the same number of",
    r"\b(?:nobody|somebody|anybody)\b": "the program, the user",
    r"\b(?:whatever|whoever|whichever)\b": "any, regardless of",
    r"\bat hand\b": "available",
    r"\b(?:kept|keeps?|held) back\b": "deferred, blocked",
    r"\b(?:come|comes|came) of\b|\bmakes? of (?:it|them)\b": "results from, derives",
    r"\bnoughts?\b": "zero",
    r"\bor so\b": "about",
}
COINED = {
    kind: [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in table.items()]
    for kind, table in (("term", TERMS), ("style", STYLE))
}

WORD = re.compile(r"[^\W\d_][\w'’-]*")
CODE = re.compile(r"``[^`]+``|`[^`]+`")
DIRECTIVE = re.compile(r"#\s*(?:!|noqa|type:|fmt:|mypy|ruff|pragma|pyright|SPDX)", re.IGNORECASE)
LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|et al|Fig|Eq|Sec)\.")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[A-Z`*\"(\[])")
RUST_FUNCTION = re.compile(r"\bfn \w|^macro_rules!")


@dataclass
class Measures:
    """Findings and the counts that they are shares of."""

    findings: list[tuple[str, str, int, str]] = field(default_factory=list)
    """Kind, path, line and text."""
    totals: Counter[str] = field(default_factory=Counter)
    """Docstrings, functions, sentences and words read."""
    lines: Counter[str] = field(default_factory=Counter)
    comments: dict[str, set[str]] = field(default_factory=dict)
    """Comments by package. A repeated one counts once."""

    def number(self, kind: str) -> float:
        """Return the percentage of a kind of finding, or its number per 1,000 words."""
        found = sum(row[0] == kind for row in self.findings)
        totals = {"long": "sentences", "function fragment": "functions", "term": "words", "style": "words"}
        return (1000 if kind in COINED else 100) * found / max(1, self.totals[totals.get(kind, "docstrings")])


def opens_with_verb(text: str) -> bool:
    """Return whether a text opens with a verb of VERBS, as imperative or in the third person."""
    first, following = [*(word.lower() for word in WORD.findall(CODE.sub("it", text))), "", ""][:2]
    ends = ((first, ""), (first, "s"), (first, "es"), (first, "ies"))
    bases = [word.removesuffix(end) + ("y" if end == "ies" else "") for word, end in ends if word.endswith(end)]
    known = [base for base in bases if base in VERBS]
    return any(base in FREE_VERBS or following not in NOUN_ENDS for base in known) and following != "of"


def is_opener(text: str) -> bool:
    """Return whether a text opens with a word that leaves out its noun or its verb."""
    if re.match(r"the (?:same|others?)(?:[,;.]|$| (?:for|of|as|with|without|in|on|at|from)\b)", text, re.IGNORECASE):
        return True
    first = next(iter(WORD.findall(CODE.sub("it", text))), "").lower()
    return first in OPENERS or (first in CLAUSE_OPENERS and not opens_with_verb(text.partition(",")[2]))


def python_docstrings(tree: ast.Module) -> list[tuple[int, bool, str]]:
    """List line, whether it is of a function, and text of docstrings, also of those behind assignments."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not any(
            "property" in ast.unparse(decorator) for decorator in node.decorator_list
        )
        for before, statement in zip([None, *node.body], node.body, strict=False):
            match before, statement:
                case (None | ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(text)))):
                    found.append((statement.lineno, function and before is None, text))
    return found


def python_messages(tree: ast.Module) -> list[tuple[int, str]]:
    """List line and text of string literals with three words or more that are no docstrings."""
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in documented)
    found = [(node.lineno, node.value) for node in texts if isinstance(node.value, str)]
    return [(line, text) for line, text in found if len(WORD.findall(text)) >= 3]


def python_comments(text: str) -> list[tuple[int, str]]:
    """List line and text of comments, without directives of tools."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    return [(line, text.lstrip("# ")) for line, text in found if not DIRECTIVE.match(text)]


def rust_prose(text: str) -> tuple[list[tuple[int, bool, str]], list[tuple[int, str]]]:
    """Return docstrings as `python_docstrings` does, and comments as `python_comments` does."""
    docs, comments, block, inner = [], [], [], []
    for line, whole in enumerate(text.split("\n"), 1):
        code = whole.strip()
        if code.startswith("//!"):
            inner.append(code[3:].strip())
        elif code.startswith("///"):
            block.append(code[3:].strip())
        else:
            before, slashes, comment = code.partition("//")
            if slashes and before.count('"') % 2 == 0 and comment.strip():
                comments.append((line, comment.strip()))
            if block and before and not before.startswith(("#[", ")]")):
                docs.append((line - len(block), bool(RUST_FUNCTION.search(before)), "\n".join(block)))
                block = []
    return docs + ([(1, False, "\n".join(inner))] if inner else []), comments


def page_sentences(text: str) -> list[tuple[int, str]]:
    """List line and text of a page's sentences, without code, tables, headings and HTML."""
    found, paragraph, start, fence = [], "", 0, False
    for line, whole in enumerate([*text.split("\n"), ""], 1):
        bare = whole.strip()
        fenced = bare.startswith("```")
        fence ^= fenced
        skipped = fence or fenced or not bare or bool(re.match(r"[#|<]|!\[|\[[^]]+\]:", bare))
        item = re.match(r"(?:[-*+]|\d+\.|>)\s+", bare)
        if (skipped or item) and paragraph:
            plain = ABBREVIATION.sub(r"\1", LINK.sub(r"\1", paragraph))
            found += [(start, part) for part in SENTENCE_END.split(plain) if WORD.search(part)]
            paragraph = ""
        if not skipped:
            start = start if paragraph else line
            paragraph += " " + bare[item.end() if item else 0 :]
    return found


def measure(root: Path) -> Measures:
    """Read all prose below `root`. Raises SyntaxError for invalid Python."""
    measures = Measures()

    def look(kind: str, path: Path, line: int, text: str) -> None:
        measures.findings.append((kind, str(path.relative_to(root)), line, " ".join(text.split())[:100]))

    def read_words(path: Path, line: int, text: str) -> None:
        measures.totals["words"] += len(text.split())
        plain = " ".join(CODE.sub("code", text).split())
        for kind, patterns in COINED.items():
            for pattern, instead in patterns:
                for hit in pattern.finditer(plain):
                    around = plain[max(0, hit.start() - 30) : hit.end() + 30]
                    look(kind, path, line, f"“{hit[0]}” (write: {instead}) in …{around}…"[:160])

    sources = [*root.glob("python/hpgo/**/*.py*"), *root.glob("research/**/*.py"), *root.glob("src/**/*.rs")]
    for path in sorted(path for path in sources if path.suffix != ".pyc"):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".rs":
            docs, comments = rust_prose(text)
        else:
            tree = ast.parse(text)
            docs, comments = python_docstrings(tree), python_comments(text)
            for line, message in python_messages(tree):
                read_words(path, line, message)
        parts = path.relative_to(root).parts[:-1]
        package = "/".join(parts[: {"python": 3, "src": 2}.get(parts[0], 1)])
        measures.lines[package] += text.count("\n")
        reasons = {comment for _, comment in comments if len(comment.split()) >= MIN_COMMENT_WORDS}
        measures.comments.setdefault(package, set()).update(reasons.difference(*measures.comments.values()))
        for line, comment in comments:
            read_words(path, line, comment)
        for line, function, doc in docs:
            prose = re.split(r">>>|```", doc)[0].strip()
            measures.totals.update(["docstrings", "functions"][: 1 + function])
            read_words(path, line, prose)
            opener, short = is_opener(prose), len(prose.split()) < MIN_DOCSTRING_WORDS
            fragment = opener or (function and not opens_with_verb(prose))
            for kind, holds in zip(MAX_PERCENT, (fragment, fragment and function, opener, short), strict=False):
                if holds:
                    look(kind, path, line, f"{kind}: {prose}")
    for path in sorted([root / "README.md", root / "CONTRIBUTING.md", *root.glob("docs/*.md")]):
        for line, sentence in page_sentences(path.read_text(encoding="utf-8")) if path.exists() else []:
            measures.totals["sentences"] += 1
            read_words(path, line, sentence)
            if (length := len(CODE.sub("code", sentence).split())) > MAX_SENTENCE_WORDS:
                look("long", path, line, f"{length} words: {sentence}")
    return measures


def main() -> int:
    """Print measures and findings. Return the exit code: 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description="Check the prose of docstrings, comments and pages against limits.")
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).parent.parent, help="a checkout")
    parser.add_argument("--all", action="store_true", help="print all findings, also within limits")
    given = parser.parse_args()
    measures, exceeded = measure(given.root), False
    for kind, limit in (MAX_PERCENT | MAX_PER_1000_WORDS).items():
        number = measures.number(kind)
        exceeded |= number > limit
        if number > limit or given.all:
            print("\n".join(f"{path}:{line}: {text}" for found, path, line, text in measures.findings if found == kind))
        print(f"{kind}: {number:.2f} {'per 1,000 words' if kind in COINED else '%'} (limit {limit})")
    for package, lines in sorted(measures.lines.items()):
        number = 100 * len(measures.comments[package]) / max(1, lines)
        limit = MIN_COMMENTS_OF_ALGORITHMS if package in ALGORITHMS else MIN_COMMENTS
        missed = number < limit and package != "research" and lines >= MIN_LINES
        exceeded |= missed
        if missed or given.all:
            print(f"{package}:1: {number:.2f} comments per 100 lines (limit {limit})")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
