"""Each package imports only the packages listed for it here."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT: dict[str, set[str]] = {
    "protocol": set(),
    "kernels": {"protocol"},
    "kv_transfer": {"protocol", "kernels"},
    "models": {"protocol", "kernels"},
    "engine": {"protocol", "kernels", "kv_transfer", "models"},
    "prefill": {"protocol", "kernels", "kv_transfer", "models", "engine"},
    "decode": {"protocol", "kernels", "kv_transfer", "models", "engine"},
    "router": {"protocol"},
}


def imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.split(".")[1] for name in names if name.startswith("twopool.")}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_lower_layers(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        unexpected = imported_packages(path) - MAY_IMPORT[package] - {package}
        assert not unexpected, f"{path.relative_to(ROOT)} imports {unexpected}"
