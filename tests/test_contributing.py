"""What a host of repositories reads: issue forms, the citation, and how to contribute."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
ASKING = {"textarea", "input", "dropdown", "checkboxes"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_github_takes(form: Path) -> None:
    told = yaml.safe_load(form.read_text())
    assert told.keys() == {"name", "description", "labels", "body"}
    asked = [part for part in told["body"] if part["type"] in ASKING]
    assert all("value" in part["attributes"] for part in told["body"] if part not in asked)
    for distinct in (
        [part["id"] for part in asked],
        [part["attributes"]["label"] for part in asked],
    ):
        assert len(distinct) == len(set(distinct)) > 2
    assert any(part.get("validations") == {"required": True} for part in asked)
    for part in asked:
        assert re.fullmatch(r"[\w-]+", part["id"])
        assert part.keys() <= {"type", "id", "attributes", "validations"}
        check_choices(part)


def check_choices(part: dict[str, Any]) -> None:
    """Options are distinct words; "None" is taken by GitHub itself."""
    assert ("options" in part["attributes"]) == (part["type"] in ("dropdown", "checkboxes"))
    options = part["attributes"].get("options", [])
    labels = [each["label"] if part["type"] == "checkboxes" else each for each in options]
    assert all(isinstance(label, str) and label.lower() != "none" for label in labels)
    assert len(labels) == len(set(labels))


def test_there_is_a_form_for_faults_numbers_and_wishes() -> None:
    assert [form.stem for form in FORMS] == ["bug", "feature", "measurement"]


def test_the_citation_is_of_this_software_and_its_model() -> None:
    told = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert told["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "type"} <= told.keys()
    assert "version" not in told, "pyproject.toml says it"
    assert told["license"] == PROJECT["project"]["license"]
    assert [each["name"] for each in told["authors"]] == [
        each["name"] for each in PROJECT["project"]["authors"]
    ]
    (model,) = told["references"]
    assert model["title"].startswith("MOSS-Speech: ")
    assert all(each.keys() == {"given-names", "family-names"} for each in model["authors"])


def test_contributors_are_told_every_marker_and_targets_and_files_that_exist() -> None:
    markers = {
        marker.partition(":")[0] for marker in PROJECT["tool"]["pytest"]["ini_options"]["markers"]
    }
    assert set(re.findall(r"^\| `(\w+)` \|", CONTRIBUTING, re.MULTILINE)) == markers
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z][a-z-]+)", CONTRIBUTING)) <= targets
    files = re.findall(r"`((?:src|tests|tools|scripts|docs)/[\w./-]+)`", CONTRIBUTING)
    assert len(files) > 10
    for name in files:
        assert (ROOT / name).exists(), name


def test_the_rules_that_contributors_read_are_those_that_are_checked() -> None:
    rules = (ROOT / "tests" / "test_house_rules.py").read_text()
    for number in re.findall(r"at most (\d+)|\((?:a kernel )?(\d+)", CONTRIBUTING):
        assert re.search(rf"= .*\b{max(number)}\b", rules), number


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_into_a_page_name_a_heading_of_it(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)#([^)]+)\)", (ROOT / name).read_text())
    assert links
    for page, place in links:
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
        assert place in {
            re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings
        }
