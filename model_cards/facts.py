"""Papers and the facts of each named method, read from `facts.yaml`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import yaml

from resformer.configuration import METHODS


@dataclass(frozen=True)
class Paper:
    """A paper, as it is cited."""

    arxiv: str
    title: str
    authors: str
    year: int

    @property
    def bibtex(self) -> str:
        fields = [f"title = {{{self.title}}}", f"author = {{{self.authors}}}", f"year = {{{self.year}}}"]
        fields += [f"eprint = {{{self.arxiv}}}", "archivePrefix = {arXiv}"]
        return f"@misc{{arxiv{self.arxiv},\n" + ",\n".join(f"  {line}" for line in fields) + "\n}"


@dataclass(frozen=True)
class MethodFacts:
    """The facts of one method that cards state."""

    title: str
    summary: str
    papers: Sequence[str]


_facts = yaml.safe_load(files("resformer.model_cards").joinpath("facts.yaml").read_text(encoding="utf-8"))
#: Connection field -> the tag and the paper of a card where it is set.
FIELDS: dict[str, dict[str, str]] = _facts["fields"]
#: Class in `architectures` of config.json -> what a card says of models with this head.
HEADS: dict[str, dict[str, str]] = _facts["heads"]
PAPERS = {name: Paper(**paper) for name, paper in _facts["papers"].items()}
FACTS = {name: MethodFacts(**facts) for name, facts in _facts["methods"].items()}


def papers_of(method: str | None, fields: Iterable[str]) -> list[Paper]:
    """The papers of a method, then those of the connection fields that are set beside it."""
    names = list(FACTS[method].papers) if method in FACTS else []
    covered = METHODS[method](2) if method in METHODS else {}
    names += [FIELDS[field]["paper"] for field in fields if field not in covered and "paper" in FIELDS[field]]
    return [PAPERS[name] for name in dict.fromkeys(names)]
