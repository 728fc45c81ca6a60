"""The dashboard, the alert rules and the page for operators speak of metrics and labels that there are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import ProcessCollector
from prometheus_client.metrics import MetricWrapperBase

from policies.health import RULES
from proxy.telemetry import names
from proxy.telemetry.metrics import Metrics, Watched

ROOT = Path(__file__).resolve().parents[2]
BOARD: dict[str, Any] = json.loads((ROOT / "docs" / "grafana" / "weir.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
NOT_SHOWN = {
    "gen_ai_client_inference_operation_input_tokens": "its sums are those of the counter of input tokens",
    "gen_ai_client_inference_operation_output_tokens": "its sums are those of the counter of output tokens",
}
SCRAPED = {"job", "instance"}
FUNCTIONS = {"sum", "avg", "max", "topk", "rate", "increase", "histogram_quantile", "label_values"}
WORDS = {"by", "and", "or", "unless", "on", "ignoring", "bool"}
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[A-Za-z_:][A-Za-z0-9_:]*|[{}(),]|=~|!~|!=|=|\S')


def described() -> dict[str, tuple[str, list[str], str]]:
    """Of every metric its kind, its labels and what it says, by its name on the page."""
    found = {}
    registered = vars(Metrics())
    for collector in (each for each in registered.values() if isinstance(each, MetricWrapperBase | Watched)):
        for family in collector.describe():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = (family.type, list(collector._labelnames), family.documentation)
    for family in ProcessCollector(registry=None).collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, [], family.documentation)
    return found


DESCRIBED = described()


def samples_of(name: str) -> dict[str, set[str]]:
    """The names of a metric's samples, and the labels that each may have."""
    kind, labels, _ = DESCRIBED[name]
    every = {*labels, *SCRAPED}
    if kind != "histogram":
        return {name: every}
    return {f"{name}_bucket": every | {"le"}, f"{name}_sum": every, f"{name}_count": every}


SAMPLES = {name: labels for each in DESCRIBED for name, labels in samples_of(each).items()}


def mistakes(expression: str) -> Iterator[str]:
    """What an expression names that there is not: metrics, labels of a selector, labels of ``by``."""
    tokens = TOKEN.findall(re.sub(r"\$\w+|\b\d+(\.\d+)?[a-z]*\b", "0", expression))
    index = 0
    while index < len(tokens):
        token = tokens[index]
        after = tokens[index + 1] if index + 1 < len(tokens) else ""
        if token == "by":
            end = tokens.index(")", index)
            wanted = {t for t in tokens[index + 2 : end] if t != ","}
            for name in metrics_in(group(tokens, end + 1)):
                yield from (f"{name} has no label {label}" for label in wanted - SAMPLES.get(name, wanted))
            index = end
        elif re.fullmatch(r"[A-Za-z_:][\w:]*", token) and token not in WORDS:
            if after in {"(", "by"}:
                yield from () if token in FUNCTIONS else (f"what is {token}()?",)
            elif token not in SAMPLES:
                yield f"there is no metric {token}"
            if after == "{":
                end = tokens.index("}", index)
                wanted = {t for t, then in zip(tokens[index + 2 : end], tokens[index + 3 : end], strict=False)
                          if then in {"=", "!=", "=~", "!~"}}  # fmt: skip
                yield from (f"{token} has no label {label}" for label in wanted - SAMPLES.get(token, wanted))
                index = end
        index += 1


def group(tokens: list[str], start: int) -> list[str]:
    """What stands in the parentheses that open at ``start``."""
    depth = 0
    for index in range(start, len(tokens)):
        depth += {"(": 1, ")": -1}.get(tokens[index], 0)
        if depth == 0:
            return tokens[start + 1 : index]
    raise AssertionError("a parenthesis is not closed")


def metrics_in(tokens: list[str]) -> set[str]:
    """The names of samples among the tokens of an expression."""
    return {token for token in tokens if token in SAMPLES}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def alert_rules() -> list[dict[str, Any]]:
    """The rules for Prometheus."""
    found = yaml.safe_load((ROOT / "deploy" / "rules.yml").read_text(encoding="utf-8"))
    return [rule for part in found["groups"] for rule in part["rules"]]


