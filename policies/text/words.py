"""The words of a text in one form, for whoever searches: the same for what is searched and what is asked.

Lower case, compatibility forms made one (NFKC), without punctuation and combining marks. Of scripts that are written
without blanks, and of Hangul, whose words take their particles with them, every two neighbouring characters are a word.
"""

import re
import unicodedata

_SOLID = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff"
)
SOLID = re.compile(f"[{_SOLID}]")
_RUN = re.compile(f"[{_SOLID}]+")
_MARKS = re.compile(f"[{''.join(c for c in map(chr, range(0x300, 0x10000)) if unicodedata.category(c)[0] == 'M')}]+")
_APART = re.compile(r"[\W_]+")


def spaced(text: str) -> str:
    """The text in one form, a blank around each word; scripts without blanks as they run."""
    if not text.isascii():
        text = _MARKS.sub("", unicodedata.normalize("NFKC", text))
    return f" {_APART.sub(' ', text.lower())} "


def words(text: str) -> list[str]:
    """The words in their order, in scripts without blanks the pairs of neighbouring characters."""
    return _RUN.sub(_paired, spaced(text)).split()


def _paired(run: re.Match[str]) -> str:
    said = run.group()
    return f" {' '.join(said[i : i + 2] for i in range(max(1, len(said) - 1)))} "
