"""The site of the documentation: its generated pages and pictures are up to date, and its menu has every page.

`make docs` builds it in an environment of its own, with warnings as errors, and checks the links of the HTML.
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import trainer_client
from benchmarks import plots
from docs.site import check, conf, reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = (DOCS / "index.md").read_text(encoding="utf-8")
PYTHON = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")


def test_the_generated_pages_are_up_to_date() -> None:
    assert reference.main(["--check"]) == 0, "run python -m docs.site.reference"


def test_a_page_that_is_not_up_to_date_is_found_and_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "PAGES", tmp_path)
    (tmp_path / "rpc.md").write_text("# RPCs of last year\n")

    assert reference.main(["--check"]) == 1
    assert capsys.readouterr().err.count("is not up to date") == 2
    assert reference.main([]) == 0 == reference.main(["--check"])


@pytest.mark.parametrize("page", reference.pages(), ids=lambda page: page.name)
def test_no_two_headings_of_a_generated_page_have_one_anchor(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"[^\w ]", "", heading).lower() for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]

    assert len(headings) > 30
    assert sorted(headings) == sorted(set(headings))


def test_the_command_line_page_has_each_option_of_a_verb_with_a_parser_of_its_own() -> None:
    text = reference.command_line()
    after = text.split("### `paramserver plan`\n", maxsplit=1)[1].split("\n### ", maxsplit=1)[0]

    assert "| `--nproc-per-node N` | Ranks on each node." in after
    assert "| `--no-search`" in after or "--no-search" in after
    assert "paramserver-admin delete-job JOB --yes --address @nodes" in text


def test_the_rpc_page_has_the_comments_of_fields_and_of_their_choices() -> None:
    text = reference.rpcs()

    assert "| `session_id` | `string` | The session to resume after its stream broke; empty: a new session." in text
    assert "| `hello` | [SessionRequest.Hello](#sessionrequesthello) | one of `message` |" in text
    assert "| `KIND_SUM` | 7 | sum of squared gradients: Adagrad |" in text
    assert "- `DATA_LOSS`: stored bytes are damaged; the message names the shard\n" in text


def test_the_index_has_every_page_once() -> None:
    listed = [(DOCS / link).resolve() for link in re.findall(r"^\| \[[^]]*\]\(([^)]+)\)", INDEX, flags=re.MULTILINE)]
    pages = {*DOCS.rglob("*.md"), *(ROOT / page for page in conf.include_patterns if "*" not in page)}

    assert sorted(listed) == sorted(pages - {DOCS / "index.md"})


def test_the_menu_of_the_site_has_the_sections_and_pages_of_the_index() -> None:
    menu = conf._add_tables_of_contents(INDEX).removeprefix(INDEX)

    assert re.findall(r":caption: (.*)", menu) == ["Tutorials", "How-to", "Reference", "Explanation"]
    assert "\nFirst model in ten minutes <tutorials/first-model.md>\n" in menu
    assert menu.count(".md>") == INDEX.count("\n| [")


def test_a_link_to_a_directory_is_text_on_the_site_and_others_stay() -> None:
    page = "[rules](../deploy/prometheus), [conf](site/conf.py) and [there](https://prometheus.io)"

    made = conf._unlink_directories(page, DOCS)

    assert made == "rules, [conf](site/conf.py) and [there](https://prometheus.io)"


def test_the_indented_examples_of_docstrings_are_code() -> None:
    lines = ["Make it.", "", "    with it:", "        run()", "", "Then end.", "", "Args:", "    it: a thing."]
    marked = list(lines)

    conf._mark_examples(None, "", "", None, None, marked)

    assert marked == [*lines[:2], ".. code-block:: python", "", *lines[2:]]


def test_the_python_page_has_every_public_name() -> None:
    modules = re.findall(r"^\.\. automodule:: ([\w.]+)$", PYTHON, flags=re.MULTILINE)
    naming = r"^\.\. auto\w+:: (?:[\w.]+\.)?(\w+)$|`trainer_client\.(\w+)` is"
    documented = set(re.findall(naming, PYTHON, flags=re.MULTILINE))
    names = {name for pair in documented for name in pair if name}
    names |= {name for module in modules for name in vars(__import__(module, fromlist=["_"]))}
    public = {
        name
        for name in trainer_client.__all__
        if inspect.isclass(getattr(trainer_client, name)) or inspect.isroutine(getattr(trainer_client, name))
    }

    assert public - names == set()


@pytest.mark.parametrize("name", plots.PICTURES)
def test_each_picture_is_up_to_date_and_is_shown(name: str, tmp_path: Path) -> None:
    result = json.loads((plots.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    plots.draw(name, result, tmp_path / "made.svg")
    made = (tmp_path / "made.svg").read_text(encoding="utf-8")

    assert made == (plots.RESULTS / f"{name}.svg").read_text(encoding="utf-8"), "run make plots"
    assert result["machine"]["cpu"] in made
    assert f"commit {result['provenance']['git_commit']}" in made
    assert f"(../benchmarks/results/{name}.svg)" in (DOCS / "plots.md").read_text(encoding="utf-8")


def test_the_pinned_packages_of_the_site_satisfy_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (DOCS / "site" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.lower().split("==") for line in lines if "==" in line)

    for wanted in map(Requirement, project["optional-dependencies"]["docs"]):
        assert wanted.specifier.contains(pinned[wanted.name]), wanted


def test_the_check_of_the_site_finds_what_leads_nowhere_and_what_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="here"></h1><a href="#here"></a><a href="b/c.html#there"></a><a href="https://prometheus.io"></a>'
        '<a href="b/c.html#gone"></a><a href="d.html"></a><a href="../../outside.html"></a>'
        '<script src="https://cdn.example/x.js"></script><img src="data:image/png;base64,AA==">'
    )
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.html").write_text('<h1 id="there"></h1><a href="../a.html#here"></a>')
    (tmp_path / "s.css").write_text("@font-face { src: url('//fonts.example/f.woff2') } a { background: url(x.png) }")

    found = [line.replace(f"{tmp_path}/", "") for line in check.problems(tmp_path)]

    assert found == [
        "a.html: b/c.html#gone has no such anchor",
        "a.html: d.html is not there",
        "a.html: ../../outside.html is not there",
        "a.html: loads https://cdn.example/x.js",
        "s.css: loads //fonts.example/f.woff2",
    ]
