"""The words of docstrings and comments: each begins with a noun or a verb, so that a newcomer knows its subject."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = ("megalite", "kernels", "launch", "tools")
HIDDEN = r"(?:Of|That|What|Those|So many|So much)\b"  # words that hide the subject of a sentence
PRONOUN = re.compile(
    r"(?:It|Its|This|These|They|He|She|Whether|Which|Who|Whose|How|Where|When|As|If|For"
    r"|At|From|In|On|There|To|With|Without)\b"
)
SENTENCE = re.compile(rf"(?:^|(?<=[.:;!?]\s)|(?<=\n\n)){HIDDEN}")
COMMENT = re.compile(HIDDEN, re.IGNORECASE)  # comments beside code begin with a small letter


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, text and whether it is a docstring, of every docstring and every comment of a file."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text, True
    begun, comment, above = 0, "", -1  # the comment so far, which may go on in the next line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        alone = token.line.lstrip().startswith("#")
        if alone and above == token.start[0] - 1:
            comment += " " + token.string.lstrip("# ")
        else:
            yield begun, comment, False
            begun, comment = token.start[0], token.string.lstrip("# ")
        above = token.start[0] if alone else -1
    yield begun, comment, False


def hidden_subjects(path: Path) -> list[str]:
    """The places of a file at which a sentence, or a docstring, does not begin with its subject."""
    found = []
    for line, text, is_docstring in texts(path):
        match = SENTENCE.search(text) or (PRONOUN if is_docstring else COMMENT).match(text)
        if match:
            found.append(f"{path}:{line}: {text[match.start() : match.start() + 70]!r}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_begin_with_their_subject(folder: str) -> None:
    found = [place for path in sorted(Path(folder).rglob("*.py")) for place in hidden_subjects(path)]
    assert found == []


def test_what_is_wrong_is_fixed() -> None:
    """One word for one thing: "fix" is that of all messages, of the code and of the documentation."""
    paths = [path for folder in FOLDERS for path in sorted(Path(folder).rglob("*.py"))]
    paths += [*sorted(Path("docs").rglob("*.md")), Path("README.md"), Path("CHANGELOG.md"), Path("CONTRIBUTING.md")]
    assert [path for path in paths if re.search(r"\bmend", path.read_text(encoding="utf-8"))] == []


def test_hidden_subjects_are_found(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(
        '"""What it is."""\n\n# Of a row. Rows of it.\nx = 1  # the row. That is so\n'
        "# rows\n# of a table\ny = 2  # of a row\nz = 3  # rows of it\n"
    )
    assert [place.split(":")[1] for place in hidden_subjects(path)] == ["1", "3", "4", "7"]
