"""Sphinx: `python -m sphinx -W -n -b html docs OUTPUT`, with resformer and its extra `docs` installed."""

import logging
import re

import typer
from docutils import nodes
from latex2mathml.converter import convert as to_mathml

from resformer.cli import app
from resformer.commands.terminal import PANELS
from resformer.version import __version__

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # warns on import where a package is missing; PEFT imports it

project = "resformer"
author = copyright = "The resformer authors"
release = version = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # outputs are committed: `make tour`
nb_merge_streams = True
html_theme = "furo"
html_title = f"resformer {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["model_types.js"]
html_math_renderer = "mathml"
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
# Other projects' names: their pages are not looked up, so that a build needs no network.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|transformers|datasets|huggingface_hub|jinja2|pathlib|os|collections|typing|types|numpy)\..*"),
    ("py:.*", "(Any|Callable|Figure|Iterable|Iterator|Literal|Mapping|Path|Sequence|optional)"),
    ("py:.*", r"(resformer\..*\.)?(Alone|Method|Needs|RecipeTrainer)"),  # no part of the reference
    ("py:.*", r"dict\[str"),  # in a signature with a default that is made, Sphinx takes types apart at commas
]


def to_restructured_text(lines: list[str]) -> list[str]:
    """Docstrings here are Markdown, as Transformers' are: code in fences and single backticks, links in brackets."""
    converted, margin = [], None
    for line in lines:
        fence = re.fullmatch(r"(\s*)```(\w*)", line)
        if margin is not None:  # within a fence
            code, closing, _ = line.partition("```")
            converted.append(f"{margin}    {code.removeprefix(margin)}".rstrip())
            if closing:
                converted.append("")
                margin = None
        elif fence:
            margin = fence[1]
            converted += ["", f"{margin}.. code-block:: {fence[2] or 'text'}", ""]
        else:
            line = re.sub(r"\[`~?([\w.]+)`\]", r"`\1`", line)
            converted.append(re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line))
    return converted


def write_math(translator, node):
    """MathML, which browsers draw themselves: equations need no script and no network."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(to_mathml(node.astext().replace("{aligned}", "{align*}"), display=display))
    raise nodes.SkipNode


def mark_cells(_app, doctree):
    """Numbers, intervals and names do not break in a cell; long cells keep a readable width (site.css)."""
    for cell in doctree.findall(nodes.entry):
        text = cell.astext()
        if len(text) > 60:
            cell["classes"].append("long")
        elif len(text) <= 27 and not re.search(r"[a-z]+ [a-z]+ [a-z]+", text):  # no phrase
            cell["classes"].append("short")


def expand_model_types(_app, page, source):
    """The table of model types, with a row for each and reasons in words, so that searches find them."""
    before, begin, rest = source[0].partition("<!-- python tests/any_decoder.py -->\n")
    if page == "any-decoder":
        table, _, below = rest.partition("<!-- end -->")[0].partition("\n\n")
        why = dict(re.findall(r"^(\d+)\. (.*)$", below, re.MULTILINE))
        rows = {
            name: re.sub(r" \((\d+)\);?", lambda number: f": {why[number[1]].rstrip('.')}.", cell)
            for names, cell in re.findall(r"^\| (`.*`) \| (.*) \|$", table, re.MULTILINE)
            for name in names.split(", ")
        }
        titles = ["| model type | refused |", "|---|---|"]
        source[0] = before + begin + "\n".join([*titles, *(f"| {name} | {rows[name]} |" for name in sorted(rows))])


def as_markdown(text):
    """A help text, with options as code."""
    return re.sub(r"(?<![`\w-])--[a-z][\w-]*", r"`\g<0>`", text.replace("<", "&lt;").replace("|", "\\|"))


def parameters(command, context):
    """The arguments and options of a command, as its help lists them; arguments first."""
    records = filter(None, (each.get_help_record(context) for each in command.get_params(context)))
    rows = []
    for name, said in sorted(records, key=lambda record: record[0].startswith("-")):
        name = name.replace("|", "\\|") if name.startswith("-") else name.partition(" ")[0].upper()
        rows += [f"| `{name}` | {as_markdown(said.strip())} |"] if name != "--help" else []
    return ["| | |", "|---|---|", *rows]


def list_commands(sphinx, page, source):
    """Every command with its help, its example and its options, from the program itself."""
    if page == "cli":
        sphinx.env.note_reread()  # in the next build too: the commands may have changed
        program = typer.main.get_command(app)
        common = parameters(program, program.context_class(program, info_name="resformer"))
        lines = ["## Before any command", "", *common]
        for panel in PANELS:
            lines += ["", f"## {panel}"]
            for name, command in program.commands.items():
                if command.rich_help_panel == panel and not command.hidden:
                    context = command.context_class(command, info_name=f"resformer {name}")
                    example = command.epilog.partition("Example:\n")[2]
                    lines += ["", f"### {name}", "", command.help.replace("\b", ""), "", "```text", example, "```", ""]
                    lines += parameters(command, context)
        source[0] = source[0].replace("<!-- commands -->", "\n".join(lines))


def setup(sphinx):
    """Converts every docstring before napoleon reads it, and equations; makes tables, and marks their cells."""
    sphinx.add_html_math_renderer("mathml", inline_renderers=(write_math, None), block_renderers=(write_math, None))

    def convert(_app, _what, _name, _object, _options, lines):
        lines[:] = to_restructured_text(lines)

    sphinx.connect("autodoc-process-docstring", convert, priority=400)
    sphinx.connect("source-read", expand_model_types)
    sphinx.connect("source-read", list_commands)
    sphinx.connect("doctree-read", mark_cells)
