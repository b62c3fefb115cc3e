"""The tree of a trace: a picture with time to the right and a lane for each service; DOT for graphviz; text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure

from immortal.pipeline.jobs.trace import Node, Trace
from immortal.pipeline.report.charts import styled, svg_of
from immortal.protocol.shown import printable

LABELS_MAX = 60
"""With more nodes the picture shows the shape only: text would cover it."""


@styled
def trace_svg(trace: Trace) -> str:
    """Arrows lead from a cause to its effect: full where the cause is exact, dotted where it is one of several."""
    lanes = {name: index for index, name in enumerate(_lanes(trace.nodes))}
    start_ns = trace.nodes[0].time_ns
    figure = Figure(figsize=(10.0, max(2.0, 0.55 * len(lanes) + 1.2)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlabel("ms after the first record")
    places = [((node.time_ns - start_ns) / 1e6, lanes[node.instance]) for node in trace.nodes]
    for node, place in zip(trace.nodes, places, strict=True):
        if node.parent is not None:
            style = {"arrowstyle": "->", "color": "#36c", "lw": 0.8, "ls": "-" if node.candidates == 1 else ":"}
            axes.annotate("", xy=place, xytext=places[node.parent], arrowprops=style)
        if len(trace.nodes) <= LABELS_MAX:
            axes.annotate(_short(node), xy=place, xytext=(3, 5), textcoords="offset points", fontsize=7)
    axes.plot([x for x, _ in places], [y for _, y in places], "o", color="#234", markersize=3)
    return svg_of(figure)


def trace_dot(trace: Trace) -> str:
    """For `dot -Tsvg`."""
    lines = ["digraph trace {", "  rankdir=LR; node [shape=box, fontsize=10];"]
    for node in trace.nodes:
        label = f"{printable(node.instance)} record {node.record}\n{printable(', '.join(node.methods))}"
        lines.append(f"  n{node.number} [label={_quoted(label)}];")
    for node in trace.nodes:
        if node.parent is not None:
            style = "" if node.candidates == 1 else f', style=dotted, label="1 of {node.candidates}"'
            lines.append(f"  n{node.parent} -> n{node.number} [weight=1{style}];")
    return "\n".join([*lines, "}", ""])


def trace_lines(trace: Trace) -> Iterator[str]:
    """The tree, one line for each node, children below their parents."""
    children: dict[int | None, list[Node]] = {}
    for node in trace.nodes:
        children.setdefault(node.parent, []).append(node)
    waiting = list(reversed(children.get(None, [])))
    while waiting:
        node = waiting.pop()
        waiting += reversed(children.get(node.number, []))
        messages = f"{node.first}" if node.first == node.last else f"{node.first}-{node.last}"
        certainty = "" if node.parent is None else "  exact" if node.candidates == 1 else f"  one of {node.candidates}"
        latency_ms = (node.time_ns - node.sent_ns) / 1e6
        yield (
            f"{'  ' * node.depth}{node.instance} record {node.record}  {', '.join(node.methods)}"
            f"  {node.source} {messages}  {latency_ms:.3f} ms under way{certainty}"
        )
    if trace.cut_off:
        yield f"... and more than the {len(trace.nodes)} that --limit allows"


def _lanes(nodes: Sequence[Node]) -> list[str]:
    """Services in the order in which they come up."""
    return list(dict.fromkeys(node.instance for node in nodes))


def _short(node: Node) -> str:
    return f"{node.record} {node.methods[0] if len(node.methods) == 1 else ''}".strip()


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
