"""What stands beside a field in the source is its text in the reference: `setting(default, "help")`, or a comment."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Comments(griffe.Extension):
    """For attributes without a docstring of their own."""

    def on_attribute_instance(self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **others: Any) -> None:
        if attr.docstring is not None or not isinstance(node, ast.Assign | ast.AnnAssign) or attr.lineno is None:
            return
        value = node.value
        text = ""
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "setting":
            text = ast.literal_eval(value.args[1])
        else:
            line = attr.lines_collection[attr.filepath][(node.end_lineno or attr.lineno) - 1]
            after = line.encode()[node.end_col_offset or 0 :].decode().strip()
            text = after.removeprefix("#").strip() if after.startswith("# ") and "type:" not in after else ""
        if text:
            attr.docstring = griffe.Docstring(f"{text[0].upper()}{text[1:]}.", lineno=attr.lineno, parent=attr)
