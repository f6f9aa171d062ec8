"""What is said of a method, of a connection and of a paper: by `resformer methods`, cards and the documentation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Paper:
    """A paper, as it is cited; of one of which the number alone is known, the rest is empty."""

    arxiv: str
    title: str = ""
    authors: str = ""
    year: int | None = None

    @property
    def bibtex(self) -> str:
        said = {"title": self.title, "author": self.authors, "year": self.year, "eprint": self.arxiv}
        fields = [f"{name} = {{{value}}}" for name, value in said.items() if value]
        fields += ["archivePrefix = {arXiv}"]
        return f"@misc{{arxiv{self.arxiv},\n" + ",\n".join(f"  {line}" for line in fields) + "\n}"


@dataclass(frozen=True)
class About:
    """What a card says of a connection, which is on where the field that this stands for is set.

    Attributes:
        tags: of the card, with spaces between them: the names that people search.
        equation: a sentence with the equation, within `$`; cards have the delimiters of the Hub.
        paper: its own, which a card cites unless the named method has others.
    """

    tags: str
    equation: str
    paper: Paper | None = None


@dataclass(frozen=True)
class Method:
    """A named choice of connection fields. Called with a number of layers, it returns them."""

    title: str
    summary: str
    fields: Callable[[int], dict[str, Any]]
    papers: tuple[Paper, ...] = ()

    def __call__(self, num_hidden_layers: int) -> dict[str, Any]:
        return self.fields(num_hidden_layers)
