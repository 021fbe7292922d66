"""The gate's result as a JUnit file: one test, named by the metric asked for. "Cannot tell" is skipped."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from diagnose.gate import words
from diagnose.gate.result import GateResult, Judgement, Verdict

SUITE = "diagnose gate"
FORBIDDEN = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, however they are escaped."""


def to_junit(result: GateResult) -> str:
    """Returns the XML text. The metrics that are judged beside never fail: they are notes of the suite."""
    case = _case(result)
    counts = {
        "tests": "1",
        "failures": str(len(case.findall("failure"))),
        "errors": str(len(case.findall("error"))),
        "time": f"{result.wall_s:.3f}",
    }
    skipped = str(len(case.findall("skipped")))
    suites = ElementTree.Element("testsuites", {"name": SUITE, **counts})
    suite = ElementTree.SubElement(suites, "testsuite", {"name": SUITE, **counts, "skipped": skipped})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(result):
        ElementTree.SubElement(properties, "property", {"name": _clean(name), "value": _clean(value)})
    suite.append(case)
    ElementTree.indent(suites)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"
    )


def _case(result: GateResult) -> ElementTree.Element:
    case = ElementTree.Element(
        "testcase",
        {"classname": "diagnose.gate", "name": result.asked.value, "time": f"{result.wall_s:.3f}"},
    )
    message = _clean(words.headline(result))
    if result.verdict is Verdict.REGRESSION:
        body = [*(reason.place + reason.text for reason in result.why), *_figures(result.judgement)]
        element = ElementTree.SubElement(case, "failure", {"message": message, "type": "regression"})
        element.text = _clean("\n".join(body))
    elif result.verdict in (Verdict.INCONCLUSIVE, Verdict.MISMATCH):
        ElementTree.SubElement(
            case, "skipped", {"message": _clean(" ".join([message, *result.causes, result.advice]).strip())}
        )
    elif result.verdict is Verdict.FAILED:
        element = ElementTree.SubElement(case, "error", {"message": message, "type": "training-failed"})
        element.text = _clean("\n".join(result.failure.last_lines if result.failure else ()))
    output = ElementTree.SubElement(case, "system-out")
    output.text = _clean("\n".join([message, *_figures(result.judgement), *result.notes]))
    return case


def _figures(judgement: Judgement | None) -> list[str]:
    if judgement is None or not judgement.pairs:
        return []
    return [words.figures(judgement), words.sensitivity(judgement)]


def _properties(result: GateResult) -> list[tuple[str, str]]:
    found = [("verdict", result.verdict.value), ("metric", result.metric.value)]
    found.append(("max_drop", str(result.max_drop)))
    found += [(f"{side.label}_commit", side.commit) for side in result.sides if side.commit]
    if result.judgement is not None and result.judgement.pairs:
        found += [("drop", f"{result.judgement.drop:.6f}"), ("pairs", str(result.judgement.pairs))]
    return found + [(f"beside_{each.metric.value}", f"{each.drop:.6f}") for each in result.beside]


def _clean(text: str) -> str:
    return FORBIDDEN.sub("?", text)
