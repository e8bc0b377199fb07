"""What stands beside a field in the source is its text in the reference: `setting(default, "help")`, or a comment."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Comments(griffe.Extension):
    """For attributes without a docstring of their own."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **others: Any) -> None:
        if attr.docstring is not None or not isinstance(node, ast.Assign | ast.AnnAssign):
            return
        value = node.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "setting":
            text = ast.literal_eval(value.args[1])
            attr.value = attr.value.arguments[0]  # the default, as for a plain field
        else:
            line = attr.lines_collection[attr.filepath][(node.end_lineno or node.lineno) - 1]
            beside = line.encode()[node.end_col_offset or 0 :].decode().strip()
            text = "" if "type:" in beside else beside.removeprefix("#").strip()
        if text:
            attr.docstring = griffe.Docstring(f"{text[0].upper()}{text[1:]}.", lineno=node.lineno, parent=attr)
