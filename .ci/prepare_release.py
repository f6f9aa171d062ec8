"""Readies a checkout for the package index: `python .ci/prepare_release.py v0.1.0 https://HOST/OWNER/NAME`.

Links of README.md become absolute, which an index's page needs, and setup.cfg and CITATION.cff get the project's
addresses. None of it is committed: a fork publishes its own. CHANGELOG.md must have a section of the version.
"""

import re
import sys
from pathlib import Path

tag, address = sys.argv[1:]
version = re.search(r'"(.+)"', Path("src/resformer/version.py").read_text(encoding="utf-8"))[1]
if tag != f"v{version}":
    sys.exit(f"The tag is {tag}, the version in src/resformer/version.py {version}: they have to be the same.")

if f"\n## [{version}]" not in Path("CHANGELOG.md").read_text(encoding="utf-8"):
    sys.exit(f"CHANGELOG.md has no section [{version}]: rename [Unreleased], with the date.")

readme = Path("README.md")
text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{address}/raw/{tag}/", readme.read_text(encoding="utf-8"))
readme.write_text(re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{address}/blob/{tag}/", text), encoding="utf-8")

setup = Path("setup.cfg")
urls = {
    "Source": "",
    "Documentation": f"/tree/{tag}/docs",
    "Changelog": f"/blob/{tag}/CHANGELOG.md",
    "Issues": "/issues",
}
lines = "".join(f"    {name} = {address}{path}\n" for name, path in urls.items())
content = setup.read_text(encoding="utf-8").replace("[options]\n", f"project_urls =\n{lines}\n[options]\n", 1)
setup.write_text(content, encoding="utf-8")

citation = Path("CITATION.cff")
content = citation.read_text(encoding="utf-8")
content = re.sub(r"(?m)^version: .+$", f"version: {version}\nrepository-code: {address}", content, count=1)
citation.write_text(content, encoding="utf-8")