@pytest.mark.parametrize(
    ("expression", "mistake"),
    [
        ("sum by (weir_kind) (rate(weir_tokens_total[5m]))", ""),
        ('histogram_quantile(0.95, sum by (le) (rate(weir_overhead_seconds_bucket{weir_summarizer=""}[5m])))', ""),
        ("rate(weir_overhead_seconds[5m])", "there is no metric weir_overhead_seconds"),
        ("rate(weir_token_total[5m])", "there is no metric weir_token_total"),
        ('weir_tokens_total{kind="saved"}', "weir_tokens_total has no label kind"),
        ('weir_tokens_total{weir_kind="saved", le="1"}', "weir_tokens_total has no label le"),
        ("sum by (weir_layer) (weir_tokens_total)", "weir_tokens_total has no label weir_layer"),
        ("median(weir_tokens_total)", "what is median()?"),
    ],
)
def test_an_expression_that_names_what_there_is_not_is_found_out(expression: str, mistake: str) -> None:
    assert list(mistakes(expression)) == ([mistake] if mistake else [])


@pytest.mark.requirement("A0.139", "P15")
@pytest.mark.parametrize("expression", expressions())
def test_every_expression_of_the_dashboard_names_metrics_and_labels_that_there_are(expression: str) -> None:
    assert list(mistakes(expression)) == []
    assert metrics_in(TOKEN.findall(expression))
    assert expression.count("(") == expression.count(")")


@pytest.mark.requirement("A0.139")
def test_every_metric_is_on_the_dashboard_or_has_a_reason_not_to_be() -> None:
    used = {name for expression in expressions() for name in metrics_in(TOKEN.findall(expression))}
    for name in DESCRIBED:
        assert bool(used & set(samples_of(name))) != (name in NOT_SHOWN), name


def test_legends_show_labels_that_the_expression_keeps() -> None:
    for panel in panels():
        for target in panel["targets"]:
            kept = {label for labels in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in labels.split(", ")}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, panel["title"]


def test_the_dashboard_can_be_imported() -> None:
    assert BOARD["schemaVersion"] >= 36
    source, job = BOARD["templating"]["list"]
    assert (source["type"], source["query"], source["name"]) == ("datasource", "prometheus", "datasource")
    assert list(mistakes(job["definition"].replace(", job", ""))) == []
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.requirement("P15", "A0.139")
def test_the_table_of_metrics_is_the_table_in_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    told = {name: (kind, re.findall(r"`(\w+)`", labels), said) for name, kind, labels, said in rows}
    assert len(told) == len(rows)
    assert told == DESCRIBED


@pytest.mark.requirement("A0.124")
def test_the_alert_rules_name_metrics_and_labels_that_there_are() -> None:
    rules = alert_rules()
    assert len(rules) >= 6
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert list(mistakes(rule["expr"])) == [], rule["alert"]
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"]["summary"]


@pytest.mark.requirement("A0.124")
def test_every_kind_of_alert_has_a_row_that_says_what_to_do() -> None:
    table = PAGE[PAGE.index("## Alerts of conversations") : PAGE.index("## Alert rules")]
    rows = re.findall(r"^\| `(\w+)` \| (\w+), (\w+) \| .+ \| .+ \|$", table, re.MULTILINE)
    assert rows == [(rule.kind, rule.level, rule.category) for rule in RULES]


@pytest.mark.requirement("A3.18")
def test_each_of_the_four_motives_has_a_metric_that_proves_it() -> None:
    section = PAGE[PAGE.index("## The four motives") :]
    rows = re.findall(r"^\| (errors|lost information|quality|cost) \| (.+?) \| (.+) \|$", section, re.MULTILINE)
    assert [motive for motive, _, _ in rows] == ["errors", "lost information", "quality", "cost"]
    for motive, _, proof in rows:
        assert metrics_in(re.findall(r"\w+", proof)), motive


def test_what_the_page_names_in_code_exists() -> None:
    known = set(SAMPLES) | {name.removesuffix(s) for name in SAMPLES for s in ("_bucket", "_sum", "_count")}
    for word in re.findall(r"`((?:weir|gen_ai|http_server)_\w+)`", PAGE):
        assert word in known or word in {label for labels in SAMPLES.values() for label in labels}, word
    for attribute in re.findall(r"`((?:weir|gen_ai|ctx|session)\.[\w.]+)`", PAGE):
        assert attribute in names.ATTRIBUTES or attribute in {"weir.eviction", "weir.alert"}, attribute
