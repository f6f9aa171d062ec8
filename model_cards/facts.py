"""Papers and the facts of each named method, read from `facts.yaml`: equation, cost, published results, limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

__all__ = ["FACTS", "PAPERS", "MethodFacts", "Paper", "papers_of"]


@dataclass(frozen=True)
class Paper:
    """A paper, as it is cited."""

    arxiv: str
    key: str
    title: str
    authors: str
    year: int
    venue: str | None = None

    @property
    def bibtex(self) -> str:
        entry, place = ("inproceedings", f"booktitle = {{{self.venue}}}") if self.venue else ("misc", "")
        fields = [f"title = {{{self.title}}}", f"author = {{{self.authors}}}", f"year = {{{self.year}}}", place]
        fields += [f"eprint = {{{self.arxiv}}}", "archivePrefix = {arXiv}"]
        return f"@{entry}{{{self.key},\n" + ",\n".join(f"  {line}" for line in fields if line) + "\n}"


@dataclass(frozen=True)
class MethodFacts:
    """What a card says of one method."""

    title: str
    summary: str
    equation: str  # LaTeX
    use: str
    avoid: str
    parameters: str  # formula of the number added to plain Llama
    cache: str  # formula of the share of the full key/value cache
    exact: bool  # whether a retrofit can compute what its source does
    limits: str
    papers: Sequence[str]
    published: Sequence[Mapping[str, Any]] = ()  # comparisons with a plain Transformer of the same size
    remarks: Sequence[str] = ()


_facts = yaml.safe_load(files("resformer.model_cards").joinpath("facts.yaml").read_text(encoding="utf-8"))
PAPERS = {name: Paper(**paper) for name, paper in _facts["papers"].items()}
FACTS = {name: MethodFacts(**facts) for name, facts in _facts["methods"].items()}


def papers_of(method: str | None, fields: Mapping[str, Any]) -> list[Paper]:
    """The papers of a method, then those of the connection fields that are set beside it."""
    names = list(FACTS[method].papers) if method in FACTS else []
    shares_values = fields.get("value_sources") is not None and fields.get("key_sources") is None
    for applies, paper in (
        (fields.get("value_residual", "none") != "none" or shares_values, "resformer"),
        (fields.get("neutreno_lambda"), "neutreno"),
        (fields.get("dwa"), "denseformer"),
        (fields.get("key_sources") is not None and method != "fusedkv-lite", "cla"),
    ):
        if applies and paper not in names:
            names.append(paper)
    return [PAPERS[name] for name in names]
